//! The outcome of one request.

use tokio::time::Instant;

use super::ModelMetrics;
use crate::error::ServeError;
use crate::requests::OpenRecord;
use crate::serve::Complete;

/// Counts the outcome of one request on drop, and closes its record. Without another outcome the client has
/// cancelled it, unless `complete` is set.
#[derive(Debug)]
pub struct Outcome {
    metrics: ModelMetrics,
    arrived: Instant,
    complete: Complete,
    word: &'static str,
    /// `None` for a request that was not admitted.
    record: Option<OpenRecord>,
}

const CANCELLED: &str = "cancelled";

impl Outcome {
    pub fn new(metrics: ModelMetrics, arrived: Instant) -> Self {
        Self { metrics, arrived, complete: Complete::default(), word: CANCELLED, record: None }
    }

    pub fn complete(&self) -> Complete {
        self.complete.clone()
    }

    /// Keeps the record of the request open until the drop.
    pub fn keep(&mut self, record: OpenRecord) {
        self.record = Some(record);
    }

    pub fn metrics(&self) -> &ModelMetrics {
        &self.metrics
    }

    pub fn finished(&mut self) {
        self.word = "finished";
        self.metrics.request.observe(self.arrived.elapsed().as_secs_f64());
    }

    /// Notes an error on its way to the client.
    pub fn note<T>(&mut self, result: Result<T, ServeError>) -> Result<T, ServeError> {
        if let Err(error) = &result {
            self.word = error.outcome();
        }
        result
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        if self.word == CANCELLED && self.complete.is_said() {
            self.finished();
        }
        self.metrics.ended(self.word);
        if let Some(record) = &mut self.record {
            record.set_outcome(self.word);
        }
    }
}
