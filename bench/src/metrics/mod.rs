//! Computes metrics from records, as pure functions. Reports contain their definitions.
//!
//! Reading order: [`metric`] (one request's latencies), [`distribution`], [`objective`], [`window`],
//! [`summary`], [`lag`] (the harness's own), [`vllm`] (metrics by the definitions of `vllm bench serve`).

pub mod distribution;
pub mod lag;
pub mod metric;
pub mod objective;
pub mod summary;
pub mod vllm;
pub mod window;

pub use distribution::Distribution;
pub use lag::{LagReport, LagSamples};
pub use metric::Metric;
pub use objective::Objectives;
pub use summary::Summary;
pub use window::Window;
