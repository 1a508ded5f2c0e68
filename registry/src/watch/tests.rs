//! Tests of the watch against a scripted feed.

use tokio::time::Instant;

use super::*;
use crate::conformance::{Watcher, left, node};

const TTL: Duration = Duration::from_secs(10);

/// One answer of the scripted feed: news, an error, or silence for some time.
enum Line {
    Says(Vec<RegistryMessage>),
    Breaks,
    IsSilentFor(Duration),
}

struct Script(VecDeque<Line>);

#[async_trait]
impl Feed for Script {
    async fn next(&mut self) -> Result<Vec<RegistryMessage>, RegistryError> {
        loop {
            let began = Instant::now();
            match self.0.front_mut() {
                Some(Line::IsSilentFor(silence)) => {
                    let until = began + *silence;
                    *silence = Duration::ZERO;
                    tokio::time::sleep_until(until).await;
                    self.0.pop_front();
                }
                Some(Line::Says(_)) => match self.0.pop_front() {
                    Some(Line::Says(news)) => return Ok(news),
                    _ => unreachable!("it was just looked at"),
                },
                Some(Line::Breaks) => {
                    self.0.pop_front();
                    return Err(RegistryError::Interrupted { reason: "the script says so".to_owned() });
                }
                None => std::future::pending().await,
            }
        }
    }

    fn ttl(&self) -> Duration {
        TTL
    }
}

fn all(nodes: &[NodeInfo], forgot: bool) -> Line {
    Line::Says(vec![RegistryMessage::All(AllNodes { nodes: nodes.to_vec(), forgot })])
}

fn watcher(script: impl IntoIterator<Item = Line>) -> Watcher {
    Watcher::new(follow(Script(script.into_iter().collect()), World::seeded(1)))
}

#[tokio::test(start_paused = true)]
async fn news_become_events_in_order() {
    let mut watcher = watcher([
        all(&[node("a", 1)], false),
        Line::Says(vec![
            RegistryMessage::Is(node("b", 1)),
            RegistryMessage::Is(node("a", 2)),
            RegistryMessage::Gone(NodeId::new("b")),
        ]),
        Line::Says(vec![RegistryMessage::Gone(NodeId::new("unknown")), RegistryMessage::Is(node("a", 2))]),
        Line::Says(vec![RegistryMessage::Gone(NodeId::new("a"))]),
    ]);
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![node("a", 1)]));
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("b", 1)));
    assert_eq!(watcher.next().await, left("a", 1));
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("a", 2)));
    assert_eq!(watcher.next().await, left("b", 1));
    assert_eq!(watcher.next().await, left("a", 2));
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_is_away_says_nothing() {
    let began = Instant::now();
    let away = (0..40).map(|_| Line::Breaks);
    let mut watcher =
        watcher([all(&[node("a", 1)], false)].into_iter().chain(away).chain([all(&[node("a", 1)], false)]));
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![node("a", 1)]));
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![node("a", 1)]));
    let took = began.elapsed().as_secs();
    assert!(
        (15..=40).contains(&took),
        "40 attempts took {took} s: a second each at most, half of it at least"
    );
}

#[tokio::test(start_paused = true)]
async fn forgotten_members_get_a_lease_to_come_back() {
    let mut watcher = watcher([
        all(&[node("a", 1), node("b", 1)], false),
        Line::Breaks,
        all(&[], true),
        Line::IsSilentFor(TTL / 2),
        Line::Says(vec![RegistryMessage::Is(node("a", 1))]),
    ]);
    watcher.next().await;
    let both = MembershipEvent::Snapshot(vec![node("a", 1), node("b", 1)]);
    assert_eq!(watcher.next().await, both);
    let began = Instant::now();
    assert_eq!(watcher.next().await, left("b", 1));
    assert_eq!(began.elapsed().as_secs(), TTL.as_secs());
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_departures_are_doubted() {
    for (n_failures, doubted) in [(1, false), (20, true)] {
        let away = (0..n_failures).map(|_| Line::Breaks);
        let script = [all(&[node("a", 1), node("b", 1)], false)].into_iter().chain(away);
        let script = script.chain([
            all(&[node("a", 1)], false),
            Line::Says(vec![RegistryMessage::Gone(NodeId::new("a"))]),
            Line::IsSilentFor(TTL / 2),
            Line::Says(vec![
                RegistryMessage::Is(node("a", 1)),
                RegistryMessage::Is(node("b", 1)),
                RegistryMessage::Is(node("c", 1)),
            ]),
        ]);
        let mut watcher = watcher(script);
        watcher.next().await;
        let heard = watcher.sees(&[node("a", 1), node("b", 1), node("c", 1)]).await;
        let n_departures = heard.iter().filter(|event| matches!(event, MembershipEvent::Left { .. })).count();
        assert_eq!(
            (n_departures, watcher.members.len()),
            (usize::from(!doubted), 3),
            "{n_failures}: {heard:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn no_node_is_given_up_while_the_registry_is_away() {
    let away = (0..40).map(|_| Line::Breaks);
    let mut watcher =
        watcher([all(&[node("a", 1)], false), Line::Breaks, all(&[], true)].into_iter().chain(away).chain([
            all(&[], false),
            Line::Says(vec![RegistryMessage::Is(node("a", 1))]),
            Line::Says(vec![RegistryMessage::Is(node("z", 1))]),
        ]));
    for _ in 0..3 {
        assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![node("a", 1)]));
    }
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("z", 1)));
}
