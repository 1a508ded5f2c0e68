//! Scripted nodes that speak the real protocol, for the tests of dispatch and continuation.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chassis::rpc::Callers;
use chassis::server::ServerLimits;
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use futures::stream::{self, Stream, StreamExt as _};
use proto::v1;
use proto::v1::decode_event::Event;
use proto::v1::decode_server::{Decode, DecodeServer};
use proto::v1::node_status_server::{NodeStatus, NodeStatusServer};
use proto::v1::pool_server::{Pool, PoolServer};
use proto::v1::prefill_answer::Answer;
use proto::v1::prefill_server::{Prefill, PrefillServer};
use proto::v1::put_event::Event as PutEvent;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use types::layout::KvDtype;
use types::{
    BlockCounts, BlockEvent, BlockHashKey, ComputedPrompt, Epoch, Fingerprint, Grant, KvLayout, Landing,
    ModelInfo, NodeId, NodeInfo, NodeLoad, Prompt, Refusal, RefusalKind, Role, Scheme, Step, TokenId,
    TransferId, Usage, WireAddress,
};

/// The response of a fake node to a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FakeResponse {
    Serve,
    /// Computes the prompt alone, as a decode node does.
    Local,
    Refuse(RefusalKind),
    /// Breaks the connection before the first message.
    Break,
    /// Breaks the stream after this number of steps.
    BreakAfter(u32),
    /// Sends nothing at all.
    Hang,
    /// Skips one step.
    Skip,
    /// Gives the first token and then reports that the KV did not arrive.
    Lose,
    /// Gives the first token, and then breaks the connection.
    Vanish,
    /// Grants room and then waits for KV forever.
    Starve,
}

/// The block events of one status stream, with their numbers.
pub(crate) type BlockEvents = Vec<(u64, BlockEvent)>;

/// One fake node. Each call uses the next response of its script; the last one repeats.
#[derive(Clone, Debug)]
pub(crate) struct FakeNode {
    pub(crate) info: NodeInfo,
    script: Arc<Mutex<Vec<FakeResponse>>>,
    /// The calls that the node received, in order.
    received: Arc<Mutex<Vec<String>>>,
    /// The block events of each status stream; those of the last stream repeat.
    events: Arc<Mutex<Vec<BlockEvents>>>,
}

impl FakeNode {
    pub(crate) fn new(id: &str, role: Role, script: &[FakeResponse]) -> Self {
        let script = Arc::new(Mutex::new(script.to_vec()));
        Self { info: info(id, role), script, received: Arc::default(), events: Arc::default() }
    }

    pub(crate) fn telling(self, streams: Vec<BlockEvents>) -> Self {
        Self { events: Arc::new(Mutex::new(streams)), ..self }
    }

    /// Serves the node's gRPC services at its address.
    pub(crate) async fn start(&self, world: &World, gate: &Gate) -> Task<()> {
        let listener = world.net().listen(&self.info.address).await.expect("the address is free");
        let routes = Routes::new(DecodeServer::new(self.clone()))
            .add_service(PrefillServer::new(self.clone()))
            .add_service(PoolServer::new(self.clone()))
            .add_service(NodeStatusServer::new(self.clone()));
        let serve = chassis::rpc::serve(
            listener,
            routes,
            Shutdown::new(),
            ServerLimits::default(),
            Callers::known_to(world),
        );
        spawn_guarded(gate, "fake node", async move { drop(serve.await) })
    }

    pub(crate) fn received(&self) -> Vec<String> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the calls that the node received, without the router's reports about it.
    pub(crate) fn prompts(&self) -> Vec<String> {
        let is_standing = |word: &String| word.starts_with("no work: ") || word == "in use";
        self.received().into_iter().filter(|word| !is_standing(word)).collect()
    }

    fn hear(&self, word: impl Into<String>) {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).push(word.into());
    }

    fn act(&self) -> FakeResponse {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        if script.len() > 1 {
            script.remove(0)
        } else {
            script.first().copied().unwrap_or(FakeResponse::Serve)
        }
    }
}

/// Returns the token that follows `tokens`. It depends on all of them, so that any change is visible.
pub(crate) fn next_token(tokens: &[TokenId]) -> TokenId {
    let sum = tokens.iter().fold(7u32, |sum, token| sum.wrapping_mul(31).wrapping_add(token.0 + 1));
    TokenId(sum % 256)
}

/// Returns all tokens that follow a prompt.
pub(crate) fn answer_to(prompt: &Prompt) -> Vec<TokenId> {
    let mut tokens = prompt.tokens.to_vec();
    for _ in 0..prompt.tokens_left() {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.tokens.len())
}

fn steps(prompt: &Prompt) -> Vec<Step> {
    let answer = answer_to(prompt);
    let last = answer.len() - 1;
    let step = |(idx, token): (usize, &TokenId)| Step {
        token: *token,
        index: (prompt.n_generated + idx) as u32,
        logprobs: None,
        finish: (idx == last).then_some(types::FinishReason::Length),
    };
    answer.iter().enumerate().map(step).collect()
}

