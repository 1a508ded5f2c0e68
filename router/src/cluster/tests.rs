//! What the registry and the nodes say, and what the router makes of it.

use std::sync::Arc;
use std::time::Duration;

use chassis::net::MemoryNet;
use chassis::{Gate, World};
use registry::{MemoryRegistry, Registry as _};
use types::node::TOKENIZER;
use types::{BlockEvent, BlockHash, Epoch, Fingerprint, NodeInfo, ProtocolRange, Role};

use super::*;
use crate::puppet::{Act, Puppet, info};

struct Town {
    cluster: Cluster,
    models: RouterModels,
    registry: MemoryRegistry,
    world: World,
    gate: Gate,
    _following: Task<()>,
}

async fn town() -> Town {
    let world = World::seeded(1).with_net(Arc::new(MemoryNet::new()));
    let gate = Gate::new("test");
    let registry = MemoryRegistry::new(Duration::from_secs(10), world.clone(), gate.clone());
    let models = RouterModels::default();
    let cluster = Cluster::new(world.clone(), gate.clone(), models.clone());
    let following = cluster.follow(&registry).await.expect("the registry is here");
    Town { cluster, models, registry, world, gate, _following: following }
}

impl Town {
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
    let town = town().await;
    let puppet = Puppet::new("d", Role::Decode, &[Act::Serve]);
    let announcement = town.registry.announce(puppet.info.clone()).await.expect("announced");
    town.state("d", &NodeState::Connecting).await;
    assert!(town.cluster.ready().is_err());
    let running = puppet.start(&town.world, &town.gate).await;
    town.state("d", &NodeState::Ready).await;
    assert_eq!(town.cluster.ready(), Ok(()));
    assert_eq!(town.cluster.models().len(), 1);
    drop(running);
    announcement.withdraw().await;
    while !town.cluster.everyone().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn another_protocol_or_another_model_under_the_same_name_is_refused() {
    let town = town().await;
    let _first = town.registry.announce(info("a", Role::Decode)).await.expect("announced");
    town.state("a", &NodeState::Connecting).await;
    let old = NodeInfo { protocol: ProtocolRange { min: 0, max: 0 }, ..info("b", Role::Decode) };
    let _old = town.registry.announce(old).await.expect("announced");
    let reason = "no common protocol version: this side speaks 1..2, the peer 0..0";
    town.state("b", &NodeState::Refused(reason.to_owned())).await;
    let mut other = info("c", Role::Prefill);
    other.model.fingerprint = Fingerprint::new([("tokenizer".to_owned(), "other".to_owned())]);
    let _other = town.registry.announce(other).await.expect("announced");
    let reason = "against a: models differ: tokenizer: bytes here, other there";
    town.state("c", &NodeState::Refused(reason.to_owned())).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_tokens_mean_something_else_to_the_router_is_refused() {
    let town = town().await;
    town.models.learn(&info("r", Role::Decode).model).expect("the router's own model");
    let with_tokenizer = |id, model: &str, tokenizer: &str| {
        let mut node = info(id, Role::Decode);
        node.model.name = model.to_owned();
        node.model.fingerprint = Fingerprint::new([(TOKENIZER.to_owned(), tokenizer.to_owned())]);
        node
    };
    let _other = town.registry.announce(with_tokenizer("a", "mock", "blake3:01")).await.expect("announced");
    let reason = "against the router: models differ: tokenizer: bytes here, blake3:01 there";
    town.state("a", &NodeState::Refused(reason.to_owned())).await;
    let _unknown = town.registry.announce(with_tokenizer("b", "real", "blake3:01")).await.expect("announced");
    let reason = "the router has no tokenizer for the model `real`: set `model.path` and `model.name` there";
    town.state("b", &NodeState::Refused(reason.to_owned())).await;
    let _same = town.registry.announce(with_tokenizer("c", "mock", "bytes")).await.expect("announced");
    town.state("c", &NodeState::Connecting).await;
}

#[tokio::test(start_paused = true)]
async fn a_sequence_may_be_as_long_as_the_least_of_the_nodes_allows() {
    let town = town().await;
    let longest = || town.models.find(None).expect("learned").context_tokens;
    let full = info("a", Role::Decode).model.context_tokens;
    let _large = town.registry.announce(info("a", Role::Decode)).await.expect("announced");
    town.state("a", &NodeState::Connecting).await;
    assert_eq!(longest(), full);
    let mut node = info("b", Role::Prefill);
    node.model.context_tokens = full / 2;
    let small = town.registry.announce(node).await.expect("announced");
    town.state("b", &NodeState::Connecting).await;
    assert_eq!(longest(), full / 2);
    small.withdraw().await;
    while town.cluster.everyone().len() > 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(longest(), full);
}

#[tokio::test(start_paused = true)]
async fn a_new_life_replaces_the_old_one() {
    let town = town().await;
    let puppet = Puppet::new("d", Role::Decode, &[Act::Serve]);
    let _running = puppet.start(&town.world, &town.gate).await;
    let _first = town.registry.announce(puppet.info.clone()).await.expect("announced");
    town.state("d", &NodeState::Ready).await;
    let again = NodeInfo { epoch: Epoch(2), ..puppet.info.clone() };
    let _second = town.registry.announce(again).await.expect("announced");
    while town.cluster.everyone().first().is_none_or(|(info, _)| info.epoch != Epoch(2)) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    town.state("d", &NodeState::Ready).await;
}

/// Events that were lost leave the node usable: what it has cached is asked for again.
#[tokio::test(start_paused = true)]
async fn lost_block_events_bring_a_snapshot_and_cost_no_node() {
    use BlockEvent::{Snapshot, Stored};
    let hash = |of: u128| BlockHash(of);
    let town = town().await;
    let told = vec![
        vec![(4, Snapshot(vec![hash(1)])), (5, Stored(vec![hash(2)])), (7, Stored(vec![hash(4)]))],
        vec![(7, Snapshot(vec![hash(1), hash(2), hash(3), hash(4)])), (8, Stored(vec![hash(5)]))],
    ];
    let puppet = Puppet::new("d", Role::Decode, &[Act::Serve]).telling(told);
    let _announcement = town.registry.announce(puppet.info.clone()).await.expect("announced");
    let _running = puppet.start(&town.world, &town.gate).await;
    town.state("d", &NodeState::Ready).await;
    let wait = async {
        while town.cluster.cached(&puppet.info.id).hashes().is_none_or(|known| known.len() < 5) {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(town.cluster.ready(), Ok(()), "the node serves on");
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wait).await.expect("the router asks again");
}
