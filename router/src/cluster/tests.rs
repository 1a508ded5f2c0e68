//! Tests of the router's view of the cluster, from events of the registry and of nodes.

use std::sync::Arc;
use std::time::Duration;

use chassis::net::MemoryNet;
use chassis::{Gate, World};
use registry::{MemoryRegistry, Registry as _};
use types::node::TOKENIZER;
use types::prompt::Priority;
use types::{
    BlockChange, BlockEvent, BlockHash, BlockHashKey, Epoch, Fingerprint, NodeInfo, NodeLoad, Prompt,
    ProtocolRange, Role, Sampling, StopRules, TenantId, TokenId,
};

use super::*;
use crate::fake_node::{FakeNode, FakeResponse, info};
use crate::policy::{NodeView, by_name};

struct TestCluster {
    cluster: Cluster,
    models: RouterModels,
    registry: MemoryRegistry,
    world: World,
    gate: Gate,
    _following: Task<()>,
}

async fn test_cluster() -> TestCluster {
    test_cluster_with(None).await
}

async fn test_cluster_with(wanted: Option<WantedFingerprint>) -> TestCluster {
    test_cluster_of(RouterModels::default(), wanted).await
}

async fn test_cluster_of(models: RouterModels, wanted: Option<WantedFingerprint>) -> TestCluster {
    let world = World::seeded(1).with_net(Arc::new(MemoryNet::new()));
    let gate = Gate::new("test");
    let registry = MemoryRegistry::new(Duration::from_secs(10), world.clone(), gate.clone());
    let cluster = Cluster::new(world.clone(), gate.clone(), models.clone(), wanted);
    let following = cluster.follow(&registry, None).await.expect("the registry is here");
    TestCluster { cluster, models, registry, world, gate, _following: following }
}

impl TestCluster {
    /// Returns the usable nodes for a prompt of 50 tokens for this model.
    fn view(&self, model: RequestedModel) -> ClusterView {
        let prompt = self.prompt(model);
        self.cluster.view(&Ask::new(&prompt, &[]), &[])
    }

    fn prompt(&self, model: RequestedModel) -> Prompt {
        Prompt {
            id: self.world.request_id(),
            tenant: TenantId::default(),
            cache_salt: types::CacheSalt::default(),
            model,
            tokens: (0..50).map(TokenId).collect(),
            n_generated: 0,
            sampling: Sampling::default(),
            stop: StopRules::default(),
            priority: Priority(0),
            deadline: self.world.deadline_in(Duration::from_secs(20)),
        }
    }

    /// Waits until the node is superseded, and returns the reason.
    async fn superseded(&self, id: &str) -> String {
        self.gets_no_work(id, |state| matches!(state, NodeState::Superseded(_))).await
    }

    /// Waits until the node is refused, and returns the reason.
    async fn refused(&self, id: &str) -> String {
        self.gets_no_work(id, |state| matches!(state, NodeState::Refused(_))).await
    }

