//! Every process of a cluster is restarted, one at a time, while requests run. No request fails, and no token changes.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use baton_tests::check::prompts;
use baton_tests::logs::{A_NODE_DIES, THE_REGISTRY_IS_AWAY};
use baton_tests::{
    Answer, Ask, Client, Etcd, PATIENCE, Process, eventually, free_addr, in_time, undisturbed,
};
use futures::future::join_all;
use tempfile::TempDir;
use tokio::sync::RwLock;

/// A mock whose steps take time, so that there is always a stream in the middle.
const MODEL: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/paced.toml");
const TOKENS: u32 = 60;
/// The number of requests at one time.
const CLIENTS: usize = 8;

/// An etcd, two routers, and two nodes of each kind.
struct Cluster {
    nodes: Vec<Process>,
    routers: Vec<Process>,
    http: [SocketAddr; 2],
    etcd: Etcd,
    _folder: TempDir,
}

impl Cluster {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let etcd = Etcd::start();
        let http = [free_addr(), free_addr()];
        let registry = || ("BATON_REGISTRY__URL", etcd.url("rolling"));
        let router = |(idx, http): (usize, &SocketAddr)| {
            let listens =
                [("BATON_ROUTER__HTTP", http.to_string()), ("BATON_ROUTER__GRPC", free_addr().to_string())];
            let settings = listens.into_iter().chain([registry()]).collect();
            Process::start(folder.path(), &format!("router-{idx}"), "router", settings)
        };
        let node = |role: &'static str, idx: usize| {
            let name = format!("{role}-{idx}");
            let settings = vec![
                registry(),
                ("BATON_NODE__ID", name.clone()),
                ("BATON_NODE__LISTEN", free_addr().to_string()),
                ("BATON_MODEL__PATH", MODEL.to_owned()),
            ];
            Process::start(folder.path(), &name, role, settings)
        };
        let nodes = vec![node("prefill", 0), node("prefill", 1), node("decode", 0), node("decode", 1)];
        let routers = http.iter().enumerate().map(router).collect();
        let cluster = Self { nodes, routers, http, etcd, _folder: folder };
        for process in cluster.nodes.iter().chain(&cluster.routers) {
            process.expect_log(A_NODE_DIES);
            process.expect_log(THE_REGISTRY_IS_AWAY);
        }
        cluster.all_ready().await;
        cluster
    }

    /// Waits until both routers listen and find every node usable.
    async fn all_ready(&self) {
        for http in self.http {
            eventually("the router to listen", async || tokio::net::TcpStream::connect(http).await.ok())
                .await;
            eventually("every node to be ready", async || {
                let cluster = Client::new(http).get_json("/debug/cluster").await;
                let nodes = cluster["nodes"].as_array().expect("a list of nodes").clone();
                let n_ready = nodes.iter().filter(|node| node["state"] == "ready").count();
                (n_ready == self.nodes.len() && nodes.len() == n_ready).then_some(())
            })
            .await;
        }
    }
}

/// A load balancer that knows which routers take requests.
struct Balancer {
    /// The routers that take requests. Read-locked while a request is sent, write-locked to take a router
    /// out, like the wait of a router's `preStop`.
    open: RwLock<Vec<SocketAddr>>,
    turn: AtomicUsize,
}

impl Balancer {
    /// Sends a request to the next router. Once that router has sent the head, it must finish the answer.
    async fn ask(&self, ask: &Ask) -> Vec<u32> {
        let mut stream = {
            let open = self.open.read().await;
            let http = open[self.turn.fetch_add(1, Ordering::Relaxed) % open.len()];
            in_time("an answer's head", Client::new(http).stream(ask)).await.expect("it is served")
        };
        let mut tokens = Vec::new();
        while let Some(event) = in_time("an event", stream.next()).await.expect("the stream goes on") {
            let ids = event["choices"].get(0).and_then(|choice| choice["token_ids"].as_array().cloned());
            tokens.extend(ids.unwrap_or_default().iter().map(|id| id.as_u64().expect("a token id") as u32));
        }
        tokens
    }

    async fn only(&self, routers: Vec<SocketAddr>) {
        *self.open.write().await = routers;
    }
}

fn asks() -> Vec<Ask> {
    let ask = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(17, 40, 200).into_iter().map(ask).collect()
}

/// Sends requests until `enough` is set, and counts the answers. A wrong answer fails the test.
async fn load(balancer: &Balancer, asks: &[Ask], expected: &[Answer], enough: &AtomicBool) -> usize {
    let next = AtomicUsize::new(0);
    let one = async || {
        while !enough.load(Ordering::Relaxed) {
            let idx = next.fetch_add(1, Ordering::Relaxed) % asks.len();
            assert_eq!(balancer.ask(&asks[idx]).await, expected[idx].tokens, "request {idx}");
        }
    };
    join_all((0..CLIENTS).map(|_| one())).await;
    next.into_inner()
}

/// Restarts nodes, then routers, then etcd, each when the cluster has recovered from the previous restart.
async fn roll(cluster: &mut Cluster, balancer: &Balancer) {
    for at in 0..cluster.nodes.len() {
        cluster.nodes[at].restart().await;
        cluster.all_ready().await;
    }
    for at in 0..cluster.routers.len() {
        balancer.only(vec![cluster.http[1 - at]]).await;
        cluster.routers[at].restart().await;
        cluster.all_ready().await;
        balancer.only(cluster.http.to_vec()).await;
    }
    cluster.etcd.restart();
    cluster.all_ready().await;
    // The restart checks that with the new etcd nodes still find the routers, and routers the nodes.
    cluster.nodes[0].restart().await;
    cluster.all_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_loses_no_request() {
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let mut cluster = Cluster::start().await;
    let balancer = Balancer { open: RwLock::new(cluster.http.to_vec()), turn: AtomicUsize::new(0) };
    let enough = AtomicBool::new(false);
    let roll = async {
        roll(&mut cluster, &balancer).await;
        enough.store(true, Ordering::Relaxed);
    };
    let both = async { tokio::join!(load(&balancer, &asks, &expected, &enough), roll).0 };
    let n_answered = tokio::time::timeout(PATIENCE * 2, both).await.expect("the restarts end in time");
    assert!(n_answered > 4 * CLIENTS, "{n_answered} requests ran meanwhile");
}
