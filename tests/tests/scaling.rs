//! Tests of scaling: prefill and decode nodes are added and removed with the load, by the rules of the
//! chart's autoscaling and only by the metrics of nodes. No request is lost, and a constant load changes
//! nothing.

use std::collections::VecDeque;
use std::time::Duration;

use baton_tests::fleet::{Fleet, FleetNode, Settings};
use baton_tests::logs::A_NODE_DIES;
use baton_tests::{Answer, Ask, Client, Stopwatch, eventually, in_time};
use futures::future::join_all;
use rustix::process::Signal;
use tokio::time::{Instant, sleep};

const MODEL: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/slow-prefill.toml");

/// The time between two samples of the metrics.
const PERIOD: Duration = Duration::from_millis(500);
/// The number of samples over which `busy` is measured, and after which a pool shrinks if all of them agree.
const RATE_OVER: usize = 4;
const SHRINK_AFTER: usize = 8;
const NODES_MAX: usize = 2;
/// The samples of a high load, and of a low one: enough to forget the high one, and to shrink.
const HIGH: usize = 16;
const LOW: usize = 2 * RATE_OVER + SHRINK_AFTER + 6;
/// The samples after a moment in which the machine stood still that are not used: the step of that moment may end later.
const CALM_MIN: usize = 2;
/// The chart's defaults: deploy/helm/baton/values.yaml.
const QUEUED_TOKENS: f64 = 16_384.0;
const BUSY: f64 = 0.7;
const KV_IN_USE: f64 = 0.7;
/// The tolerance of Kubernetes' autoscaler: a smaller difference from the target changes nothing.
const TOLERANCE: f64 = 0.1;

/// One pool of nodes, and the state of its autoscaler.
struct Pool {
    role: &'static str,
    next: usize,
    /// The seconds of computing by all nodes, at each sample.
    computed: VecDeque<(Instant, f64)>,
    /// The wanted numbers of nodes of the last samples.
    wanted: VecDeque<usize>,
    /// The number of nodes at each change.
    changes: Vec<usize>,
    /// The time since the last sample, and the samples since the machine stood still.
    watch: Stopwatch,
    n_calm: usize,
}

/// The metrics of one node's page.
struct Page(String);

impl Page {
    async fn of(node: &FleetNode) -> Self {
        Self(in_time("the metrics", Client::new(node.admin).get("/metrics")).await.1)
    }

    /// Returns the sum of all series with this name that have this label.
    fn sum(&self, name: &str, label: &str) -> f64 {
        let of = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            let labels = series.strip_prefix(name)?;
            (labels.is_empty() || labels.starts_with('{')).then_some(())?;
            if labels.contains(label) { value.parse::<f64>().ok() } else { None }
        };
        self.0.lines().filter_map(of).sum()
    }
}

impl Pool {
    fn new(role: &'static str) -> Self {
        let (computed, wanted) = (VecDeque::new(), VecDeque::new());
        Self {
            role,
            next: 1,
            computed,
            wanted,
            changes: vec![1],
            watch: Stopwatch::start(),
            n_calm: CALM_MIN,
        }
    }

    /// Returns the number of nodes that this sample wants: the largest of all triggers.
    fn wants(&mut self, n_nodes: usize, pages: &[Page]) -> usize {
        let name = |what: &str| format!("baton_node_{what}");
        let sum =
            |what: &str, label: &str| pages.iter().map(|page| page.sum(&name(what), label)).sum::<f64>();
        let totals = if self.role == "prefill" {
            let now = (Instant::now(), sum("step_seconds_sum", ""));
            self.computed.push_back(now);
            if self.computed.len() > RATE_OVER {
                self.computed.pop_front();
            }
            let before = self.computed[0];
            // A decrease counts as zero, as in PromQL's `rate`: the sum decreases when a node is gone.
            let computed = (now.1 - before.1).max(0.0);
            let took = (now.0 - before.0).as_secs_f64().max(PERIOD.as_secs_f64());
            [sum("queued_tokens", "") / QUEUED_TOKENS, computed / took / BUSY]
        } else {
            let in_use = |page: &Page| {
                page.sum(&name("kv_blocks"), "state=\"leased\"") / page.sum(&name("kv_blocks"), "").max(1.0)
            };
            [pages.iter().map(in_use).sum::<f64>() / KV_IN_USE, 0.0]
        };
        let wanted = totals.map(|total| {
            let ratio = total / n_nodes as f64;
            if (ratio - 1.0).abs() <= TOLERANCE { n_nodes } else { total.ceil() as usize }
        });
        wanted.into_iter().max().expect("two triggers").clamp(1, NODES_MAX)
    }

    /// Grows at once, and shrinks when all of the last samples want fewer nodes.
    fn decides(&mut self, n_nodes: usize, wants: usize) -> usize {
        self.wanted.push_back(wants);
        if self.wanted.len() > SHRINK_AFTER {
            self.wanted.pop_front();
        }
        if self.wanted.len() < SHRINK_AFTER {
            return n_nodes.max(wants);
        }
        let most = self.wanted.iter().copied().max().unwrap_or(wants);
        if wants > n_nodes { wants } else { most.min(n_nodes) }
    }

