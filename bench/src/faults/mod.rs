//! Faults on schedule: what is done to which process, and when.

pub mod cluster;
pub mod schedule;
pub mod strike;

pub use schedule::{Deed, Fault, Schedule};
pub use strike::{Struck, strike_all};
