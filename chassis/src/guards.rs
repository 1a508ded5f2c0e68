//! Checks that a test can disable, to prove that the simulation detects the faults from which they protect.
//!
//! Disabling needs the cargo feature `mutations`, which only the test crate enables. Without it every check is active
//! and costs nothing. A check is disabled for one thread, so that parallel tests keep theirs.

/// A check that a test can disable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The check that a landing opens only with its grant.
    Grant,
    /// The check that a landing opens only for the epoch of the node that granted it.
    Epoch,
    /// The check that no bytes are written into a landing that has ended.
    Quiet,
    /// The reserve of free blocks that running sequences can grow into.
    GrowthReserve,
    /// The limit of failed attempts per request.
    AttemptBudget,
    /// The check that a sequence ends at its deadline.
    DeadlineReaper,
    /// The check that a member whose lease has expired is removed.
    LeaseExpiry,
    /// The rule that the last token of a fully cached prompt is computed.
    LastToken,
    /// The rule that a ticket leaves its line when its request ends.
    LineTicket,
    /// The rule that an admitted ticket does not wait any longer.
    Admission,
    /// The rule that a request's assigned work ends with the attempt.
    Assignment,
    /// The rule that a watcher replaces its state by the registry's after a gap.
    Resync,
    /// The check that a message between two processes of a node is the next one.
    MessageNumber,
    /// The rule that the sender of a landing waits until all processes of the node have accepted it.
    AllAccepted,
    /// The check that all processes of a node have verified their pages before a landing counts as arrived.
    AllLanded,
    /// The rule that blocks are not reused while another process of the node may write them.
    AllQuiet,
}

impl Guard {
    pub const ALL: [Self; 16] = [
        Self::Grant,
        Self::Epoch,
        Self::Quiet,
        Self::GrowthReserve,
        Self::AttemptBudget,
        Self::DeadlineReaper,
        Self::LeaseExpiry,
        Self::LastToken,
        Self::LineTicket,
        Self::Admission,
        Self::Assignment,
        Self::Resync,
        Self::MessageNumber,
        Self::AllAccepted,
        Self::AllLanded,
        Self::AllQuiet,
    ];
}

/// Returns whether the check `guard` is active.
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

    /// Disables `guard` on this thread until the returned value is dropped.
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
