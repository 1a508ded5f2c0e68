//! The KV blocks of one node, and the rights to use them.
//!
//! Suggested reading order:
//!
//! - the memory of blocks ([`memory`]), and the right to some of them ([`lease`])
//! - the pool that hands out leases ([`pool`]), its `pool_state` of `record`s and `hold`s, and the lock of `shared`
//! - the prefix index (`prefix`), and runs of free neighbours (`runs`)
//! - the integrity check (`integrity`)
//! - the events for mirrors of the cache ([`events`], from an `event_log`), and the ledger for operators ([`ledger`])
//! - the fence that tells a sender which layers are computed ([`fence`])
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
pub use events::{BlockEvents, NumberedEvent};
pub use fence::{FenceBroken, FenceSignal, LayerFence};
pub use holder::{Holder, Holding};
pub use lease::{BlockLease, Quarantine};
pub use ledger::LedgerEntry;
pub use memory::{KvMemory, OnCard, RankMemory};
pub use pool::BlockPool;
pub use record::BlockState;
