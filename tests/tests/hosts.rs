//! Runs the processes of `deploy/compose.yaml`, each on its own host with a real etcd, as an unprivileged
//! user, on a read-only root file system. Hosts are disconnected and come back; nothing is restarted.
//!
//! A program that forwards the frames (`tests/hosts/cable.py`) causes delay, loss, low bandwidth and half-open
//! connections, because not every kernel has netem.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::hosts::{self, Flaw, Hosts};
use baton_tests::{Answer, Ask, Client, Stopwatch, eventually, executable, in_time, python, undisturbed};
use futures::future::join_all;
use serde_json::Value;
use tempfile::TempDir;

const NAMES: &[&str] = &["etcd", "router", "prefill-0", "prefill-1", "decode-0", "decode-1", "pool-0"];
/// The number of nodes among the processes.
const N_NODES: usize = 5;
/// The length of an answer, in tokens: long enough that a stream's host can be disconnected in the middle.
const TOKENS: u32 = 300;
/// The time for which the router hears nothing of nodes, and the time after which it must know their caches again.
const CUT: Duration = Duration::from_secs(30);
const KNOWN_AGAIN: Duration = Duration::from_secs(2);
/// The number of requests over all paths while one of them is broken.
const N_OVER_PATHS: u64 = 48;
/// The bandwidth of a slow cable in bytes per second: a tenth of a host's traffic with half of the load on a
/// good cable.
const SLOW: u32 = 60_000;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

