//! A scripted [`Serve`] and an HTTP client for the tests of the API.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use chassis::World;
use chassis::metrics::Metrics;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::sync::watch;
use tower::ServiceExt;
use types::layout::KvDtype;
use types::step::{Logprobs, PromptLogprob};
use types::{Fingerprint, FinishReason, KvLayout, ModelInfo, Prompt, Step, TokenId, Usage};

use crate::accept::{Acceptor, Deadlines};
use crate::error::AcceptError;
use crate::http::{BodyLimits, HttpApi, api, chat_box, description, health, stack};
use crate::metrics::RouterMetrics;
use crate::requests::{RecordHead, Requests};
use crate::serve::{Arrival, Complete, Detail, Generation, Ready, Serve, ServeError};
use crate::text::tokenizer::END;
use crate::text::{RouterModels, ServedModel, Tokenizer};

/// The response of the scripted [`Serve`] to a prompt.
pub(crate) enum ScriptedEvent {
    Refuse(ServeError),
    /// Does something when the future has ended.
    Later(BoxFuture<'static, ScriptedEvent>),
    Steps(BoxStream<'static, Result<Step, ServeError>>),
}

impl ScriptedEvent {
    /// Gives no step, ever.
    pub(crate) fn silence() -> Self {
        Self::Later(futures::future::pending().boxed())
    }
}

type Script = dyn Fn(&Prompt) -> ScriptedEvent + Send + Sync;

/// A scripted [`Serve`] that records prompts and counts those in progress.
pub(crate) struct FakeServe {
    script: Box<Script>,
    seen: Mutex<Vec<Prompt>>,
    alive: watch::Sender<usize>,
    ready: Result<(), String>,
}

impl std::fmt::Debug for FakeServe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeServe")
    }
}

impl FakeServe {
    pub(crate) fn new(script: impl Fn(&Prompt) -> ScriptedEvent + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::with(script, Ok(())))
    }

    pub(crate) fn unready(reason: &str) -> Arc<Self> {
        Arc::new(Self::with(|_| ScriptedEvent::silence(), Err(reason.to_owned())))
    }

    fn with(
        script: impl Fn(&Prompt) -> ScriptedEvent + Send + Sync + 'static,
        ready: Result<(), String>,
    ) -> Self {
        Self { script: Box::new(script), seen: Mutex::default(), alive: watch::Sender::new(0), ready }
    }

    /// Makes a `FakeServe` that answers every prompt with this text.
    pub(crate) fn saying(text: &'static str) -> Arc<Self> {
        Self::new(move |_| says(text))
    }

    /// Returns the received prompts, in order of their ids, because choices begin at the same time.
    pub(crate) fn seen(&self) -> Vec<Prompt> {
        let mut seen = self.seen.lock().unwrap().clone();
        seen.sort_by(|a, b| a.id.cmp(&b.id));
        seen
    }

    /// Returns the text of the only prompt, without its special tokens.
    pub(crate) fn prompt_text(&self) -> String {
        let seen = self.seen();
        assert_eq!(seen.len(), 1);
        Tokenizer::Bytes.text_of(&seen[0].tokens)
    }

    /// Waits until exactly `n` prompts are in progress.
    pub(crate) async fn holds(&self, n: usize) {
        let mut alive = self.alive.subscribe();
        let reached =
            tokio::time::timeout(Duration::from_secs(20), alive.wait_for(|alive| *alive == n)).await;
        reached.expect("in time").expect("the fake_serve lives");
    }
}

/// A prompt in progress. Dropping it ends the count.
struct RunningGuard(watch::Sender<usize>);

