//! Tests of announcements against a scripted registry.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::*;
use crate::conformance::{in_time, node};

const TERMS: LeaseTerms = LeaseTerms { ttl: Duration::from_secs(10), beat: Duration::from_secs(1) };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Announce,
    KeepAlive,
    Withdraw,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Yes,
    Away,
    Silence,
    Lost,
    No,
    Later,
}

/// A registry that gives scripted answers, and then `Yes` to every call. It records the calls with their
/// times.
#[derive(Clone, Default)]
struct Scripted {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    calls: Arc<Mutex<Vec<(Call, Instant)>>>,
}

impl Scripted {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let scripted = Self::default();
        scripted.then(answers);
        scripted
    }

    fn then(&self, answers: impl IntoIterator<Item = Answer>) {
        self.answers.lock().expect("not poisoned").extend(answers);
    }

    fn calls(&self) -> Vec<Call> {
        self.calls.lock().expect("not poisoned").iter().map(|(call, _)| *call).collect()
    }

    async fn answer(&self, call: Call) -> Result<(), RegistryError> {
        self.calls.lock().expect("not poisoned").push((call, Instant::now()));
        let answer = self.answers.lock().expect("not poisoned").pop_front().unwrap_or(Answer::Yes);
        match answer {
            Answer::Yes => Ok(()),
            Answer::Away => Err(RegistryError::Unreachable { operation: "test", source: "away".into() }),
            Answer::Silence => std::future::pending().await,
            Answer::Lost => Err(RegistryError::LeaseLost),
            Answer::No => Err(RegistryError::Denied { operation: "test", source: "no".into() }),
            Answer::Later => Err(RegistryError::Superseded { id: NodeId::new("a"), epoch: Epoch(1) }),
        }
    }

    async fn keep(&self, gate: &Gate) -> Result<Announcement, RegistryError> {
        in_time(keep(&node("a", 1), self.clone(), gate, World::seeded(1))).await
    }
}

#[async_trait]
impl Presence for Scripted {
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError> {
        self.answer(Call::Announce).await.map(|()| TERMS)
    }

    async fn keep_alive(&mut self) -> Result<(), RegistryError> {
        self.answer(Call::KeepAlive).await
    }

    async fn withdraw(&mut self) -> Result<(), RegistryError> {
        self.answer(Call::Withdraw).await
    }
}

fn gate() -> Gate {
    Gate::new("test")
}

async fn stands(announcement: &Announcement, wanted: AnnouncementState) {
    let mut standings = announcement.standings();
    in_time(standings.wait_for(|standing| *standing == wanted)).await.expect("the task runs");
}

