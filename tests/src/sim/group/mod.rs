//! A node of several processes on a virtual clock: the real head and followers compute prompts and decode steps, and a
//! decode node gets the prompts' KV. Between the head and each follower is a relay that loses, delays, doubles and reorders messages.
//!
//! Suggested reading order: the plan of a seed ([`plan`]), its execution and its checks ([`mod@run`]), the steps and the
//! transfers ([`work`], [`mod@reference`]), the processes ([`processes`]), the relay ([`relay`]), and the clock ([`clock`], [`waits`]). In [`landings`] the node of
//! several processes is a decode node, and [`reports`] has the messages about its landings.
//!
//! Models compute on real threads, so a seed repeats the faults of a run, but not each of its moments.

pub mod plan;
pub mod run;
pub mod work;
pub mod reference;
pub mod processes;
pub mod relay;
pub mod clock;
pub mod waits;
pub mod reports;
pub mod landings;

pub use run::run;
