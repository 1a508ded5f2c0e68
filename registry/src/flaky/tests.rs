use chassis::{Gate, World};

use super::*;
use crate::MemoryRegistry;
use crate::conformance::{RegistryUnderTest, Watcher, announced, in_time, left, node};

fn flaky() -> (Flaky<MemoryRegistry>, FaultSwitch, MemoryRegistry) {
    let parts = RegistryParts { world: World::seeded(1), gate: Gate::new("test") };
    let inner = MemoryRegistry::new(memory::TTL, parts.world.clone(), parts.gate.clone());
    let (flaky, switch) = Flaky::new(inner.clone(), parts);
    (flaky, switch, inner)
}

async fn subject() -> RegistryUnderTest {
    let (one, _, inner) = flaky();
    RegistryUnderTest { one: Arc::new(one), two: Arc::new(inner), keep: Box::new(()) }
}

crate::conformance!(
    #[tokio::test(start_paused = true)]
    subject
);

#[tokio::test(start_paused = true)]
async fn away_and_back() {
    let (flaky, switch, inner) = flaky();
    let mut watcher = Watcher::of(&flaky).await;
    let _a = announced(&inner, node("a", 1)).await;
    watcher.sees(&[node("a", 1)]).await;
    switch.away();
    let _b = announced(&inner, node("b", 1)).await;
    let mut c = in_time(flaky.announce(node("c", 1))).await.expect("away is no error");
    tokio::time::timeout(Duration::from_secs(30), watcher.next()).await.expect_err("nothing is heard");
    assert_eq!(c.standing(), AnnouncementState::Trying);
    switch.back();
    in_time(c.announced()).await;
    let read = watcher.sees(&[node("a", 1), node("b", 1), node("c", 1)]).await;
    assert!(matches!(read[0], MembershipEvent::Snapshot(_)), "{read:?}");
}

#[tokio::test(start_paused = true)]
async fn a_gap_brings_a_snapshot() {
    let (flaky, switch, inner) = flaky();
    let a = announced(&inner, node("a", 1)).await;
    let mut watcher = Watcher::of(&flaky).await;
    watcher.sees(&[node("a", 1)]).await;
    switch.gap();
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![node("a", 1)]));
    in_time(a.withdraw()).await;
    assert_eq!(watcher.next().await, left("a", 1));
}
