//! Measures how much KV reads and digests slow down the products of a long prompt on the same GPU.
//!
//! Each kind of load is measured separately: reads by the other GPU's copy engines or kernels, and digests by
//! more or fewer multiprocessors. Each is compared with the same products alone, round by round.

use std::thread;
use std::time::Duration;

use baton_kernels::cuda::{ComputeCard, Factors, OutputRows, Products, WeightMatrix};
use device::RegionShape;
use device::cuda::{Bf16, Buffer, CudaError, Graph, PageCopier, PageCopierSize, PageDigests};
use serde_json::{Value, json};

use crate::measure::{N_LAYERS, N_PAGES, N_SENT, RUNS, What, start};
use crate::{Outcome, Two};

const N_TOKENS: usize = 8192;
/// The rows and columns of an 8B model's matrices, in the order of a layer.
const MATRICES: [(usize, usize); 4] = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)];
const WIDEST: usize = 14_336;
const N_ROUNDS: usize = 10;
/// The pause between rounds: a GPU that has just computed is slowed down by its power limit.
const REST: Duration = Duration::from_millis(150);

/// The concurrent load for each layer's KV.
struct Disturbance {
    name: &'static str,
    whats: &'static [What],
    size: PageCopierSize,
}

fn disturbances() -> Vec<Disturbance> {
    let usual = PageCopierSize::default();
    let by_engines: &[What] = &[What::Fetch { digests: PageDigests::Skip }];
    let all_of_it: &[What] = &[What::Digest, What::Fetch { digests: PageDigests::Make }];
    let all: [(_, &[What], _); _] = [
        ("nothing", &[], usual),
        ("nothing again", &[], usual),
        ("read by two engines", by_engines, usual),
        ("read by one engine", by_engines, PageCopierSize { n_engines: 1, ..usual }),
        ("read by 16 multiprocessors", &[What::Copy], usual),
        ("read by 4 multiprocessors", &[What::Copy], PageCopierSize { n_lanes: 1, ..usual }),
        ("written by its own kernels", &[What::Push], usual),
        ("digested by 16", &[What::Digest], usual),
        ("digested by 132", &[What::Digest], PageCopierSize { digest_multiprocessors: 132, ..usual }),
        ("digested by 16, read by two", all_of_it, usual),
    ];
    all.into_iter().map(|(name, whats, size)| Disturbance { name, whats, size }).collect()
}

pub(crate) fn all(cards: &[ComputeCard; 2]) -> Outcome<Value> {
    let shapes = [RegionShape { page_bytes: RUNS.page_bytes(), n_pages: N_PAGES }; N_LAYERS as usize];
    let two = Two::new(cards, &shapes)?;
    let disturbances = disturbances();
    let copiers = disturbances.iter().map(|disturbance| disturbance.copiers(&two));
    let copiers = copiers.collect::<Outcome<Vec<_>>>()?;
    let mut prompt = Prompt::new(&cards[0])?;
    // The first run starts on an idle GPU, so it is discarded. The second run's time gives the interval
    // between layers.
    prompt.ms(&cards[0], || Ok(()))?;
    let between = Duration::from_secs_f64(prompt.ms(&cards[0], || Ok(()))? / 1e3 / f64::from(N_LAYERS + 1));
    let mut times = vec![vec![]; disturbances.len()];
    for _ in 0..N_ROUNDS {
        for (nth, disturbance) in disturbances.iter().enumerate() {
            thread::sleep(REST);
            times[nth].push(prompt.ms(&cards[0], || disturbance.go(&two, &copiers[nth], between))?);
        }
    }
    let lines = disturbances.iter().zip(&times).map(|(disturbance, all)| {
        let longer = all.iter().zip(&times[0]).map(|(with, without)| 100.0 * (with / without - 1.0));
        let (ms, percent) = (middle(all.clone()), middle(longer.collect()));
        eprintln!("{:28} {ms:7.2} ms, {percent:5.2} % longer", disturbance.name);
        json!({"what": disturbance.name, "ms": ms, "percent_longer": percent, "all_ms": all})
    });
    Ok(lines.collect())
}

impl Disturbance {
    /// Makes page copiers for the GPU that computes and for the other GPU.
    fn copiers(&self, two: &Two) -> Outcome<[PageCopier; 2]> {
        Ok([PageCopier::new(&two.near, self.size)?, PageCopier::new(&two.far, self.size)?])
    }

    /// Runs the load layer by layer, at the interval of the layers.
    fn go(&self, two: &Two, [near, far]: &[PageCopier; 2], between: Duration) -> Outcome<()> {
        let mut under_way = vec![];
        for layer in 0..N_LAYERS {
            thread::sleep(between);
            let places: Vec<_> = (0..N_SENT).map(|page| (layer, page)).collect();
            for what in self.whats {
                let copier = if what.is_near() { near } else { far };
                let copy_job = start(two, copier, *what, &places, places.len(), false)?;
                under_way.push((copier, copy_job));
            }
        }
        for (copier, copy_job) in under_way {
            copier.take(copy_job)?;
        }
        Ok(())
    }
}

/// The products of all layers, as one graph.
struct Prompt {
    graph: Graph,
    // These two fields are kept alive, because the graph uses their memory and libraries.
    _rooms: Vec<Buffer<Bf16>>,
    _products: Products,
}

impl Prompt {
    fn new(card: &ComputeCard) -> Outcome<Self> {
        let room = |n: usize, seed: u64| {
            let mut room = card.buffer::<Bf16>(n)?;
            card.dummy_weights(room.view_mut(), seed, 0.02)?;
            Ok::<_, CudaError>(room)
        };
        let matrices = MATRICES.iter().map(|(n, k)| room(n * k, 1)).collect::<Result<Vec<_>, _>>()?;
        let x = room(N_TOKENS * WIDEST, 2)?;
        let mut y = room(N_TOKENS * WIDEST * 2, 3)?;
        let mut products = Products::open(card, None)?;
        let mut layer = || {
            MATRICES.iter().zip(&matrices).try_for_each(|((n, k), w)| {
                let y = OutputRows::Narrow(y.view_mut().slice(0..N_TOKENS * n));
                let (w, x) = (WeightMatrix::Bf16(w.view()), x.slice(0..N_TOKENS * k));
                products.multiply(card, y, Factors { w, x, k: *k })
            })
        };
        // The first run loads code, which cannot be recorded, so it comes before the recording.
        layer()?;
        card.synchronize()?;
        let graph = card.record(|| (0..N_LAYERS).try_for_each(|_| layer()))?;
        Ok(Self { graph, _rooms: matrices.into_iter().chain([x, y]).collect(), _products: products })
    }

    /// Returns the time of the products in milliseconds, while `meanwhile` runs.
    fn ms(&mut self, card: &ComputeCard, meanwhile: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
        let start = card.mark()?;
        self.graph.launch()?;
        let end = card.mark()?;
        meanwhile()?;
        Ok(f64::from(start.ms_until(&end)?))
    }
}

fn middle(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