    /// Returns whether nodes have computed for as long as their metrics say. A step is longer by the time for which the
    /// machine stood still in it.
    fn is_calm(&mut self) -> bool {
        let watch = std::mem::replace(&mut self.watch, Stopwatch::start());
        self.n_calm = if watch.stood_still() < PERIOD { self.n_calm + 1 } else { 0 };
        self.n_calm >= CALM_MIN
    }

    /// Takes one sample and acts on it.
    async fn look(&mut self, fleet: &mut Fleet, leaving: &mut Vec<FleetNode>) {
        if !self.is_calm() {
            self.computed.clear();
            return;
        }
        let ours: Vec<&FleetNode> = fleet.nodes.iter().filter(|node| node.role == self.role).collect();
        let pages = join_all(ours.iter().map(|node| Page::of(node))).await;
        let n_nodes = ours.len();
        let wants = self.wants(n_nodes, &pages);
        let decided = self.decides(n_nodes, wants);
        if decided > n_nodes {
            fleet.add_with(self.role, self.next, MODEL, narrow());
            self.next += 1;
            let added = fleet.nodes.last().expect("it was added");
            added.process.expect_log(A_NODE_DIES);
            eventually("its admin port", async || tokio::net::TcpStream::connect(added.admin).await.ok())
                .await;
        } else if decided < n_nodes {
            // The node with the fewest sequences is removed.
            let running = |page: &Page| page.sum("baton_node_running", "");
            let least = (0..n_nodes).min_by(|a, b| running(&pages[*a]).total_cmp(&running(&pages[*b])));
            let name = ours[least.expect("a node")].name.clone();
            let at = fleet.nodes.iter().position(|node| node.name == name).expect("it is there");
            let node = fleet.nodes.remove(at);
            node.process.signal(Signal::TERM);
            leaving.push(node);
        } else {
            return;
        }
        self.changes.push(decided);
        self.wanted.clear();
        self.computed.clear();
    }
}

/// Takes this number of samples. On a slow machine a sample takes longer, and the rules count samples.
async fn scale_for(n_samples: usize, fleet: &mut Fleet, pools: &mut [Pool], leaving: &mut Vec<FleetNode>) {
    for _ in 0..n_samples {
        for pool in &mut *pools {
            pool.look(fleet, leaving).await;
        }
        sleep(PERIOD).await;
    }
}

/// Returns settings with room for 13 of the prompts: fewer than all, so that no prompt is found in a cache.
fn narrow() -> Settings {
    vec![("BATON_MODEL__KV_MEMORY", "2MiB".to_owned())]
}

fn asks() -> Vec<Ask> {
    let prompt = |nth: u32| (0..300).map(|at| (nth * 31 + at) % 256).collect();
    (0..40).map(|nth| Ask::new(prompt(nth), 60).with("ignore_eos", true.into())).collect()
}

/// The pools follow a load that comes and goes, and every request gets the same answer as without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_follow_a_square_wave_of_load_and_no_request_is_lost() {
    let mut fleet = Fleet::start_narrow(MODEL, 1, 1, narrow()).await;
    fleet.expect_log(A_NODE_DIES);
    let client = fleet.client();
    let asks = asks();
    let expected: Vec<Answer> =
        join_all(asks.iter().map(async |ask| client.ask(ask).await.expect("alone"))).await;
    let (mut pools, mut leaving) = ([Pool::new("prefill"), Pool::new("decode")], Vec::new());
    for _wave in 0..2 {
        let high = client.ask_while(24, (&asks, &expected), async |_| {
            scale_for(HIGH, &mut fleet, &mut pools, &mut leaving).await;
        });
        high.await;
        for pool in &pools {
            assert_eq!(pool.changes.last(), Some(&2), "{} nodes under load: {:?}", pool.role, pool.changes);
        }
        let low = client.ask_while(1, (&asks, &expected), async |_| {
            scale_for(LOW, &mut fleet, &mut pools, &mut leaving).await;
        });
        low.await;
        for pool in &pools {
            assert_eq!(
                pool.changes.last(),
                Some(&1),
                "{} nodes when it is over: {:?}",
                pool.role,
                pool.changes
            );
        }
    }
    let changes = pools.each_ref().map(|pool| pool.changes.len());
    assert_eq!(changes, [5, 5], "one change up and one down for each wave");
    // The prefill node is busy for less than two thirds of the time on any machine, and far from its threshold.
    let constant = client.ask_while(3, (&asks, &expected), async |_| {
        scale_for(SHRINK_AFTER, &mut fleet, &mut pools, &mut leaving).await;
        let settled = pools.each_ref().map(|pool| pool.changes.len());
        scale_for(HIGH, &mut fleet, &mut pools, &mut leaving).await;
        settled
    });
    let settled = constant.await;
    assert_eq!(pools.each_ref().map(|pool| pool.changes.len()), settled, "a constant load changes nothing");
    for node in &mut leaving {
        eventually("the node to drain and end", async || (!node.process.is_alive()).then_some(())).await;
    }
}
