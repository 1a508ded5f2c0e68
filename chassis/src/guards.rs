//! Guards that a test takes away, to see that the simulation notices what they guard against.
//!
//! Only with the cargo feature `mutations`, which only the test crate can enable; without it every guard stands,
//! and asking costs nothing. A guard is taken away for one thread, so that other tests beside it keep theirs.

/// What can be taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A landing is opened only with its grant.
    Grant,
    /// A landing is opened only for the life of the node that granted it.
    Epoch,
    /// No bytes are written into a landing that has ended.
    Quiet,
    /// Blocks are left for running sequences to grow into.
    GrowthReserve,
    /// The number of failed attempts per request is bounded.
    AttemptBudget,
    /// Sequences end with their deadline.
    DeadlineReaper,
    /// Members who are silent for a whole lease are no members.
    LeaseExpiry,
    /// The last token of a prompt that is cached whole is computed.
    LastToken,
    /// After a gap, what a watcher knew is replaced by what is.
    Resync,
}

impl Guard {
    pub const ALL: [Self; 9] = [
        Self::Grant,
        Self::Epoch,
        Self::Quiet,
        Self::GrowthReserve,
        Self::AttemptBudget,
        Self::DeadlineReaper,
        Self::LeaseExpiry,
        Self::LastToken,
        Self::Resync,
    ];
}

/// Whether `guard` does its work.
#[cfg(not(feature = "mutations"))]
#[inline(always)]
pub const fn stands(_guard: Guard) -> bool {
    true
}

#[cfg(feature = "mutations")]
pub use removal::{Removed, remove, stands};

#[cfg(feature = "mutations")]
mod removal {
    use std::cell::Cell;

    use super::Guard;

    thread_local! {
        static REMOVED: Cell<Option<Guard>> = const { Cell::new(None) };
    }

    pub fn stands(guard: Guard) -> bool {
        REMOVED.get() != Some(guard)
    }

    /// Takes `guard` away on this thread, until the answer is dropped.
    pub fn remove(guard: Guard) -> Removed {
        REMOVED.set(Some(guard));
        Removed(())
    }

    #[derive(Debug)]
    #[must_use = "the guard is back when this is dropped"]
    pub struct Removed(());

    impl Drop for Removed {
        fn drop(&mut self) {
            REMOVED.set(None);
        }
    }
}
