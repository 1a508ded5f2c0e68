//! The metrics of a worker.

use chassis::metrics::Metrics;
use chassis::metrics::prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use types::NodeLoad;

use crate::sink::SequenceEnd;

/// Buckets for the number of tokens in a step: 1 to 16384, by factors of two.
const TOKEN_BUCKETS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

#[derive(Clone, Debug)]
pub struct SchedulerMetrics {
    pub(crate) steps: IntCounter,
    pub(crate) step_seconds: Histogram,
    pub(crate) step_tokens: Histogram,
    pub(crate) prefill_tokens: IntCounter,
    pub(crate) cached_tokens: IntCounter,
    pub(crate) sampled_tokens: IntCounter,
    /// Rows that were computed for sequences that had already ended.
    pub(crate) discarded_rows: IntCounter,
    pub(crate) preemptions: IntCounter,
    pub(crate) failed_steps: IntCounter,
    /// Rows without a token because a GPU has not waited for their masks.
    pub(crate) late_masks: IntCounter,
    /// Steps that were launched shortly before, or after, the end of the previous step.
    pub(crate) tight_launches: IntCounter,
    pub(crate) queue_seconds: Histogram,
    pub(crate) room_wait_seconds: Histogram,
    pub(crate) integrity_failures: IntCounter,
    ended: IntCounterVec,
    running: IntGauge,
    waiting: IntGauge,
    queued_tokens: IntGauge,
}

impl SchedulerMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            steps: metrics.counter("steps_total", "Steps that the model has run."),
            step_seconds: metrics.latency("step_seconds", "One step of the model."),
            step_tokens: metrics.histogram("step_tokens", "Tokens that one step computed.", TOKEN_BUCKETS),
            prefill_tokens: metrics.counter("prefill_tokens_total", "Prompt tokens computed."),
            cached_tokens: metrics.counter("cached_tokens_total", "Prompt tokens found in the prefix cache."),
            sampled_tokens: metrics.counter("sampled_tokens_total", "Tokens sampled and sent."),
            discarded_rows: metrics
                .counter("discarded_rows_total", "Rows computed for sequences that had ended meanwhile."),
            preemptions: metrics.counter("preemptions_total", "Sequences whose blocks were taken away."),
            failed_steps: metrics.counter("failed_steps_total", "Steps that the backend failed."),
            late_masks: metrics
                .counter("late_masks_total", "Rows that failed because the mask of their grammar was late."),
            tight_launches: metrics.counter(
                "tight_launches_total",
                "Steps launched after, or shortly before, the end of the previous one: above a few percent the device idles.",
            ),
            queue_seconds: metrics
                .latency("queue_seconds", "From a sequence's submission to its first step."),
            room_wait_seconds: metrics
                .latency("room_wait_seconds", "Time that a prompt waited in line for KV room."),
            integrity_failures: metrics
                .counter("integrity_failures_total", "Failed integrity checks of the block pool."),
            ended: metrics.counter_vec("sequences_total", "Sequences ended, by outcome.", &["outcome"]),
            running: metrics.gauge("running", "Sequences that hold blocks."),
            waiting: metrics.gauge("waiting", "Prompts that wait in line for KV room."),
            queued_tokens: metrics.gauge("queued_tokens", "Prompt tokens that are to be computed."),
        }
    }

    pub(crate) fn ended(&self, end: &SequenceEnd) {
        let outcome = match end {
            SequenceEnd::Finished { finish: Some(types::FinishReason::Stop), .. } => "stop",
            SequenceEnd::Finished { finish: Some(types::FinishReason::Length), .. } => "length",
            SequenceEnd::Finished { finish: None, .. } => "handed_over",
            SequenceEnd::Failed(refusal) => refusal.kind.code(),
        };
        self.ended.with_label_values(&[outcome]).inc();
    }

    pub(crate) fn report(&self, load: &NodeLoad) {
        self.running.set(i64::from(load.running));
        self.waiting.set(i64::from(load.waiting));
        self.queued_tokens.set(i64::try_from(load.queued_tokens).unwrap_or(i64::MAX));
    }
}