impl RunningGuard {
    fn new(alive: &watch::Sender<usize>) -> Self {
        alive.send_modify(|n| *n += 1);
        Self(alive.clone())
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl Ready for FakeServe {
    fn ready(&self) -> Result<(), String> {
        self.ready.clone()
    }
}

#[async_trait]
impl Serve for FakeServe {
    fn models(&self) -> Vec<ModelInfo> {
        vec![ModelInfo {
            name: "org/mock".to_owned(),
            context_tokens: 512,
            vocab: 261,
            eos_tokens: vec![END],
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: Fingerprint::default(),
        }]
    }

    async fn generate(&self, prompt: Prompt, arrival: Arrival) -> Result<Generation, ServeError> {
        let alive = RunningGuard::new(&self.alive);
        let mut play = (self.script)(&prompt);
        let usage = Usage { prompt_tokens: prompt.tokens.len() as u32, cached_tokens: 1 };
        let prompt_logprobs = made_up(&prompt);
        let record = || Requests::default().begin(RecordHead::of(&prompt), &arrival, Duration::ZERO);
        let explained = (arrival.detail == Detail::Explained).then(|| record().record().clone());
        self.seen.lock().unwrap().push(prompt);
        while let ScriptedEvent::Later(later) = play {
            play = later.await;
        }
        match play {
            ScriptedEvent::Refuse(error) => Err(error),
            ScriptedEvent::Later(_) => unreachable!("it has ended"),
            ScriptedEvent::Steps(steps) => {
                let steps = steps.inspect(move |_| _ = &alive).boxed();
                Ok(Generation { usage, prompt_logprobs, complete: Complete::default(), explained, steps })
            }
        }
    }

    fn knows_nodes(&self) -> Result<(), AcceptError> {
        self.ready.clone().map_err(|reason| AcceptError::NoNodes { reason })
    }
}

/// Returns log-probabilities for a prompt that asks for them: -1 for the second token, -2 for the third, and so on. The
/// best alternatives are the tokens from 65 on.
fn made_up(prompt: &Prompt) -> Vec<PromptLogprob> {
    let Some(n_top) = prompt.sampling.prompt_logprobs else { return Vec::new() };
    let top: Vec<_> = (0..u32::from(n_top)).map(|nth| (TokenId(65 + nth), -0.25 - nth as f32)).collect();
    let one = |nth: usize| PromptLogprob {
        logprobs: Logprobs { chosen: -(nth as f32), top: top.clone() },
        rank: 3,
    };
    (1..prompt.tokens.len()).map(one).collect()
}

// === scripts ===

pub(crate) fn step(index: u32, token: TokenId, finish: Option<FinishReason>) -> Step {
    Step { token, index, logprobs: None, finish }
}

/// Returns the steps of a text, one per byte, and the end token.
pub(crate) fn steps_of(text: &str) -> Vec<Step> {
    let tokens = text.bytes().map(|byte| (TokenId(u32::from(byte)), None));
    let all = tokens.chain([(END, Some(FinishReason::Stop))]);
    all.enumerate().map(|(index, (token, finish))| step(index as u32, token, finish)).collect()
}

pub(crate) fn plays(steps: Vec<Step>) -> ScriptedEvent {
    ScriptedEvent::Steps(futures::stream::iter(steps).map(Ok).boxed())
}

pub(crate) fn says(text: &str) -> ScriptedEvent {
    plays(steps_of(text))
}

/// Gives the steps of a text and then nothing.
pub(crate) fn begins(text: &str) -> ScriptedEvent {
    let mut steps = steps_of(text);
    steps.pop();
    ScriptedEvent::Steps(futures::stream::iter(steps).map(Ok).chain(futures::stream::pending()).boxed())
}

/// Gives the steps of a text and then an error.
pub(crate) fn breaks(text: &str, error: ServeError) -> ScriptedEvent {
    let mut steps: Vec<Result<Step, ServeError>> = steps_of(text).into_iter().map(Ok).collect();
    steps.pop();
    steps.push(Err(error));
    ScriptedEvent::Steps(futures::stream::iter(steps).boxed())
}

/// Gives steps without end.
pub(crate) fn babbles() -> ScriptedEvent {
    ScriptedEvent::Steps(futures::stream::iter((0..).map(|index| Ok(step(index, TokenId(97), None)))).boxed())
}

// === the client ===

pub(crate) fn app(fake_serve: &Arc<FakeServe>) -> Router {
    app_with(fake_serve, BodyLimits::default())
}

pub(crate) fn app_with(fake_serve: &Arc<FakeServe>, body: BodyLimits) -> Router {
    app_of(fake_serve, body, ServedModel::mock("org/mock", 512))
}

pub(crate) fn app_of(fake_serve: &Arc<FakeServe>, body: BodyLimits, model: ServedModel) -> Router {
    let world = World::seeded(1);
    let metrics = RouterMetrics::new(&Metrics::new("router"));
    let acceptor = Acceptor::new(world.clone(), Deadlines::default(), metrics.clone());
    let models = RouterModels::new([model]);
    let http = HttpApi { serve: fake_serve.clone(), models, acceptor: acceptor.clone(), world, body };
    let pages = health(fake_serve.clone()).merge(description(http.clone())).merge(chat_box(http.clone()));
    stack(api(http).merge(pages), acceptor, metrics)
}

/// A response of the API, received completely.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("a JSON body")
    }

    /// Returns the data of all events in a stream. `[DONE]` is a string; an `error` event is wrapped in an
    /// object of that name.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.body.split_terminator("\n\n").map(event).collect()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

fn event(text: &str) -> Value {
    let (name, data) = match text.strip_prefix("event: ") {
        Some(rest) => rest.split_once('\n').unwrap(),
        None => ("", text),
    };
    let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("not an event: {text:?}"));
    match (name, data) {
        ("", "[DONE]") => "[DONE]".into(),
        ("", data) => serde_json::from_str(data).unwrap(),
        (name, data) => serde_json::json!({name: serde_json::from_str::<Value>(data).unwrap()}),
    }
}

pub(crate) async fn send(app: Router, request: Request<Body>) -> Answer {
    let response = app.oneshot(request).await.expect("routers are infallible");
    let (head, body) = response.into_parts();
    let body = body.collect().await.expect("bodies do not break").to_bytes();
    Answer { status: head.status, headers: head.headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

pub(crate) async fn post(fake_serve: &Arc<FakeServe>, path: &str, body: impl Into<Body>) -> Answer {
    let request = Request::post(path).header("x-request-id", "r1").body(body.into()).unwrap();
    send(app(fake_serve), request).await
}

pub(crate) async fn chat(fake_serve: &Arc<FakeServe>, fields: Value) -> Answer {
    let mut body = serde_json::json!({"model": "org/mock", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    post(fake_serve, "/v1/chat/completions", body.to_string()).await
}

pub(crate) async fn complete(fake_serve: &Arc<FakeServe>, fields: Value) -> Answer {
    let mut body = serde_json::json!({"model": "org/mock", "prompt": "Hi"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    post(fake_serve, "/v1/completions", body.to_string()).await
}
