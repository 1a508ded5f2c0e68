//! Many requests that arrive together: chunks of prompts run beside decoding sequences, until all requests
//! are finished.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::sequences::{SequenceInput, Sequences, collect};
use super::{MeasureError, Offline, OfflineTimes};
use crate::backend::Backend;
use crate::step::PendingStep;

/// A request that has a sequence.
#[derive(Clone, Copy, Debug)]
struct RunningSequence {
    sequence: usize,
    n_computed: usize,
    /// Whether the last launched step samples its last token.
    is_in_flight: bool,
}

/// A minimal scheduler: running sequences first, then prompts in order of arrival.
#[derive(Debug)]
struct Queue {
    of: Offline,
    n_waiting: usize,
    free_sequences: Vec<usize>,
    running: VecDeque<RunningSequence>,
    n_done: usize,
}

pub(super) fn measure(backend: &mut dyn Backend, of: Offline) -> Result<OfflineTimes, MeasureError> {
    let (rows, n_tokens) = (of.rows(), of.tokens_of_sequence());
    let sequences = Sequences::new(backend, rows, of.prompt_tokens, n_tokens)?;
    let mut queue = Queue {
        of,
        n_waiting: of.n_requests,
        free_sequences: (0..rows).rev().collect(),
        running: VecDeque::with_capacity(rows),
        n_done: 0,
    };
    let started = Instant::now();
    let mut in_flight: Option<PendingStep> = None;
    let mut steps = 0;
    while queue.n_done < of.n_requests {
        let parts = queue.next_step();
        let next = if parts.is_empty() { None } else { Some(sequences.launch(backend, &parts)?) };
        steps += usize::from(next.is_some());
        if let Some(step) = std::mem::replace(&mut in_flight, next) {
            collect(backend, step)?;
        }
    }
    if let Some(step) = in_flight {
        collect(backend, step)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(OfflineTimes { of, seconds, requests_per_s: of.n_requests as f64 / seconds, steps })
}

impl Queue {
    /// Returns the rows of the next step. Lengths are fixed, so the host need not read tokens between steps.
    fn next_step(&mut self) -> Vec<(usize, SequenceInput)> {
        let mut tokens_left = self.of.step_tokens;
        let mut parts = Vec::with_capacity(self.running.len());
        self.admit();
        // Sequences with a token in flight are in every step, because the token is kept for one step only.
        let (decoding, computing): (Vec<_>, Vec<_>) =
            self.running.iter_mut().partition(|request| request.n_computed >= self.of.prompt_tokens);
        for request in decoding.into_iter().chain(computing) {
            if let Some(part) = request.next(self.of, tokens_left) {
                tokens_left -= part.n_tokens();
                parts.push((request.sequence, part));
            }
        }
        let end = self.of.prompt_tokens + self.of.output_tokens - 1;
        let (done, going): (VecDeque<_>, VecDeque<_>) =
            self.running.drain(..).partition(|request| request.n_computed == end);
        self.n_done += done.len();
        self.free_sequences.extend(done.iter().map(|request| request.sequence));
        self.running = going;
        parts
    }

    fn admit(&mut self) {
        while self.n_waiting > 0
            && let Some(sequence) = self.free_sequences.pop()
        {
            self.n_waiting -= 1;
            self.running.push_back(RunningSequence { sequence, n_computed: 0, is_in_flight: false });
        }
    }
}

impl RunningSequence {
    fn next(&mut self, of: Offline, tokens_left: usize) -> Option<SequenceInput> {
        if tokens_left == 0 {
            return None;
        }
        let start = self.n_computed;
        if start >= of.prompt_tokens {
            let is_in_flight = std::mem::replace(&mut self.is_in_flight, true);
            self.n_computed += 1;
            return Some(SequenceInput::Next { position: start, is_in_flight });
        }
        let end = (start + tokens_left).min(of.prompt_tokens);
        self.n_computed = end;
        self.is_in_flight = end == of.prompt_tokens;
        Some(SequenceInput::Prompt { start, end })
    }
}
