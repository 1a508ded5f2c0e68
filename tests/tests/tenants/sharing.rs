//! What one tenant's requests reveal about another's: cached tokens, first-token times, and blocks on pool
//! nodes.

use std::collections::BTreeSet;

use baton_tests::fleet::{Fleet, Settings};
use baton_tests::{Ask, Client, Up, in_time};
use chassis::World;
use chassis::identity::{ClusterSecret, ExpectedPeer, Identity};
use chassis::rpc::{RpcChannel, RpcLimits, channel};
use proto::v1;
use proto::v1::pool_client::PoolClient;
use proto::v1::put_event::Event;
use tempfile::TempDir;
use tokio::time::Instant;

/// Computing it takes 96 ms, and a cached one a fraction.
const PROMPT_TOKENS: u32 = 304;
const SLOW_PREFILL: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/slow-prefill.toml");

/// How long two kinds of requests are compared.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// The rounds before each verdict.
    n_rounds: usize,
    /// If true, the times must be shown to be equal. If false, they must not be shown to differ, which a few
    /// rounds can check on a loaded machine.
    is_strict: bool,
}

impl Plan {
    /// `./test.sh long` sets the variable.
    fn from_env() -> Self {
        match std::env::var("TEST_TIMING_ROUNDS") {
            Ok(rounds) => Self { n_rounds: rounds.parse().expect("a number"), is_strict: true },
            Err(_) => Self { n_rounds: 60, is_strict: false },
        }
    }
}

/// A strict comparison goes on while the interval is too wide for a verdict, at most this many times.
const VERDICTS_MAX: usize = 3;

/// The nth prompt. It differs from the others in the first block.
fn prompt(nth: u32) -> Vec<u32> {
    let token = |at| if at < 4 { nth >> (8 * at) & 255 } else { at * 7 % 256 };
    (0..PROMPT_TOKENS).map(token).collect()
}

/// The owner's requests fill the cache. The other's must not show it.
struct Pair {
    client: Client,
    owner: fn(Ask) -> Ask,
    other: fn(Ask) -> Ask,
}

/// The time to the first token, and the cached tokens of the answer's usage.
#[derive(Clone, Copy, Debug)]
struct Probe {
    ms: f64,
    cached_tokens: u64,
}

impl Pair {
    async fn probe(&self, by: fn(Ask) -> Ask, nth: u32) -> Probe {
        in_time("an answer", async {
            let ask = by(Ask::new(prompt(nth), 2));
            let began = Instant::now();
            let mut stream = self.client.stream(&ask).await.expect("accepted");
            let mut probe = Probe { ms: 0.0, cached_tokens: 0 };
            while let Some(event) = stream.next().await.expect("a stream") {
                let cached = event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
                probe.cached_tokens = cached.unwrap_or(probe.cached_tokens);
                if probe.ms == 0.0 {
                    probe.ms = began.elapsed().as_secs_f64() * 1e3;
                }
            }
            probe
        })
        .await
    }

    /// The other sends a prompt that the owner has sent, and a new one, in random order.
    async fn round(&self, nth: u32) -> Round {
        let (known, unknown) = (2 * nth, 2 * nth + 1);
        assert_eq!(self.probe(self.owner, known).await.cached_tokens, 0, "the prompt is new");
        let is_known_first = World::real().draw().is_multiple_of(2);
        let order = if is_known_first { [known, unknown] } else { [unknown, known] };
        let mut probes = [self.probe(self.other, order[0]).await, self.probe(self.other, order[1]).await];
        if !is_known_first {
            probes.reverse();
        }
        let [known, unknown] = probes;
        assert_eq!(
            (known.cached_tokens, unknown.cached_tokens),
            (0, 0),
            "round {nth}: only the owner sent it"
        );
        Round { unknown_ms: unknown.ms, difference_ms: known.ms - unknown.ms }
    }

    async fn hides_the_owners_cache(&self) {
        let plan = Plan::from_env();
        let mut rounds = Vec::new();
        for verdict in 1..=VERDICTS_MAX {
            for _ in 0..plan.n_rounds {
                rounds.push(self.round(rounds.len() as u32).await);
            }
            let seen = Interval::of(&rounds);
            eprintln!("{} rounds: {seen:?}", rounds.len());
            assert!(!seen.is_outside(), "first-token times differ: {seen:?}");
            if seen.is_inside() || !plan.is_strict {
                return self.would_be_seen(&rounds, seen).await;
            }
            assert!(verdict < VERDICTS_MAX, "no verdict, is the machine loaded? {seen:?}");
        }
    }

    /// The owner's own hits are faster by more than the interval: the measurement would show a shared cache.
    async fn would_be_seen(&self, rounds: &[Round], seen: Interval) {
        let mut own = Vec::new();
        for nth in 0..20 {
            let probe = self.probe(self.owner, 2 * (rounds.len() as u32 - 1 - nth)).await;
            assert!(probe.cached_tokens > 0, "its own blocks are found");
            own.push(probe.ms);
        }
        let (hit, miss) = (median(own), median(rounds.iter().map(|round| round.unknown_ms).collect()));
        eprintln!("own hits: {hit} ms, misses: {miss} ms");
        assert!(hit - miss < seen.low_ms.min(-seen.bound_ms), "hit {hit} ms, miss {miss} ms, {seen:?}");
    }
}