/// Reads `deploy/compose.yaml` with Python's YAML parser.
fn compose() -> Value {
    let read = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))";
    let file = root().join("deploy/compose.yaml");
    let output = Command::new(python()).args(["-c", read]).arg(file).output().expect("./test.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Makes the contents of the image: the executable and its libraries. Configuration files are beside it,
/// because they are mounted by name.
fn image(hosts: &Hosts) -> TempDir {
    let image = tempfile::tempdir().expect("a folder");
    let put = |from: &Path, to: &str| {
        let to = image.path().join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().expect("a folder")).expect("made");
        std::fs::copy(from, &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    };
    put(&executable::baton(), "/usr/local/bin/baton");
    for library in libraries(&executable::baton()) {
        put(Path::new(&library), &library);
    }
    for file in ["router.toml", "node.toml", "pool.toml"] {
        put(&root().join("deploy/compose").join(file), &format!("/etc/baton/{file}"));
    }
    put(&root().join("tests/mocks/paced.toml"), "/etc/baton/paced.toml");
    let identity = image.path().join("etc/baton-identity");
    std::fs::create_dir_all(&identity).expect("made");
    std::fs::write(identity.join("cluster"), "a secret of this test's cluster").expect("written");
    std::fs::write(image.path().join("etc/hosts"), hosts.file()).expect("written");
    for folder in ["proc", "dev/shm", "tmp"] {
        std::fs::create_dir_all(image.path().join(folder)).expect("made");
    }
    // The folder is made readable for all users, as an image is, because a temporary folder is readable only
    // by its owner.
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(image.path(), everybody).expect("it is ours");
    image
}

/// Returns the libraries that the loader would load.
fn libraries(executable: &Path) -> Vec<String> {
    let output = Command::new("ldd").arg(executable).output().expect("ldd runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect()
}

/// The running processes of the cluster. They must be dropped before the hosts.
struct Cluster {
    processes: Vec<(String, Child)>,
    logs: TempDir,
    client: Client,
    _image: TempDir,
    hosts: Hosts,
}

impl Cluster {
    /// Starts a cluster with a model whose KV is checked and whose speed is known.
    async fn start_paced() -> Self {
        Self::start(&[("BATON_MODEL__PATH", "mock:/etc/baton/paced.toml")]).await
    }

    /// Starts the processes of the compose file, with the changes in `env`.
    async fn start(env: &[(&str, &str)]) -> Self {
        let hosts = Hosts::new(NAMES);
        let image = image(&hosts);
        let client = Client::new((hosts.addr_of("router"), 8000).into());
        let logs = tempfile::tempdir().expect("a folder");
        let mut cluster = Self { processes: Vec::new(), logs, client, _image: image, hosts };
        let compose = compose();
        cluster.start_etcd(&compose["services"]["etcd"]);
        for name in &NAMES[1..] {
            cluster.start_baton(name, &compose["services"][*name], env);
        }
        let router = (cluster.hosts.addr_of("router"), 8000);
        eventually("the router to listen", async || tokio::net::TcpStream::connect(router).await.ok()).await;
        cluster.all_ready().await;
        cluster
    }

    /// Starts etcd from its executable, with the flags of the compose file, because there is no image of it.
    fn start_etcd(&mut self, service: &Value) {
        let flags = texts(&service["command"]);
        let data = self.logs.path().join("etcd");
        let flags = flags[1..].iter().map(|flag| match flag.strip_prefix("--data-dir=") {
            Some(_) => format!("--data-dir={}", data.display()),
            None => flag.replace("//etcd:", &format!("//{}:", self.hosts.addr_of("etcd"))),
        });
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.hosts.namespace_of("etcd")]);
        command.arg(etcd_bin_vendored::etcd_bin_path().expect("etcd for this platform")).args(flags);
        self.run("etcd", command);
    }

    fn start_baton(&mut self, name: &str, service: &Value, env: &[(&str, &str)]) {
        let mut command = Command::new(root().join("tests/hosts/enter.sh"));
        command.arg(self.hosts.namespace_of(name)).arg(self._image.path()).arg("/usr/local/bin/baton");
        command.args(texts(&service["command"])).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        for (variable, value) in service["environment"].as_object().into_iter().flatten() {
            command.env(variable, value.as_str().expect("a text"));
        }
        // A pool node has no model, and only the router has the router's settings.
        let is_known = |variable: &str| match variable {
            _ if variable.starts_with("BATON_MODEL__") => !name.starts_with("pool"),
            _ if variable.starts_with("BATON_ROUTER__") => name == "router",
            _ => true,
        };
        command.envs(env.iter().copied().filter(|(variable, _)| is_known(variable)));
        // The admin key is turned off, because the test reads /debug without a key.
        command.env("BATON_CLUSTER__ADMIN_KEY_FILE", "").env("BATON_CLUSTER__INSECURE", "true");
        self.run(name, command);
    }

    fn run(&mut self, name: &str, mut command: Command) {
        let log = File::create(self.logs.path().join(format!("{name}.log"))).expect("a log file");
        let child = command.stdout(Stdio::null()).stderr(log).spawn().expect("it starts");
        self.processes.push((name.to_owned(), child));
    }

    async fn all_ready(&self) {
        eventually("every node to be ready", async || {
            let cluster = self.client.get_json("/debug/cluster").await;
            let nodes = cluster["nodes"].as_array().expect("a list of nodes").clone();
            let n_ready = nodes.iter().filter(|node| node["state"] == "ready").count();
            (n_ready == N_NODES && nodes.len() == N_NODES).then_some(())
        })
        .await;
    }

    fn pid(&self, name: &str) -> u32 {
        self.processes.iter().find(|(known, _)| known == name).expect("it was started").1.id()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (name, child) in &mut self.processes {
            let _ = child.kill();
            let _ = child.wait();
            if std::thread::panicking() {
                let log = std::fs::read_to_string(self.logs.path().join(format!("{name}.log")));
                eprintln!("--- log of {name} ---\n{}", log.unwrap_or_default());
            }
        }
    }
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().expect("a list").iter().map(|text| text.as_str().expect("a text").to_owned()).collect()
}

fn asks() -> Vec<Ask> {
    let ask = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(23, 16, 200).into_iter().map(ask).collect()
}

