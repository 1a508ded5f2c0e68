//! Many requests that arrive together: chunks of prompts run beside decoding sequences, until all requests
//! are finished.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::sequences::{SequenceInput, Sequences, collect, n_parts};
use super::{MeasureError, Offline, OfflineTimes};
use crate::backend::Backend;
use crate::step::PendingStep;

/// A request that has a sequence.
#[derive(Clone, Copy, Debug)]
struct RunningSequence {
    sequence: usize,
    n_computed: usize,
    /// The step that samples its last token; `None` if it has no token yet.
    sampled_in: Option<usize>,
}

/// A minimal scheduler: running sequences first, then prompts in order of arrival.
#[derive(Debug)]
struct Queue {
    of: Offline,
    n_parts: usize,
    /// The number of the next step.
    step: usize,
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
        n_parts: n_parts(backend),
        step: 0,
        n_waiting: of.n_requests,
        free_sequences: (0..rows).rev().collect(),
        running: VecDeque::with_capacity(rows),
        n_done: 0,
    };
    let started = Instant::now();
    let mut in_flight: VecDeque<(usize, PendingStep)> = VecDeque::new();
    while queue.n_done < of.n_requests {
        let oldest = in_flight.front().map_or(queue.step, |(number, _)| *number);
        let parts = queue.next_step(oldest);
        let is_launched = !parts.is_empty();
        if is_launched {
            in_flight.push_back((queue.step, sequences.launch(backend, &parts)?));
            queue.step += 1;
        }
        if (!is_launched || in_flight.len() > queue.n_parts)
            && let Some((_, step)) = in_flight.pop_front()
        {
            collect(backend, step)?;
        }
    }
    in_flight.into_iter().try_for_each(|(_, step)| collect(backend, step).map(drop))?;
    let seconds = started.elapsed().as_secs_f64();
    let requests_per_s = of.n_requests as f64 / seconds;
    Ok(OfflineTimes { of, seconds, requests_per_s, steps: queue.step })
}

impl Queue {
    /// Returns the rows of the next step. Lengths are fixed, so the host need not read tokens between steps. `oldest` is the
    /// oldest step in flight.
    fn next_step(&mut self, oldest: usize) -> Vec<(usize, SequenceInput)> {
        let Self { step, n_parts, .. } = *self;
        let mut tokens_left = self.of.step_tokens;
        let mut parts = Vec::with_capacity(self.running.len());
        self.admit();
        let (decoding, computing): (Vec<_>, Vec<_>) =
            self.running.iter_mut().partition(|request| request.n_computed >= self.of.prompt_tokens);
        // With several stages, a sequence waits until its token has almost come, so that no stage waits for it.
        let part_len = decoding.len().div_ceil(n_parts);
        let is_in_part = |request: &&mut RunningSequence| {
            request.sampled_in.is_none_or(|sampled_in| sampled_in + n_parts <= step)
        };
        let decoding = decoding.into_iter().filter(is_in_part).take(part_len);
        for request in decoding.chain(computing) {
            if let Some(part) = request.next(self.of, step, oldest, tokens_left) {
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
            self.running.push_back(RunningSequence { sequence, n_computed: 0, sampled_in: None });
        }
    }
}

impl RunningSequence {
    /// Returns the sequence's part of a step. A token of a step before `oldest` is collected already.
    fn next(&mut self, of: Offline, step: usize, oldest: usize, tokens_left: usize) -> Option<SequenceInput> {
        if tokens_left == 0 {
            return None;
        }
        let start = self.n_computed;
        if start >= of.prompt_tokens {
            let sampled_in = self.sampled_in.replace(step);
            let is_in_flight = sampled_in.is_some_and(|sampled_in| sampled_in >= oldest);
            self.n_computed += 1;
            return Some(SequenceInput::Next { position: start, is_in_flight });
        }
        let end = (start + tokens_left).min(of.prompt_tokens);
        self.n_computed = end;
        self.sampled_in = (end == of.prompt_tokens).then_some(step);
        Some(SequenceInput::Prompt { start, end })
    }
}
