//! Measures the transfer of 1 GiB of KV between two GPUs: the KV of 8,192 tokens of Llama-3.1-8B.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_kernels::cuda::ComputeCard;
use device::RegionShape;
use device::cuda::{CopyJob, PageCopier, PageCopierSize, PageDigests, PageRuns, RemotePages, SomePages};
use serde_json::{Value, json};

use crate::{Outcome, Two};

pub(crate) const RUNS: PageRuns = PageRuns::whole(2, 8, 4096);
pub(crate) const N_LAYERS: u32 = 32;
/// The number of pages of each layer: twice the number that is sent, so that the KV is scattered.
pub(crate) const N_PAGES: u32 = 1024;
pub(crate) const N_SENT: u32 = 512;
const GIGABYTE: f64 = 1e9;
const ROUNDS: usize = 15;
/// The number of copy jobs that are queued on the GPU, so that it never waits for the host.
const AHEAD: usize = 6;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum What {
    Push,
    Copy,
    Pull,
    Digest,
    /// Fetches pages as the connector does.
    Fetch {
        digests: PageDigests,
    },
}

impl What {
    /// Returns whether the GPU that has the pages does the work.
    pub(crate) fn is_near(self) -> bool {
        matches!(self, Self::Digest | Self::Push)
    }
}

/// The division of all pages into copy jobs.
#[derive(Clone, Copy)]
struct CopyJobs {
    n_layers: u32,
    n_blocks: u32,
}

/// A division in which each copy job has two layers of all blocks.
const FLAT: CopyJobs = CopyJobs { n_layers: 2, n_blocks: N_SENT };

pub(crate) fn all(cards: &[ComputeCard; 2]) -> Outcome<Value> {
    let shapes = [RegionShape { page_bytes: RUNS.page_bytes(), n_pages: N_PAGES }; N_LAYERS as usize];
    let two = Two::new(cards, &shapes)?;
    let bytes = f64::from(N_LAYERS * N_SENT) * RUNS.page_bytes() as f64;
    let neighbours: Vec<u32> = (0..N_SENT).collect();
    let scattered: Vec<u32> = (0..N_SENT).map(|nth| nth * 2 * 181 % N_PAGES + nth % 2).collect();
    let mut lines = Vec::new();
    let mut tell = |what: &str, blocks: &str, size: PageCopierSize, copy_jobs: CopyJobs, took: Duration| {
        let rate = bytes / took.as_secs_f64() / GIGABYTE;
        eprintln!(
            "{what:14} {blocks:10} {} x {:2} multiprocessors, {} engines, {:2} layers of {:3} blocks: {rate:6.1} GB/s",
            size.n_lanes, size.lane_multiprocessors, size.n_engines, copy_jobs.n_layers, copy_jobs.n_blocks
        );
        lines.push(json!({
            "what": what, "blocks": blocks, "lanes": size.n_lanes,
            "lane_multiprocessors": size.lane_multiprocessors, "engines": size.n_engines,
            "digest_multiprocessors": size.digest_multiprocessors, "copy_job_layers": copy_jobs.n_layers,
            "copy_job_blocks": copy_jobs.n_blocks, "gigabytes_per_second": rate,
        }));
    };
    let plain = PageCopierSize { n_lanes: 1, lane_multiprocessors: 0, ..PageCopierSize::default() };
    let copier = PageCopier::new(&two.far, plain)?;
    let took = median(|| Ok(copier.copy_plainly(&two.near_from_far, &two.far, bytes as usize)?))?;
    tell("plain", "contiguous", plain, CopyJobs { n_layers: N_LAYERS, n_blocks: N_SENT }, took);
    let both = [("neighbours", &neighbours), ("scattered", &scattered)];
    for (n_lanes, lane_multiprocessors) in [(1, 16), (2, 8), (4, 4)] {
        let size = PageCopierSize { n_lanes, lane_multiprocessors, ..PageCopierSize::default() };
        for (blocks, pages) in both {
            for (name, what) in [("copy", What::Copy), ("pull", What::Pull), ("push", What::Push)] {
                tell(name, blocks, size, FLAT, median_of(&two, size, what, pages, FLAT)?);
            }
        }
    }
    for digest_multiprocessors in [8, 16] {
        let size = PageCopierSize { digest_multiprocessors, ..PageCopierSize::default() };
        tell("digest", "scattered", size, FLAT, median_of(&two, size, What::Digest, &scattered, FLAT)?);
    }
    for n_engines in [1, 2, 4] {
        let size = PageCopierSize { n_engines, engine_bytes_min: 0, ..PageCopierSize::default() };
        for (n_layers, n_blocks) in [(32, 8), (32, 16), (32, 32), (8, 64), (2, 256), (1, 512)] {
            let copy_jobs = CopyJobs { n_layers, n_blocks };
            for (blocks, pages) in both {
                for (name, digests) in
                    [("fetch", PageDigests::Make), ("fetch, no digests", PageDigests::Skip)]
                {
                    if blocks == "neighbours" && n_layers < 32 && n_blocks < N_SENT {
                        continue;
                    }
                    let what = What::Fetch { digests };
                    tell(name, blocks, size, copy_jobs, median_of(&two, size, what, pages, copy_jobs)?);
                }
            }
        }
    }
    Ok(json!(lines))
}

