//! The load loop: sends what the workload says when the pacing says, on one thread.
//!
//! Reading order: [`plan`] (what was typed), [`compose`] (bodies, made on another thread before they are due),
//! [`mod@drive`] (the loop), [`session_runner`] (one session), [`live`] and [`probe`] (what is watched meanwhile).

pub mod compose;
pub mod drive;
pub mod live;
pub mod plan;
pub mod probe;
pub mod session_runner;

pub use drive::{Drive, Observed, Pacing, drive};
pub use live::Live;
pub use plan::LoadArgs;
