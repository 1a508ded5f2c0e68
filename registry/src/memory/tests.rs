use super::*;
use crate::conformance::{RegistryUnderTest, Watcher, announced, in_time, left, node};

fn registry() -> MemoryRegistry {
    MemoryRegistry::new(TTL, World::seeded(1), Gate::new("test"))
}

async fn subject() -> RegistryUnderTest {
    let registry = registry();
    RegistryUnderTest { one: Arc::new(registry.clone()), two: Arc::new(registry), keep: Box::new(()) }
}

crate::conformance!(
    #[tokio::test(start_paused = true)]
    subject
);

#[tokio::test(start_paused = true)]
async fn a_dead_node_lapses_on_time() {
    let registry = registry();
    let mut watcher = Watcher::of(&registry).await;
    announced(&registry, node("a", 1)).await.abandon();
    watcher.sees(&[node("a", 1)]).await;
    let began = registry.world.now();
    assert_eq!(watcher.next().await, left("a", 1));
    let took = (registry.world.now() - began).as_secs_f64();
    assert!((10.0..=11.0).contains(&took), "a lease, and a tenth of it for the reaper: {took} s");
}

#[tokio::test(start_paused = true)]
async fn a_slow_watcher_gets_a_snapshot() {
    let registry = registry();
    let mut watcher = Watcher::of(&registry).await;
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![]));
    for epoch in 0..=EVENTS_BEHIND_MAX as u64 {
        registry.grant(node("a", epoch)).expect("always newer");
    }
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![node("a", EVENTS_BEHIND_MAX as u64)]));
    let _b = announced(&registry, node("b", 1)).await;
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("b", 1)));
}

#[tokio::test(start_paused = true)]
async fn nothing_runs_after_the_last_handle() {
    let gate = Gate::new("test");
    let registry = MemoryRegistry::new(TTL, World::seeded(1), gate.clone());
    let announcement = announced(&registry, node("a", 1)).await;
    drop(registry);
    in_time(announcement.withdraw()).await;
    gate.close(Duration::from_secs(1)).await.expect("neither reaper nor announcement is left");
}

#[tokio::test(start_paused = true)]
async fn a_new_registry_is_a_new_life() {
    let world = World::seeded(1);
    let life = || MemoryRegistry::new(TTL, world.clone(), Gate::new("test")).life();
    assert_ne!(life(), life());
}
