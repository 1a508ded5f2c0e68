//! `deploy/monitoring` with a real Prometheus: it scrapes a cluster under load with a dead node and a
//! sleeping one. Every query of a dashboard and every rule returns a series, and the alert for the dead node
//! fires.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use baton_tests::check::prompts;
use baton_tests::executable::{self, prometheus};
use baton_tests::fleet::{FleetNode, PACED, Settings};
use baton_tests::logs::A_NODE_DIES;
use baton_tests::{Ask, Client, Fleet, eventually, free_addr, in_time};
use futures::future::join_all;
use serde_json::Value;
use tempfile::TempDir;

/// Time between two scrapes, and between two evaluations of the rules. The shipped rules have 15 s.
const EVERY: &str = "1s";
/// The window of the dashboards' rates.
const RATE_INTERVAL: &str = "30s";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/monitoring")
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(folder().join(path)).expect("a file of deploy/monitoring")
}

fn succeeds(command: &mut Command) {
    let output = command.output().expect("./test.sh installs what this needs");
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", said(&output.stdout), said(&output.stderr));
}

/// Returns the values of `key` in the rules, one on each line.
fn values<'a>(rules: &'a str, key: &str) -> Vec<&'a str> {
    let lines = rules.lines().map(|line| line.trim_start().trim_start_matches("- "));
    lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix(": ")).collect()
}

#[test]
fn the_rules_do_what_they_promise() {
    succeeds(
        Command::new(prometheus("promtool")).args(["test", "rules", "rules.test.yaml"]).current_dir(folder()),
    );
}

#[test]
fn the_dashboards_are_what_the_script_makes() {
    succeeds(Command::new("python3").arg(folder().join("dashboards.py")).arg("--check"));
}

#[test]
fn every_alert_has_a_line_in_the_runbook() {
    let (rules, page) =
        (read("rules.yaml"), std::fs::read_to_string(folder().join("../../docs/operating.md")));
    let page = page.expect("the page");
    let alerts = values(&rules, "alert");
    assert!(alerts.len() > 10, "{alerts:?}");
    for alert in &alerts {
        assert!(
            page.contains(&format!("| `{alert}` |")),
            "docs/operating.md does not say what to do about {alert}"
        );
    }
    let known: BTreeSet<&str> = alerts.into_iter().collect();
    let explained = page.lines().filter_map(|line| line.strip_prefix("| `Baton")?.split_once('`'));
    for (alert, _) in explained {
        assert!(known.contains(format!("Baton{alert}").as_str()), "there is no alert Baton{alert}");
    }
}

/// A Prometheus that scrapes a fleet. Dropping it stops it.
struct Prometheus {
    child: Child,
    client: Client,
    _folder: TempDir,
}

impl Prometheus {
    async fn start(targets: &[SocketAddr], flags: &[&str]) -> Self {
        let home = tempfile::tempdir().expect("a folder");
        let targets = targets.iter().map(|target| format!("\"{target}\"")).collect::<Vec<_>>().join(", ");
        let config = format!(
            "global: {{ scrape_interval: {EVERY}, evaluation_interval: {EVERY} }}\n\
             rule_files: [rules.yaml]\n\
             scrape_configs: [{{ job_name: baton, static_configs: [{{ targets: [{targets}] }}] }}]\n"
        );
        let rules = read("rules.yaml").replace("interval: 15s", &format!("interval: {EVERY}"));
        let rules = rules.replace("for: 30s", "for: 2s");
        for (name, text) in [("prometheus.yaml", config), ("rules.yaml", rules)] {
            std::fs::write(home.path().join(name), text).expect("the folder is ours");
        }
        let address = free_addr();
        let log = std::fs::File::create(home.path().join("log")).expect("the folder is ours");
        let child = Command::new(prometheus("prometheus"))
            .arg("--config.file=prometheus.yaml")
            .arg("--storage.tsdb.path=data")
            .arg(format!("--web.listen-address={address}"))
            .args(flags)
            .current_dir(home.path())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("./test.sh installs it");
        let prometheus = Self { child, client: Client::new(address), _folder: home };
        eventually("Prometheus to listen", async || tokio::net::TcpStream::connect(address).await.ok()).await;
        eventually("Prometheus to be ready", async || {
            (prometheus.client.get("/-/ready").await.0.as_u16() == 200).then_some(())
        })
        .await;
        prometheus
    }

