//! Measures NCCL alone with one contiguous buffer, for comparison with the connector.

use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::conformance::node::layout;
use device::cuda::Slots;
use device::cuda::nccl::{Communicator, Nccl, Rank, UniqueId};
use serde_json::{Value, json};

use crate::{Outcome, now, one_stage};

const SIZES: &[usize] = &[16 << 20, 64 << 20, 128 << 20, 256 << 20, 1 << 30];
const ROUNDS: usize = 9;
const WITHIN: Duration = Duration::from_secs(60);

/// The total bytes of a row of messages, in which no message waits for the previous one.
const ROW_BYTES: usize = 1 << 30;

/// Gigabytes per second for one message size: with one message at a time, and with a row of messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    bytes: usize,
    pub(crate) one: f64,
    row: f64,
}

/// Measures `ncclSend` and `ncclRecv` by message size, one message at a time and in a row. If NCCL cannot
/// run, returns the reason.
pub(crate) fn alone() -> Value {
    let line = |Rate { bytes, one, row }: &Rate| {
        json!({
            "bytes": bytes, "median_ms": *bytes as f64 / one / 1e6, "gigabytes_per_second": one,
            "in_a_row_gigabytes_per_second": row,
        })
    };
    match rates(SIZES) {
        Ok(rates) => json!(rates.iter().map(line).collect::<Vec<_>>()),
        Err(error) => json!({"error": error.to_string()}),
    }
}

pub(crate) fn rates(sizes: &'static [usize]) -> Outcome<Vec<Rate>> {
    let id = Nccl::load()?.unique_id()?;
    let far = move || end("decode", id, Rank::Receiver, sizes).map_err(|error| error.to_string());
    let far = std::thread::spawn(far);
    let near = end("prefill", id, Rank::Sender, sizes)?;
    let far = far.join().expect("no panic")?;
    let rate = |(bytes, (near, far)): (&usize, (&[Duration; 2], &[Duration; 2]))| {
        let of = |bytes: usize, nth: usize| bytes as f64 / near[nth].max(far[nth]).as_secs_f64() / 1e9;
        Rate { bytes: *bytes, one: of(*bytes, 0), row: of(ROW_BYTES, 1) }
    };
    Ok(sizes.iter().zip(near.iter().zip(&far)).map(rate).collect())
}

/// Measures one end of the pair: returns the median times of one message and of a row, for each size.
fn end(name: &str, id: UniqueId, rank: Rank, sizes: &[usize]) -> Outcome<Vec<[Duration; 2]>> {
    let memory = one_stage(name, layout(), 1);
    let largest = sizes.iter().max().copied().unwrap_or(0);
    let slots = Arc::new(Slots::on_gpu(&[memory.on_card().expect("on a card").memory()], 1, largest)?);
    let mut pair = Communicator::join(slots, id, rank)?;
    settle(&mut pair)?;
    let mut medians = Vec::new();
    for size in sizes {
        let mut median_of = |n_messages: usize| -> Outcome<Duration> {
            let mut took = Vec::new();
            for _ in 0..ROUNDS + 2 {
                // A first message, so that both ends start at about the same time: the earlier one waits for
                // the other.
                some(&mut pair, rank, 16, 1)?;
                let start = now();
                some(&mut pair, rank, *size, n_messages)?;
                took.push(start.elapsed());
            }
            let mut took = took.split_off(2);
            took.sort();
            Ok(took[ROUNDS / 2])
        };
        medians.push([median_of(1)?, median_of(ROW_BYTES / size)?]);
    }
    pair.finalize()?;
    settle(&mut pair)?;
    pair.destroy()?;
    Ok(medians)
}

/// Sends or receives `n_messages` messages of `bytes`, each as soon as NCCL accepts calls again.
fn some(pair: &mut Communicator, rank: Rank, bytes: usize, n_messages: usize) -> Outcome<()> {
    for _ in 0..n_messages {
        match rank {
            Rank::Sender => pair.send(0, bytes)?,
            Rank::Receiver => pair.receive(0, bytes)?,
        }
        settle(pair)?;
    }
    let mut message = pair.message()?;
    until(|| Ok(message.is_done()?))
}

fn settle(pair: &mut Communicator) -> Outcome<()> {
    until(|| Ok(pair.is_settled()?))
}

fn until(mut is_so: impl FnMut() -> Outcome<bool>) -> Outcome<()> {
    let start = now();
    while !is_so()? {
        if start.elapsed() > WITHIN {
            return Err("NCCL stands still".into());
        }
        std::hint::spin_loop();
    }
    Ok(())
}
