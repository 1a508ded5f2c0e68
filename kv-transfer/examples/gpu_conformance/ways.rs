//! Compares variants of nccl's messages with each other and with NCCL alone. All variants run in turn in one
//! process, because two runs of a process differ by more than two variants.

use std::fmt::Write as _;
use std::sync::Arc;

use baton_kv_transfer::FrameSizes;
use device::cuda::nccl::Nccl;
use kv_cache::KvMemory;
use serde_json::{Value, json};

use crate::measure::{How, N_BLOCKS, NCCL, ROUNDS, WARM_UP, fill, layout, marked, median, one, rate, side};
use crate::nccl::rates;
use crate::{Outcome, now, one_stage};

/// The number of times that each variant is set up again, with all others in between.
const REPEATS: usize = 5;
/// The message sizes of NCCL alone: one buffer of the size of the transfer.
const CONTIGUOUS: &[usize] = &[1 << 30];

/// One variant and its results, for neighbouring blocks and for scattered blocks.
struct Row {
    name: &'static str,
    how: How,
    seen: [Seen; 2],
    /// Seconds of the first transfer between two nodes, connection included, once for each repeat.
    first: Vec<f64>,
    error: Option<String>,
}

#[derive(Default)]
struct Seen {
    /// Gigabytes per second to the arrival, and to the end of the sender's `finish`, once for each repeat.
    arrived: Vec<f64>,
    finished: Vec<f64>,
    /// A summary of the events of one of the last transfers.
    marks: Value,
    walk: Value,
}

fn rows() -> Vec<Row> {
    let tapered = |first_part, least_part, share| How {
        taper: Some(FrameSizes { first_part, least_part, share }),
        ..NCCL
    };
    let all = [
        ("as it is", NCCL),
        ("one queue", How { nccl_queues: 1, ..NCCL }),
        ("first a quarter, halves of the rest", tapered(4, 4, 2)),
        ("first a half, halves of the rest", tapered(2, 4, 2)),
        ("first a half, thirds of the rest", tapered(2, 4, 3)),
        ("first whole, thirds of the rest", tapered(1, 4, 3)),
        ("first whole, down to an eighth", tapered(1, 8, 2)),
        ("48 multiprocessors", How { multiprocessors: 48, ..NCCL }),
    ];
    let row = |(name, how)| Row { name, how, seen: Default::default(), first: Vec::new(), error: None };
    all.into_iter().map(row).collect()
}

/// Runs all variants `REPEATS` times and prints the table to stderr. Returns the results, and every step of
/// one transfer of each variant.
pub(crate) async fn all() -> Outcome<(Value, Vec<Value>)> {
    let (near, far) = (one_stage("prefill", layout(), N_BLOCKS), one_stage("decode", layout(), N_BLOCKS));
    fill(&near);
    let (mut alone, mut rows) = (Vec::new(), rows());
    for _ in 0..REPEATS {
        alone.push(rates(CONTIGUOUS)?[0].one);
        for row in &mut rows {
            if let Err(error) = row.measure(&near, &far).await {
                row.error = Some(error.to_string());
            }
            // Each result is printed at once, in case the run is interrupted.
            eprintln!("{} {:.1?} {:.1?}", row.name, row.seen[0].arrived, row.seen[1].arrived);
        }
    }
    alone.push(rates(CONTIGUOUS)?[0].one);
    let denominator = middle(&alone);
    eprintln!("{}", table(&rows, &alone));
    let told = json!({
        "nccl_version": Nccl::load()?.version(),
        "nccl_alone_1_gib": {"gigabytes_per_second": alone, "median": denominator},
        "ways": rows.iter().map(|row| row.told(denominator)).collect::<Vec<_>>(),
    });
    Ok((told, rows.iter().flat_map(Row::walks).collect()))
}

impl Row {
    /// Returns the measurement with neighbouring blocks, and with scattered blocks.
    fn hows(&self) -> [How; 2] {
        [false, true].map(|is_scattered| How { is_scattered, ..self.how })
    }

    async fn measure(&mut self, near: &KvMemory, far: &KvMemory) -> Outcome<()> {
        let (prefill, decode) =
            (side("prefill", near, self.how).await?, side("decode", far, self.how).await?);
        for (how, seen) in self.hows().into_iter().zip(&mut self.seen) {
            prefill.is_free().await?;
            decode.is_free().await?;
            let (from, _between) = prefill.blocks(how);
            let from = Arc::new(from);
            if !how.is_scattered {
                let began = now();
                one(&prefill, &decode, &from, how).await?;
                self.first.push(began.elapsed().as_secs_f64());
            }
            let (mut arrivals, mut finishes) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS + WARM_UP {
                let took = one(&prefill, &decode, &from, how).await?;
                arrivals.push(took.arrival);
                finishes.push(took.finish);
            }
            seen.arrived.push(rate(median(arrivals.split_off(WARM_UP))));
            seen.finished.push(rate(median(finishes.split_off(WARM_UP))));
            (seen.marks, seen.walk) = marked(&prefill, &decode, &from, how).await?;
        }
        prefill.ends().await?;
        decode.ends().await
    }

    fn told(&self, denominator: f64) -> Value {
        let of = |seen: &Seen| {
            let median = middle(&seen.arrived);
            json!({
                "arrived_gigabytes_per_second": seen.arrived,
                "finished_gigabytes_per_second": seen.finished,
                "median": median, "of_nccl_alone": median / denominator,
                "marks": seen.marks,
            })
        };
        let [neighbours, scattered] = self.seen.each_ref().map(of);
        json!({
            "way": self.name, "how": self.how.told(), "error": self.error,
            "neighbours": neighbours, "scattered": scattered, "first_transfer_seconds": self.first,
        })
    }

    fn walks(&self) -> [Value; 2] {
        let [neighbours, scattered] = self.hows();
        [(neighbours, &self.seen[0]), (scattered, &self.seen[1])]
            .map(|(how, seen)| json!({"way": self.name, "how": how.told(), "walk": seen.walk}))
    }
}

/// Returns the median; NaN without numbers.
fn middle(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(rows: &[Row], alone: &[f64]) -> String {
    let denominator = middle(alone);
    let mut table = format!("NCCL alone, 1 GiB: {alone:.1?} GB/s, median {denominator:.1}\n");
    for row in rows {
        let of = |seen: &Seen| {
            let median = middle(&seen.arrived);
            format!("{median:6.1} ({:.3}) {:<36}", median / denominator, format!("{:.1?}", seen.arrived))
        };
        let [neighbours, scattered] = row.seen.each_ref().map(of);
        let error = row.error.as_deref().unwrap_or("");
        let first = middle(&row.first);
        let line = writeln!(table, "{:<36} {neighbours} | {scattered} first {first:.2} s {error}", row.name);
        line.expect("a string takes all");
    }
    table
}