fn median_of(
    two: &Two,
    size: PageCopierSize,
    what: What,
    pages: &[u32],
    copy_jobs: CopyJobs,
) -> Outcome<Duration> {
    let memory = if what.is_near() { &two.near } else { &two.far };
    let copier = PageCopier::new(memory, size)?;
    median(|| whole(two, &copier, what, pages, copy_jobs))
}

/// Moves all layers, some in each copy job, like a sequence that is computed already.
fn whole(two: &Two, copier: &PageCopier, what: What, pages: &[u32], copy_jobs: CopyJobs) -> Outcome<()> {
    let is_scattered = pages[2] != pages[1] + 1;
    let mut under_way = VecDeque::new();
    for first in (0..N_LAYERS).step_by(copy_jobs.n_layers as usize) {
        for blocks in pages.chunks(copy_jobs.n_blocks as usize) {
            let layers = first..first + copy_jobs.n_layers;
            let places: Vec<_> =
                layers.flat_map(|layer| blocks.iter().map(move |page| (layer, *page))).collect();
            under_way.push_back(start(two, copier, what, &places, blocks.len(), is_scattered)?);
            if under_way.len() > AHEAD {
                copier.take(under_way.pop_front().expect("there is one"))?;
            }
        }
    }
    for copy_job in under_way {
        copier.take(copy_job)?;
    }
    Ok(())
}

pub(crate) fn start(
    two: &Two,
    copier: &PageCopier,
    what: What,
    places: &[(u32, u32)],
    n_of_layer: usize,
    is_scattered: bool,
) -> Outcome<CopyJob> {
    let some = SomePages { places, n_of_layer, runs: RUNS, partial: None };
    let mut offsets: Vec<u64> = places.iter().map(|(region, page)| two.near.offset(*region, *page)).collect();
    if is_scattered {
        // Each layer's pages arrive in another order than on this side, so their offsets are reversed.
        offsets.chunks_mut(n_of_layer).for_each(<[u64]>::reverse);
    }
    let at = |memory| RemotePages { memory, offsets: &offsets, runs: RUNS };
    Ok(match what {
        What::Push => copier.push(&two.near, some, at(&two.far_from_near))?,
        What::Copy => copier.copy(at(&two.near_from_far), &two.far, some)?,
        What::Pull => copier.pull(at(&two.near_from_far), &two.far, some)?,
        What::Digest => copier.digest(&two.near, some)?,
        What::Fetch { digests } => copier.fetch(at(&two.near_from_far), &two.far, some, digests)?,
    })
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
