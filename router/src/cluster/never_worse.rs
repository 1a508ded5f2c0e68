//! The policy `cost` in simulated time, against policies that always compute prompts on the prefill node, and always on
//! the decode node.

mod model;

use model::Model;

use crate::policy::AllowedArms;

/// The largest p99 of `cost`, as a multiple of that of a fixed arm.
const BOUND: f64 = 1.05;

/// The number of simulations of a cell. They differ in the clients' pauses.
const N_SEEDS: u64 = 2;

/// A load: clients that send one request after the other.
#[derive(Clone, Copy, Debug)]
struct Cell {
    prompt_tokens: usize,
    answer_tokens: u32,
    concurrency: usize,
    /// The share of a prompt that all prompts have in common.
    shared_percent: usize,
}

impl Cell {
    fn all() -> Vec<Self> {
        let mut cells = Vec::new();
        for prompt_tokens in [128, 1024, 4096, 16384] {
            for answer_tokens in [16, 256] {
                for concurrency in [1, 8, 32] {
                    for shared_percent in [0, 90] {
                        cells.push(Self { prompt_tokens, answer_tokens, concurrency, shared_percent });
                    }
                }
            }
        }
        cells
    }

    fn n_requests(&self) -> usize {
        self.n_warm_up() + 200
    }

    /// The number of first requests that are not counted.
    fn n_warm_up(&self) -> usize {
        2 * self.concurrency
    }

    /// The time in which the clients begin, in microseconds: about that of one answer.
    fn start_us(&self) -> u64 {
        u64::from(self.answer_tokens) * 5_000
    }

    fn run(self, policy: &str, arms: AllowedArms<'static>) -> Outcome {
        let mut outcome = Outcome::default();
        (1..=N_SEEDS).for_each(|seed| outcome.add(Model::new(self, seed, policy, arms).run()));
        outcome
    }
}

/// The times of simulations, in microseconds.
#[derive(Debug, Default)]
struct Outcome {
    first: Vec<u64>,
    second: Vec<u64>,
    gaps: Vec<u64>,
    /// The number of requests by arm.
    arms: [usize; 3],
}

impl Outcome {
    fn add(&mut self, other: Self) {
        self.first.extend(other.first);
        self.second.extend(other.second);
        self.gaps.extend(other.gaps);
        self.arms.iter_mut().zip(other.arms).for_each(|(own, more)| *own += more);
    }

    /// Returns the 99th percentiles of the time to the first token, of the gap before the second, and of the gaps
    /// after it.
    fn p99s(mut self) -> [f64; 3] {
        [&mut self.first, &mut self.second, &mut self.gaps].map(|times| {
            times.sort_unstable();
            times[(times.len() * 99).div_ceil(100) - 1] as f64
        })
    }
}

fn is_within(found: [f64; 3], of: [f64; 3]) -> bool {
    found.iter().zip(of).all(|(found, of)| *found <= of * BOUND)
}

/// In every cell, `cost` is as good as one of the fixed arms in all three times. In most cells it has the best of both
/// in all three. In the others, an arm with earlier first tokens has longer gaps, and `cost` keeps the gaps short.
#[test]
fn cost_is_never_worse_than_a_fixed_arm() {
    let mut others = Vec::new();
    for cell in Cell::all() {
        let remote = cell.run("least-loaded", AllowedArms::RemoteOrLocal).p99s();
        let local = cell.run("least-loaded", AllowedArms::OnlyLocal).p99s();
        let cost = cell.run("cost", AllowedArms::RemoteOrLocal);
        let arms = cost.arms;
        let cost = cost.p99s();
        let times =
            format!("{cell:?}, requests by arm {arms:?}: remote {remote:?}, local {local:?}, cost {cost:?}");
        assert!(is_within(cost, remote) || is_within(cost, local), "{times}");
        if !is_within(cost, [0, 1, 2].map(|nth| remote[nth].min(local[nth]))) {
            others.push(times);
        }
    }
    let n_best = Cell::all().len() - others.len();
    assert!(n_best >= 34, "the best of both in {n_best} cells of 48, not in:\n{}", others.join("\n"));
}
