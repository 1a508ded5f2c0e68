//! The demand for one model: the work that has arrived within a window of time, and the work that waits.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::admission::Arrived;

/// The demand on nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Demand {
    /// Prompt tokens to compute, per millisecond.
    pub(super) prompt_tokens: f64,
    /// Answer tokens to generate, per millisecond.
    pub(super) answer_tokens: f64,
    /// The tokens of prompts in the router's line.
    pub(super) waiting_tokens: f64,
    /// The tokens of answers to them.
    pub(super) waiting_answer_tokens: f64,
    /// The time in which the waiting work is to be served, in milliseconds.
    pub(super) window_ms: f64,
}

/// The work that had arrived by each sample within the window.
#[derive(Debug)]
pub(super) struct DemandWindow {
    window: Duration,
    looks: VecDeque<(Instant, Arrived)>,
}

impl DemandWindow {
    pub(super) fn new(window: Duration) -> Self {
        Self { window, looks: VecDeque::new() }
    }

    /// Returns the demand; `None` until a whole window was seen.
    pub(super) fn measure(&mut self, arrived: Arrived, now: Instant) -> Option<Demand> {
        self.looks.push_back((now, arrived));
        // The newest look that is a window old stays.
        while self.looks.get(1).is_some_and(|(at, _)| *at + self.window <= now) {
            self.looks.pop_front();
        }
        let (since, before) = self.looks.front()?;
        let elapsed = now.saturating_duration_since(*since);
        if elapsed < self.window {
            return None;
        }
        let ms = elapsed.as_secs_f64() * 1e3;
        let more = |of: fn(&Arrived) -> u64| of(&arrived).saturating_sub(of(before)) as f64;
        Some(Demand {
            prompt_tokens: more(|it| it.prompt_tokens) / ms,
            answer_tokens: more(|it| it.answer_tokens) / ms,
            waiting_tokens: arrived.waiting_tokens as f64,
            waiting_answer_tokens: arrived.waiting_answer_tokens as f64,
            window_ms: self.window.as_secs_f64() * 1e3,
        })
    }
}
