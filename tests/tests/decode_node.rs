//! A decode node in this process, and a sender with a wrong handoff.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_tests::{eventually, in_time};
use chassis::metrics::Metrics;
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use decode_node::DecodeService;
use engine::{Mock, MockSettings, Pace};
use futures::StreamExt as _;
use kv_cache::{Holder, Holding, LayerFence};
use node::{Drive, Lives, NodeConfig, NodeParts, RawNodeConfig};
use proto::v1;
use proto::v1::decode_event::Event;
use proto::v1::decode_server::Decode as _;
use registry::MemoryRegistry;
use tonic::Request;
use tonic::service::Routes;
use types::{
    Destination, GroupIdx, Handoff, KvSpan, Landing, NodeId, Prompt, RequestedModel, Role, Sampling, Step,
    StopRules, TenantId, TokenId,
};

const PROMPT_TOKENS: u32 = 40;

/// A node in this process, which runs until the value is dropped.
struct Node {
    parts: NodeParts,
    config: NodeConfig,
    _living: Task<()>,
}

async fn node(name: &'static str, role: Role, world: &World, registry: &MemoryRegistry) -> Node {
    let mut raw = RawNodeConfig::default();
    raw.transfer.connectors = vec!["tcp".to_owned()];
    let config = NodeConfig::resolve(raw).expect("right settings");
    let grpc = world.net().listen(&config.listen).await.expect("a free port");
    let admin = world.net().listen(&config.admin).await.expect("a free port");
    let mock = Mock::new("mock", MockSettings::default(), 64, Pace::Modelled).expect("memory");
    let seen: Arc<Mutex<Option<NodeParts>>> = Arc::default();
    let (at_start, of_life, registry, world) =
        (Arc::clone(&seen), config.clone(), registry.clone(), world.fork(name));
    let living = spawn_guarded(&Gate::new("test"), "node", async move {
        let services = |_, parts: &NodeParts| {
            *at_start.lock().unwrap_or_else(PoisonError::into_inner) = Some(parts.clone());
            Ok(Routes::default())
        };
        let lives = Lives {
            config: &of_life,
            id: NodeId::new(name),
            role,
            registry: &registry,
            services: &services,
            world,
            metrics: Metrics::new("node"),
            drive: Drive::Task,
            shutdown: Shutdown::new(),
            grpc,
            admin,
            group: None,
        };
        drop(node::lives::run(lives, Box::new(mock)).await);
    });
    let parts =
        eventually("the node to live", async || seen.lock().unwrap_or_else(PoisonError::into_inner).clone());
    Node { parts: parts.await, config, _living: living }
}

fn prompt(world: &World) -> Prompt {
    Prompt {
        id: world.request_id(),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: RequestedModel::named("mock"),
        tokens: (0..PROMPT_TOKENS).map(TokenId).collect(),
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules { max_tokens: 8, ..StopRules::default() },
        priority: Default::default(),
        deadline: world.deadline_in(Duration::from_secs(20)),
    }
}

/// Sends all KV of the landing, and a first token with this index.
async fn send(sender: &NodeParts, landing: Landing, index: u32) {
    let connector = sender.connectors.by_scheme(&landing.wire.scheme).expect("the wire in common");
    let layout = sender.model.layout.clone();
    let n_blocks = layout.blocks_for(PROMPT_TOKENS as usize);
    let holder = Holder { what: Holding::Sequence, request: types::RequestId::new("sender") };
    let lease = Arc::new(sender.pool.reserve(n_blocks, holder).expect("an empty pool"));
    let transfer = landing.transfer;
    let mut to = connector.open(&Destination::Landing(landing)).await.expect("the landing is open");
    let layers = 0..layout.group(GroupIdx(0)).layers.len() as u16;
    let span = KvSpan { group: GroupIdx(0), blocks: 0..n_blocks as u32, layers };
    to.send(span, lease, LayerFence::open()).await.expect("it is sent");
    let first = Step { token: TokenId(65), index, logprobs: None, finish: None };
    to.finish(Handoff { transfer, n_tokens: PROMPT_TOKENS, first }).await.expect("it is delivered");
}

/// The token after a prompt of 40 tokens is step 0. A first token with another index would continue the wrong
/// text, so it is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_token_for_another_position_is_refused() {
    let world = World::real();
    let registry = MemoryRegistry::new(Duration::from_secs(10), world.clone(), Gate::new("registry"));
    let sender = node("prefill", Role::Prefill, &world, &registry).await;
    let receiver = node("decode", Role::Decode, &world, &registry).await;
    let service = DecodeService::new(receiver.parts.clone(), receiver.config.decode.clone());
    let peer = v1::Peer {
        node: "prefill".to_owned(),
        host: sender.parts.host.to_string(),
        wires: sender.parts.connectors.addresses().iter().map(Into::into).collect(),
    };
    let request = v1::DecodeRequest {
        prompt: Some(proto::prompt_to_wire(&prompt(&world), world.now().into_std())),
        prefill: Some(v1::decode_request::Prefill::Offered(peer)),
        explain: false,
    };
    let mut events = service.run(Request::new(request)).await.expect("a stream").into_inner();
    let mut next =
        async || in_time("an event", events.next()).await.and_then(|event| event.expect("no error").event);
    let Some(Event::Landing(landing)) = next().await else { panic!("there is room") };
    let landing = Landing::try_from(landing).expect("a right landing").opened_with(prompt(&world).digest());
    send(&sender.parts, landing, 3).await;
    assert!(matches!(next().await, Some(Event::Arrived(_))), "all KV has come");
    let Some(Event::Refused(refusal)) = next().await else {
        panic!("the first token is for another position")
    };
    assert_eq!((&*refusal.code, &*refusal.reason), ("failed", "step 3 arrived for a prompt with 0 steps"));
    let given_back = async || (receiver.parts.pool.counts().leased == 0).then_some(());
    eventually("the blocks to come back", given_back).await;
}
