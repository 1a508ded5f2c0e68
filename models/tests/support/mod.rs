//! A fake hub on this machine, with the paths, headers, redirects and failures of the real one.

pub mod proxy;
pub mod tls;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use baton_models::{Authorities, Hub, HubSettings, Proxies};
use futures::stream::{self, StreamExt as _};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::json;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const OLD: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// The behaviour of the fake hub. Tests change it while it runs.
#[derive(Debug, Default)]
pub struct FakeHubState {
    /// The contents of the model's files by name. The store serves safetensors, the hub the other files.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The status and error code that every request is answered with, if set.
    pub refuse: Option<(StatusCode, &'static str)>,
    /// The token that every request needs.
    pub token: Option<&'static str>,
    /// The number of bytes after which each of the store's next responses ends.
    pub cuts: Vec<usize>,
    /// If true, the store ignores ranges and sends the whole file.
    pub no_ranges: bool,
    /// If true, the store sends bytes that do not match the etag.
    pub damage: bool,
    /// The requests that the hub and the store have received, in order.
    pub received: Vec<String>,
}

/// A fake hub and its store, on two ports.
#[derive(Clone, Debug)]
pub struct FakeHub {
    state: Arc<Mutex<FakeHubState>>,
    hub: SocketAddr,
    store: SocketAddr,
}

impl FakeHub {
    /// Starts a hub with one model, `org/name`, that has these files.
    pub async fn new(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let state = Arc::new(Mutex::new(FakeHubState { files, ..FakeHubState::default() }));
        let (hub, store) = (listener().await, listener().await);
        let address = |listener: &tokio::net::TcpListener| listener.local_addr().expect("it is bound");
        let fake = Self { state, hub: address(&hub), store: address(&store) };
        let hub_routes = Router::new()
            .route("/api/models/{org}/{name}/revision/{revision}", get(revision))
            .route("/api/resolve-cache/{org}/{name}/{commit}/{*file}", get(small))
            .route("/{org}/{name}/resolve/{commit}/{*file}", get(resolve))
            .with_state(fake.clone());
        serve(hub, hub_routes);
        serve(store, Router::new().route("/blobs/{digest}", get(blob)).with_state(fake.clone()));
        fake
    }

    pub fn state(&self) -> std::sync::MutexGuard<'_, FakeHubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn settings(&self, cache: &FilePath) -> HubSettings {
        HubSettings {
            endpoint: format!("http://{}", self.hub),
            token: None,
            cache: cache.to_owned(),
            offline: false,
            authorities: Authorities::default(),
            proxies: Proxies::default(),
        }
    }

    pub fn hub(&self) -> SocketAddr {
        self.hub
    }

    pub fn client(&self, cache: &FilePath) -> Hub {
        Hub::new(self.settings(cache)).expect("an address")
    }

    /// Returns the requests that were received since the last call.
    pub fn received(&self) -> Vec<String> {
        std::mem::take(&mut self.state().received)
    }

    fn hear(&self, what: String) {
        self.state().received.push(what);
    }

    /// Checks that a request may be answered. The error is the response that the state requires.
    fn admitted(&self, headers: &HeaderMap) -> Result<(), Box<Response>> {
        let state = self.state();
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let wanted = state.token.map(|token| format!("Bearer {token}"));
        let refusal = match (state.refuse, wanted) {
            (Some(refusal), _) => refusal,
            (None, Some(wanted)) if shown != Some(&wanted) => (StatusCode::UNAUTHORIZED, "RepoNotFound"),
            _ => return Ok(()),
        };
        Err(Box::new((refusal.0, [("x-error-code", refusal.1)]).into_response()))
    }

    fn file(&self, name: &str) -> Option<Vec<u8>> {
        self.state().files.get(name).cloned()
    }
}

async fn listener() -> tokio::net::TcpListener {
    tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port")
}

