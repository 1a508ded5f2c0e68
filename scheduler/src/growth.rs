//! Room for sequences that grow: the blocks that are kept free, and the sequence to preempt if there are
//! none.
//!
//! A running sequence needs one more block every `block_tokens` steps. Admission keeps a reserve so that this
//! rarely fails. If it fails, the sequence of the lowest precedence is preempted: it releases its blocks
//! and is computed again later. A sequence can preempt only sequences of lower precedence. So the first one
//! in line can get all blocks that this worker's sequences hold.
//!
//! Blocks of other holders (landings, connectors that still read) cannot be taken away. So reservations for
//! landings leave free all blocks that the first sequence in line can still need.

use chassis::guards::{Guard, stands};

use crate::precedence::{Precedence, SequenceId};

/// The facts that growth decisions need about a sequence that has blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grower {
    pub id: SequenceId,
    pub precedence: Precedence,
    /// Blocks per group that the sequence may still need until it ends.
    pub blocks_left: usize,
    /// Whether a connector still reads the sequence's blocks, so that preempting the sequence would free none
    /// now.
    pub is_shared: bool,
}

/// Returns the blocks per group that admission leaves free: at most `each` for each sequence.
pub fn reserve(growers: &[Grower], each: usize) -> usize {
    if !stands(Guard::GrowthReserve) {
        return 0;
    }
    growers.iter().map(|grower| grower.blocks_left.min(each)).sum()
}

/// Returns the blocks per group that leases for landings leave free: all that the first sequence in line can
/// still need, and at most `each` for each other sequence.
pub fn lasting_reserve(growers: &[Grower], each: usize) -> usize {
    let first =
        growers.iter().min_by_key(|grower| grower.precedence).filter(|_| stands(Guard::GrowthReserve));
    reserve(growers, each) + first.map_or(0, |first| first.blocks_left.saturating_sub(each))
}

/// Returns the sequence to preempt for `needy`: that of the lowest precedence behind it whose blocks would
/// become free.
pub fn victim(growers: &[Grower], needy: Precedence) -> Option<SequenceId> {
    let behind = growers.iter().filter(|grower| grower.precedence > needy && !grower.is_shared);
    behind.max_by_key(|grower| grower.precedence).map(|grower| grower.id)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use types::prompt::Priority;

    use super::*;

    fn grower(id: u64, priority: i8, blocks_left: usize, is_shared: bool) -> Grower {
        let id = SequenceId(id);
        Grower {
            id,
            precedence: Precedence::new(Priority(priority), id, Duration::ZERO, Duration::MAX),
            blocks_left,
            is_shared,
        }
    }

    #[test]
    fn reserves() {
        for (growers, expected, lasting) in [
            (vec![], 0, 0),
            (vec![grower(1, 0, 9, false)], 2, 9),
            (vec![grower(1, 0, 1, false)], 1, 1),
            (
                vec![grower(1, 0, 9, false), grower(2, 0, 50, false), grower(3, 0, 1, false)],
                2 + 2 + 1,
                9 + 2 + 1,
            ),
            (vec![grower(1, 0, 9, false), grower(2, 1, 50, false)], 2 + 2, 2 + 50),
        ] {
            assert_eq!(reserve(&growers, 2), expected, "{growers:?}");
            assert_eq!(lasting_reserve(&growers, 2), lasting, "{growers:?}");
        }
    }

    #[test]
    fn the_last_in_line_gives_way() {
        let (first, urgent) = (grower(1, 0, 1, false), grower(2, 5, 1, false));
        let (last, shared) = (grower(3, 0, 1, false), grower(4, 0, 1, true));
        for (growers, needy, expected, why) in [
            (vec![first, last], first, Some(3), "the youngest"),
            (vec![first, urgent, last], urgent, Some(3), "the youngest of the lowest priority"),
            (vec![first, urgent], urgent, Some(1), "lower priority, though older"),
            (vec![first, urgent], first, None, "none is behind"),
            (vec![first, shared], first, None, "a wire keeps the blocks"),
            (vec![first, last, shared], first, Some(3), "the next one whose blocks come back"),
            (vec![last], last, None, "never itself"),
        ] {
            assert_eq!(victim(&growers, needy.precedence).map(|id| id.0), expected, "{why}");
        }
    }
}
