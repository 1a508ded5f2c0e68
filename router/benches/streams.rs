//! CPU time per token of a node's steps on their way to the router, with a stream for each sequence as in
//! `Decode.Run`, and with one stream for all: `cargo bench -p baton-router --bench streams`.
//!
//! Server and client have one thread each, and only their CPU times count. The shared stream is what
//! `docs/decisions/0034-a-stream-for-each-sequence.md` rejects.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _};
use chassis::identity::ExpectedPeer;
use chassis::rpc::{Callers, RpcChannel, RpcLimits, channel};
use chassis::server::ServerLimits;
use chassis::{Gate, Shutdown, World, spawn_guarded};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use http::uri::PathAndQuery;
use proto::v1;
use proto::v1::decode_client::DecodeClient;
use proto::v1::decode_event::Event;
use proto::v1::decode_server::{Decode, DecodeServer};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use types::{Step, TokenId};

const ROUNDS: usize = 5;
const SEQUENCES: [usize; 4] = [1, 16, 64, 256];
const STEP: Duration = Duration::from_millis(20);
const PACED_STEPS: usize = 150;
const FAST_TOKENS: usize = 100_000;
/// The room of each queue, as in a decode node.
const QUEUE_MAX: usize = 128;
const SHARED_PATH: &str = "/baton.bench/Steps";

#[derive(Clone, Copy)]
enum Streams {
    OfEachSequence,
    Shared,
}

#[derive(Clone, Copy)]
enum Pace {
    Every20Ms,
    Fast,
}

#[derive(Clone, Copy)]
struct Load {
    streams: Streams,
    pace: Pace,
    n_sequences: usize,
}

impl Load {
    fn n_steps(self) -> usize {
        match self.pace {
            Pace::Every20Ms => PACED_STEPS,
            Pace::Fast => FAST_TOKENS / self.n_sequences,
        }
    }
}

/// CPU microseconds per token.
struct Cost {
    client: f64,
    server: f64,
}

fn main() {
    for (pace, name) in [(Pace::Every20Ms, "every 20 ms"), (Pace::Fast, "fast")] {
        for n_sequences in SEQUENCES {
            let (mut own, mut shared) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                own.push(measured(Load { streams: Streams::OfEachSequence, pace, n_sequences }));
                shared.push(measured(Load { streams: Streams::Shared, pace, n_sequences }));
            }
            for (side, of) in
                [("client", (|cost: &Cost| cost.client) as fn(&Cost) -> f64), ("server", |cost| cost.server)]
            {
                let (own, shared) = (shown(&own, of), shown(&shared, of));
                println!("{name:11} {n_sequences:3} sequences, {side}: own streams {own}, shared {shared}");
            }
        }
    }
}

/// Returns the median with the range.
fn shown(costs: &[Cost], of: fn(&Cost) -> f64) -> String {
    let mut values: Vec<f64> = costs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    format!("{:.2} ({:.2} to {:.2}) us", values[values.len() / 2], values[0], values[values.len() - 1])
}

fn measured(load: Load) -> Cost {
    let (ready, address) = oneshot::channel();
    let server = std::thread::spawn(move || runtime().block_on(serve(load, ready)));
    let address = runtime().block_on(address).unwrap();
    let client = runtime().block_on(read(load, &address));
    let server = server.join().unwrap();
    let per_token = |cpu: Duration| cpu.as_secs_f64() * 1e6 / (load.n_steps() * load.n_sequences) as f64;
    Cost { client: per_token(client), server: per_token(server) }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Returns the CPU time of this thread.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split_whitespace().next().unwrap().parse().unwrap())
}

// === the server ===

/// The sender's ends of the streams that clients have opened.
#[derive(Clone, Debug)]
struct Node {
    opened: mpsc::Sender<Queue>,
}

#[derive(Debug)]
enum Queue {
    OfSequence(mpsc::Sender<v1::DecodeEvent>),
    Shared(mpsc::Sender<Steps>),
}

/// The events of one step of the node, each with its sequence.
type Steps = Vec<(u32, v1::DecodeEvent)>;

