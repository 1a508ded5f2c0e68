//! A decode node of several processes on a virtual clock. Senders fill its landings, each process takes the KV of its
//! layers, and the node computes the answers with it.
//!
//! Messages between head and followers have the faults of the relay. The KV travels over the simulated network of clusters,
//! whose paths have faults of their own.
//!
//! Suggested reading order: the plan of a seed ([`plan`]), its execution and its checks ([`mod@run`]), the senders
//! ([`sender`]), the node's memory ([`memory`]), and its steps ([`answers`]).

pub mod plan;
pub mod run;
pub mod sender;
pub mod memory;
pub mod answers;

pub use run::run;
