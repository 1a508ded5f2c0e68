use std::time::Duration;

use super::*;
use crate::conformance::{left, node};

fn snapshot(nodes: &[(&str, u64)]) -> MembershipEvent {
    MembershipEvent::Snapshot(nodes.iter().map(|(id, epoch)| node(id, *epoch)).collect())
}

fn knows(ids: &[&str]) -> (KnownMembers, Instant) {
    let until = Instant::now();
    let mut known = KnownMembers::default();
    known.snapshot(ids.iter().map(|id| node(id, 1)).collect(), AbsentMembers::HaveLeft, until);
    (known, until)
}

#[test]
fn a_registry_without_doubts_is_believed() {
    let (mut known, until) = knows(&["a", "b", "c"]);
    assert_eq!(
        known.snapshot(vec![node("b", 1), node("c", 1)], AbsentMembers::HaveLeft, until),
        snapshot(&[("b", 1), ("c", 1)])
    );
    assert_eq!(known.left(NodeId::new("c")), Some(left("c", 1)));
    assert_eq!(known.left(NodeId::new("c")), None);
    assert_eq!(known.snapshot(vec![], AbsentMembers::HaveLeft, until), snapshot(&[]));
    assert_eq!(known.doubts_end(), None);
}

#[test]
fn who_is_absent_is_missed_until_the_doubts_end() {
    let (mut known, until) = knows(&["a", "b", "c"]);
    assert_eq!(
        known.snapshot(vec![node("b", 2)], AbsentMembers::MayReturn, until),
        snapshot(&[("a", 1), ("b", 2), ("c", 1)])
    );
    assert_eq!((known.n_missed(), known.doubts_end()), (2, Some(until)));
    assert_eq!(known.joined(node("a", 1)), [], "it was never told to have left");
    assert_eq!(known.believe(), [left("c", 1)]);
    assert_eq!((known.n_missed(), known.doubts_end()), (0, None));
}

#[test]
fn who_leaves_while_there_are_doubts_is_missed_too() {
    let (mut known, until) = knows(&["a", "b"]);
    known.snapshot(vec![node("a", 1), node("b", 1)], AbsentMembers::MayReturn, until);
    assert_eq!((known.left(NodeId::new("a")), known.left(NodeId::new("b"))), (None, None));
    assert_eq!(known.left(NodeId::new("unknown")), None);
    assert_eq!(known.joined(node("b", 1)), []);
    assert_eq!(known.believe(), [left("a", 1)]);
}

#[test]
fn doubts_begin_anew_after_another_gap() {
    let (mut known, until) = knows(&["a", "b"]);
    known.snapshot(vec![], AbsentMembers::MayReturn, until);
    known.joined(node("b", 1));
    let later = until + Duration::from_secs(5);
    assert_eq!(known.snapshot(vec![], AbsentMembers::HaveLeft, later), snapshot(&[("a", 1), ("b", 1)]));
    assert_eq!(known.doubts_end(), Some(later));
    assert_eq!(known.believe(), [left("a", 1), left("b", 1)]);
}

#[test]
fn who_comes_back_in_a_new_life_is_a_new_member() {
    let (mut known, until) = knows(&["a"]);
    known.snapshot(vec![], AbsentMembers::MayReturn, until);
    assert_eq!(known.joined(node("a", 2)), [left("a", 1), MembershipEvent::Joined(node("a", 2))]);
    assert_eq!(known.believe(), []);
}
