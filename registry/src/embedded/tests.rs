//! Tests of the embedded registry over real sockets.

use std::sync::Arc;
use std::time::Duration;

use chassis::identity::refusals::{Reason, Refused};
use chassis::identity::{ClusterSecret, Identity};
use chassis::rpc::Callers;
use chassis::server::ServerLimits;
use chassis::{Gate, Shutdown, Task, World, rpc, spawn_guarded};
use tonic::service::Routes;

use super::*;
use crate::conformance::{Subject, Watcher, announced, in_time, left, node};
use crate::error::Trouble;
use crate::url::RegistryUrl;
use crate::watch::Feed as _;
use crate::{MembershipEvent, MemoryRegistry, Registry, RegistryParts, Standing};

/// The shortest lease that works on a loaded machine.
const TTL: Duration = Duration::from_secs(1);

/// The parts of a router that serve the registry.
#[derive(Debug)]
struct Router {
    address: String,
    registry: MemoryRegistry,
    shutdown: Shutdown,
    serving: Task<()>,
}

impl Router {
    async fn start() -> Self {
        Self::start_at("127.0.0.1:0").await
    }

    async fn start_at(address: &str) -> Self {
        Self::start_in(World::real(), address).await
    }

    async fn start_in(world: World, address: &str) -> Self {
        let (gate, shutdown) = (Gate::new("router"), Shutdown::new());
        let registry = MemoryRegistry::new(TTL, world.clone(), gate.clone());
        let listener = world.net().listen(address).await.expect("the port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let routes = Routes::new(bootstrap_server(registry.clone(), shutdown.clone()));
        let limits = ServerLimits { drain: Duration::ZERO, ..ServerLimits::default() };
        let (stop, callers) = (shutdown.clone(), Callers::known_to(&world));
        let serving = spawn_guarded(&gate, "serve", async move {
            // The test cuts connections, so an error of the server is ignored.
            let _ = rpc::serve(listener, routes, stop, limits, callers).await;
        });
        Self { address, registry, shutdown, serving }
    }

    /// Stops the router and cuts its connections. Returns its address, for a router that starts there again.
    async fn stop(self) -> String {
        self.shutdown.trigger();
        in_time(self.serving).await.expect("it ends");
        self.address
    }

    fn client(&self) -> EmbeddedRegistry {
        client(&self.address)
    }
}

fn client(address: &str) -> EmbeddedRegistry {
    EmbeddedRegistry::new(address, World::real(), Gate::new("test"))
}

async fn subject() -> Subject {
    let router = Router::start().await;
    Subject { one: Arc::new(router.client()), two: Arc::new(router.client()), keep: Box::new(router) }
}

crate::conformance!(
    #[tokio::test]
    subject
);

#[tokio::test]
async fn the_router_sees_what_its_clients_see() {
    let router = Router::start().await;
    let _a = announced(&router.client(), node("a", 1)).await;
    assert_eq!(router.registry.members(), [node("a", 1)]);
    let _b = announced(&router.registry, node("b", 1)).await;
    Watcher::of(&router.client()).await.sees(&[node("a", 1), node("b", 1)]).await;
}

#[tokio::test]
async fn a_restarted_router_learns_its_members_again() {
    let router = Router::start().await;
    let client = router.client();
    let (mut a, _b) = (announced(&client, node("a", 1)).await, announced(&client, node("b", 1)).await);
    let both = [node("a", 1), node("b", 1)];
    let mut watcher = Watcher::of(&client).await;
    watcher.sees(&both).await;

    let router = Router::start_at(&router.stop().await).await;
    let mut inside = Watcher::of(&router.registry).await;
    inside.sees(&both).await;
    in_time(a.announced()).await;
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(both.to_vec()), "no node was reported gone");
    drop(a);
    assert_eq!(watcher.next().await, left("a", 1), "nor after it");
}

#[tokio::test]
async fn who_died_with_the_router_is_given_up() {
    let router = Router::start().await;
    let client = router.client();
    let _a = announced(&client, node("a", 1)).await;
    let b = announced(&client, node("b", 1)).await;
    let both = [node("a", 1), node("b", 1)];
    let mut watcher = Watcher::of(&client).await;
    watcher.sees(&both).await;

    b.abandon();
    let _router = Router::start_at(&router.stop().await).await;
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(both.to_vec()));
    assert_eq!(watcher.next().await, left("b", 1));
}

#[tokio::test]
async fn nodes_may_start_before_their_router() {
    let router = Router::start().await;
    let address = router.stop().await;
    let client = client(&address);
    let mut a = in_time(client.announce(node("a", 1))).await.expect("away is no error");
    assert_eq!(a.standing(), Standing::Trying);
    let mut watcher = Watcher::of(&client).await;
    let router = Router::start_at(&address).await;
    in_time(a.announced()).await;
    watcher.sees(&[node("a", 1)]).await;
    assert_eq!(router.registry.members(), [node("a", 1)]);
}

#[tokio::test]
async fn open_watches_do_not_hold_a_stop_up() {
    let router = Router::start().await;
    let mut watcher = Watcher::of(&router.client()).await;
    watcher.sees(&[]).await;
    tokio::time::timeout(Duration::from_secs(5), router.stop())
        .await
        .expect("the watch ends with the router");
}

#[tokio::test]
async fn what_cannot_be_an_address_is_refused() {
    for (text, reason) in [
        ("embedded://router", "the port of the router's gRPC services is missing"),
        ("embedded://a:1,b:2", "give one host: the embedded registry is on one router"),
        ("embedded://a:1/blue", "nothing may follow the port"),
        ("embedded://me:secret@a:1", "the embedded registry has no users"),
    ] {
        let parts = RegistryParts { world: World::real(), gate: Gate::new("test") };
        let url = RegistryUrl::parse(text).expect("it can be read");
        let refused = EmbeddedRegistry::open(&url, parts).expect_err(text).to_string();
        assert!(refused.ends_with(reason), "{text}: {refused}");
    }
}

// === strangers ===

fn world_with(secret: &str) -> World {
    World::real().with_identity(Identity::of_cluster(ClusterSecret::new(secret.as_bytes())))
}

#[tokio::test]
async fn who_does_not_have_the_secret_neither_announces_nor_watches() {
    let router_world = world_with("one secret of a cluster");
    let router = Router::start_in(router_world.clone(), "127.0.0.1:0").await;
    let registry_in = |world| EmbeddedRegistry::new(&router.address, world, Gate::new("test"));
    let _member = announced(&registry_in(world_with("one secret of a cluster")), node("a", 1)).await;
    for stranger in [World::real(), world_with("the secret of another cluster")] {
        let stranger = registry_in(stranger);
        for impostor in [node("invented", 1), node("a", 9)] {
            let refused = in_time(stranger.announce(impostor)).await.expect_err("it has no secret");
            assert_eq!(refused.trouble(), Trouble::Secret, "{}", types::in_full(&refused));
        }
        let refused = in_time(stranger.feed().next()).await.map(drop).expect_err("nor may it look");
        assert_eq!(refused.trouble(), Trouble::Secret, "{}", types::in_full(&refused));
    }
    assert_eq!(router.registry.members(), [node("a", 1)]);
    let refusals = router_world.identity().refusals();
    let counts = [Reason::Unsigned, Reason::Signature].map(|reason| refusals.get(Refused::Call, reason));
    assert_eq!(counts, [3, 3]);
}