    /// Returns the series of a query, with their labels.
    async fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let (status, body) = self.client.get(&format!("/api/v1/query?query={encoded}")).await;
        assert_eq!(status.as_u16(), 200, "{query}: {body}");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        answer["data"]["result"].as_array().expect("series").clone()
    }

    /// Waits until a query returns a series.
    async fn returns(&self, query: &str) {
        let series = async || (!self.query(query).await.is_empty()).then_some(());
        eventually(&format!("a series of {query}"), series).await;
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns all queries of the dashboards.
fn queries() -> Vec<String> {
    let mut found = Vec::new();
    // Without a GPU there is nothing to query for gpus.json.
    for name in ["cluster", "router", "transfers"] {
        let dashboard: Value = serde_json::from_str(&read(format!("dashboards/{name}.json"))).expect("JSON");
        for panel in dashboard["panels"].as_array().expect("panels") {
            let targets = panel["targets"].as_array().expect("targets");
            let exprs = targets.iter().map(|target| target["expr"].as_str().expect("a query"));
            found.extend(exprs.map(|expr| expr.replace("$__rate_interval", RATE_INTERVAL)));
        }
    }
    found
}

/// The queries of GPUs name metrics that the page documents.
#[test]
fn the_dashboard_of_gpus_names_known_metrics() {
    let page = std::fs::read_to_string(folder().join("../../docs/metrics.md")).expect("the page");
    let dashboard = read("dashboards/gpus.json");
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    let names: BTreeSet<&str> =
        dashboard.split(|c| !is_name(c)).filter(|word| word.starts_with("baton_")).collect();
    assert!(names.len() > 6, "{names:?}");
    for name in names {
        assert!(page.contains(&format!("`{name}`")), "docs/metrics.md lacks {name}");
    }
}

/// Returns the expressions of the rules, and those that the alerts compare with their thresholds.
fn rules() -> Vec<String> {
    let rules = read("rules.yaml");
    let exprs = values(&rules, "expr").into_iter();
    let compared = |expr: &str| {
        let alert = expr.starts_with("baton:").then(|| expr.rsplit_once([' '])).flatten();
        alert.map_or(expr.to_owned(), |(left, _)| left.trim_end_matches(['<', '>', ' ']).to_owned())
    };
    exprs.map(compared).collect()
}

/// Sends 24 requests for answers of this many tokens.
async fn load(client: &Client, tokens: u32) {
    let asks = prompts(5, 24, 300)
        .into_iter()
        .map(|prompt| Ask::new(prompt, tokens).with("ignore_eos", true.into()));
    let asks: Vec<Ask> = asks.collect();
    for answer in in_time("all answers", join_all(asks.iter().map(|ask| client.ask(ask)))).await {
        answer.expect("an answer");
    }
}

/// Counters that may stay 0 in this test, with the place that counts them.
const MAY_BE_ZERO: &[(&str, &str)] = &[
    ("router_role_moves", "`[balance]` is off here: tests/tests/roles.rs"),
    ("router_callers_refused", "no stranger is here: tests/tests/strangers.rs, tests/tests/tls.rs"),
    ("node_callers_refused", "the same"),
    ("router_text_pieces", "prompts are token ids here: router/src/text/tokenizing.rs"),
    ("router_tokenized_bytes", "the same"),
    ("router_log_lines_lost", "the log is read: tests/tests/logging.rs"),
    ("node_log_lines_lost", "the same"),
    ("router_connections_refused", "no flood is here: tests/tests/silence.rs"),
    ("router_pool_fallbacks", "the pool has room: tests/tests/pool.rs"),
    ("router_upstream_source_failures", "nothing lists servers here: tests/tests/upstream.rs"),
    ("router_unauthorized", "there are no keys: tests/tests/tenants.rs"),
    ("router_tenant_refusals", "the same"),
    ("router_tenants_file_reloads", "the same"),
    ("router_oidc_keys_fetches", "no provider gives keys: tests/tests/tenants/provider.rs"),
    ("router_line_refusals", "there is room, and no request has an objective: tests/tests/line.rs"),
    ("router_retries", "it depends on the moment at which the node dies: tests/tests/faults.rs"),
    ("router_breaker_changes", "a dead node leaves the registry: router/src/breaker/tests.rs"),
    ("router_upstream_legs", "there are no other engines: tests/tests/upstream.rs"),
    ("router_upstream_prefills_without_kv", "the same"),
    ("node_preemptions", "KV memory suffices: tests/tests/room.rs"),
    ("node_failed_steps", "the mock fails no step: scheduler/src/tests"),
    ("node_late_masks", "the mock waits for its masks: scheduler/src/tests"),
    ("node_tight_launches", "it depends on the machine's load: scheduler/src/tests"),
    ("node_discarded_rows", "it depends on the machine's load: scheduler/src/tests"),
    ("node_integrity_failures", "it would be a bug"),
    ("node_kv_refetched_pages", "no page is corrupt: kv-transfer/src/conformance"),
];

/// Returns the counters of docs/metrics.md.
fn counters() -> BTreeSet<String> {
    let page = std::fs::read_to_string(folder().join("../../docs/metrics.md")).expect("the page");
    let names = page.split('`').filter_map(|word| word.strip_prefix("baton_")?.strip_suffix("_total"));
    names.map(str::to_owned).collect()
}

/// Checks that the cluster increments every counter, except those that need another test.
async fn every_counter_counts(prometheus: &Prometheus) {
    let mut counters = counters();
    assert!(counters.len() > 30, "{counters:?}");
    for (counter, reason) in MAY_BE_ZERO {
        assert!(counters.remove(*counter), "docs/metrics.md has no {counter} ({reason})");
    }
    for counter in counters {
        // The dead node's and the woken role's series end, and count too.
        prometheus.returns(&format!("sum(max_over_time(baton_{counter}_total[10m])) > 0")).await;
    }
}

/// A Prometheus that reads native histograms gets those of what clients wait for.
async fn native_histograms_are_read(router: SocketAddr) {
    let prometheus = Prometheus::start(&[router], &["--enable-feature=native-histograms"]).await;
    for histogram in ["first_token_seconds", "token_gap_seconds", "request_seconds"] {
        let name = format!("baton_router_{histogram}");
        prometheus.returns(&format!("histogram_quantile(0.99, {name}) > 0")).await;
        prometheus.returns(&format!("histogram_count({name}) > 0")).await;
    }
}

/// Returns the queries of the autoscaling, for this Prometheus, which knows processes by their address.
fn triggers() -> Vec<String> {
    let objects = read("../k8s/components/autoscaling/objects.yaml");
    let here =
        |query: &str| query.replace("namespace=\"baton\"", "job=\"baton\"").replace("(pod)", "(instance)");
    let found: Vec<String> = values(&objects, "query").into_iter().map(here).collect();
    assert_eq!(found.len(), 4, "{found:?}");
    found
}

/// Runs Prometheus's own checks of names, help texts and types.
fn promtool_finds_nothing(page: &str) {
    let mut promtool = Command::new(prometheus("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("./test.sh installs it");
    promtool.stdin.take().expect("it is piped").write_all(page.as_bytes()).expect("it reads");
    let output = promtool.wait_with_output().expect("it ends");
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && said.is_empty(), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_and_a_sleeping_node_are_seen() {
    let roles = [("prefill", 2), ("pool", 1), ("decode", 2)];
    let certificates = tempfile::tempdir().expect("a folder");
    succeeds(Command::new(executable::baton()).arg("certs").arg(certificates.path()));
    let of_role = |role: &str| -> Settings {
        let file = |name: String| certificates.path().join(name).display().to_string();
        vec![
            ("BATON_TLS__CA", file("ca.pem".to_owned())),
            ("BATON_TLS__CERT", file(format!("{role}.pem"))),
            ("BATON_TLS__KEY", file(format!("{role}.key"))),
        ]
    };
    let order = ("BATON_ROUTER__ORDER", "prefill-first".to_owned());
    let of_router = of_role("router").into_iter().chain([order]).collect();
    let mut fleet = Fleet::start_all(PACED, &roles, of_router, of_role).await;
    fleet.expect_log(A_NODE_DIES);
    let nodes: Vec<SocketAddr> = fleet.nodes.iter().map(|node| node.admin).collect();
    let targets: Vec<SocketAddr> = nodes.iter().copied().chain([fleet.admin]).collect();
    for target in &targets {
        promtool_finds_nothing(&Client::new(*target).get("/metrics").await.1);
    }
    let prometheus = Prometheus::start(&targets, &[]).await;
    // A rate needs a sample before the load and one after it.
    prometheus.returns(&format!("sum(up{{job=\"baton\"}}) == {}", targets.len())).await;
    load(&fleet.client(), 40).await;
    prometheus.returns("sum(baton_router_requests_total) > 0").await;
    for target in &targets {
        promtool_finds_nothing(&Client::new(*target).get("/metrics").await.1);
    }
    let asleep = Client::new(fleet.nodes[1].admin).post("/sleep", "").await;
    assert_eq!(asleep.0.as_u16(), 200, "{}", asleep.2);
    let client = fleet.client();
    assert_eq!(client.post("/v1/completions", "{").await.0.as_u16(), 400);
    // The answers are long, so that streams still run when the test sees them.
    let ((), dead) = tokio::join!(load(&client, 400), async {
        let admin = eventually("streams on a decode node", async || {
            let page = client.get_json("/debug/cluster").await;
            let nodes = page["nodes"].as_array().expect("a list");
            let decodes =
                |node: &&Value| node["role"] == "decode" && node["load"]["running"].as_u64() > Some(2);
            nodes.iter().find(decodes).map(|node| node["admin"].as_str().expect("an address").to_owned())
        });
        let admin = admin.await;
        let is_here = |node: &FleetNode| node.admin.to_string() == admin;
        let mut dead = fleet.nodes.remove(fleet.nodes.iter().position(is_here).expect("one of these"));
        dead.process.kill();
        dead
    });
    for query in queries().into_iter().chain(rules()).chain(triggers()) {
        prometheus.returns(&query).await;
    }
    every_counter_counts(&prometheus).await;
    native_histograms_are_read(fleet.admin).await;
    prometheus.returns("ALERTS{alertname=\"BatonProcessDown\",alertstate=\"firing\"}").await;
    let down = prometheus.query("ALERTS{alertname=\"BatonProcessDown\",alertstate=\"firing\"}").await;
    let instances: Vec<&str> =
        down.iter().filter_map(|series| series["metric"]["instance"].as_str()).collect();
    assert_eq!(instances, [dead.admin.to_string()], "the sleeping node is not down");
    let asleep = prometheus.query("baton_node_asleep == 1").await;
    assert_eq!(asleep.len(), 1, "{asleep:?}");
    assert_eq!(asleep[0]["metric"]["instance"], nodes[1].to_string());
}
