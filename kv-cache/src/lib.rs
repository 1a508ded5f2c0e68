//! Whose block is which, on one node.
//!
//! Suggested reading order: where the bytes are ([`memory`]), the right to some of them ([`lease`]), who hands that
//! right out ([`pool`], over its `books` of `hold`s), how blocks are found again (`prefix`), what makes a sequence's
//! blocks neighbours (`runs`), how all of it is checked (`integrity`), how others learn of it ([`events`]), and what
//! an operator sees ([`ledger`]). Beside them: how a sender knows that a layer is computed ([`fence`]).
#![forbid(unsafe_code)]

pub mod memory;

pub mod lease;
pub mod pool;

mod books;
mod hold;
mod prefix;
mod runs;

mod integrity;

pub mod events;
pub mod ledger;

pub mod fence;

pub mod error;

pub use error::{IntegrityError, NoRoom};
pub use events::{BlockEvents, NumberedEvent};
pub use fence::{FenceBroken, FenceSignal, LayerFence};
pub use kernels::{MemoryError, PageBusy, PageMut, PageRef};
pub use lease::{BlockLease, Holder, Holding, Quarantine};
pub use ledger::{BlockState, LedgerEntry};
pub use memory::{KvMemory, OnCard, RankMemory};
pub use pool::BlockPool;
