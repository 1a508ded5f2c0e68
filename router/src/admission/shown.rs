//! The state of the lines, for pages and metrics.

use std::collections::BTreeMap;

/// One model's line at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownLine {
    pub model: String,
    /// The number of waiting requests by priority and tenant.
    pub waiting: BTreeMap<(i8, String), usize>,
    pub n_waiting: usize,
    pub n_served: usize,
    /// The number of admitted requests that no node was assigned for.
    pub n_admitted: usize,
    /// The work that is served per second while requests wait, in tokens; `None` if it is not known.
    pub work_per_second: Option<f64>,
    /// The predicted number of tokens of an answer.
    pub answer_tokens: f64,
}
