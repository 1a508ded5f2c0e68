//! Tests of the table without a runtime: time is a number.

use super::*;
use crate::conformance::{left, node};

const TTL: Duration = Duration::from_secs(10);
const A: LeaseId = LeaseId(100);
const B: LeaseId = LeaseId(200);

struct Clock(Instant);

impl Clock {
    fn at(&self, seconds: u64) -> Instant {
        self.0 + Duration::from_secs(seconds)
    }
}

fn table() -> (Table, Clock) {
    let start = Instant::now();
    (Table::new(TTL, start), Clock(start))
}

/// Expires leases at each of these seconds, as the registry's task does. Returns the events.
fn look(table: &mut Table, clock: &Clock, seconds: std::ops::RangeInclusive<u64>) -> Vec<MembershipEvent> {
    seconds.flat_map(|second| table.lapse(clock.at(second))).collect()
}

#[test]
fn who_is_silent_for_a_whole_lease_lapses() {
    let (mut table, clock) = table();
    assert_eq!(
        table.announce(node("a", 1), A, clock.at(0)).ok(),
        Some(vec![MembershipEvent::Joined(node("a", 1))])
    );
    table.announce(node("b", 1), B, clock.at(0)).expect("room");
    assert_eq!(look(&mut table, &clock, 1..=9), []);
    table.keep_alive(B, clock.at(9)).expect("it is alive");
    assert_eq!(look(&mut table, &clock, 10..=18), [left("a", 1)]);
    assert_eq!(table.members(), [node("b", 1)]);
    assert!(matches!(table.keep_alive(A, clock.at(18)), Err(RegistryError::LeaseLost)));
    assert_eq!(look(&mut table, &clock, 19..=30), [left("b", 1)]);
}

#[test]
fn a_registry_that_stood_still_expires_no_node() {
    let (mut table, clock) = table();
    table.announce(node("a", 1), A, clock.at(0)).expect("room");
    assert_eq!(table.lapse(clock.at(60)), []);
    assert_eq!(look(&mut table, &clock, 61..=69), []);
    assert_eq!(look(&mut table, &clock, 70..=70), [left("a", 1)]);
}

#[test]
fn one_place_for_one_id() {
    // Each case: the epoch of the member, the epoch that is announced, and the resulting events (`None`:
    // refused).
    let joined = |epoch| MembershipEvent::Joined(node("a", epoch));
    for (held, asked, told) in
        [(1, 2, Some(vec![left("a", 1), joined(2)])), (1, 1, Some(vec![])), (2, 1, None)]
    {
        let (mut table, clock) = table();
        table.announce(node("a", held), A, clock.at(0)).expect("room");
        assert_eq!(table.announce(node("a", asked), B, clock.at(1)).ok(), told, "{held} then {asked}");
        let holder = if told.is_some() { (B, asked) } else { (A, held) };
        assert_eq!(table.members(), [node("a", holder.1)]);
        assert_eq!(table.keep_alive(A, clock.at(1)).is_ok(), holder.0 == A);
        assert_eq!(table.keep_alive(B, clock.at(1)).is_ok(), holder.0 == B);
    }
}

#[test]
fn a_replaced_lease_has_no_power() {
    let (mut table, clock) = table();
    table.announce(node("a", 1), A, clock.at(0)).expect("room");
    table.announce(node("a", 2), B, clock.at(5)).expect("newer");
    assert_eq!(table.withdraw(A), None);
    assert_eq!(look(&mut table, &clock, 1..=14), [], "nor does its end lapse the newer one");
    assert_eq!(table.withdraw(B), Some(left("a", 2)));
    assert_eq!(table.withdraw(B), None);
    assert_eq!(table.members(), []);
}

#[test]
fn the_same_life_may_say_something_new() {
    let (mut table, clock) = table();
    table.announce(node("a", 1), A, clock.at(0)).expect("room");
    let moved = NodeInfo { admin: "elsewhere:1".to_owned(), ..node("a", 1) };
    let told = table.announce(moved.clone(), B, clock.at(1)).expect("the same life");
    assert_eq!(told, [MembershipEvent::Joined(moved)]);
}

#[test]
fn members_are_bounded() {
    let (mut table, clock) = table();
    for n in 0..N_MEMBERS_MAX as u64 {
        table.announce(node(&format!("n{n}"), 1), LeaseId(n), clock.at(0)).expect("room");
    }
    let refused = table.announce(node("one-more", 1), LeaseId(u64::MAX), clock.at(0));
    assert!(matches!(refused, Err(RegistryError::Full { n_members_max: N_MEMBERS_MAX })));
    table.announce(node("n0", 2), LeaseId(u64::MAX), clock.at(0)).expect("it takes no new place");
    assert_eq!(table.leases.len(), table.places.len());
}
