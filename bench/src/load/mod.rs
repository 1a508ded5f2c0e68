//! The load loop: sends the workload at the times of the plan, on one thread.
//!
//! Reading order: [`plan`] (the settings), [`compose`] (bodies, made on another thread before they are due),
//! [`mod@drive`] (the loop), [`session_runner`] (one session), [`live`] and [`probe`] (live numbers, and the
//! harness's own lag).

pub mod compose;
pub mod drive;
pub mod live;
pub mod plan;
pub mod probe;
pub mod session_runner;

pub use drive::{Drive, LoadResult, Pacing, drive};
pub use live::Live;
pub use plan::LoadArgs;
