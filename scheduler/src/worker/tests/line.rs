//! Tests of the order in which requests for room and the worker's own sequences get KV room.

use chassis::counted::Counter;
use kv_cache::BlockLease;
use proptest::prelude::*;
use tokio::sync::oneshot::Receiver;
use tokio::time::Instant;
use types::Refusal;

use super::*;
use crate::landing_room::{GrantedRoom, RoomRequest, RoomWaiter};
use crate::precedence::SequenceId;
use crate::testing::holder;
use crate::worker::Event;

type Answer = Receiver<Result<GrantedRoom, Refusal>>;

fn request(n_blocks: usize) -> RoomRequest {
    RoomRequest {
        holder: holder("landing"),
        priority: Priority(0),
        deadline: deadline_in(Duration::from_secs(3600)),
        hashes: Vec::new(),
        n_blocks,
        landings: Counter::default(),
        landings_max: 256,
    }
}

impl Rig {
    /// Adds a request for room to the worker.
    fn ask_room(&mut self, request: RoomRequest) -> (SequenceId, Answer) {
        let (id, (answer, answered)) = (self.next_id(), tokio::sync::oneshot::channel());
        let waiter = RoomWaiter { id, request, submitted: Instant::now(), answer };
        self.worker.apply(Event::Wait(Box::new(waiter)));
        (id, answered)
    }

    fn taken(&self, n_blocks: usize) -> BlockLease {
        self.pool.reserve(n_blocks, holder("another")).expect("there is room")
    }
}

/// Returns the room if the request was granted.
fn granted(answer: &mut Answer) -> Option<GrantedRoom> {
    answer.try_recv().ok().map(|answer| answer.expect("no refusal"))
}

#[test]
fn a_large_request_at_the_head_gets_the_room_before_small_ones_behind_it() {
    let mut rig = Rig::new(10, roomy());
    let (first, second) = (rig.taken(4), rig.taken(4));
    let (_, mut large) = rig.ask_room(request(9));
    let (_, mut small) = rig.ask_room(request(1));
    for returned in [None, Some(first)] {
        drop(returned);
        rig.turn();
        assert!(granted(&mut large).is_none() && granted(&mut small).is_none(), "the large one is first");
    }
    drop(second);
    rig.turn();
    let rooms = (granted(&mut large).expect("its turn"), granted(&mut small).expect("one block is left"));
    assert_eq!((rooms.0.lease.n_blocks(), rooms.1.lease.n_blocks()), (9, 1));
    drop(rooms);
    rig.assert_at_baseline();
}

#[test]
fn a_fresh_prompt_and_a_request_wait_in_one_line() {
    let mut rig = Rig::new(10, roomy());
    let taken = rig.taken(6);
    let (_, mut large) = rig.ask_room(request(8));
    let (_, fresh) = rig.stream(endless("a", 8, 4));
    rig.settle();
    assert!(fresh.tokens().is_empty(), "it came later");
    drop(taken);
    rig.turn();
    drop(granted(&mut large).expect("it was first"));
    rig.settle();
    assert!(fresh.is_finished());
    rig.assert_at_baseline();
}

#[test]
fn priority_comes_before_arrival_and_age_before_priority() {
    for (age_bound, first) in [(Duration::MAX, 1), (Duration::ZERO, 0)] {
        let mut rig = Rig::new(4, SchedulerSettings { age_bound, ..roomy() });
        let taken = rig.taken(4);
        let mut answers =
            [0, 5].map(|priority| rig.ask_room(RoomRequest { priority: Priority(priority), ..request(4) }).1);
        drop(taken);
        rig.turn();
        let rooms = answers.each_mut().map(granted);
        assert_eq!(rooms.iter().position(Option::is_some), Some(first), "{age_bound:?}");
        assert_eq!(rooms.iter().flatten().count(), 1);
    }
}

#[test]
fn running_sequences_keep_the_room_that_they_grow_into() {
    let mut rig = Rig::new(10, roomy());
    let (_, running) = rig.stream(endless("a", 4, 25));
    rig.turn();
    let (_, mut answer) = rig.ask_room(request(6));
    rig.turn();
    assert!(granted(&mut answer).is_none(), "the running sequence needs 7 blocks in all");
    rig.settle();
    assert!(running.is_finished());
    assert_eq!(rig.metric("preemptions_total"), 0);
    rig.turn();
    drop(granted(&mut answer).expect("the sequence has ended"));
    rig.assert_at_baseline();
}

