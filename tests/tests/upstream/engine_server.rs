//! Servers that speak the protocols of vLLM and SGLang, and check what a router sends them.

use std::collections::HashSet;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

/// The bootstrap port that prefill servers of SGLang have in these tests.
pub const BOOTSTRAP_PORT: u16 = 8998;
/// The pieces of every answer.
pub const PIECES: [&str; 4] = ["The", " prompt", " has", " arrived"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Vllm,
    Sglang,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Prefill,
    Decode,
}

/// The response of a server to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Answer,
    /// Answers with this status and an error object.
    Status(u16),
    /// Never answers.
    Silent,
    /// Answers after this time.
    Late(Duration),
    /// Closes the connection after the first pieces of the answer, between two events.
    Cut,
    /// Closes the connection inside an event.
    CutInside,
    /// Sends the first piece, and nothing else.
    Stall,
    /// Answers without parameters of KV (vLLM).
    WithoutKv,
}

/// The KV that prefill servers have computed and decode servers have not fetched: rooms of SGLang, or ids of vLLM.
#[derive(Debug)]
pub struct Transfers {
    engine: Engine,
    n_made: AtomicUsize,
    /// All rooms that were ever used, to find a room that is not fresh.
    rooms: Mutex<HashSet<u64>>,
    open: watch::Sender<HashSet<u64>>,
}

/// One server. Dropping it closes its port and all connections.
#[derive(Debug)]
pub struct EngineServer {
    pub addr: SocketAddr,
    shared: Arc<Shared>,
    _runtime: OwnRuntime,
}

/// The runtime of one server: its end closes every connection, as the end of a process does.
#[derive(Debug)]
pub struct OwnRuntime(Option<Runtime>);

#[derive(Debug)]
struct Shared {
    role: Role,
    transfers: Arc<Transfers>,
    act: Mutex<Act>,
    is_well: AtomicBool,
    seen: Mutex<Vec<Seen>>,
    /// Requests whose answers have not ended.
    running: Arc<AtomicUsize>,
}

/// A request that reached a server.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Seen {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl OwnRuntime {
    pub fn new(runtime: Runtime) -> Self {
        Self(Some(runtime))
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

impl Transfers {
    pub fn new(engine: Engine) -> Arc<Self> {
        let (rooms, open) = (Mutex::default(), watch::Sender::default());
        Arc::new(Self { engine, n_made: AtomicUsize::new(0), rooms, open })
    }

    fn offer(&self, id: u64) {
        self.open.send_if_modified(|open| open.insert(id));
    }

    /// Waits for the KV of `id` and takes it. Without it the answer would be one without a prompt.
    async fn take(&self, id: u64) -> bool {
        let mut open = self.open.subscribe();
        let there = open.wait_for(|open| open.contains(&id));
        let is_there = tokio::time::timeout(Duration::from_secs(5), there).await.is_ok();
        self.open.send_if_modified(|open| open.remove(&id)) && is_there
    }
}

impl EngineServer {
    pub fn start(role: Role, transfers: &Arc<Transfers>) -> Self {
        let shared = Arc::new(Shared {
            role,
            transfers: Arc::clone(transfers),
            act: Mutex::new(Act::Answer),
            is_well: AtomicBool::new(true),
            seen: Mutex::default(),
            running: Arc::default(),
        });
        let routes = Router::new()
            .route("/health", get(health))
            .route("/{*path}", any(serve))
            .with_state(Arc::clone(&shared));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let addr = listener.local_addr().expect("it is bound");
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("a socket");
            drop(axum::serve(listener, routes).await);
        });
        Self { addr, shared, _runtime: OwnRuntime::new(runtime) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn does(&self, act: Act) {
        *locked(&self.shared.act) = act;
    }

    pub fn is_ill(&self) {
        self.shared.is_well.store(false, Ordering::SeqCst);
    }

    pub fn seen(&self) -> Vec<Seen> {
        locked(&self.shared.seen).clone()
    }

    pub fn n_running(&self) -> usize {
        self.shared.running.load(Ordering::SeqCst)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test panics with it")
}

async fn health(State(shared): State<Arc<Shared>>) -> StatusCode {
    if shared.is_well.load(Ordering::SeqCst) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn serve(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    shared.running.fetch_add(1, Ordering::SeqCst);
    let running = Running(Arc::clone(&shared.running));
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 16 << 20).await.expect("a body");
    let path = head.uri.path().to_owned();
    locked(&shared.seen).push(Seen { path: path.clone(), headers: head.headers, body: body.clone() });
    let act = *locked(&shared.act);
    match act {
        Act::Status(status) => return refusal(status, "as told"),
        Act::Silent => std::future::pending::<()>().await,
        Act::Late(by) => tokio::time::sleep(by).await,
        _ => {}
    }
    if !path.ends_with("/completions") && path != "/generate" {
        return axum::Json(
            json!({ "object": "list", "path": path, "data": [{ "id": "m", "object": "model" }] }),
        )
        .into_response();
    }
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let checked = match (shared.transfers.engine, shared.role) {
        (Engine::Vllm, Role::Prefill) => return vllm_prefill(&shared, &body, act),
        (Engine::Vllm, Role::Decode) => vllm_decode(&shared, &body).await,
        (Engine::Sglang, role) => sglang(&shared, role, &body).await,
    };
    match checked {
        Ok(()) => answer(&path, &body, act, running),
        Err(reason) => refusal(500, &reason),
    }
}

fn refusal(status: u16, reason: &str) -> Response {
    let body = json!({ "object": "error", "message": reason, "code": status });
    (StatusCode::from_u16(status).expect("a status"), axum::Json(body)).into_response()
}

fn vllm_prefill(shared: &Shared, body: &Value, act: Act) -> Response {
    let is_of_proxy = body["stream"] == false
        && body["max_tokens"] == 1
        && body["stream_options"].is_null()
        && body["min_tokens"].is_null()
        && body["max_completion_tokens"].as_u64().is_none_or(|n| n == 1)
        && body["kv_transfer_params"]["do_remote_decode"] == true
        && body["kv_transfer_params"]["do_remote_prefill"] == false;
    if !is_of_proxy {
        return refusal(400, &format!("not a prefill leg: {body}"));
    }
    if act == Act::WithoutKv {
        return axum::Json(json!({ "choices": [], "kv_transfer_params": null })).into_response();
    }
    let id = shared.transfers.n_made.fetch_add(1, Ordering::SeqCst) as u64;
    shared.transfers.offer(id);
    let params = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_engine_id": format!("engine-{id}"),
        "remote_block_ids": [id, id + 1],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
    });
    axum::Json(json!({ "choices": [{ "index": 0 }], "kv_transfer_params": params })).into_response()
}

