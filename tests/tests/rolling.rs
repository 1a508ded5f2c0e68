//! Every process of a cluster is restarted, one at a time, while requests run: none of them fails, and no token changes.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use baton_tests::check::prompts;
use baton_tests::{Answer, Ask, Client, PATIENCE, Up, eventually, executable, in_time};
use futures::future::join_all;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A mock whose steps take time, so that there is always a stream in the middle.
const MODEL: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/paced.toml");
const TOKENS: u32 = 60;
/// Requests at one time.
const CLIENTS: usize = 8;

/// One process of the cluster, which can be asked to stop and started again at the same ports.
struct Process {
    role: &'static str,
    settings: Vec<(&'static str, String)>,
    child: Child,
    log: std::path::PathBuf,
}

impl Process {
    fn start(
        folder: &TempDir,
        name: &str,
        role: &'static str,
        settings: Vec<(&'static str, String)>,
    ) -> Self {
        let log = folder.path().join(format!("{name}.log"));
        File::create(&log).expect("a log file");
        Self { role, child: spawn(role, &settings, &log), settings, log }
    }

    /// As an orchestrator does: SIGTERM, wait, start.
    async fn restart(&mut self) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a pid is not zero");
        kill_process(pid, Signal::TERM).expect("it is there");
        let status =
            eventually("the process to stop", async || self.child.try_wait().expect("our child")).await;
        assert!(status.success(), "{} ended with {status}:\n{}", self.role, self.log());
        self.child = spawn(self.role, &self.settings, &self.log);
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of a {} ---\n{}", self.role, self.log());
        }
    }
}

fn spawn(role: &str, settings: &[(&'static str, String)], log: &std::path::Path) -> Child {
    let log = File::options().append(true).open(log).expect("the log file");
    let ours = std::env::vars().map(|(name, _)| name).filter(|name| name.starts_with("BATON_"));
    let mut command = Command::new(executable::baton());
    ours.for_each(|name| {
        command.env_remove(name);
    });
    command.arg(role).envs(settings.iter().cloned()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("baton starts")
}

fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr()).expect("a free port")
}

/// A router that is the registry, and two nodes of each kind.
struct Cluster {
    nodes: Vec<Process>,
    router: Process,
    http: SocketAddr,
    client: Client,
    _folder: TempDir,
}

impl Cluster {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (http, grpc) = (free_addr(), free_addr());
        let listens =
            vec![("BATON_ROUTER__HTTP", http.to_string()), ("BATON_ROUTER__GRPC", grpc.to_string())];
        let router = Process::start(&folder, "router", "router", listens);
        let node = |role: &'static str, idx: usize| {
            let name = format!("{role}-{idx}");
            let settings = vec![
                ("BATON_NODE__ID", name.clone()),
                ("BATON_NODE__LISTEN", free_addr().to_string()),
                ("BATON_REGISTRY__URL", format!("embedded://{grpc}")),
                ("BATON_MODEL__PATH", MODEL.to_owned()),
            ];
            Process::start(&folder, &name, role, settings)
        };
        let nodes = vec![node("prefill", 0), node("prefill", 1), node("decode", 0), node("decode", 1)];
        let cluster = Self { nodes, router, http, client: Client::new(http), _folder: folder };
        cluster.all_ready().await;
        cluster
    }

    /// Waits until the router is there and finds every node usable.
    async fn all_ready(&self) {
        eventually("the router to listen", async || tokio::net::TcpStream::connect(self.http).await.ok())
            .await;
        eventually("every node to be ready", async || {
            let cluster = self.client.get_json("/debug/cluster").await;
            let nodes = cluster["nodes"].as_array().expect("a list of nodes").clone();
            let n_ready = nodes.iter().filter(|node| node["state"] == "ready").count();
            (n_ready == self.nodes.len() && nodes.len() == n_ready).then_some(())
        })
        .await;
    }
}

fn asks() -> Vec<Ask> {
    let ask = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(17, 40, 200).into_iter().map(ask).collect()
}

async fn undisturbed(asks: &[Ask]) -> Vec<Answer> {
    let up = Up::start(&["--colocated"]).await;
    let client = up.client();
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("the undisturbed run", all).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// Asks again and again until `enough`, and counts what was answered. Anything but the right answer is a panic.
async fn load(client: &Client, asks: &[Ask], expected: &[Answer], enough: &AtomicBool) -> usize {
    let next = AtomicUsize::new(0);
    let one = async || {
        while !enough.load(Ordering::Relaxed) {
            let idx = next.fetch_add(1, Ordering::Relaxed) % asks.len();
            let answer = client.ask(&asks[idx]).await;
            let answer = answer.unwrap_or_else(|failed| panic!("request {idx}: {failed:?}"));
            assert_eq!(answer.tokens, expected[idx].tokens, "request {idx}");
        }
    };
    join_all((0..CLIENTS).map(|_| one())).await;
    next.into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_loses_no_request() {
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let mut cluster = Cluster::start().await;
    let (client, enough) = (cluster.client.clone(), AtomicBool::new(false));
    let roll = async {
        for at in 0..cluster.nodes.len() {
            cluster.nodes[at].restart().await;
            cluster.all_ready().await;
        }
        enough.store(true, Ordering::Relaxed);
    };
    let both = async { tokio::join!(load(&client, &asks, &expected, &enough), roll).0 };
    let n_answered = tokio::time::timeout(PATIENCE * 3, both).await.expect("the nodes are restarted in time");
    assert!(n_answered > CLIENTS, "{n_answered} requests ran meanwhile");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_asked_to_stop_answers_what_it_has() {
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let mut cluster = Cluster::start().await;
    let client = cluster.client.clone();
    let mut under_way = Vec::new();
    for ask in &asks[..CLIENTS] {
        under_way.push(in_time("a stream", client.stream(ask)).await.expect("it is served"));
    }
    let read = join_all(under_way.into_iter().map(async |mut stream| {
        let mut tokens = Vec::new();
        while let Some(event) = in_time("an event", stream.next()).await.expect("the stream goes on") {
            let ids = event["choices"].get(0).and_then(|choice| choice["token_ids"].as_array().cloned());
            tokens.extend(ids.unwrap_or_default().iter().map(|id| id.as_u64().expect("a token id") as u32));
        }
        tokens
    }));
    let (tokens, ()) = tokio::join!(read, cluster.router.restart());
    for (tokens, expected) in tokens.iter().zip(&expected) {
        assert_eq!(*tokens, expected.tokens);
    }
    cluster.all_ready().await;
    assert_eq!(client.ask(&asks[0]).await.expect("the new router serves").tokens, expected[0].tokens);
}
