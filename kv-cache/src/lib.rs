//! The KV blocks of one node, and the rights to them.
//!
//! Suggested reading order: where the bytes are ([`memory`]), the right to some of them ([`lease`]), what hands that
//! right out ([`pool`], over its `pool_state` of `record`s and `hold`s, behind the lock of `shared`), how blocks are found
//! again (`prefix`), what makes a sequence's blocks neighbours (`runs`), how all of it is checked (`integrity`), how others
//! learn of it ([`events`], from an `event_log`), and what an operator sees ([`ledger`]). Beside them: how a sender knows
//! that a layer is computed ([`fence`]).
#![forbid(unsafe_code)]

pub mod memory;

mod holder;
pub mod lease;
pub mod pool;

mod shared;
mod pool_state;
mod record;
mod hold;
mod prefix;
mod runs;

mod integrity;

mod event_log;
pub mod events;
pub mod ledger;

pub mod fence;

pub mod error;

pub use device::{MemoryError, PageBusy, PageMut, PageRef};
pub use error::{IntegrityError, NoRoom};
pub use event_log::NumberedEvent;
pub use events::BlockEvents;
pub use fence::{FenceBroken, FenceSignal, LayerFence};
pub use holder::{Holder, Holding};
pub use lease::{BlockLease, Quarantine};
pub use ledger::LedgerEntry;
pub use memory::{KvMemory, OnCard, RankMemory};
pub use pool::BlockPool;
pub use record::BlockState;