#[allow(clippy::disallowed_methods, reason = "a test's server ends with its runtime")]
fn serve(listener: tokio::net::TcpListener, routes: Router) {
    tokio::spawn(async move { axum::serve(listener, routes).await });
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

pub fn git_name(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0", bytes.len()).as_bytes());
    context.update(bytes);
    hex(context.finish().as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// === the hub ===

async fn revision(
    State(fake): State<FakeHub>,
    Path((_, name, revision)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Response {
    fake.hear(format!("revision {revision}"));
    if let Err(refusal) = fake.admitted(&headers) {
        return *refusal;
    }
    let commit = match (name.as_str(), revision.as_str()) {
        ("name", "main") => COMMIT,
        ("name", "refs/pr/3" | OLD) => OLD,
        ("name", _) => {
            return (StatusCode::NOT_FOUND, [("x-error-code", "RevisionNotFound")]).into_response();
        }
        _ => return (StatusCode::NOT_FOUND, [("x-error-code", "RepoNotFound")]).into_response(),
    };
    let siblings: Vec<_> = fake.state().files.keys().map(|name| json!({ "rfilename": name })).collect();
    Json(json!({ "id": "org/name", "sha": commit, "siblings": siblings })).into_response()
}

/// Redirects small files to another path of the hub, and large ones to the store.
async fn resolve(
    State(fake): State<FakeHub>,
    Path((org, name, commit, file)): Path<(String, String, String, String)>,
    request: Request,
) -> Response {
    fake.hear(format!("{} {file}", request.method()));
    if let Err(refusal) = fake.admitted(request.headers()) {
        return *refusal;
    }
    let Some(bytes) = fake.file(&file) else { return StatusCode::NOT_FOUND.into_response() };
    if !file.ends_with(".safetensors") {
        let there = format!("/api/resolve-cache/{org}/{name}/{commit}/{file}");
        return (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, there)]).into_response();
    }
    let there = format!("http://{}/blobs/{}?signature=s", fake.store, sha256(&bytes));
    let about = [
        ("location", there),
        ("x-repo-commit", commit),
        ("x-linked-etag", format!("\"{}\"", sha256(&bytes))),
        ("x-linked-size", bytes.len().to_string()),
    ];
    (StatusCode::FOUND, axum::response::AppendHeaders(about)).into_response()
}

async fn small(
    State(fake): State<FakeHub>,
    Path((_, _, _, file)): Path<(String, String, String, String)>,
    request: Request,
) -> Response {
    if let Err(refusal) = fake.admitted(request.headers()) {
        return *refusal;
    }
    let bytes = fake.file(&file).unwrap_or_default();
    ([("etag", format!("\"{}\"", git_name(&bytes)))], bytes).into_response()
}

// === the store ===

async fn blob(State(fake): State<FakeHub>, Path(digest): Path<String>, request: Request) -> Response {
    assert!(!request.headers().contains_key(header::AUTHORIZATION), "the token is for the hub alone");
    let range = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok()).unwrap_or("all");
    fake.hear(format!("store {range}"));
    let mut state = fake.state();
    let content = state.files.values().find(|bytes| sha256(bytes) == digest).cloned().expect("a content");
    let first = range.strip_prefix("bytes=").and_then(|range| range.trim_end_matches('-').parse().ok());
    let first: usize = if state.no_ranges { 0 } else { first.unwrap_or(0) };
    if first > content.len() {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    let mut bytes = content[first..].to_vec();
    if state.damage {
        bytes.iter_mut().for_each(|byte| *byte ^= 1);
    }
    let status = if first > 0 { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let about = [
        (header::CONTENT_LENGTH, bytes.len().to_string()),
        (header::CONTENT_RANGE, format!("bytes {first}-{}/{}", content.len().max(1) - 1, content.len())),
    ];
    let cut = if state.cuts.is_empty() { bytes.len() } else { state.cuts.remove(0) };
    (status, about, cut_off(bytes, cut)).into_response()
}

/// Makes a body of the first `n` bytes. If there are more, the connection breaks after them.
fn cut_off(bytes: Vec<u8>, n: usize) -> Body {
    if bytes.len() <= n {
        return Body::from(bytes);
    }
    let first = stream::iter([Ok(Bytes::from(bytes).slice(..n))]);
    // The wait makes the server send the bytes that are already written.
    let cut = stream::once(async {
        tokio::task::yield_now().await;
        Err(std::io::Error::other("the wire was cut"))
    });
    Body::from_stream(first.chain(cut))
}
