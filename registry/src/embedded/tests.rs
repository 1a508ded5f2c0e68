//! Tests of the embedded registry over real sockets.

use std::sync::Arc;
use std::time::Duration;

use chassis::identity::refusals::{Reason, RefusedKind};
use chassis::identity::{ClusterSecret, Identity};
use chassis::rpc::Callers;
use chassis::server::ServerLimits;
use chassis::{Gate, Shutdown, Task, World, rpc, spawn_guarded};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::service::Routes;

use super::*;
use crate::conformance::{RegistryUnderTest, Watcher, announced, in_time, left, node};
use crate::error::RegistryProblem;
use crate::url::RegistryUrl;
use crate::watch::Feed as _;
use crate::{AnnouncementState, MembershipEvent, MemoryRegistry, Registry, RegistryParts};

/// The shortest lease that works on a machine that may stop this process for two seconds.
const TTL: Duration = Duration::from_secs(3);

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
        let callers = Callers::known_to(&world);
        Self::start_for(callers, world, address).await
    }

    async fn start_for(callers: Callers, world: World, address: &str) -> Self {
        let (gate, shutdown) = (Gate::new("router"), Shutdown::new());
        let registry = MemoryRegistry::new(TTL, world.clone(), gate.clone());
        let listener = world.net().listen(address).await.expect("the port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let routes = Routes::new(bootstrap_server(registry.clone(), shutdown.clone()));
        let limits = ServerLimits { drain: Duration::ZERO, ..ServerLimits::default() };
        let stop = shutdown.clone();
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

async fn subject() -> RegistryUnderTest {
    let router = Router::start().await;
    RegistryUnderTest {
        one: Arc::new(router.client()),
        two: Arc::new(router.client()),
        keep: Box::new(router),
    }
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
    assert_eq!(a.standing(), AnnouncementState::Trying);
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
            assert_eq!(refused.trouble(), RegistryProblem::Secret, "{}", types::in_full(&refused));
        }
        let refused = in_time(stranger.feed().next()).await.map(drop).expect_err("nor may it look");
        assert_eq!(refused.trouble(), RegistryProblem::Secret, "{}", types::in_full(&refused));
    }
    assert_eq!(router.registry.members(), [node("a", 1)]);
    let refusals = router_world.identity().refusals();
    let counts = [Reason::Unsigned, Reason::Signature].map(|reason| refusals.get(RefusedKind::Call, reason));
    assert_eq!(counts, [3, 3]);
}

/// Forwards one connection to `to`, and returns the bytes of the one who dialled.
async fn recorded(listener: TcpListener, to: &str, announced: &Shutdown) -> Vec<u8> {
    let (mut near, _) = listener.accept().await.expect("a connection");
    let mut far = TcpStream::connect(to).await.expect("it listens");
    let (mut sent, mut from_near, mut from_far) = (Vec::new(), [0; 4096], [0; 4096]);
    loop {
        tokio::select! {
            () = announced.wait() => return sent,
            n = near.read(&mut from_near) => {
                let n = n.expect("open");
                sent.extend(&from_near[..n]);
                far.write_all(&from_near[..n]).await.expect("open");
            }
            n = far.read(&mut from_far) => {
                let n = n.expect("open");
                near.write_all(&from_far[..n]).await.expect("open");
            }
        }
    }
}

/// An attacker records a connection on which a node announces itself, and sends the bytes to other routers.
#[tokio::test]
async fn a_recorded_announcement_makes_no_node_at_another_router() {
    let world = || world_with("one secret of a cluster");
    let bound = |world: &World| Callers::known_to(world).calling_this_instance();
    let of = async |world: World| Router::start_for(bound(&world), world, "127.0.0.1:0").await;
    let (first, second) = (of(world()).await, of(world()).await);
    // A router that serves calls for every target would take the recording.
    let careless = Router::start_in(world(), "127.0.0.1:0").await;
    let proxy = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let registry =
        EmbeddedRegistry::new(&proxy.local_addr().expect("bound").to_string(), world(), Gate::new("test"));
    let is_announced = Shutdown::new();
    let announcing = async {
        let announcement = announced(&registry, node("a", 1)).await;
        is_announced.trigger();
        announcement
    };
    let both = async { tokio::join!(recorded(proxy, &first.address, &is_announced), announcing) };
    let (sent, announcement) = in_time(Box::pin(both)).await;
    assert_eq!(first.registry.members(), [node("a", 1)]);
    let mut open = Vec::new();
    for router in [&second, &careless] {
        let mut stream = TcpStream::connect(&router.address).await.expect("it listens");
        stream.write_all(&sent).await.expect("a socket has room");
        open.push(stream);
    }
    let taken = async {
        while careless.registry.members().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    in_time(taken).await;
    // The second router answers both calls on the connection, and serves neither.
    let mut heard = Vec::new();
    while n_answers(&heard) < 2 {
        let n = in_time(open[0].read_buf(&mut heard)).await.expect("open");
        assert!(n > 0, "it answers");
    }
    assert_eq!(second.registry.members(), []);
    announcement.abandon();
}

/// The number of HTTP/2 frames with headers.
fn n_answers(mut bytes: &[u8]) -> usize {
    const HEADERS: u8 = 1;
    let mut n = 0;
    while let Some(([a, b, c, kind, ..], rest)) = bytes.split_first_chunk::<9>() {
        n += usize::from(*kind == HEADERS);
        let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
        bytes = rest.get(length..).unwrap_or_default();
    }
    n
}
