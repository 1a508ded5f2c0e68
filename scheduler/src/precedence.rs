//! The order in which sequences get room and steps.

use std::cmp::Reverse;
use std::time::Duration;

use types::prompt::Priority;

/// The id of a sequence within one worker. Later sequences have greater ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId(pub u64);

/// The place of a sequence in the order of a worker: the smallest value comes first. No two sequences have
/// the same.
///
/// A higher priority comes first, and among equal priorities the earlier arrival. A sequence older than the
/// age bound comes before all younger ones, in order of arrival alone. So a stream of urgent prompts cannot
/// starve the others: the work that came before a prompt bounds its wait. Age only grows, and sequences past
/// the bound are ordered by arrival, so two sequences cannot preempt each other in turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Precedence {
    class: Reverse<Class>,
    arrival: SequenceId,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Class {
    Young(Priority),
    Aged,
}

/// The place of a sequence or request among all that wait for KV room: the smaller one comes first.
///
/// A preempted sequence comes before all that have not run yet, because its client already has tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Turn {
    is_new: bool,
    precedence: Precedence,
}

impl Turn {
    /// Makes the turn of a sequence or a request that has not run yet.
    pub fn of_new(precedence: Precedence) -> Self {
        Self { is_new: true, precedence }
    }

    /// Makes the turn of a preempted sequence.
    pub fn of_preempted(precedence: Precedence) -> Self {
        Self { is_new: false, precedence }
    }
}

impl Precedence {
    pub fn new(priority: Priority, arrival: SequenceId, age: Duration, bound: Duration) -> Self {
        let class = if age >= bound { Class::Aged } else { Class::Young(priority) };
        Self { class: Reverse(class), arrival }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn precedence(priority: i8, arrival: u64, age_s: u64) -> Precedence {
        let bound = Duration::from_secs(10);
        Precedence::new(Priority(priority), SequenceId(arrival), Duration::from_secs(age_s), bound)
    }

    #[test]
    fn preempted_sequences_have_the_first_turn() {
        for (first, second, why) in [
            (
                Turn::of_preempted(precedence(0, 9, 0)),
                Turn::of_new(precedence(5, 1, 0)),
                "before a higher priority",
            ),
            (
                Turn::of_preempted(precedence(0, 9, 0)),
                Turn::of_new(precedence(0, 1, 11)),
                "before an aged one",
            ),
            (
                Turn::of_preempted(precedence(0, 1, 0)),
                Turn::of_preempted(precedence(0, 2, 0)),
                "among preempted ones, precedence",
            ),
            (
                Turn::of_new(precedence(1, 2, 0)),
                Turn::of_new(precedence(0, 1, 0)),
                "among new ones, precedence",
            ),
        ] {
            assert!(first < second, "{why}");
        }
    }

    #[test]
    fn order() {
        for (first, second, why) in [
            (precedence(0, 1, 0), precedence(0, 2, 0), "arrival"),
            (precedence(1, 2, 0), precedence(0, 1, 0), "priority before arrival"),
            (precedence(-1, 1, 10), precedence(9, 2, 0), "age before priority"),
            (precedence(0, 1, 11), precedence(5, 2, 12), "among the aged, arrival"),
        ] {
            assert!(first < second, "{why}");
        }
    }
}