/// Serves one client. Returns the CPU time from the first step to the last.
async fn serve(load: Load, ready: oneshot::Sender<String>) -> Duration {
    let (world, gate, shutdown) = (World::real(), Gate::new("server"), Shutdown::new());
    let listener = world.net().listen("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (opened, mut streams) = mpsc::channel(QUEUE_MAX);
    let node = Node { opened };
    let shared = axum::routing::post({
        let node = node.clone();
        move |request| respond_shared(node, request)
    });
    let routes = Routes::new(DecodeServer::new(node)).into_axum_router().route(SHARED_PATH, shared);
    let callers = Callers::known_to(&world);
    let limits = ServerLimits::default();
    let serving = chassis::rpc::serve(listener, routes.into(), shutdown.clone(), limits, callers);
    let serving = spawn_guarded(&gate, "server", serving);
    ready.send(address).unwrap();
    let n_streams = match load.streams {
        Streams::OfEachSequence => load.n_sequences,
        Streams::Shared => 1,
    };
    let mut queues = Vec::new();
    while queues.len() < n_streams {
        queues.push(streams.recv().await.unwrap());
    }
    tokio::time::sleep(10 * STEP).await;
    let began = cpu();
    run_steps(load, &queues).await;
    tokio::time::sleep(STEP).await;
    let spent = cpu() - began;
    drop(queues);
    shutdown.trigger();
    let _ = serving.await;
    spent
}

async fn run_steps(load: Load, queues: &[Queue]) {
    let mut ticks = tokio::time::interval(STEP);
    for index in 0..load.n_steps() {
        if matches!(load.pace, Pace::Every20Ms) {
            ticks.tick().await;
        }
        for queue in queues {
            match queue {
                Queue::OfSequence(events) => events.send(event(index)).await.unwrap(),
                Queue::Shared(steps) => {
                    let all = (0..load.n_sequences as u32).map(|nth| (nth, event(index)));
                    steps.send(all.collect()).await.unwrap();
                }
            }
        }
    }
}

fn event(index: usize) -> v1::DecodeEvent {
    let step = Step { token: TokenId(12_345), index: index as u32, logprobs: None, finish: None };
    v1::DecodeEvent { event: Some(Event::Step((&step).into())), timing: None, prompt_logprobs: None }
}

/// Makes the stream of a queue's messages.
fn received<T: Send + 'static>(queue: mpsc::Receiver<T>) -> BoxStream<'static, Result<T, Status>> {
    stream::unfold(queue, |mut queue| async move { Some((Ok(queue.recv().await?), queue)) }).boxed()
}

#[tonic::async_trait]
impl Decode for Node {
    type RunStream = BoxStream<'static, Result<v1::DecodeEvent, Status>>;

    async fn run(&self, _: Request<v1::DecodeRequest>) -> Result<Response<Self::RunStream>, Status> {
        let (events, queue) = mpsc::channel(QUEUE_MAX);
        self.opened.send(Queue::OfSequence(events)).await.unwrap();
        Ok(Response::new(received(queue)))
    }
}

async fn respond_shared(node: Node, request: axum::extract::Request) -> http::Response<tonic::body::Body> {
    let answer = tower::service_fn(move |_: Request<Steps>| {
        let node = node.clone();
        async move {
            let (steps, queue) = mpsc::channel(QUEUE_MAX);
            node.opened.send(Queue::Shared(steps)).await.unwrap();
            Ok(Response::new(received(queue)))
        }
    });
    tonic::server::Grpc::new(StepsCodec).server_streaming(answer, request).await
}

// === the client ===

/// Reads all steps. Returns the CPU time from the first step to the last.
async fn read(load: Load, address: &str) -> Duration {
    let (world, gate) = (World::real(), Gate::new("client"));
    let expected = ExpectedPeer::Node { id: types::NodeId::new("node"), role: types::Role::Decode };
    let channel = channel(&world, address, expected, RpcLimits::default());
    let n_steps = load.n_steps();
    let readers: Vec<_> = match load.streams {
        Streams::OfEachSequence => {
            let mut readers = Vec::new();
            for _ in 0..load.n_sequences {
                let request = v1::DecodeRequest { prompt: None, prefill: None, explain: false };
                let mut events = DecodeClient::new(channel.clone()).run(request).await.unwrap().into_inner();
                readers.push(spawn_guarded(&gate, "reader", async move {
                    for wanted in 0..n_steps {
                        check(events.message().await.unwrap(), wanted);
                    }
                }));
            }
            readers
        }
        Streams::Shared => {
            let mut queues = Vec::new();
            let mut readers = Vec::new();
            for _ in 0..load.n_sequences {
                let (events, mut queue) = mpsc::channel(QUEUE_MAX);
                queues.push(events);
                readers.push(spawn_guarded(&gate, "reader", async move {
                    for wanted in 0..n_steps {
                        check(queue.recv().await, wanted);
                    }
                }));
            }
            spawn_guarded(&gate, "divider", divide(channel, Arc::from(queues))).detach();
            readers
        }
    };
    tokio::time::sleep(5 * STEP).await;
    let began = cpu();
    for reader in readers {
        reader.await.unwrap();
    }
    cpu() - began
}

fn check(event: Option<v1::DecodeEvent>, wanted: usize) {
    let Some(Event::Step(step)) = event.unwrap().event else { panic!("no step") };
    let step = Step::try_from(step).unwrap();
    assert_eq!(step.index as usize, wanted);
}

/// Reads the shared stream and gives each event to its sequence.
async fn divide(channel: RpcChannel, queues: Arc<[mpsc::Sender<v1::DecodeEvent>]>) {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let path = PathAndQuery::from_static(SHARED_PATH);
    let request = Request::new(Steps::new());
    let mut steps = client.server_streaming(request, path, StepsCodec).await.unwrap().into_inner();
    while let Some(events) = steps.message().await.unwrap() {
        for (sequence, event) in events {
            queues[sequence as usize].send(event).await.unwrap();
        }
    }
}

// === the message of a shared stream ===

/// Writes each event as its sequence, its length and its bytes, which costs what a repeated field costs.
#[derive(Clone, Copy, Debug, Default)]
struct StepsCodec;

impl Codec for StepsCodec {
    type Encode = Steps;
    type Decode = Steps;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for StepsCodec {
    type Item = Steps;
    type Error = Status;

    fn encode(&mut self, steps: Steps, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        for (sequence, event) in steps {
            let bytes = proto::encode(&event);
            to.put_u32(sequence);
            to.put_u32(bytes.len() as u32);
            to.put_slice(&bytes);
        }
        Ok(())
    }
}

impl Decoder for StepsCodec {
    type Item = Steps;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Steps>, Status> {
        let mut steps = Steps::new();
        while from.has_remaining() {
            let (sequence, n_bytes) = (from.get_u32(), from.get_u32() as usize);
            let event = proto::decode((&mut *from).take(n_bytes));
            steps.push((sequence, event.map_err(|error| Status::internal(error.to_string()))?));
        }
        Ok(Some(steps))
    }
}