#[derive(Clone, Copy, Debug)]
struct Round {
    unknown_ms: f64,
    /// The time for the prompt that the owner has sent, minus the time for the unknown one.
    difference_ms: f64,
}

/// The 95 % interval of the median difference, from the ranks of the sorted differences, and the allowed
/// difference.
#[derive(Clone, Copy, Debug)]
struct Interval {
    low_ms: f64,
    high_ms: f64,
    bound_ms: f64,
}

impl Interval {
    fn is_inside(self) -> bool {
        self.low_ms > -self.bound_ms && self.high_ms < self.bound_ms
    }

    fn is_outside(self) -> bool {
        self.high_ms < -self.bound_ms || self.low_ms > self.bound_ms
    }

    fn of(rounds: &[Round]) -> Self {
        let mut differences: Vec<f64> = rounds.iter().map(|round| round.difference_ms).collect();
        differences.sort_by(f64::total_cmp);
        let (middle, spread) = (rounds.len() as f64 / 2.0, 0.98 * (rounds.len() as f64).sqrt());
        let low = (middle - spread).floor().max(0.0) as usize;
        let high = ((middle + spread).ceil() as usize).min(rounds.len() - 1);
        let typical = median(rounds.iter().map(|round| round.unknown_ms).collect());
        Self { low_ms: differences[low], high_ms: differences[high], bound_ms: (0.02 * typical).max(0.2) }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A router that believes this machine's clients: they may name their tenants.
const TRUSTED: (&str, &str) = ("BATON_ROUTER__TRUSTED_PROXIES", "[\"127.0.0.1\"]");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_tenants_cache_shows_neither_in_counts_nor_in_times() {
    let up = Up::start_with(&["--model", SLOW_PREFILL, "--prefill", "1", "--decode", "1"], &[TRUSTED]).await;
    let pair = Pair {
        client: up.client(),
        owner: |ask| ask.header("x-baton-tenant", "acme"),
        other: |ask| ask.header("x-baton-tenant", "zenith"),
    };
    pair.hides_the_owners_cache().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_salt_separates_like_a_tenant() {
    let up = Up::start_with(&["--model", SLOW_PREFILL, "--prefill", "1", "--decode", "1"], &[]).await;
    let pair = Pair {
        client: up.client(),
        owner: |ask| ask.with("cache_salt", "one".into()),
        other: |ask| ask.with("cache_salt", "two".into()),
    };
    pair.hides_the_owners_cache().await;
    // No salt is another salt.
    let without = Pair { other: |ask| ask, ..pair };
    assert_eq!(without.probe(without.other, 0).await.cached_tokens, 0);
    assert!(without.probe(without.other, 0).await.cached_tokens > 0, "its own");
}

/// A cluster with a secret and a pool.
struct Secret {
    fleet: Fleet,
    world: World,
    _file: TempDir,
}

const SECRET: &str = "a secret of sixteen bytes and more";

impl Secret {
    async fn start(secret: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        std::fs::write(&path, secret).expect("written");
        let of_all = [("BATON_CLUSTER__SECRET_FILE", path.display().to_string())];
        let router = [TRUSTED, ("BATON_ROUTER__ORDER", "prefill-first")];
        let router = router.map(|(name, value)| (name, value.to_owned()));
        let of_router: Settings = of_all.iter().cloned().chain(router).collect();
        let roles = [("prefill", 1), ("decode", 1), ("pool", 1)];
        // Little memory, so that the page of all blocks is short.
        let memory = |role| match role {
            "pool" => ("BATON_POOL__MEMORY", "1MiB".to_owned()),
            _ => ("BATON_MODEL__KV_MEMORY", "1MiB".to_owned()),
        };
        let of_node = |role| of_all.iter().cloned().chain([memory(role)]).collect();
        let fleet = Fleet::start_all(SLOW_PREFILL, &roles, of_router, of_node).await;
        let world = World::real().with_identity(Identity::of_cluster(ClusterSecret::new(secret.as_bytes())));
        Self { fleet, world, _file: folder }
    }

    /// The hashes of all cached blocks, as the router's page shows them.
    async fn hashes(&self) -> BTreeSet<String> {
        let page = self.fleet.client().get_json("/debug/kv?blocks=1").await;
        let nodes = page["nodes"].as_array().expect("nodes").iter();
        let blocks = nodes.flat_map(|node| node["blocks"].as_array().expect("blocks"));
        let hashes = blocks.filter_map(|block| block["hash"].as_str());
        hashes.filter(|hash| !hash.is_empty()).map(str::to_owned).collect()
    }

    async fn fingerprints(&self) -> BTreeSet<String> {
        let page = self.fleet.client().get_json("/debug/cluster").await;
        let nodes = page["nodes"].as_array().expect("nodes").iter();
        nodes.map(|node| node["fingerprint"].as_str().expect("a digest").to_owned()).collect()
    }

    /// The pool node's port for calls, as a process of this world reaches it.
    fn pool(&self, world: &World) -> PoolClient<RpcChannel> {
        let node = self.fleet.nodes.iter().find(|node| node.role == "pool").expect("a pool node");
        PoolClient::new(channel(world, &node.grpc.to_string(), ExpectedPeer::Registry, RpcLimits::default()))
    }

    fn put(&self, prompt: Option<v1::Prompt>) -> v1::PutRequest {
        let sender = self.fleet.nodes.iter().find(|node| node.role == "prefill").expect("a prefill node");
        let wire =
            v1::WireAddress { scheme: "tcp".to_owned(), endpoint: sender.kv.to_string(), within_host: false };
        let peer = v1::Peer { node: sender.name.clone(), host: "elsewhere".to_owned(), wires: vec![wire] };
        v1::PutRequest { prompt, prefill: Some(peer) }
    }

    /// The tokens of this prompt that the pool node has for a caller with the secret.
    async fn held_tokens(&self, prompt: v1::Prompt) -> u32 {
        let asked = self.pool(&self.world).put(self.put(Some(prompt))).await;
        let mut events = asked.expect("accepted").into_inner();
        let opening = in_time("a landing", events.message()).await.expect("a stream");
        match opening.and_then(|opening| opening.event) {
            Some(Event::Landing(landing)) => landing.held_tokens,
            other => panic!("{other:?}"),
        }
    }
}

fn wire_prompt(tenant: &str, salt: &str) -> v1::Prompt {
    v1::Prompt {
        request_id: "someone".to_owned(),
        tenant: tenant.to_owned(),
        cache_salt: salt.to_owned(),
        tokens: prompt(1),
        sampling: Some(v1::Sampling { top_p: 1.0, repetition_penalty: 1.0, ..v1::Sampling::default() }),
        stop: Some(v1::StopRules { max_tokens: 4, ..v1::StopRules::default() }),
        timeout_ms: 30_000,
        ..v1::Prompt::default()
    }
}

/// The right to blocks is the knowledge of a prompt: its tenant, its salt and its tokens. Hashes are not
/// enough, and the cluster's secret is needed too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_node_gives_blocks_only_for_their_tenants_prompt() {
    let secret = Secret::start(SECRET).await;
    secret.fleet.expect_log(&["call refused"]);
    let client = secret.fleet.client();
    let ask = |tenant: &str| Ask::new(prompt(1), 4).header("x-baton-tenant", tenant);
    let cached = async |tenant: &str| client.ask(&ask(tenant)).await.expect("an answer").cached_tokens;
    assert_eq!(cached("acme").await, 0);
    assert_eq!(cached("zenith").await, 0, "prefill first, through the pool");
    assert!(cached("acme").await > 0);

    assert_eq!(
        secret.held_tokens(wire_prompt("acme", "")).await,
        PROMPT_TOKENS - 16,
        "all but the last block"
    );
    for (tenant, salt) in [("nadir", ""), ("acme", "salt"), ("default", "")] {
        assert_eq!(secret.held_tokens(wire_prompt(tenant, salt)).await, 0, "{tenant} {salt}");
    }
    let refused = secret.pool(&secret.world).put(secret.put(None)).await.expect_err("hashes are no right");
    assert_eq!((refused.code(), refused.message()), (tonic::Code::InvalidArgument, "prompt is missing"));
    let other = Identity::of_cluster(ClusterSecret::new(b"the secret of another cluster"));
    for world in [World::real(), World::real().with_identity(other)] {
        let asked = secret.pool(&world).put(secret.put(Some(wire_prompt("acme", "")))).await;
        assert_eq!(asked.expect_err("a stranger").code(), tonic::Code::Unauthenticated);
    }
    secret.fleet.baseline().await;
}

/// With a new secret all hashes are new: nothing of the old cluster is found, and its nodes are another
/// group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_secret_makes_new_hashes() {
    let mut seen = Vec::new();
    for text in [SECRET, SECRET, "another secret of sixteen bytes and more"] {
        let secret = Secret::start(text).await;
        let answer = secret.fleet.client().ask(&Ask::new(prompt(1), 4)).await.expect("an answer");
        assert_eq!(answer.cached_tokens, 0);
        secret.fleet.baseline().await;
        let (hashes, fingerprints) = (secret.hashes().await, secret.fingerprints().await);
        assert_eq!((hashes.len(), fingerprints.len()), (PROMPT_TOKENS as usize / 16, 1), "{hashes:?}");
        seen.push((hashes, fingerprints, answer.tokens));
    }
    assert_eq!(seen[0], seen[1], "the same secret makes the same hashes");
    assert_eq!(seen[0].2, seen[2].2, "the answer does not depend on it");
    assert_ne!(seen[0].1, seen[2].1, "another fingerprint");
    assert!(seen[0].0.is_disjoint(&seen[2].0), "other hashes");
}
