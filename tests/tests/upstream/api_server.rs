//! A puppet of Kubernetes' API server: it lists and watches EndpointSlices over TLS, for those who have the token.
//!
//! The test `the_puppet_serves_what_the_kubernetes_api_defines` checks its objects by the API's schemas.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path as Route, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::serve::Listener;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::engine_server::OwnRuntime;

/// The namespace of all slices and of the router's pod.
pub const NAMESPACE: &str = "prod";
/// How long a watch stays open here, as long as it asks for at least this time.
const WATCH_FOR: Duration = Duration::from_secs(2);

/// An API server. Dropping it ends it.
#[derive(Debug)]
pub struct ApiServer {
    pub addr: SocketAddr,
    tls: Arc<ServerConfig>,
    /// The folder of a pod's service account.
    account: TempDir,
    shared: Arc<Shared>,
    /// `None` while the server is away.
    runtime: Option<OwnRuntime>,
}

#[derive(Debug)]
struct Shared {
    cluster: Mutex<Cluster>,
    /// The newest version.
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Cluster {
    slices: BTreeMap<String, Value>,
    /// All changes with their versions.
    changes: Vec<(u64, &'static str, Value)>,
    /// Whether the next watch is refused, as after its version was compacted.
    is_compacted: bool,
    token: String,
    may_read: bool,
    seen: Calls,
}

/// The calls since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub lists: usize,
    pub further_pages: usize,
    pub watches: usize,
}

impl ApiServer {
    pub fn start() -> Self {
        let account = tempfile::tempdir().expect("a folder");
        let tls = certified(account.path());
        std::fs::write(account.path().join("namespace"), NAMESPACE).expect("written");
        let cluster = Cluster { may_read: true, ..Cluster::default() };
        let shared = Arc::new(Shared { cluster: Mutex::new(cluster), version: watch::Sender::new(100) });
        let mut server = Self { addr: baton_tests::free_addr(), tls, account, shared, runtime: None };
        server.accept_token("first");
        server.write_token("first");
        server.revive();
        server
    }

    pub fn account(&self) -> &Path {
        self.account.path()
    }

    /// Ends the server. Its objects stay.
    pub fn kill(&mut self) {
        self.runtime = None;
    }

    /// Starts it again on the same port.
    pub fn revive(&mut self) {
        self.kill();
        let routes = Router::new()
            .route("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", get(slices))
            .with_state(Arc::clone(&self.shared));
        let listener = bound(self.addr);
        listener.set_nonblocking(true).expect("a socket");
        let tls = TlsAcceptor::from(Arc::clone(&self.tls));
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        runtime.spawn(async move {
            let tcp = TcpListener::from_std(listener).expect("a socket");
            drop(axum::serve(TlsListener { tcp, tls }, routes).await);
        });
        self.runtime = Some(OwnRuntime::new(runtime));
    }

    /// Adds a slice or replaces it.
    pub fn put(&self, slice: &Value) {
        let name = slice["metadata"]["name"].as_str().expect("a name").to_owned();
        let is_new = !self.cluster().slices.contains_key(&name);
        self.change(if is_new { "ADDED" } else { "MODIFIED" }, slice.clone(), |slices, slice| {
            drop(slices.insert(name, slice));
        });
    }

    pub fn remove(&self, name: &str) {
        let slice = self.cluster().slices[name].clone();
        self.change("DELETED", slice, |slices, _| drop(slices.remove(name)));
    }

    fn change(
        &self,
        kind: &'static str,
        mut slice: Value,
        apply: impl FnOnce(&mut BTreeMap<String, Value>, Value),
    ) {
        let version = *self.shared.version.borrow() + 1;
        slice["metadata"]["resourceVersion"] = json!(version.to_string());
        let mut cluster = self.cluster();
        cluster.changes.push((version, kind, slice.clone()));
        apply(&mut cluster.slices, slice);
        drop(cluster);
        self.shared.version.send_replace(version);
    }

    /// Forgets all changes: the next watch is refused.
    pub fn compact(&self) {
        self.cluster().is_compacted = true;
    }

    /// The only token that is accepted from now on.
    pub fn accept_token(&self, token: &str) {
        self.cluster().token = token.to_owned();
    }

    /// Replaces the token in the pod, as the kubelet does.
    pub fn write_token(&self, token: &str) {
        std::fs::write(self.account().join("token"), token).expect("written");
    }

    /// Gives the Role to the service account, or takes it away.
    pub fn set_role(&self, may_read: bool) {
        self.cluster().may_read = may_read;
    }

    pub fn seen(&self) -> Calls {
        self.cluster().seen
    }

    /// Returns all slices, the watch's events and the answers of a list, for the check of schemas.
    pub fn objects(&self) -> Vec<Value> {
        let cluster = self.cluster();
        cluster.slices.values().chain(cluster.changes.iter().map(|(_, _, slice)| slice)).cloned().collect()
    }

    fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.shared.cluster()
    }
}

impl Shared {
    fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().expect("no test panics with it")
    }
}

/// Makes a CA, puts it into the pod's folder, and certifies a server at this address.
fn certified(account: &Path) -> Arc<ServerConfig> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
    std::fs::write(account.join("ca.crt"), ca.pem()).expect("written");
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["kubernetes".to_owned(), "127.0.0.1".to_owned()]);
    let certificate = params.expect("names").signed_by(&key, &ca).expect("a certificate");
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let config =
        ServerConfig::builder_with_provider(default_provider().into()).with_safe_default_protocol_versions();
    let config = config.expect("ring has the ciphers").with_no_client_auth();
    Arc::new(config.with_single_cert(vec![certificate.der().clone()], key).expect("its key"))
}

