//! A prefill and a decode node that speak Baton's protocol and move no KV.

use std::pin::Pin;
use std::time::Duration;

use chassis::rpc::Callers;
use chassis::server::ServerLimits;
use chassis::{Gate, Shutdown, World};
use futures::stream::{self, Stream, StreamExt as _};
use proto::v1;
use proto::v1::decode_event::Event;
use proto::v1::decode_server::{Decode, DecodeServer};
use proto::v1::node_status_server::{NodeStatus, NodeStatusServer};
use proto::v1::prefill_answer::Answer;
use proto::v1::prefill_server::{Prefill, PrefillServer};
use registry::RegistryParts;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use types::layout::KvDtype;
use types::node::TOKENIZER_BYTES;
use types::{
    BlockCounts, BlockHashKey, ComputedPrompt, Epoch, Fingerprint, Grant, KvLayout, Landing, ModelInfo,
    NodeId, NodeInfo, NodeLoad, Role, Scheme, Step, TokenId, TransferId, Usage, WireAddress,
};

/// The token of a step: the letter `a` of the byte tokenizer.
const TOKEN: u32 = 97;

/// Returns the token of a step that is sent now. A request with `ignore_eos` gets the time in microseconds.
fn token(prompt: &v1::Prompt) -> u32 {
    let is_timed = prompt.stop.as_ref().is_some_and(|stop| stop.ignore_eos);
    if is_timed { crate::now_us() } else { TOKEN }
}

#[derive(Clone, Debug)]
struct InstantNode {
    info: NodeInfo,
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(crate) async fn serve(router: &str, prefill: &str, decode: &[&str]) -> Result<(), String> {
    let (world, gate) = (World::real(), Gate::new("puppets"));
    let parts = RegistryParts { world: world.clone(), gate };
    let registry =
        registry::open(&format!("embedded://{router}"), parts).map_err(|error| error.to_string())?;
    let decode = decode.iter().enumerate();
    let decode = decode.map(|(nth, address)| node(&format!("decode-{nth}"), Role::Decode, address));
    let nodes = std::iter::once(node("prefill", Role::Prefill, prefill)).chain(decode);
    let serving = nodes.map(|node| {
        let (world, registry) = (world.clone(), registry.clone());
        async move {
            let listener = world.net().listen(&node.info.address).await.map_err(|error| error.to_string())?;
            let _announced = registry.announce(node.info.clone()).await.map_err(|error| error.to_string())?;
            let routes = Routes::new(DecodeServer::new(node.clone()))
                .add_service(PrefillServer::new(node.clone()))
                .add_service(NodeStatusServer::new(node));
            let (shutdown, callers) = (Shutdown::new(), Callers::known_to(&world));
            let served =
                chassis::rpc::serve(listener, routes, shutdown, ServerLimits::default(), callers).await;
            served.map_err(|error| format!("{error:?}"))
        }
    });
    futures::future::try_join_all(serving).await.map(|_| ())
}

fn node(id: &str, role: Role, address: &str) -> InstantNode {
    let wire =
        WireAddress { scheme: Scheme::new("tcp"), endpoint: "127.0.0.1:9".to_owned(), within_host: false };
    let fingerprint = Fingerprint::new([("tokenizer".to_owned(), TOKENIZER_BYTES.to_owned())]);
    let info = NodeInfo {
        id: NodeId::new(id),
        epoch: Epoch(World::real().unix_time().as_secs()),
        role,
        pid: std::process::id(),
        host: "puppets".to_owned(),
        address: address.to_owned(),
        admin: "127.0.0.1:9".to_owned(),
        wires: vec![wire],
        without: Vec::new(),
        keeps_role: false,
        model: ModelInfo {
            name: "mock".to_owned(),
            context_tokens: 16_384,
            vocab: 261,
            eos_tokens: Vec::new(),
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: fingerprint.hashed_with(&BlockHashKey::default()),
        },
        protocol: types::node::PROTOCOL,
    };
    InstantNode { info }
}

fn step(token: u32, index: u32, n_tokens: u32) -> Step {
    let finish = (index + 1 == n_tokens).then_some(types::FinishReason::Length);
    Step { token: TokenId(token), index, logprobs: None, finish }
}

fn n_tokens(prompt: &v1::Prompt) -> u32 {
    prompt.stop.as_ref().map_or(1, |stop| stop.max_tokens)
}

impl InstantNode {
    fn landing(&self, n_tokens: usize) -> Landing {
        let layout = self.info.model.layout.clone();
        let blocks = layout.blocks_for(n_tokens) as u32;
        Landing {
            transfer: TransferId(1),
            node: self.info.id.clone(),
            epoch: self.info.epoch,
            grant: Grant::from_bytes([0; 16]),
            bound: false,
            wire: self.info.wires[0].clone(),
            n_tokens: n_tokens as u32,
            held_tokens: 0,
            tables: vec![(0..blocks).map(types::BlockIdx).collect()],
            layout,
            fingerprint: self.info.model.fingerprint.clone(),
        }
    }
}

#[tonic::async_trait]
impl Decode for InstantNode {
    type RunStream = Streamed<v1::DecodeEvent>;

