//! The HTTP endpoint over a service with fixed answers: from bytes on a connection to events on a stream.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Body;
use chassis::metrics::Metrics;
use chassis::net::{MemoryNet, Net as _};
use chassis::server::{PortTls, ServerLimits, serve};
use chassis::{Gate, Shutdown, World, spawn_guarded};
use futures::StreamExt as _;
use http::Request;
use http_body_util::BodyExt as _;
use router::accept::{Acceptor, Deadlines};
use router::error::AcceptError;
use router::http::{BodyLimits, HttpApi, api, description, health, stack};
use router::metrics::RouterMetrics;
use router::serve::{Arrival, Complete, Generation, Ready, Serve, ServeError};
use router::text::{RouterModels, ServedModel};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower::ServiceExt as _;
use types::layout::KvDtype;
use types::{Fingerprint, FinishReason, KvLayout, ModelInfo, Prompt, Step, TokenId, Usage};

use super::Script;

const MODEL: &str = "mock";
const CONTEXT: u32 = 512;
const VOCAB: u32 = 261;
const PATIENCE: Duration = Duration::from_secs(1_000);

/// Sends the bytes to the endpoint. Every input must get a complete answer, never an internal error.
pub fn http(bytes: &[u8]) {
    let mut script = Script(bytes);
    let how = script.byte();
    let n_said = usize::from(script.byte() % 32);
    let said: Vec<u8> = script.take(n_said).to_vec();
    let rest = script.0;
    super::in_paused_time(async {
        match how % 4 {
            0 => connection(&said, rest).await,
            1 => request("/v1/chat/completions", &said, rest).await,
            2 => request("/v1/completions", &said, rest).await,
            _ => path(&said, rest).await,
        }
    });
}

fn app(said: &[u8]) -> axum::Router {
    let world = World::seeded(1);
    let metrics = RouterMetrics::new(&Metrics::new("router"));
    let acceptor = Acceptor::new(world.clone(), Deadlines::default(), metrics.clone());
    let models = RouterModels::new([ServedModel::mock(MODEL, CONTEXT)]);
    let serve = Arc::new(FixedAnswer(said.to_vec()));
    let http_api = HttpApi { serve, models, acceptor: acceptor.clone(), world, body: BodyLimits::default() };
    stack(
        api(http_api.clone()).merge(description(http_api.clone())).merge(health(http_api.serve)),
        acceptor,
        metrics,
    )
}

/// Sends bytes on a connection, as they come.
async fn connection(said: &[u8], bytes: &[u8]) {
    let net = MemoryNet::new();
    let listener = net.listen("door").await.expect("a name of its own");
    let shutdown = Shutdown::new();
    let serving = serve(listener, PortTls::Plaintext, app(said), shutdown.clone(), ServerLimits::default());
    let serving = spawn_guarded(&Gate::new("fuzz"), "server", serving);
    let mut stream = net.connect("door").await.expect("it listens");
    let talk = async {
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let mut heard = Vec::new();
        let _ = stream.read_to_end(&mut heard).await;
        heard
    };
    let heard = tokio::time::timeout(PATIENCE, talk).await.expect("a connection that has ended is closed");
    let is_ours = heard.starts_with(b"HTTP/1.1 5");
    assert!(!is_ours, "{}", String::from_utf8_lossy(&heard));
    shutdown.trigger();
    let served = tokio::time::timeout(PATIENCE, serving).await.expect("it stops");
    drop(served.expect("the server did not panic"));
}

/// Sends a body to one of the two endpoints.
async fn request(path: &str, said: &[u8], body: &[u8]) {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.body(Body::from(body.to_vec())).expect("a request");
    let response = app(said).oneshot(request).await.expect("it never fails");
    let status = response.status().as_u16();
    let is_stream = response.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream");
    let answer =
        tokio::time::timeout(PATIENCE, response.into_body().collect()).await.expect("an answer ends");
    let answer = answer.expect("an answer is whole").to_bytes();
    let text = std::str::from_utf8(&answer).expect("text");
    assert!(status == 200 || (400..500).contains(&status), "{status}: {text}");
    if is_stream {
        return check_events(text);
    }
    let json: serde_json::Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(json.get("error").is_some(), status != 200, "{text}");
}

/// Checks that every event is JSON, and that the stream ends with `[DONE]`.
fn check_events(text: &str) {
    let events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    let (last, others) = events.split_last().expect("at least one event");
    assert_eq!(*last, "data: [DONE]", "{text}");
    for event in others.iter().filter(|event| !event.starts_with(':')) {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?} in {text}"));
        let _: serde_json::Value = serde_json::from_str(data).expect("JSON in an event");
    }
}

/// Sends a request whose path and headers come from the lines of `bytes`.
async fn path(said: &[u8], bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let uri = lines.next().unwrap_or_default();
    let Ok(mut request) = Request::get(uri).body(Body::empty()) else { return };
    for line in lines {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { continue };
        let name = http::HeaderName::from_bytes(&line[..at]);
        let value = http::HeaderValue::from_bytes(&line[at + 1..]);
        if let (Ok(name), Ok(value)) = (name, value) {
            request.headers_mut().append(name, value);
        }
    }
    let response = app(said).oneshot(request).await.expect("it never fails");
    assert!(response.status().as_u16() < 500, "{:?}", response.status());
}

/// Answers every request with the same tokens.
#[derive(Debug)]
struct FixedAnswer(Vec<u8>);

impl Ready for FixedAnswer {
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
}

#[async_trait]
impl Serve for FixedAnswer {
    fn models(&self) -> Vec<ModelInfo> {
        vec![ModelInfo {
            name: MODEL.to_owned(),
            context_tokens: CONTEXT,
            vocab: VOCAB,
            eos_tokens: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: Fingerprint::default(),
        }]
    }

    async fn generate(&self, prompt: Prompt, _: Arrival) -> Result<Generation, ServeError> {
        let usage = Usage { prompt_tokens: prompt.tokens.len() as u32, cached_tokens: 0 };
        let said: Vec<u8> = self.0.iter().copied().chain([b'.']).take(prompt.tokens_left().max(1)).collect();
        let n = said.len();
        let step = move |(index, byte): (usize, u8)| {
            Ok(Step {
                token: TokenId(u32::from(byte)),
                index: index as u32,
                logprobs: None,
                finish: (index + 1 == n).then_some(FinishReason::Stop),
            })
        };
        let steps = futures::stream::iter(said.into_iter().enumerate().map(step)).boxed();
        Ok(Generation {
            usage,
            prompt_logprobs: Vec::new(),
            complete: Complete::default(),
            explained: None,
            steps,
        })
    }

    fn knows_nodes(&self) -> Result<(), AcceptError> {
        Ok(())
    }
}