/// Binds the port. The runtime of a killed server may still close its own socket.
fn bound(addr: SocketAddr) -> std::net::TcpListener {
    let tries = (0..100).find_map(|_| match std::net::TcpListener::bind(addr) {
        Ok(listener) => Some(listener),
        Err(_) => {
            std::thread::sleep(Duration::from_millis(20));
            None
        }
    });
    tries.expect("its port is free")
}

struct TlsListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, peer)) = self.tcp.accept().await else { continue };
            if let Ok(stream) = self.tls.accept(stream).await {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.tcp.local_addr()
    }
}

type Asked = HashMap<String, String>;

async fn slices(
    State(shared): State<Arc<Shared>>,
    Route(namespace): Route<String>,
    Query(asked): Query<Asked>,
    headers: HeaderMap,
) -> Response {
    let verb = if asked.get("watch").is_some_and(|watch| watch == "true") { "watch" } else { "list" };
    let cluster = shared.cluster();
    if headers.get(header::AUTHORIZATION).is_none_or(|value| *value != format!("Bearer {}", cluster.token)) {
        return refused(401, "Unauthorized", "Unauthorized");
    }
    if !cluster.may_read || namespace != NAMESPACE {
        let message = format!(
            "endpointslices.discovery.k8s.io is forbidden: User \"system:serviceaccount:{NAMESPACE}:baton-router\" cannot \
             {verb} resource \"endpointslices\" in API group \"discovery.k8s.io\" in the namespace \"{namespace}\""
        );
        return refused(403, "Forbidden", &message);
    }
    drop(cluster);
    if verb == "list" { list(&shared, &asked) } else { watched(shared, &asked) }
}

fn refused(code: u16, reason: &str, message: &str) -> Response {
    (StatusCode::from_u16(code).expect("a status"), axum::Json(status(code, reason, message))).into_response()
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code,
    })
}

/// Returns whether a label selector, which names one label, selects a slice.
fn is_selected(slice: &Value, asked: &Asked) -> bool {
    let selector = asked.get("labelSelector").expect("slices of one Service are asked for");
    let (label, value) = selector.split_once('=').expect("one label");
    slice["metadata"]["labels"][label] == value
}

fn list(shared: &Shared, asked: &Asked) -> Response {
    let mut cluster = shared.cluster();
    let limit: usize = asked.get("limit").map_or(usize::MAX, |limit| limit.parse().expect("a number"));
    let offset = asked.get("continue").map_or(0, |token| {
        let token = BASE64.decode(token).expect("the token as it was given");
        String::from_utf8(token).expect("text").parse().expect("a number")
    });
    *(if offset == 0 { &mut cluster.seen.lists } else { &mut cluster.seen.further_pages }) += 1;
    let selected: Vec<&Value> = cluster.slices.values().filter(|slice| is_selected(slice, asked)).collect();
    // The items of a list do not repeat their kind.
    let item = |slice: &&Value| {
        let mut item = (*slice).clone();
        item.as_object_mut().expect("an object").retain(|name, _| name != "kind" && name != "apiVersion");
        item
    };
    let items: Vec<Value> = selected.iter().skip(offset).take(limit).map(item).collect();
    let mut metadata = json!({ "resourceVersion": shared.version.borrow().to_string() });
    if offset + items.len() < selected.len() {
        metadata["continue"] = json!(BASE64.encode(format!("{:04}", offset + items.len())));
    }
    axum::Json(json!({
        "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata, "items": items,
    }))
    .into_response()
}

/// Answers a watch: the changes since its version, a bookmark before its end.
fn watched(shared: Arc<Shared>, asked: &Asked) -> Response {
    let number = |name: &str| asked.get(name).and_then(|value| value.parse::<u64>().ok()).expect("a number");
    let (since, asked_for) = (number("resourceVersion"), Duration::from_secs(number("timeoutSeconds")));
    assert_eq!(asked.get("allowWatchBookmarks").map(String::as_str), Some("true"));
    let mut cluster = shared.cluster();
    cluster.seen.watches += 1;
    if std::mem::take(&mut cluster.is_compacted) {
        let message = format!("too old resource version: {since} ({})", since + 1);
        let body = line("ERROR", &status(410, "Expired", &message));
        return ([(header::CONTENT_TYPE, "application/json")], body).into_response();
    }
    drop(cluster);
    let (versions, until) = (shared.version.subscribe(), Instant::now() + WATCH_FOR.min(asked_for));
    let state = Some((shared, versions, since));
    let asked = asked.clone();
    let lines = futures::stream::unfold(state, move |state| {
        let asked = asked.clone();
        async move {
            let (shared, mut versions, since) = state?;
            let is_over = timeout_at(until, versions.wait_for(|version| *version > since)).await.is_err();
            let newest = *versions.borrow_and_update();
            if is_over {
                return Some((Ok::<_, Infallible>(line("BOOKMARK", &bookmark(newest))), None));
            }
            let changes = shared.cluster().changes.clone();
            let new =
                changes.iter().filter(|(version, _, slice)| *version > since && is_selected(slice, &asked));
            let text: String = new.map(|(_, kind, slice)| line(kind, slice)).collect();
            Some((Ok(text), Some((shared, versions, newest))))
        }
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

fn line(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({ "type": kind, "object": object }))
}

fn bookmark(version: u64) -> Value {
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": { "resourceVersion": version.to_string(), "creationTimestamp": null },
        "addressType": "", "endpoints": null, "ports": null,
    })
}
