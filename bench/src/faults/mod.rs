//! Faults on a schedule.

pub mod cluster;
pub mod schedule;
pub mod inject;

pub use inject::{InjectedFault, inject_all};
pub use schedule::{Fault, FaultAction, Schedule};
