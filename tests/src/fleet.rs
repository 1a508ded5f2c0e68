//! A cluster of separate processes: a router with its registry, and nodes. Each has known ports, so that a
//! test can stop them one by one.

use std::net::SocketAddr;

use serde_json::Value;
use tempfile::TempDir;

use crate::client::Client;
use crate::probe::Probed;
use crate::process::Process;
use crate::{eventually, free_addr, in_time};

/// A model for tests: a mock whose steps take time, so that there are always unfinished streams.
pub const PACED: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/paced.toml");

/// Variables of a process's environment, with their values.
pub type Settings = Vec<(&'static str, String)>;

/// Returns the router's setting for tests that need prompts on every node. The default policy gives no prompt to a decode node
/// that has learned a long time of steps, as after a moment in which the machine stood still, while another is idle.
pub fn round_robin() -> Settings {
    vec![("BATON_ROUTER__POLICY", "round-robin".to_owned())]
}

/// All processes of a cluster. Dropping it ends them.
#[derive(Debug)]
pub struct Fleet {
    pub router: Process,
    pub http: SocketAddr,
    /// The router's admin port.
    pub admin: SocketAddr,
    /// The router's gRPC port, with the registry.
    pub grpc: SocketAddr,
    pub nodes: Vec<FleetNode>,
    folder: TempDir,
}

/// One node: its process and its ports.
#[derive(Debug)]
pub struct FleetNode {
    pub name: String,
    pub role: &'static str,
    pub process: Process,
    pub grpc: SocketAddr,
    pub admin: SocketAddr,
    pub kv: SocketAddr,
}

impl Fleet {
    /// Starts the given number of nodes of each kind for `model`. Returns when all of them are usable.
    pub async fn start(model: &str, n_prefill: usize, n_decode: usize) -> Self {
        Self::start_with(model, n_prefill, n_decode, Vec::new()).await
    }

    /// Starts nodes like [`start`](Self::start), with settings of the nodes.
    pub async fn start_narrow(model: &str, n_prefill: usize, n_decode: usize, of_nodes: Settings) -> Self {
        Self::start_each(model, n_prefill, n_decode, Vec::new(), |_| of_nodes.clone()).await
    }

    /// Starts nodes like [`start`](Self::start), with settings of the router, and of the nodes by their role.
    pub async fn start_each(
        model: &str,
        n_prefill: usize,
        n_decode: usize,
        of_router: Settings,
        of_role: impl Fn(&'static str) -> Settings,
    ) -> Self {
        let roles = [("prefill", n_prefill), ("decode", n_decode)];
        Self::start_all(model, &roles, of_router, of_role).await
    }

    /// Starts nodes like [`start`](Self::start), with settings of the router.
    pub async fn start_with(model: &str, n_prefill: usize, n_decode: usize, of_router: Settings) -> Self {
        Self::start_each(model, n_prefill, n_decode, of_router, |_| Vec::new()).await
    }

    /// Starts nodes like [`start`](Self::start), and `n_pool` pool nodes.
    pub async fn start_pooled(model: &str, n_prefill: usize, n_decode: usize, n_pool: usize) -> Self {
        let roles = [("prefill", n_prefill), ("decode", n_decode), ("pool", n_pool)];
        let prefill_first = vec![("BATON_ROUTER__ORDER", "prefill-first".to_owned())];
        Self::start_all(model, &roles, prefill_first, |_| Vec::new()).await
    }

    /// Starts these numbers of nodes of each role. Returns when all of them are usable.
    pub async fn start_all(
        model: &str,
        roles: &[(&'static str, usize)],
        of_router: Settings,
        of_role: impl Fn(&'static str) -> Settings,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (http, grpc, admin) = (free_addr(), free_addr(), free_addr());
        let settings = vec![
            ("BATON_ROUTER__HTTP", http.to_string()),
            ("BATON_ROUTER__GRPC", grpc.to_string()),
            ("BATON_ROUTER__ADMIN", admin.to_string()),
        ];
        let settings = settings.into_iter().chain(of_router).collect();
        let router = Process::start(folder.path(), "router", "router", settings);
        eventually("the registry to listen", async || tokio::net::TcpStream::connect(grpc).await.ok()).await;
        let names = roles.iter().flat_map(|(role, n)| (0..*n).map(move |nth| (*role, nth)));
        let start = |(role, nth)| FleetNode::start(&folder, role, nth, model, grpc, of_role(role));
        let nodes = names.map(start).collect();
        let fleet = Self { router, http, grpc, admin, nodes, folder };
        fleet.all_ready().await;
        fleet
    }

    /// Starts another node and does not wait for it.
    pub fn add(&mut self, role: &'static str, nth: usize, model: &str) {
        self.add_with(role, nth, model, Vec::new());
    }

    /// Starts another node with these settings and does not wait for it.
    pub fn add_with(&mut self, role: &'static str, nth: usize, model: &str, settings: Settings) {
        self.nodes.push(FleetNode::start(&self.folder, role, nth, model, self.grpc, settings));
    }

    pub fn client(&self) -> Client {
        Client::new(self.http)
    }

    /// Returns the ports that serve health, with their processes: the router has two such ports.
    pub fn health_ports(&self) -> Vec<Probed> {
        let nodes = self.nodes.iter().map(|node| (node.admin, node.process.pid()));
        let ports = [self.http, self.admin].map(|port| (port, self.router.pid())).into_iter().chain(nodes);
        ports.map(|(port, pid)| Probed { client: Client::new(port), pid }).collect()
    }

    /// Returns every port of every process.
    pub fn ports(&self) -> Vec<SocketAddr> {
        let nodes = self.nodes.iter().flat_map(|node| [node.grpc, node.admin, node.kv]);
        [self.http, self.grpc, self.admin].into_iter().chain(nodes).collect()
    }

    /// Waits until the router finds every node's current life usable.
    pub async fn all_ready(&self) {
        let connect = async || tokio::net::TcpStream::connect(self.http).await.ok();
        eventually("the router to listen", connect).await;
        eventually("every node to be usable", async || {
            let cluster = self.client().get_json("/debug/cluster").await;
            let nodes = cluster["nodes"].as_array().expect("a list of nodes");
            let is_usable = |node: &FleetNode| {
                let known = nodes.iter().find(|known| known["id"] == node.name.as_str());
                known.is_some_and(|known| {
                    known["state"] == "ready" && known["pid"].as_u64() == Some(u64::from(node.process.pid()))
                })
            };
            self.nodes.iter().all(is_usable).then_some(())
        })
        .await;
    }

    /// Waits until no node holds a block.
    pub async fn baseline(&self) {
        eventually("the pools' baseline", async || {
            let kv = self.client().get_json("/debug/kv").await;
            let nodes = kv["nodes"].as_array().expect("a list of nodes").clone();
            let count = |node: &Value, name: &str| node[name].as_u64();
            let is_quiet =
                |node: &Value| count(node, "leased") == Some(0) && count(node, "quarantined") == Some(0);
            nodes.iter().all(is_quiet).then_some(())
        })
        .await;
    }

    /// Names parts of warnings that the test is about to cause in any process. Other warnings fail the test.
    pub fn expect_log(&self, parts: &[&'static str]) {
        self.processes().into_iter().for_each(|(_, process)| process.expect_log(parts));
    }

    /// Returns every process, the router first, by name.
    pub fn processes(&self) -> Vec<(&str, &Process)> {
        let nodes = self.nodes.iter().map(|node| (node.name.as_str(), &node.process));
        std::iter::once(("router", &self.router)).chain(nodes).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let nodes = self.nodes.iter_mut().map(|node| &mut node.process);
        std::iter::once(&mut self.router).chain(nodes).for_each(Process::judge_until_now);
    }
}

impl FleetNode {
    fn start(
        folder: &TempDir,
        role: &'static str,
        nth: usize,
        model: &str,
        registry: SocketAddr,
        more: Settings,
    ) -> Self {
        let name = format!("{role}-{nth}");
        let (grpc, admin, kv) = (free_addr(), free_addr(), free_addr());
        let settings = vec![
            ("BATON_NODE__ID", name.clone()),
            ("BATON_NODE__LISTEN", grpc.to_string()),
            ("BATON_NODE__ADMIN", admin.to_string()),
            ("BATON_TRANSFER__LISTEN", kv.to_string()),
            ("BATON_TRANSFER__CONNECTORS", "[\"tcp\"]".to_owned()),
            ("BATON_REGISTRY__URL", format!("embedded://{registry}")),
        ];
        let model = (role != "pool").then(|| ("BATON_MODEL__PATH", model.to_owned()));
        let settings = settings.into_iter().chain(model).chain(more).collect();
        let process = Process::start(folder.path(), &name, role, settings);
        Self { name, role, process, grpc, admin, kv }
    }

    /// Returns the answer of `/ready` on the node's admin port: the status, and the reason if it gives one.
    pub async fn readiness(&self) -> (u16, String) {
        let (status, body) = in_time("an admin page", Client::new(self.admin).get("/ready")).await;
        (status.as_u16(), body)
    }

    /// Posts to a page of the node's admin port, such as `sleep`. Returns the status and the body.
    pub async fn tell(&self, page: &str) -> (u16, Value) {
        let (status, _, body) = in_time(page, Client::new(self.admin).post(&format!("/{page}"), "")).await;
        (status.as_u16(), serde_json::from_str(&body).unwrap_or(Value::Null))
    }

    /// Does the same. The node must answer 200.
    pub async fn told(&self, page: &str) -> Value {
        let (status, body) = self.tell(page).await;
        assert_eq!(status, 200, "{page} of {}: {body}", self.name);
        body
    }
}