/// Sends all requests at once, calls `disturb` in the middle, and compares the answers with the expected
/// ones.
async fn disturbed(cluster: &Cluster, asks: &[Ask], expected: &[Answer], disturb: impl FnOnce()) {
    let run = join_all(asks.iter().map(|ask| cluster.client.ask(ask)));
    let disturb = async {
        tokio::time::sleep(Duration::from_millis(600)).await;
        disturb();
    };
    let (answers, ()) = in_time("the disturbed run", async { tokio::join!(run, disturb) }).await;
    for (idx, (answer, expected)) in answers.into_iter().zip(expected).enumerate() {
        let answer = answer.unwrap_or_else(|failed| panic!("request {idx}: {failed:?}"));
        assert_eq!(answer.tokens, expected.tokens, "request {idx}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_are_cut_off_and_come_back() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let cluster = Cluster::start_paced().await;
    for name in &NAMES[1..] {
        confined(cluster.pid(name));
    }
    disturbed(&cluster, &asks, &expected, || {}).await;
    for host in ["decode-0", "prefill-0", "pool-0", "etcd"] {
        disturbed(&cluster, &asks, &expected, || cluster.hosts.cut(host)).await;
        // The host is away, so other nodes do its work.
        disturbed(&cluster, &asks, &expected, || {}).await;
        cluster.hosts.mend(host);
        cluster.all_ready().await;
    }
    disturbed(&cluster, &asks, &expected, || {}).await;
}

/// While a node's status stream is cut, the router shows that it does not know the node's cache, and no request fails.
/// When the stream is back, the router soon knows all of the cache again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cache_of_a_cut_node_is_unknown_and_soon_exact_again() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let cluster = Cluster::start_paced().await;
    let cut = ["prefill-0", "decode-0"];
    let all = async |knowledge: &str| {
        let answer = cluster.client.get_json("/debug/cluster").await;
        let nodes = answer["nodes"].as_array().expect("a list of nodes").clone();
        let of_cut = nodes.iter().filter(|node| cut.iter().any(|id| node["id"] == *id));
        (of_cut.filter(|node| node["cache"] == knowledge).count() == cut.len()).then_some(())
    };
    eventually("all caches to be known", async || all("exact").await).await;
    let run = async {
        let begin = tokio::time::Instant::now();
        let mut n_asked = 0_u32;
        while begin.elapsed() < CUT + CUT / 4 {
            // Each prompt is asked four times.
            let prompt = prompts(u64::from(n_asked / 4), 1, 200).remove(0);
            let answer = cluster.client.ask(&Ask::new(prompt, 16)).await;
            answer.unwrap_or_else(|failed| panic!("request {n_asked}: {failed:?}"));
            n_asked += 1;
        }
        n_asked
    };
    let cutting = async {
        tokio::time::sleep(CUT / 8).await;
        cut.iter().for_each(|host| cluster.hosts.part(host, "router"));
        let cut_at = tokio::time::Instant::now();
        eventually("the caches to be unknown", async || all("blind").await).await;
        tokio::time::sleep_until(cut_at + CUT).await;
        cut.iter().for_each(|host| cluster.hosts.reunite(host, "router"));
        let mended_at = Stopwatch::start();
        eventually("the caches to be known again", async || all("exact").await).await;
        mended_at.elapsed()
    };
    let (n_asked, took) = tokio::join!(run, cutting);
    assert!(n_asked > 30, "{n_asked} requests");
    assert!(took < KNOWN_AGAIN, "the caches were known again after {took:?}");
}

/// No KV passes from one prefill node to one decode node. Both work with the others, so few requests try this path.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_path_between_two_nodes_delays_few_requests() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    // Other policies leave out a node after one slow answer, and all its paths with it.
    let env = [
        ("BATON_MODEL__PATH", "mock:/etc/baton/paced.toml"),
        ("BATON_ROUTER__ORDER", "decode-first"),
        ("BATON_ROUTER__POLICY", "random"),
    ];
    let cluster = Cluster::start(&env).await;
    cluster.hosts.part("decode-1", "prefill-0");
    let (mut n_late, mut is_shown) = (0, false);
    for idx in 0..N_OVER_PATHS {
        let ask = Ask::new(prompts(idx, 1, 200).remove(0), 8);
        let began = tokio::time::Instant::now();
        cluster.client.ask(&ask).await.unwrap_or_else(|failed| panic!("request {idx}: {failed:?}"));
        n_late += u32::from(began.elapsed() > Duration::from_secs(2));
        let page = cluster.client.get_json("/debug/cluster").await;
        let failing = page["failing_pairs"].as_array().expect("a list").first();
        is_shown |= failing.is_some_and(|pair| pair["from"] == "prefill-0" && pair["to"] == "decode-1");
    }
    assert!(is_shown, "the pair is named");
    // A quarter of the routes uses the path.
    assert!((1..=4).contains(&n_late), "{n_late} of {N_OVER_PATHS} requests were late");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_cables_change_no_token() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let cluster = Cluster::start_paced().await;
    for (host, flaw) in [
        ("decode-0", Flaw { loss: 0.05, ..Flaw::default() }),
        ("prefill-0", Flaw { delay_ms: 50, ..Flaw::default() }),
        ("decode-1", Flaw { bytes_per_second: SLOW, ..Flaw::default() }),
        ("pool-0", Flaw { loss: 0.05, delay_ms: 50, ..Flaw::default() }),
        ("etcd", Flaw { loss: 0.05, delay_ms: 50, ..Flaw::default() }),
    ] {
        let cable = cluster.hosts.bad_cable(host, flaw);
        disturbed(&cluster, &asks, &expected, || {}).await;
        assert!(cable.n_carried() > 0, "nothing of {host}'s went over the bad cable");
    }
    for host in ["decode-0", "prefill-1"] {
        let mut cable = None;
        let deaf = Flaw { deaf: true, ..Flaw::default() };
        disturbed(&cluster, &asks, &expected, || cable = Some(cluster.hosts.bad_cable(host, deaf))).await;
        drop(cable);
        cluster.all_ready().await;
    }
    disturbed(&cluster, &asks, &expected, || {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compose_serves_the_demo_model() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let cluster = Cluster::start(&[]).await;
    let ask = serde_json::json!({
        "model": "demo",
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "What is prefill?"}],
    });
    let (status, _, body) =
        in_time("an answer", cluster.client.post("/v1/chat/completions", ask.to_string())).await;
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(status, 200, "{answer}");
    let said = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert!(said.contains("prompt"), "{said}");
    // The prompt is longer than a block, so its KV goes through the pool.
    let ask =
        serde_json::json!({ "model": "demo", "max_tokens": 4, "prompt": (100..140).collect::<Vec<u32>>() });
    let (status, _, body) =
        in_time("an answer", cluster.client.post("/v1/completions", ask.to_string())).await;
    assert_eq!(status, 200, "{body}");
    // The answer may come before the node has counted the delivery.
    let pool = Client::new((cluster.hosts.addr_of("pool-0"), 7001).into());
    let delivered = "baton_node_deliveries_total{outcome=\"delivered\",role=\"pool\"}";
    let is_counted = async || (pool.counter(delivered).await > 0).then_some(());
    eventually("the delivery to be counted", is_counted).await;
}

/// Checks that a process is not root, has no capabilities or way to get them, and has a read-only root.
fn confined(pid: u32) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel says so").trim().to_owned()
    };
    assert_eq!(line("Uid:"), "65532\t65532\t65532\t65532");
    assert_eq!((line("CapEff:"), line("NoNewPrivs:")), ("0000000000000000".to_owned(), "1".to_owned()));
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("it runs");
    let root =
        mounts.lines().map(|mount| mount.split(' ').collect::<Vec<_>>()).rfind(|mount| mount[4] == "/");
    let options = root.expect("there is a root")[5];
    assert!(options.split(',').any(|option| option == "ro"), "{options}");
}
