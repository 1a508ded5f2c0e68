//! The requests and their times: sessions of turns, drawn from seeds or read from files.
//!
//! Reading order: [`session`] (the plan of one conversation), [`prompt`] (recipes of prompts, and their
//! tokens), [`lengths`] and [`arrivals`] (what is drawn at random), then the sources [`synthetic`],
//! [`sharegpt`] and [`mooncake`], and [`source`], which chooses among them.

pub mod arrivals;
pub mod lengths;
pub mod mooncake;
pub mod prompt;
pub mod session;
pub mod sharegpt;
pub mod source;
pub mod synthetic;

pub use arrivals::{Arrivals, ArrivalsSpec};
pub use lengths::Lengths;
pub use prompt::{Recipe, Segment, Vocabulary};
pub use session::{Session, Turn};
pub use source::{ArrivalTimes, WorkloadArgs, sessions};