async fn vllm_decode(shared: &Shared, body: &Value) -> Result<(), String> {
    let params = &body["kv_transfer_params"];
    if params.is_null() && locked(&shared.act).eq(&Act::WithoutKv) {
        return Ok(());
    }
    let id = params["remote_block_ids"][0].as_u64().ok_or("the prefill was skipped")?;
    let is_whole =
        params["do_remote_prefill"] == true && params["remote_engine_id"] == format!("engine-{id}");
    match is_whole && shared.transfers.take(id).await {
        true => Ok(()),
        false => Err(format!("no such KV: {params}")),
    }
}

async fn sglang(shared: &Shared, role: Role, body: &Value) -> Result<(), String> {
    let room = body["bootstrap_room"].as_u64().ok_or("no room")?;
    let is_addressed = body["bootstrap_host"] == "127.0.0.1" && body["bootstrap_port"] == BOOTSTRAP_PORT;
    if room >= 1 << 63 || !is_addressed {
        return Err(format!("a wrong room: {body}"));
    }
    match role {
        Role::Prefill if !locked(&shared.transfers.rooms).insert(room) => Err(format!("room {room} again")),
        Role::Prefill => {
            shared.transfers.offer(room);
            Ok(())
        }
        Role::Decode => match shared.transfers.take(room).await {
            true => Ok(()),
            false => Err("the prefill was skipped".to_owned()),
        },
    }
}

/// The events of a streamed answer.
pub fn events(path: &str) -> Vec<String> {
    let (object, is_chat) = match path {
        "/v1/chat/completions" => ("chat.completion.chunk", true),
        _ => ("text_completion", false),
    };
    let choice = |piece: &str| match is_chat {
        true => {
            json!({ "index": 0, "delta": { "role": "assistant", "content": piece }, "finish_reason": null })
        }
        false => json!({ "index": 0, "text": piece, "finish_reason": null }),
    };
    let event = |piece: &&str| {
        let event =
            json!({ "id": "p", "object": object, "created": 1, "model": "m", "choices": [choice(piece)] });
        format!("data: {event}\n\n")
    };
    PIECES.iter().map(event).chain(["data: [DONE]\n\n".to_owned()]).collect()
}

/// The body of an answer that is not streamed.
pub fn whole(path: &str) -> String {
    let text = PIECES.concat();
    let usage = json!({ "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7 });
    let answer = match path {
        "/v1/chat/completions" => json!({
            "id": "p", "object": "chat.completion", "created": 1, "model": "m", "usage": usage,
            "choices": [{ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": "stop" }],
        }),
        _ => json!({
            "id": "p", "object": "text_completion", "created": 1, "model": "m", "usage": usage,
            "choices": [{ "index": 0, "text": text, "finish_reason": "stop", "logprobs": null }],
        }),
    };
    answer.to_string()
}

fn answer(path: &str, body: &Value, act: Act, running: Running) -> Response {
    if body["stream"] != true {
        return ([("content-type", "application/json")], whole(path)).into_response();
    }
    let events = events(path);
    let (sent, then_stalls, is_cut) = match act {
        Act::Cut => (events[..2].to_vec(), false, true),
        Act::CutInside => (vec![events[0].clone(), events[1][..9].to_owned()], false, true),
        Act::Stall => (events[..1].to_vec(), true, false),
        _ => (events, false, false),
    };
    let sent = futures::stream::iter(sent.into_iter().map(Ok::<_, std::io::Error>));
    let end = futures::stream::once(async move {
        if then_stalls {
            std::future::pending::<Infallible>().await;
        }
        if is_cut {
            // The pieces before are on their way.
            tokio::time::sleep(Duration::from_millis(100)).await;
            Err(std::io::Error::other("cut"))
        } else {
            Ok(String::new())
        }
    });
    let body = sent.chain(end).map(move |piece| {
        let _until_the_end = &running;
        piece
    });
    ([("content-type", "text/event-stream; charset=utf-8")], Body::from_stream(body)).into_response()
}
