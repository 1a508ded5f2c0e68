//! How fast 1 GiB of KV comes from one card to the other: the KV of 8,192 tokens of Llama-3.1-8B.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_kernels::RegionShape;
use baton_kernels::cuda::{Card, Courier, CourierSize, PageRuns, SomePages};
use serde_json::{Value, json};

use crate::{Outcome, Two};

const RUNS: PageRuns = PageRuns { n_parts: 2, n_heads: 8, run_bytes: 4096 };
const N_LAYERS: u32 = 32;
/// Of each layer: twice what is sent, so that there is something to scatter over.
const N_PAGES: u32 = 1024;
const N_SENT: u32 = 512;
const GIGABYTE: f64 = 1e9;
const ROUNDS: usize = 15;
/// Errands that wait on the card, so that it never waits for the host.
const AHEAD: usize = 6;

#[derive(Clone, Copy, PartialEq)]
enum What {
    Push,
    Copy,
    Pull,
    Digest,
}

pub(crate) fn all(cards: &[Card; 2]) -> Outcome<Value> {
    let shapes = [RegionShape { page_bytes: RUNS.page_bytes(), n_pages: N_PAGES }; N_LAYERS as usize];
    let two = Two::new(cards, &shapes)?;
    let bytes = f64::from(N_LAYERS * N_SENT) * RUNS.page_bytes() as f64;
    let neighbours: Vec<u32> = (0..N_SENT).collect();
    let scattered: Vec<u32> = (0..N_SENT).map(|nth| nth * 2 * 181 % N_PAGES + nth % 2).collect();
    let mut lines = Vec::new();
    let mut tell = |what: &str, blocks: &str, size: CourierSize, took: Duration| {
        let rate = bytes / took.as_secs_f64() / GIGABYTE;
        eprintln!(
            "{what:8} {blocks:10} {} x {:2} multiprocessors: {rate:6.1} GB/s",
            size.n_lanes, size.lane_multiprocessors
        );
        lines.push(json!({"what": what, "blocks": blocks, "lanes": size.n_lanes, "lane_multiprocessors": size.lane_multiprocessors, "gigabytes_per_second": rate}));
    };
    let plain = CourierSize { n_lanes: 1, lane_multiprocessors: 0 };
    let courier = Courier::new(&two.far, plain)?;
    let took = median(|| Ok(courier.copy_plainly(&two.near_from_far, &two.far, bytes as usize)?))?;
    tell("plain", "contiguous", plain, took);
    for (n_lanes, lane_multiprocessors) in [(1, 16), (2, 8), (4, 4), (2, 4)] {
        let size = CourierSize { n_lanes, lane_multiprocessors };
        for (blocks, pages) in [("neighbours", &neighbours), ("scattered", &scattered)] {
            for (name, what) in
                [("copy", What::Copy), ("pull", What::Pull), ("push", What::Push), ("digest", What::Digest)]
            {
                tell(name, blocks, size, median_of(&two, size, what, pages)?);
            }
        }
    }
    Ok(json!(lines))
}

fn median_of(two: &Two, size: CourierSize, what: What, pages: &[u32]) -> Outcome<Duration> {
    let memory = if matches!(what, What::Digest | What::Push) { &two.near } else { &two.far };
    let courier = Courier::new(memory, size)?;
    median(|| whole(two, &courier, what, pages))
}

/// All layers, two in an errand, as a sequence that is computed already is sent.
fn whole(two: &Two, courier: &Courier, what: What, pages: &[u32]) -> Outcome<()> {
    let is_scattered = pages[2] != pages[1] + 1;
    let mut under_way = VecDeque::new();
    for layers in 0..N_LAYERS / 2 {
        let places: Vec<_> = (2 * layers..2 * layers + 2)
            .flat_map(|layer| pages.iter().map(move |page| (layer, *page)))
            .collect();
        let some = SomePages { places: &places, n_of_layer: pages.len(), runs: RUNS, partial: None };
        let mut offsets: Vec<u64> =
            places.iter().map(|(region, page)| two.near.offset(*region, *page)).collect();
        if is_scattered {
            offsets.reverse();
        }
        under_way.push_back(match what {
            What::Push => courier.push(&two.near, some, &two.far_from_near, &offsets)?,
            What::Copy => courier.copy(&two.near_from_far, &offsets, &two.far, some)?,
            What::Pull => courier.pull(&two.near_from_far, &offsets, &two.far, some)?,
            What::Digest => courier.digest(&two.near, some)?,
        });
        if under_way.len() > AHEAD {
            courier.take(under_way.pop_front().expect("there is one"))?;
        }
    }
    for errand in under_way {
        courier.take(errand)?;
    }
    Ok(())
}

fn median(mut once: impl FnMut() -> Outcome<()>) -> Outcome<Duration> {
    for _ in 0..3 {
        once()?;
    }
    let mut took = Vec::new();
    for _ in 0..ROUNDS {
        #[allow(clippy::disallowed_methods, reason = "a measurement of real time")]
        let start = Instant::now();
        once()?;
        took.push(start.elapsed());
    }
    took.sort();
    Ok(took[ROUNDS / 2])
}
