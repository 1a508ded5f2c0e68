//! Whole clusters on a simulated network and a virtual clock: real router, registry, nodes, scheduler and tcp
//! connector, in one thread. A seed repeats a run exactly.
//!
//! Suggested reading order: the plan of a seed ([`plan`], and `siege` for rare combinations), its execution
//! ([`mod@run`]), its checks ([`oracle`], [`client`] against the [`mod@reference`], [`explain`] for refusals,
//! [`witness`]), and the simulated machines ([`host`], [`net`], [`pipe`]). `docs/simulation.md` shows its use, and the
//! guard that each kind of fault tests.

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
pub mod death;
pub mod rogue;
pub mod net;
pub mod pipe;
pub mod chance;
pub mod log;
pub mod group;

pub use plan::Plan;
pub use run::{Report, play, run};