#[test]
fn landings_are_bounded_and_their_end_lets_the_next_in() {
    let mut rig = Rig::new(10, roomy());
    let request = RoomRequest { landings_max: 1, ..request(2) };
    let (_, mut first) = rig.ask_room(request.clone());
    let (_, mut second) = rig.ask_room(request);
    rig.turn();
    let room = granted(&mut first).expect("one may be open");
    assert!(granted(&mut second).is_none());
    drop(room);
    rig.turn();
    assert!(granted(&mut second).is_some());
}

#[test]
fn a_place_in_the_line_ends_with_its_request() {
    let mut rig = Rig::new(10, roomy());
    let taken = rig.taken(10);
    let (cancelled, mut first) = rig.ask_room(request(5));
    let deadline = deadline_in(Duration::ZERO);
    let (_, mut late) = rig.ask_room(RoomRequest { deadline, ..request(5) });
    assert_eq!(rig.worker.load().node.waiting, 2);
    rig.cancel(cancelled);
    rig.turn();
    assert_eq!(rig.worker.load().node.waiting, 0);
    assert!(first.try_recv().is_err(), "there is no answer for a request that left");
    let refused = late.try_recv().expect("an answer").expect_err("it is late");
    assert_eq!(refused.kind, RefusalKind::Deadline);
    drop(taken);
    rig.assert_at_baseline();
}

#[test]
fn room_for_a_requester_that_has_left_comes_back() {
    let mut rig = Rig::new(10, roomy());
    let (_, answer) = rig.ask_room(request(10));
    drop(answer);
    rig.turn();
    rig.assert_at_baseline();
}

#[test]
fn a_lost_device_refuses_all_that_wait() {
    let flaky = Flaky::new(mock(8), Failures { lost_from: Some(0), ..Failures::default() });
    let mut rig = Rig::with_backend(Box::new(flaky), roomy());
    let taken = rig.taken(4);
    rig.stream(endless("a", 5, 5));
    let (_, mut waiting) = rig.ask_room(request(8));
    rig.settle();
    let (_, mut later) = rig.ask_room(request(1));
    for answer in [&mut waiting, &mut later] {
        let refused = answer.try_recv().expect("an answer").expect_err("nothing is computed here");
        assert_eq!(refused.kind, RefusalKind::Failed);
    }
    drop(taken);
}

// === no request starves ===

const POOL: usize = 12;

/// One request for room of a case.
#[derive(Clone, Debug)]
struct One {
    n_blocks: usize,
    priority: i8,
    /// The turn before which the request is made.
    at: usize,
    /// The number of turns for which the request's room is held.
    holds: usize,
}

fn one() -> impl Strategy<Value = One> {
    (1..=POOL, 0i8..3, 0usize..20, 0usize..6).prop_map(|(n_blocks, priority, at, holds)| One {
        n_blocks,
        priority,
        at,
        holds,
    })
}

/// Returns the turn in which each request got its room.
fn grants(ones: &[One]) -> Vec<usize> {
    let mut rig = Rig::new(POOL as u32, roomy());
    let mut answers: Vec<Option<Answer>> = ones.iter().map(|_| None).collect();
    let mut held: Vec<(usize, GrantedRoom)> = Vec::new();
    let mut granted_at = vec![usize::MAX; ones.len()];
    // The number of turns is enough for the worst case, in which every request is served alone.
    for turn in 0..20 + 8 * ones.len() {
        held.retain(|(until, _)| *until > turn);
        for (one, answer) in ones.iter().zip(&mut answers).filter(|(one, _)| one.at == turn) {
            let priority = Priority(one.priority);
            *answer = Some(rig.ask_room(RoomRequest { priority, ..request(one.n_blocks) }).1);
        }
        rig.turn();
        for (nth, answer) in answers.iter_mut().enumerate() {
            if let Some(room) = answer.as_mut().and_then(granted) {
                granted_at[nth] = turn;
                held.push((turn + 1 + ones[nth].holds, room));
            }
        }
    }
    drop(held);
    rig.assert_at_baseline();
    granted_at
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every request gets its room. No request gets it before an earlier request of at least the same
    /// priority, whatever their sizes.
    #[test]
    fn no_request_is_overtaken_by_a_later_one(mut ones in proptest::collection::vec(one(), 1..16)) {
        ones.sort_by_key(|one| one.at);
        let granted_at = grants(&ones);
        for (nth, one) in ones.iter().enumerate() {
            prop_assert!(granted_at[nth] < usize::MAX, "{one:?} got no room");
            for (later, other) in ones.iter().enumerate().skip(nth + 1) {
                let overtaken = other.priority <= one.priority && granted_at[later] < granted_at[nth];
                prop_assert!(!overtaken, "{other:?} overtook {one:?}: {granted_at:?}");
            }
        }
    }
}