pub(crate) fn info(id: &str, role: Role) -> NodeInfo {
    NodeInfo {
        id: NodeId::new(id),
        // The epoch is later than any router's, so that no decision waits for more nodes.
        epoch: Epoch(u64::MAX - 1),
        role,
        pid: 1,
        host: "h".to_owned(),
        address: format!("{id}:1"),
        admin: format!("{id}:2"),
        wires: vec![WireAddress {
            scheme: Scheme::new("tcp"),
            endpoint: format!("{id}:3"),
            within_host: false,
        }],
        without: vec![],
        keeps_role: false,
        model: ModelInfo {
            name: "mock".to_owned(),
            context_tokens: 1024,
            vocab: 261,
            eos_tokens: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: Fingerprint::new([("tokenizer".to_owned(), "bytes".to_owned())])
                .hashed_with(&BlockHashKey::default()),
        },
        protocol: types::node::PROTOCOL,
    }
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn parse(prompt: Option<v1::Prompt>) -> Prompt {
    let now = tokio::time::Instant::now().into_std();
    proto::prompt_from_wire(prompt.expect("a prompt"), now).expect("a good prompt")
}

fn said<T: Send + 'static>(words: Vec<Result<T, Status>>) -> Streamed<T> {
    stream::iter(words).boxed()
}

fn broken<T>() -> Result<T, Status> {
    Err(Status::unavailable("the fake node broke"))
}

fn refusal(kind: RefusalKind) -> v1::Refusal {
    (&Refusal::new(kind, "as the script says")).into()
}

// === the services ===

#[tonic::async_trait]
impl Decode for FakeNode {
    type RunStream = Streamed<v1::DecodeEvent>;

    async fn run(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::RunStream>, Status> {
        let request = request.into_inner();
        let prompt = parse(request.prompt);
        let act = self.act();
        self.hear(format!("decode {} tokens, {act:?}", prompt.tokens.len()));
        let local = matches!(request.prefill, Some(v1::decode_request::Prefill::None(_)))
            || act == FakeResponse::Local;
        let event = |event| Ok(v1::DecodeEvent { event: Some(event), timing: None, prompt_logprobs: None });
        let opening = match act {
            FakeResponse::Refuse(kind) => {
                return Ok(Response::new(said(vec![event(Event::Refused(refusal(kind)))])));
            }
            FakeResponse::Break => return Err(Status::unavailable("the fake node broke")),
            FakeResponse::Hang => return Ok(Response::new(stream::pending().boxed())),
            FakeResponse::Starve => {
                let landing = event(Event::Landing((&self.landing(prompt.tokens.len())).into()));
                return Ok(Response::new(stream::iter([landing]).chain(stream::pending()).boxed()));
            }
            _ if local => event(Event::Local(v1::Local { held_tokens: 0 })),
            _ => event(Event::Landing((&self.landing(prompt.tokens.len())).into())),
        };
        let mut all = steps(&prompt);
        if !local {
            all.remove(0);
        }
        if act == FakeResponse::Skip && !all.is_empty() {
            all.remove(0);
        }
        let mut words: Vec<_> = all.iter().map(|step| event(Event::Step(step.into()))).collect();
        if let FakeResponse::BreakAfter(n) = act {
            words.truncate(n as usize);
            words.push(broken());
        }
        // Steps come after the prefill node's answer, as they do when KV is transferred.
        let words = stream::once(async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            stream::iter(words)
        });
        Ok(Response::new(stream::iter([opening]).chain(words.flatten()).boxed()))
    }
}

impl FakeNode {
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
impl Prefill for FakeNode {
    type RunStream = Streamed<v1::PrefillAnswer>;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        let prompt = parse(request.into_inner().prompt);
        let act = self.act();
        self.hear(format!("prefill {} tokens, {act:?}", prompt.tokens.len()));
        let answer = |answer| Ok(v1::PrefillAnswer { answer: Some(answer) });
        match act {
            FakeResponse::Refuse(kind) => {
                Ok(Response::new(said(vec![answer(Answer::Refused(refusal(kind)))])))
            }
            FakeResponse::Break | FakeResponse::BreakAfter(_) => broken(),
            FakeResponse::Hang => Ok(Response::new(stream::pending().boxed())),
            FakeResponse::Serve
            | FakeResponse::Local
            | FakeResponse::Skip
            | FakeResponse::Starve
            | FakeResponse::Lose
            | FakeResponse::Vanish => {
                let prefilled = ComputedPrompt {
                    prompt_logprobs: Vec::new(),
                    first: steps(&prompt).swap_remove(0),
                    usage: Usage { prompt_tokens: prompt.tokens.len() as u32, cached_tokens: 0 },
                    room: Duration::ZERO,
                    queued: Duration::from_millis(1),
                    computed: Duration::from_millis(2),
                };
                let first = stream::iter([answer(Answer::Prefilled((&prefilled).into()))]);
                let after = match act {
                    FakeResponse::Lose => said(vec![answer(Answer::Refused(refusal(RefusalKind::Failed)))]),
                    FakeResponse::Vanish => said(vec![broken()]),
                    _ => stream::pending().boxed(),
                };
                Ok(Response::new(first.chain(after).boxed()))
            }
        }
    }

