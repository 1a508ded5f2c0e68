//! Hot path. Collects a step: sends its tokens to the sinks, and releases or publishes its blocks.

use std::time::Duration;

use engine::{RowError, SampledToken};
use tokio::time::Instant;
use tracing::{error, info, trace, warn};
use types::step::PromptLogprob;
use types::{CallerAction, Refusal, RefusalKind};

use super::{Worker, failed};
use crate::launched_step::{LaunchTiming, LaunchedStep, StepRow};
use crate::load::StepShape;
use crate::sequence::After;
use crate::sink::SequenceEnd;

impl Worker {
    /// Waits for the oldest launched step, and applies its results.
    pub(super) fn collect(&mut self) {
        let Some(LaunchedStep { launched, rows, launched_at, due, held, .. }) = self.flights.pop_front()
        else {
            return;
        };
        let asked = self.world.now();
        let outcome = self.backend.collect(launched);
        let now = self.world.now();
        self.note_launch_behind(due, now.saturating_duration_since(asked));
        self.note_step(StepShape::of(&rows), launched_at, now);
        match outcome {
            Ok(output) => {
                assert_eq!(output.rows.len(), rows.len(), "a backend answers for every row");
                let mut of_prompts = output.prompt_logprobs.into_iter();
                for (row, outcome) in rows.iter().zip(output.rows) {
                    self.note_prompt_logprobs(*row, of_prompts.next().unwrap_or_default());
                    self.take_in(*row, outcome, now);
                }
            }
            Err(error) => self.fail_step(&rows, &error),
        }
        drop(held);
    }

    /// Records how much of a step was left when the next one was launched: the time until it was `due`, or
    /// the time that the worker `waited` for it.
    fn note_launch_behind(&mut self, due: Option<Instant>, waited: Duration) {
        let Some(next) = self.flights.front().filter(|next| next.timing == LaunchTiming::Late) else {
            return;
        };
        let spare = due.map_or(waited, |due| due.saturating_duration_since(next.launched_at));
        if self.lead.learn(spare) {
            self.metrics.tight_launches.inc();
        }
    }

    /// Records the time that the device took for a step: from its launch, or from the end of the previous
    /// step.
    fn note_step(&mut self, shape: StepShape, launched_at: Instant, now: Instant) {
        let began = self.last_step.map_or(launched_at, |last| last.max(launched_at));
        let took = now.saturating_duration_since(began);
        self.costs.observe(shape.filled_up(self.backend.rows_together()), took);
        let StepShape { n_running, n_prefill_tokens, .. } = shape;
        trace!(target: "walk", n_running, n_prefill_tokens, took_us = took.as_micros() as u64, "engine step collected");
        self.metrics.steps.inc();
        self.metrics.step_seconds.observe(took.as_secs_f64());
        self.metrics.step_tokens.observe((shape.n_running + shape.n_prefill_tokens) as f64);
        self.metrics.prefill_tokens.inc_by(shape.n_prefill_tokens as u64);
        self.done.add(shape, took);
        self.last_step = Some(now);
        self.last_progress = now;
    }

    fn note_prompt_logprobs(&mut self, row: StepRow, of_row: Vec<PromptLogprob>) {
        if let (Some(sequence), false) = (self.sequences.get_mut(&row.id), of_row.is_empty()) {
            sequence.note_prompt_logprobs(row.n_before, of_row);
        }
    }

    fn take_in(&mut self, row: StepRow, outcome: Result<Option<SampledToken>, RowError>, now: Instant) {
        let Some(sequence) = self.sequences.get_mut(&row.id) else {
            // The sequence ended while the step was running, by its last token or by a cancellation, so its
            // row is dropped.
            self.metrics.discarded_rows.inc();
            return;
        };
        sequence.row_collected();
        match outcome {
            Err(error) => self.fail_row(row, &error),
            Ok(None) => sequence.confirm(row.n_tokens, &self.model.layout),
            Ok(Some(sampled)) => {
                sequence.confirm(row.n_tokens, &self.model.layout);
                self.metrics.sampled_tokens.inc();
                if let After::End(finish) = sequence.accept(sampled, &self.model, self.done, now) {
                    let end = sequence.finished(finish);
                    self.end(row.id, end);
                }
            }
        }
    }

    fn fail_row(&mut self, row: StepRow, reason: &RowError) {
        if *reason == RowError::LateMask {
            self.metrics.late_masks.inc();
        }
        let (action, sequence) = (reason.caller_action(), row.id.0);
        match action {
            CallerAction::Bug => error!(%reason, sequence, "sequence failed in an engine step"),
            CallerAction::Reject => info!(%reason, sequence, "sequence ends: its request is at fault"),
            _ => warn!(%reason, sequence, "sequence failed in an engine step"),
        }
        let kind = if action == CallerAction::Reject { RefusalKind::Invalid } else { RefusalKind::Failed };
        self.end(row.id, SequenceEnd::Failed(Refusal::new(kind, reason.to_string())));
    }

    /// Ends all sequences of a failed step, because no row has a token and the step's KV must not be read.
    pub(super) fn fail_step(&mut self, rows: &[StepRow], error: &engine::BackendError) {
        warn!(%error, n_rows = rows.len(), "engine step failed, all of its sequences fail");
        self.metrics.failed_steps.inc();
        for row in rows {
            self.end(row.id, failed(error.to_string()));
        }
        if error.is_fatal() {
            self.lose(&error.to_string());
        }
    }
}
