//! Load and truth: measures what an OpenAI-compatible server does to those who wait for its tokens.
//!
//! Suggested reading order: what is seen ([`record`]) and what it means ([`metrics`]); what is sent ([`workload`]), by
//! whom ([`client`]) and when ([`load`]); then [`report`], and [`command`] for what is typed. [`puppet`] is a server
//! with programmed delays, against which all of it is held.
#![forbid(unsafe_code)]

pub mod record;
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