#[tokio::test(start_paused = true)]
async fn signs_of_life_are_regular_and_few() {
    let registry = Scripted::default();
    let announcement = registry.keep(&gate()).await.expect("announced");
    assert_eq!(announcement.standing(), AnnouncementState::Member);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let n_beats = registry.calls().iter().filter(|call| **call == Call::KeepAlive).count();
    assert!(
        (60..=120).contains(&n_beats),
        "{n_beats} beats in a minute: one a second, early by a half at most"
    );
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_registry_is_no_error() {
    let registry = Scripted::new([Answer::Away, Answer::Silence, Answer::Away]);
    let mut announcement = registry.keep(&gate()).await.expect("it goes on trying");
    assert_eq!(announcement.standing(), AnnouncementState::Trying);
    in_time(announcement.announced()).await;
    assert_eq!(registry.calls(), [Call::Announce; 4]);
}

#[tokio::test(start_paused = true)]
async fn a_denial_at_first_is_an_error() {
    let (registry, gate) = (Scripted::new([Answer::No]), gate());
    let refused = registry.keep(&gate).await.expect_err("it is denied");
    assert_eq!(refused.to_string(), "test: refused by the registry");
    gate.close(Duration::from_secs(1)).await.expect("nothing goes on");
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_announced_again_at_once() {
    let registry = Scripted::new([Answer::Yes, Answer::Lost]);
    let announcement = registry.keep(&gate()).await.expect("announced");
    tokio::time::sleep(TERMS.beat).await;
    assert_eq!(registry.calls(), [Call::Announce, Call::KeepAlive, Call::Announce]);
    assert_eq!(announcement.standing(), AnnouncementState::Member);
    let calls = registry.calls.lock().expect("not poisoned");
    assert_eq!(calls[1].1, calls[2].1);
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_whose_announcement_is_refused_is_told() {
    let registry = Scripted::new([Answer::Yes, Answer::Lost, Answer::No, Answer::No, Answer::Away]);
    let mut announcement = registry.keep(&gate()).await.expect("announced");
    stands(&announcement, AnnouncementState::Refused).await;
    stands(&announcement, AnnouncementState::Trying).await;
    in_time(announcement.announced()).await;
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_is_away_for_a_moment_changes_nothing() {
    let registry = Scripted::new([Answer::Yes, Answer::Away, Answer::Silence, Answer::Away]);
    let announcement = registry.keep(&gate()).await.expect("announced");
    let mut standings = announcement.standings();
    standings.mark_unchanged();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(registry.calls().iter().skip(1).all(|call| *call == Call::KeepAlive));
    assert_eq!(*standings.borrow_and_update(), AnnouncementState::Member);
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_is_away_for_longer_than_the_lease_is_waited_for() {
    let registry = Scripted::new([Answer::Yes].into_iter().chain([Answer::Away; 30]).chain([Answer::Lost]));
    let mut announcement = registry.keep(&gate()).await.expect("announced");
    let began = Instant::now();
    stands(&announcement, AnnouncementState::Trying).await;
    assert!((9..=12).contains(&began.elapsed().as_secs()), "as soon as the lease may have lapsed");
    in_time(announcement.announced()).await;
    assert_eq!(registry.calls().last(), Some(&Call::Announce));
}

#[tokio::test(start_paused = true)]
async fn a_later_life_is_waited_for() {
    let registry = Scripted::new([Answer::Later, Answer::Later]);
    let mut announcement = registry.keep(&gate()).await.expect("it goes on trying");
    assert_eq!(announcement.standing(), AnnouncementState::Superseded);
    in_time(announcement.announced()).await;
}

#[tokio::test(start_paused = true)]
async fn dropping_withdraws_inside_the_gate() {
    let (registry, gate) = (Scripted::default(), gate());
    drop(registry.keep(&gate).await.expect("announced"));
    gate.close(Duration::from_secs(1)).await.expect("the withdrawal is quick");
    assert_eq!(registry.calls(), [Call::Announce, Call::Withdraw]);
}

#[tokio::test(start_paused = true)]
async fn dropping_it_half_way_withdraws_too() {
    let (registry, gate) = (Scripted::new([Answer::Silence]), gate());
    let half = tokio::time::timeout(Duration::from_millis(10), registry.keep(&gate));
    half.await.expect_err("the registry is silent");
    gate.close(Duration::from_secs(1)).await.expect("the withdrawal is quick");
    assert_eq!(registry.calls(), [Call::Announce, Call::Withdraw]);
}

#[tokio::test(start_paused = true)]
async fn a_withdrawal_has_an_end_even_if_the_registry_is_silent() {
    let registry = Scripted::new([Answer::Yes, Answer::Silence]);
    let announcement = registry.keep(&gate()).await.expect("announced");
    let began = Instant::now();
    announcement.withdraw().await;
    assert_eq!(began.elapsed(), CALL_WITHIN);
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_announcement_says_nothing() {
    let (registry, gate) = (Scripted::default(), gate());
    registry.keep(&gate).await.expect("announced").abandon();
    gate.close(Duration::from_secs(1)).await.expect("the task is gone");
    assert_eq!(registry.calls(), [Call::Announce]);
}

#[tokio::test(start_paused = true)]
async fn a_stopping_process_announces_nothing() {
    let (registry, gate) = (Scripted::default(), gate());
    gate.close(Duration::from_secs(1)).await.expect("no guard is held");
    assert!(matches!(registry.keep(&gate).await, Err(RegistryError::Stopping)));
    assert_eq!(registry.calls(), []);
}
