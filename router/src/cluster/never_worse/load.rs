//! The load and the machine of a simulation.

use std::iter::successors;

/// The prompt and the answer of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) prompt_tokens: usize,
    pub(super) answer_tokens: u32,
    /// The prefix with which the prompt begins.
    pub(super) prefix: usize,
}

/// The two nodes of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fleet {
    /// A prefill node and a decode node.
    Pair,
    /// Two nodes that do both.
    Colocated,
}

/// The times of steps, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) step_us: f64,
    pub(super) row_us: f64,
    /// The time of 1,000 tokens of context.
    pub(super) context_us: f64,
    pub(super) prompt_token_us: f64,
    /// The time by which a prompt token takes longer per 1,000 tokens before it.
    pub(super) rise_us: f64,
}

/// Requests of closed clients, or with the times of their arrivals.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) fleet: Fleet,
    pub(super) machine: Machine,
    pub(super) shapes: Vec<Shape>,
    pub(super) prefix_tokens: usize,
    /// The number of first requests that are not counted.
    pub(super) n_warm_up: usize,
    /// The number of clients that send one request after the other, and the time in which they begin.
    pub(super) concurrency: usize,
    pub(super) start_us: u64,
    /// The arrivals without clients.
    pub(super) arrivals: Vec<u64>,
    /// The largest number of tokens in a step of a prefill node.
    pub(super) prefill_step_tokens: usize,
    /// The longest gap that prompts may cause on a decode node; zero: any.
    pub(super) gap_us: f64,
}

/// Lengths whose logarithm is normal: the median, and the deviation of the logarithm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    median: f64,
    deviation: f64,
}

/// A load of `bench/two-gpus.sh`, part `never-worse`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) per_second: f64,
    pub(super) n_requests: usize,
    pub(super) prompt: Lengths,
    pub(super) answer: Lengths,
    pub(super) prefix_tokens: usize,
}

impl Machine {
    pub(super) const H200: Self =
        Self { step_us: 4_000.0, row_us: 35.0, context_us: 0.0, prompt_token_us: 23.0, rise_us: 0.0 };
    /// With 8,192 tokens a prompt takes 205 ms.
    pub(super) const H100: Self =
        Self { step_us: 5_500.0, row_us: 35.0, context_us: 35.0, prompt_token_us: 20.0, rise_us: 1.2 };

    pub(super) fn running_us(&self, n_streams: usize, context: usize) -> f64 {
        self.step_us + self.row_us * n_streams as f64 + self.context_us * context as f64 / 1e3
    }

    /// Returns the time of prompt tokens with this number of tokens before them.
    pub(super) fn prompt_us(&self, before: usize, n_tokens: usize) -> f64 {
        let middle = before as f64 + n_tokens as f64 / 2.0;
        n_tokens as f64 * (self.prompt_token_us + self.rise_us * middle / 1e3)
    }

    /// Returns the number of prompt tokens that take at most this time.
    pub(super) fn tokens_within(&self, us: f64, before: usize) -> usize {
        (us / (self.prompt_token_us + self.rise_us * before as f64 / 1e3)) as usize
    }
}

impl Lengths {
    const fn new(median: f64, deviation: f64) -> Self {
        Self { median, deviation }
    }
}

impl Workload {
    pub(super) const ALL: [Self; 5] = [
        Self::new("mixed", 4.0, 120, Lengths::new(3_000.0, 0.8), Lengths::new(120.0, 0.6)),
        Self::new("long", 3.0, 60, Lengths::new(8_192.0, 0.0), Lengths::new(256.0, 0.0)),
        Self::new("chat", 12.0, 240, Lengths::new(600.0, 0.6), Lengths::new(200.0, 0.0)),
        Self {
            prefix_tokens: 4_000,
            ..Self::new("prefix", 6.0, 120, Lengths::new(4_500.0, 0.0), Lengths::new(128.0, 0.0))
        },
        Self::new("summary", 2.5, 60, Lengths::new(6_000.0, 0.5), Lengths::new(32.0, 0.0)),
    ];

    const fn new(
        name: &'static str,
        per_second: f64,
        n_requests: usize,
        prompt: Lengths,
        answer: Lengths,
    ) -> Self {
        Self { name, per_second, n_requests, prompt, answer, prefix_tokens: 0 }
    }

    pub(super) fn load(&self, fleet: Fleet, seed: u64) -> Load {
        let mut draws = successors(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1), |last| {
            let mut next = *last;
            next ^= next << 13;
            next ^= next >> 7;
            next ^= next << 17;
            Some(next)
        })
        .skip(8)
        .map(|draw| ((draw.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64);
        let mut draw = move || draws.next().expect("endless");
        let (mut at, mut arrivals, mut shapes) = (0.0, Vec::new(), Vec::new());
        for nth in 0..self.n_requests {
            at -= draw().ln() / self.per_second * 1e6;
            let mut lognormal = |Lengths { median, deviation }: Lengths| {
                let normal = (-2.0 * draw().ln()).sqrt() * (std::f64::consts::TAU * draw()).cos();
                median * (deviation * normal).exp()
            };
            let prompt_tokens = (lognormal(self.prompt) as usize).clamp(32, 32_000);
            let answer_tokens = (lognormal(self.answer) as u32).max(4);
            let prefix = if self.prefix_tokens > 0 { (draw() * 8.0) as usize } else { nth };
            arrivals.push(at as u64);
            shapes.push(Shape { prompt_tokens, answer_tokens, prefix });
        }
        Load {
            fleet,
            machine: Machine::H100,
            shapes,
            prefix_tokens: self.prefix_tokens,
            n_warm_up: 0,
            concurrency: 0,
            start_us: 1,
            arrivals,
            prefill_step_tokens: 8_192,
            gap_us: 25_000.0,
        }
    }
}
