//! Measures latencies and throughput of OpenAI-compatible servers as their clients see them.
//!
//! Suggested reading order: the events of a request ([`record`]), the server's explanation of it ([`explanation`]), and
//! [`metrics`]; the [`workload`], the [`client`] and the [`load`] loop; then [`report`], and [`command`] for the
//! command line. [`puppet`] is a server with programmed delays, against which the harness is tested.
#![forbid(unsafe_code)]

pub mod record;
pub mod explanation;
pub mod metrics;

pub mod workload;
pub mod client;
pub mod load;

pub mod bootstrap;
pub mod faults;
pub mod recovery;
pub mod report;

pub mod command;
pub mod progress;
pub mod puppet;

pub mod clock;
pub mod error;
pub mod machine;
pub mod random;
pub mod span;

pub use command::{BenchArgs, run};