    async fn run(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::RunStream>, Status> {
        let prompt = request.into_inner().prompt.ok_or_else(|| Status::invalid_argument("no prompt"))?;
        let event = |event| Ok(v1::DecodeEvent { event: Some(event), timing: None, prompt_logprobs: None });
        let opening = event(Event::Landing((&self.landing(prompt.tokens.len())).into()));
        let n_tokens = n_tokens(&prompt);
        let gap = Duration::from_millis(prompt.sampling.as_ref().map_or(0, |sampling| sampling.seed));
        let prompt = v1::Prompt { tokens: Vec::new(), ..prompt };
        let steps = stream::unfold(1, move |index| {
            let prompt = prompt.clone();
            async move {
                if index >= n_tokens {
                    return None;
                }
                if !gap.is_zero() {
                    tokio::time::sleep(gap).await;
                }
                let event = Some(Event::Step((&step(token(&prompt), index, n_tokens)).into()));
                Some((Ok(v1::DecodeEvent { event, timing: None, prompt_logprobs: None }), index + 1))
            }
        });
        Ok(Response::new(stream::iter([opening]).chain(steps).boxed()))
    }
}

#[tonic::async_trait]
impl Prefill for InstantNode {
    type RunStream = Streamed<v1::PrefillAnswer>;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        let prompt = request.into_inner().prompt.ok_or_else(|| Status::invalid_argument("no prompt"))?;
        let prefilled = ComputedPrompt {
            prompt_logprobs: Vec::new(),
            first: step(token(&prompt), 0, n_tokens(&prompt)),
            usage: Usage { prompt_tokens: prompt.tokens.len() as u32, cached_tokens: 0 },
            room: Duration::ZERO,
            queued: Duration::ZERO,
            computed: Duration::ZERO,
        };
        let answer = v1::PrefillAnswer { answer: Some(Answer::Prefilled((&prefilled).into())) };
        Ok(Response::new(stream::iter([Ok(answer)]).boxed()))
    }

    async fn deliver(&self, _: Request<v1::DeliverRequest>) -> Result<Response<v1::DeliverAnswer>, Status> {
        Err(Status::unimplemented("a puppet holds no KV"))
    }
}

#[tonic::async_trait]
impl NodeStatus for InstantNode {
    type WatchStream = Streamed<v1::StatusEvent>;

    async fn watch(&self, _: Request<v1::StatusRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let blocks = BlockCounts { total: 1_000_000, free: 1_000_000, ..BlockCounts::default() };
        let load = v1::NodeLoad::from(NodeLoad { blocks, ..NodeLoad::default() });
        let loads = stream::repeat(load).then(|load| async move {
            tokio::time::sleep(Duration::from_millis(250)).await;
            Ok(v1::StatusEvent { event: Some(v1::status_event::Event::Load(load)) })
        });
        Ok(Response::new(loads.boxed()))
    }

    async fn set_standing(
        &self,
        _: Request<v1::StandingRequest>,
    ) -> Result<Response<v1::StandingAnswer>, Status> {
        Ok(Response::new(v1::StandingAnswer {}))
    }

    async fn change_role(
        &self,
        _: Request<v1::ChangeRoleRequest>,
    ) -> Result<Response<v1::ChangeRoleAnswer>, Status> {
        Err(Status::failed_precondition("it keeps its role"))
    }

    async fn ledger(&self, _: Request<v1::LedgerRequest>) -> Result<Response<v1::LedgerAnswer>, Status> {
        Err(Status::unimplemented("a puppet holds nothing"))
    }
}