    async fn deliver(&self, _: Request<v1::DeliverRequest>) -> Result<Response<v1::DeliverAnswer>, Status> {
        self.hear("deliver");
        Ok(Response::new(v1::DeliverAnswer { refused: None }))
    }
}

#[tonic::async_trait]
impl Pool for FakeNode {
    type PutStream = Streamed<v1::PutEvent>;

    async fn put(&self, request: Request<v1::PutRequest>) -> Result<Response<Self::PutStream>, Status> {
        let n_tokens = parse(request.into_inner().prompt).tokens.len();
        let act = self.act();
        self.hear(format!("put {n_tokens} tokens, {act:?}"));
        let event = |event| Ok(v1::PutEvent { event: Some(event) });
        let landing = event(PutEvent::Landing((&self.landing(n_tokens)).into()));
        match act {
            FakeResponse::Refuse(kind) => {
                Ok(Response::new(said(vec![event(PutEvent::Refused(refusal(kind)))])))
            }
            FakeResponse::Break => broken(),
            FakeResponse::Hang => Ok(Response::new(stream::pending().boxed())),
            FakeResponse::BreakAfter(_) => Ok(Response::new(said(vec![landing, broken()]))),
            FakeResponse::Starve => {
                Ok(Response::new(stream::iter([landing]).chain(stream::pending()).boxed()))
            }
            _ => {
                let stored = event(PutEvent::Stored(v1::Stored { bytes: 0 }));
                let stored = stream::once(async {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    stored
                });
                let words = stream::iter([landing]).chain(stored).chain(stream::pending());
                Ok(Response::new(words.boxed()))
            }
        }
    }

    async fn deliver(&self, _: Request<v1::DeliverRequest>) -> Result<Response<v1::DeliverAnswer>, Status> {
        let act = self.act();
        self.hear(format!("fetch, {act:?}"));
        match act {
            FakeResponse::Refuse(kind) => {
                Ok(Response::new(v1::DeliverAnswer { refused: Some(refusal(kind)) }))
            }
            FakeResponse::Serve => Ok(Response::new(v1::DeliverAnswer { refused: None })),
            _ => broken(),
        }
    }
}

#[tonic::async_trait]
impl NodeStatus for FakeNode {
    type WatchStream = Streamed<v1::StatusEvent>;

    async fn watch(&self, _: Request<v1::StatusRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let blocks = BlockCounts { total: 100, free: 100, ..BlockCounts::default() };
        let load = v1::NodeLoad::from(NodeLoad { blocks, ..NodeLoad::default() });
        let load = v1::StatusEvent { event: Some(v1::status_event::Event::Load(load)) };
        let mut streams = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let events =
            if streams.len() > 1 { streams.remove(0) } else { streams.first().cloned().unwrap_or_default() };
        let events = events.into_iter().map(|(number, event)| v1::BlockEvents::new(number, &event));
        let events = events
            .map(|event| v1::StatusEvent { event: Some(v1::status_event::Event::Blocks(event)) })
            .collect::<Vec<_>>();
        let words = std::iter::once(load).chain(events).map(Ok);
        Ok(Response::new(stream::iter(words).chain(stream::pending()).boxed()))
    }

    async fn set_standing(
        &self,
        request: Request<v1::StandingRequest>,
    ) -> Result<Response<v1::StandingAnswer>, Status> {
        let v1::StandingRequest { refusal, .. } = request.into_inner();
        let word = if refusal.is_empty() { "in use".to_owned() } else { format!("no work: {refusal}") };
        // The router repeats its reports, so only changes are recorded: a refusal, and its end.
        let before =
            self.received().into_iter().rfind(|word| word.starts_with("no work: ") || word == "in use");
        if before.unwrap_or_else(|| "in use".to_owned()) != word {
            self.hear(word);
        }
        Ok(Response::new(v1::StandingAnswer {}))
    }

    async fn change_role(
        &self,
        _: Request<v1::ChangeRoleRequest>,
    ) -> Result<Response<v1::ChangeRoleAnswer>, Status> {
        Err(Status::failed_precondition("it keeps its role"))
    }

    async fn ledger(&self, _: Request<v1::LedgerRequest>) -> Result<Response<v1::LedgerAnswer>, Status> {
        Err(Status::unimplemented("a fake node holds nothing"))
    }
}
