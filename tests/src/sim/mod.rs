//! Whole clusters on a simulated network and a virtual clock: real router, registry, nodes, scheduler and tcp connector,
//! in one thread, and a seed repeats a run exactly.
//!
//! Suggested reading order: what a seed means ([`plan`], and what chance alone would seldom play, `siege`), how it is played ([`mod@run`]) and judged ([`oracle`],
//! [`client`] against the [`mod@reference`], [`explain`], [`witness`]), and what it is played on ([`host`], [`net`], [`pipe`]).
//! `docs/simulation.md` says how to use it, and which guard each kind of fault tests.

pub mod plan;
mod siege;
pub mod explain;
pub mod run;
pub mod client;
pub mod reference;
pub mod oracle;
pub mod witness;
pub mod host;
pub mod pool;
pub mod watcher;
pub mod operator;
pub mod rogue;
pub mod net;
pub mod pipe;
pub mod chance;
pub mod log;

pub use plan::Plan;
pub use run::{Report, play, run};