    async fn gets_no_work(&self, id: &str, is_so: fn(&NodeState) -> bool) -> String {
        let seen = || self.cluster.everyone().into_iter().find(|(info, _)| info.id.as_str() == id);
        for _ in 0..30_000 {
            match seen() {
                Some((_, state)) if is_so(&state) => return state.reason().expect("a reason").to_owned(),
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
        panic!("{id} is {:?}", seen());
    }

    async fn state(&self, id: &str, expected: &NodeState) {
        let seen = || self.cluster.everyone().into_iter().find(|(info, _)| info.id.as_str() == id);
        let wait = async {
            while !seen().is_some_and(|(_, state)| state == *expected) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
        waited.unwrap_or_else(|_| panic!("{id} is {:?} instead of {expected:?}", seen()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_is_usable_once_it_has_spoken_and_until_it_falls_silent() {
    let test_cluster = test_cluster().await;
    let fake_node = FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]);
    let announcement = test_cluster.registry.announce(fake_node.info.clone()).await.expect("announced");
    test_cluster.state("d", &NodeState::Connecting).await;
    assert!(test_cluster.cluster.ready().is_err());
    let no_stream = || test_cluster.cluster.no_stream(&fake_node.info.id);
    // Nothing listens at its address yet.
    while no_stream().is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let running = fake_node.start(&test_cluster.world, &test_cluster.gate).await;
    test_cluster.state("d", &NodeState::Ready).await;
    assert_eq!(no_stream(), None);
    assert_eq!(test_cluster.cluster.ready(), Ok(()));
    assert_eq!(test_cluster.cluster.models().len(), 1);
    drop(running);
    announcement.withdraw().await;
    while !test_cluster.cluster.everyone().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_of_the_file_that_answers_outlives_a_list_without_it() {
    let test_cluster = test_cluster().await;
    let cluster = &test_cluster.cluster;
    let ids = || cluster.everyone().into_iter().map(|(info, _)| info.id.to_string()).collect::<Vec<_>>();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let fake_node = FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]);
    let _running = fake_node.start(&test_cluster.world, &test_cluster.gate).await;
    for node in [fake_node.info.clone(), info("gone", Role::Decode)] {
        let id = node.id.clone();
        cluster.join(node, MemberSource::OneEvent);
        cluster.members().mark_old(&id);
    }
    test_cluster.state("d", &NodeState::Ready).await;
    cluster.apply(MembershipEvent::Snapshot(Vec::new()));
    assert_eq!((ids(), cluster.ready()), (vec!["d".to_owned()], Ok(())));
    cluster.unreachable(&fake_node.info, "gone".to_owned());
    assert_eq!(ids(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn another_protocol_or_another_model_under_the_same_name_is_refused() {
    let test_cluster = test_cluster().await;
    let first = FakeNode::new("a", Role::Decode, &[FakeResponse::Serve]);
    let _serving = announced(&test_cluster, &[&first]).await;
    test_cluster.state("a", &NodeState::Ready).await;
    let old = NodeInfo { protocol: ProtocolRange { min: 0, max: 0 }, ..info("b", Role::Decode) };
    let _old = test_cluster.registry.announce(old).await.expect("announced");
    let reason = "no common protocol version: this side speaks 3..7, the peer 0..0";
    test_cluster.state("b", &NodeState::Refused(reason.to_owned())).await;
    let _other = test_cluster.registry.announce(other("c", Role::Decode).info).await.expect("announced");
    let state = test_cluster.superseded("c").await;
    assert!(state.contains("is served by 1 nodes with "), "{state}");
    assert!(state.ends_with(": models differ: tokenizer: bytes here, none there"), "{state}");
}

/// The node would hash blocks with another key, so that neither side would find the other's blocks.
#[tokio::test(start_paused = true)]
async fn a_node_with_another_key_of_block_hashes_is_refused() {
    let test_cluster = test_cluster().await;
    let mut fake_node = FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]);
    let key = BlockHashKey::new([1; 32]);
    fake_node.info.model.fingerprint = fake_node.info.model.fingerprint.clone().hashed_with(&key);
    let _running = announced(&test_cluster, &[&fake_node]).await;
    let reason = test_cluster.refused("d").await;
    assert!(reason.contains(&format!("{} there", key.id())), "{reason}");
    assert!(reason.contains("`cluster.secret_file`"), "{reason}");
    assert!(test_cluster.cluster.ready().is_err());
}

/// Returns a fake node with a fingerprint of its own.
fn other(id: &str, role: Role) -> FakeNode {
    let mut fake_node = FakeNode::new(id, role, &[FakeResponse::Serve]);
    fake_node.info.model.fingerprint =
        Fingerprint::new([(TOKENIZER.to_owned(), types::node::TOKENIZER_NONE.to_owned())])
            .hashed_with(&BlockHashKey::default());
    fake_node
}

/// Serves and announces fake nodes until the returned values are dropped.
async fn announced(
    test_cluster: &TestCluster,
    fake_nodes: &[&FakeNode],
) -> Vec<(Task<()>, registry::Announcement)> {
    let mut running = Vec::new();
    for fake_node in fake_nodes {
        let task = fake_node.start(&test_cluster.world, &test_cluster.gate).await;
        running
            .push((task, test_cluster.registry.announce(fake_node.info.clone()).await.expect("announced")));
    }
    running
}

/// A node with other weights that joined first serves until the group with most nodes is usable. Then it is
/// told the reason, and it is removed after it has left.
#[tokio::test(start_paused = true)]
async fn the_group_with_most_nodes_serves_and_the_others_are_told() {
    let test_cluster = test_cluster().await;
    let wrong = other("wrong", Role::Decode);
    let mut wrongs = announced(&test_cluster, &[&wrong]).await;
    test_cluster.state("wrong", &NodeState::Ready).await;
    assert!(test_cluster.models.find(None).expect("learned").template.is_none(), "the wrong one's text half");
    let right = [
        FakeNode::new("p", Role::Prefill, &[FakeResponse::Serve]),
        FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]),
    ];
    let _rights = announced(&test_cluster, &right.iter().collect::<Vec<_>>()).await;
    test_cluster.superseded("wrong").await;
    test_cluster.state("d", &NodeState::Ready).await;
    assert!(test_cluster.models.find(None).expect("learned").template.is_some(), "the right ones' text half");
    let used = |model: &RequestedModel| {
        let view = test_cluster.view(model.clone());
        view.nodes.iter().map(|node| node.info.id.to_string()).collect::<Vec<_>>()
    };
    let any = RequestedModel::named("mock");
    assert_eq!(used(&any), ["d", "p"]);
    let begun = RequestedModel { fingerprint: Some(wrong.info.model.fingerprint.digest()), ..any };
    assert_eq!(used(&begun), ["wrong"], "what began there goes on there");
    assert_eq!(used(&RequestedModel::named("other")), Vec::<String>::new());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(
        wrong.received().iter().any(|word| word.starts_with("no work: `mock` is served by")),
        "{wrong:?}"
    );
    let (_task, announcement) = wrongs.remove(0);
    announcement.withdraw().await;
    let groups = test_cluster.cluster.groups();
    assert_eq!(groups[0].groups.len(), 1, "{groups:?}");
    assert_eq!(test_cluster.cluster.ready(), Ok(()));
}

/// A node of the expected weights that loses a tie is told so, and serves at once when the other node leaves.
#[tokio::test(start_paused = true)]
async fn superseded_nodes_serve_once_the_others_are_gone() {
    let test_cluster = test_cluster().await;
    let (wrong, right) =
        (other("wrong", Role::Decode), FakeNode::new("right", Role::Decode, &[FakeResponse::Serve]));
    let mut wrongs = announced(&test_cluster, &[&wrong]).await;
    test_cluster.state("wrong", &NodeState::Ready).await;
    let _rights = announced(&test_cluster, &[&right]).await;
    test_cluster.superseded("right").await;
    let (_task, announcement) = wrongs.remove(0);
    announcement.withdraw().await;
    let gone = tokio::time::Instant::now();
    test_cluster.state("right", &NodeState::Ready).await;
    assert!(gone.elapsed() < Duration::from_secs(1), "{:?}", gone.elapsed());
    assert_eq!(test_cluster.cluster.ready(), Ok(()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(right.received().last().map(String::as_str), Some("in use"));
}

/// Nodes that existed before the router announce themselves one after the other; the node with other weights
/// is first.
#[tokio::test(start_paused = true)]
async fn a_router_that_has_just_started_waits_for_nodes_that_were_there_before() {
    let test_cluster = test_cluster().await;
    let before = |mut fake_node: FakeNode| {
        fake_node.info.epoch = Epoch(1);
        fake_node
    };
    let wrong = before(other("wrong", Role::Decode));
    let _wrong = announced(&test_cluster, &[&wrong]).await;
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(test_cluster.cluster.ready().is_err(), "no group is chosen yet");
    }
    let right = [
        before(FakeNode::new("p", Role::Prefill, &[FakeResponse::Serve])),
        before(FakeNode::new("d", Role::Decode, &[FakeResponse::Serve])),
    ];
    let _rights = announced(&test_cluster, &right.iter().collect::<Vec<_>>()).await;
    test_cluster.state("d", &NodeState::Ready).await;
    test_cluster.superseded("wrong").await;
}

#[tokio::test(start_paused = true)]
async fn the_operators_word_comes_before_numbers() {
    let (right, wrong) = (
        FakeNode::new("right", Role::Decode, &[FakeResponse::Serve]),
        ["x", "y"].map(|id| other(id, Role::Decode)),
    );
    let wanted =
        WantedFingerprint { model: "mock".to_owned(), fingerprint: right.info.model.fingerprint.digest() };
    let test_cluster = test_cluster_with(Some(wanted)).await;
    let _wrong = announced(&test_cluster, &wrong.iter().collect::<Vec<_>>()).await;
    test_cluster.refused("x").await;
    assert!(test_cluster.cluster.ready().is_err());
    let _right = announced(&test_cluster, &[&right]).await;
    test_cluster.state("right", &NodeState::Ready).await;
    test_cluster.refused("y").await;
    assert_eq!(test_cluster.cluster.ready(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn prompts_for_one_model_see_its_nodes_only() {
    let test_cluster = test_cluster().await;
    let of = |id: &str, model: &str| {
        let mut fake_node = FakeNode::new(id, Role::Decode, &[FakeResponse::Serve]);
        fake_node.info.model.name = model.to_owned();
        fake_node
    };
    let fake_nodes = [of("a1", "a"), of("a2", "a"), of("b1", "b")];
    let _running = announced(&test_cluster, &fake_nodes.iter().collect::<Vec<_>>()).await;
    for id in ["a1", "a2", "b1"] {
        test_cluster.state(id, &NodeState::Ready).await;
    }
    let used = |model: &str| {
        let view = test_cluster.view(RequestedModel::named(model));
        view.nodes.iter().map(|node| node.info.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(
        (used("a"), used("b"), used("c")),
        (vec!["a1".into(), "a2".into()], vec!["b1".into()], vec![])
    );
    let names: Vec<String> = test_cluster.cluster.models().into_iter().map(|model| model.name).collect();
    assert_eq!(names, ["a", "b"]);
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_tokens_mean_something_else_to_the_router_is_refused() {
    let own = RouterModels::new([crate::text::ServedModel::mock("mock", 1024)]);
    let test_cluster = test_cluster_of(own, None).await;
    let with_tokenizer = |id, model: &str, tokenizer: &str| {
        let mut node = info(id, Role::Decode);
        node.model.name = model.to_owned();
        node.model.fingerprint = Fingerprint::new([(TOKENIZER.to_owned(), tokenizer.to_owned())])
            .hashed_with(&BlockHashKey::default());
        node
    };
    let _other =
        test_cluster.registry.announce(with_tokenizer("a", "mock", "blake3:01")).await.expect("announced");
    let reason =
        "the node's model differs from the router's: models differ: tokenizer: bytes here, blake3:01 there";
    test_cluster.state("a", &NodeState::Refused(reason.to_owned())).await;
    let _unknown =
        test_cluster.registry.announce(with_tokenizer("b", "real", "blake3:01")).await.expect("announced");
    let reason = "the router has no tokenizer for the model `real`: set `model.path` and `model.name` there";
    test_cluster.state("b", &NodeState::Refused(reason.to_owned())).await;
    let _same =
        test_cluster.registry.announce(with_tokenizer("c", "mock", "bytes")).await.expect("announced");
    test_cluster.state("c", &NodeState::Connecting).await;
}

#[tokio::test(start_paused = true)]
async fn a_sequence_may_be_as_long_as_the_least_of_the_nodes_allows() {
    let test_cluster = test_cluster().await;
    let longest = || test_cluster.models.find(None).expect("learned").context_tokens;
    let full = info("a", Role::Decode).model.context_tokens;
    let _large = test_cluster.registry.announce(info("a", Role::Decode)).await.expect("announced");
    test_cluster.state("a", &NodeState::Connecting).await;
    assert_eq!(longest(), full);
    let mut node = info("b", Role::Prefill);
    node.model.context_tokens = full / 2;
    let small = test_cluster.registry.announce(node).await.expect("announced");
    test_cluster.state("b", &NodeState::Connecting).await;
    assert_eq!(longest(), full / 2);
    small.withdraw().await;
    while test_cluster.cluster.everyone().len() > 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(longest(), full);
}

#[tokio::test(start_paused = true)]
async fn a_new_life_replaces_the_old_one() {
    let test_cluster = test_cluster().await;
    let fake_node = FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]);
    let _serving = announced(&test_cluster, &[&fake_node]).await;
    test_cluster.state("d", &NodeState::Ready).await;
    let again = NodeInfo { epoch: Epoch(u64::MAX), ..fake_node.info.clone() };
    let _second = test_cluster.registry.announce(again).await.expect("announced");
    while test_cluster.cluster.everyone().first().is_none_or(|(info, _)| info.epoch != Epoch(u64::MAX)) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    test_cluster.state("d", &NodeState::Ready).await;
}

/// A node changes its role, and back, while this router receives nothing from the registry: it learns from the next
/// status stream that the node accepts work again.
#[tokio::test(start_paused = true)]
async fn a_drain_ends_with_a_new_stream_that_begins_with_a_load() {
    let test_cluster = test_cluster().await;
    let fake_node = FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]);
    let _serving = announced(&test_cluster, &[&fake_node]).await;
    test_cluster.state("d", &NodeState::Ready).await;
    let (cluster, info) = (&test_cluster.cluster, &fake_node.info);
    let load = || cluster.update(info, NodeReport::Load(NodeLoad::default()));
    let drains = || cluster.update(info, NodeReport::Draining);
    let stream_ends = || cluster.members().stream_ended(info);
    let state = || cluster.everyone()[0].1.clone();

    drains();
    load();
    assert_eq!(state(), NodeState::Draining, "the node drains, and reports its load meanwhile");
    stream_ends();
    assert_eq!(state(), NodeState::Draining, "the node may be gone");
    drains();
    load();
    assert_eq!(state(), NodeState::Draining, "the new stream begins with the drain, which goes on");
    stream_ends();
    stream_ends();
    load();
    assert_eq!(state(), NodeState::Ready, "the new stream begins with a load");
    assert_eq!(cluster.ready(), Ok(()));
}

/// Block events are lost: the node stays usable, and the router requests a snapshot of its cached blocks.
#[tokio::test(start_paused = true)]
async fn lost_block_events_bring_a_snapshot_and_cost_no_node() {
    use BlockChange::{Snapshot, Stored};
    let hash = |of: u128| BlockHash(of);
    let test_cluster = test_cluster().await;
    let told = vec![
        vec![(4, Snapshot(vec![hash(1)])), (5, Stored(vec![hash(2)])), (7, Stored(vec![hash(4)]))],
        vec![(7, Snapshot(vec![hash(1), hash(2), hash(3), hash(4)])), (8, Stored(vec![hash(5)]))],
    ];
    let complete = |events: Vec<_>| {
        events.into_iter().map(|(number, change)| (number, BlockEvent::complete(change))).collect()
    };
    let told = told.into_iter().map(complete).collect();
    let fake_node = FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]).telling(told);
    let _serving = announced(&test_cluster, &[&fake_node]).await;
    test_cluster.state("d", &NodeState::Ready).await;
    let cache = test_cluster.cluster.cache(&fake_node.info.id).expect("a member");
    let wait = async {
        while !cache.has_exactly(&(1..6).map(BlockHash).collect::<Vec<_>>()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(test_cluster.cluster.ready(), Ok(()), "the node serves on");
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wait).await.expect("the router asks again");
}

/// A node reports its load every 20 ms. A prompt that waits for room on a decode node, or that is on its way, is
/// in no report of the prefill node.
#[tokio::test(start_paused = true)]
async fn assigned_work_survives_a_load_report_and_ends_with_the_request() {
    let test_cluster = test_cluster().await;
    let fake_nodes = [
        FakeNode::new("p", Role::Prefill, &[FakeResponse::Serve]),
        FakeNode::new("d", Role::Decode, &[FakeResponse::Serve]),
    ];
    let _running = announced(&test_cluster, &fake_nodes.iter().collect::<Vec<_>>()).await;
    for id in ["p", "d"] {
        test_cluster.state(id, &NodeState::Ready).await;
    }
    let (cluster, prompt) = (&test_cluster.cluster, test_cluster.prompt(RequestedModel::named("mock")));
    let hashes = cluster.hashes(&prompt);
    assert_eq!(hashes.len(), 3, "three full blocks of 16 tokens");
    let ask = Ask::new(&prompt, &hashes);
    let assigned = || {
        let of = |node: &NodeView| (node.assigned, node.assigned_work.n_tokens, node.cached_tokens);
        cluster.view(&ask, &[]).nodes.iter().map(of).collect::<Vec<_>>()
    };
    let report = || {
        let now = test_cluster.world.now();
        for id in ["p", "d"] {
            cluster.node(&NodeId::new(id)).expect("a member").report(NodeLoad::default(), now);
        }
    };
    let policy = by_name("prefix-aware").expect("in the table");
    let decision = policy.route(&ask, &cluster.view(&ask, &[]), 0).expect("two nodes");
    assert_eq!(decision.terms.cached_tokens, 0);
    let assignment = cluster.assign(&ask, &decision);
    assert_eq!(assigned(), [(1, 0, 0), (1, 50, 48)], "blocks are expected where they are computed");
    report();
    assert_eq!(assigned(), [(1, 0, 0), (1, 50, 48)], "no node was called");
    assignment.decode_called(test_cluster.world.now());
    tokio::time::sleep(Duration::from_millis(100)).await;
    report();
    assert_eq!(assigned(), [(0, 0, 0), (1, 50, 48)], "the decode node reports the prompt itself");
    drop(assignment);
    assert_eq!(assigned(), [(0, 0, 0), (0, 0, 48)]);
    let again = policy.route(&ask, &cluster.view(&ask, &[]), 0).expect("two nodes");
    assert_eq!(again.terms.cached_tokens, 48, "the same prompt needs two tokens more");
    let assignment = cluster.assign(&ask, &again);
    assert_eq!(assigned(), [(1, 0, 0), (1, 2, 48)], "what is cached is no work for the prefill node");
    drop(assignment);
}

/// Whatever the router knows of a node's cache is forgotten when the node leaves, and shown while it is there.
#[tokio::test(start_paused = true)]
async fn the_index_knows_members_only_and_shows_what_it_knows() {
    let test_cluster = test_cluster().await;
    let told = |change| vec![(1, BlockEvent::complete(change))];
    let hashes = vec![BlockHash(1), BlockHash(2)];
    let exact = FakeNode::new("a", Role::Decode, &[FakeResponse::Serve])
        .telling(vec![told(BlockChange::Snapshot(hashes.clone()))]);
    let blind = FakeNode::new("b", Role::Decode, &[FakeResponse::Serve]);
    let mut running = announced(&test_cluster, &[&exact, &blind]).await;
    for id in ["a", "b"] {
        test_cluster.state(id, &NodeState::Ready).await;
    }
    let cache = test_cluster.cluster.cache(&NodeId::new("a")).expect("a member");
    while !cache.has_exactly(&hashes) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let known = |n_exact, n_blind| {
        use CacheKnowledge::{Approximate, Blind, Exact};
        [(Exact, n_exact), (Approximate, 0), (Blind, n_blind)]
    };
    assert_eq!(test_cluster.cluster.n_known(), known(1, 1));
    drop(cache);
    let (task, announcement) = running.remove(0);
    announcement.withdraw().await;
    drop(task);
    while test_cluster.cluster.everyone().len() > 1 || test_cluster.cluster.shared.index.n_blocks() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(test_cluster.cluster.n_known(), known(0, 1));
}
