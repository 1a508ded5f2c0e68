//! The admin port for operators: liveness, readiness and metrics.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::connections::{ConnectionCounts, ConnectionLimits};
use crate::gate::StillHeld;
use crate::metrics::{Metrics, PROTOBUF_FORMAT, is_protobuf_preferred};
use crate::net::Listener;
use crate::server::{self, PortTls, ServerLimits};
use crate::shutdown::Shutdown;

/// Whether the process accepts work, and whether a rollout may replace other processes. Clones share one
/// state.
#[derive(Clone, Debug)]
pub struct Readiness {
    reasons: watch::Sender<Reasons>,
}

/// The reasons why a process does not accept work yet, and why a rollout must wait; `None`: no reason.
#[derive(Debug)]
struct Reasons {
    ready: Option<String>,
    rollout: Option<String>,
    /// The reason why the process gets no work although it could do it.
    registration: Option<String>,
}

impl Reasons {
    fn of_ready(&self) -> Option<&String> {
        self.ready.as_ref().or(self.registration.as_ref())
    }
}

impl Readiness {
    /// Makes a process that is not ready; `reason` names the event for which it waits.
    pub fn unready(reason: impl Into<String>) -> Self {
        let reason = Some(reason.into());
        let (ready, rollout) = (reason.clone(), reason);
        Self { reasons: watch::Sender::new(Reasons { ready, rollout, registration: None }) }
    }

    pub fn set_ready(&self) {
        self.set(None, None);
    }

    pub fn set_unready(&self, reason: impl Into<String>) {
        let reason = Some(reason.into());
        self.set(reason.clone(), reason);
    }

    /// Sets the reasons why the process does not accept work yet (`ready`) and why a rollout must wait
    /// (`rollout`).
    pub fn set(&self, ready: Option<String>, rollout: Option<String>) {
        self.reasons.send_modify(|reasons| (reasons.ready, reasons.rollout) = (ready, rollout));
    }

    /// Sets the reason why the process is not ready although it could work: the registry does not list it. `None`: it
    /// does.
    pub fn set_registration(&self, reason: Option<String>) {
        self.reasons.send_modify(|reasons| reasons.registration = reason);
    }

    /// Returns whether the process is ready. `Err` carries the reason.
    pub fn check(&self) -> Result<(), String> {
        self.reasons.borrow().of_ready().cloned().map_or(Ok(()), Err)
    }

    /// Returns whether a rollout may go on to replace other processes. `Err` carries the reason.
    pub fn check_rollout(&self) -> Result<(), String> {
        let reasons = self.reasons.borrow();
        reasons.rollout.as_ref().or(reasons.registration.as_ref()).cloned().map_or(Ok(()), Err)
    }

    /// Returns once the process is ready. Cancel-safe.
    pub async fn wait(&self) {
        let mut reasons = self.reasons.subscribe();
        reasons
            .wait_for(|reasons| reasons.of_ready().is_none())
            .await
            .expect("the readiness holds the sender");
    }
}

/// Serves `/live`, `/ready`, `/rollout`, `/version` and `/metrics`. A process merges its own pages
/// (`/debug/…`) into the router.
pub fn router(readiness: Readiness, metrics: Metrics) -> Router {
    Router::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready).with_state(readiness.clone()))
        .route("/rollout", get(rollout).with_state(readiness))
        .route("/version", get(version))
        .route("/metrics", get(page).with_state(metrics))
}

/// Serves `/debug/config` of a node: its settings as [`crate::config::shown`] returns them. It needs the
/// admin key.
pub fn config_page(settings: Value) -> Router {
    Router::new().route("/debug/config", get(config).with_state(settings))
}

/// Answers `/debug/config`.
pub async fn config(State(settings): State<Value>) -> Json<Value> {
    Json(settings)
}

/// Answers `/version`: the version of the process, and those of the protocol between processes that it
/// speaks.
pub async fn version() -> Json<Value> {
    let protocol = json!({ "min": types::node::PROTOCOL.min, "max": types::node::PROTOCOL.max });
    Json(json!({ "version": env!("CARGO_PKG_VERSION"), "protocol": protocol }))
}

/// Serves the admin pages until shutdown is requested.
///
/// Pass the shutdown that is triggered last, so that operators can observe a drain.
pub async fn serve(
    listener: Box<dyn Listener>,
    router: Router,
    shutdown: Shutdown,
    connections: ConnectionLimits,
    counts: ConnectionCounts,
) -> Result<(), StillHeld> {
    let connections = ConnectionLimits { connections_max: connections.admin_max, ..connections };
    let limits = ServerLimits { connections, counts, drain: DRAIN, ..ServerLimits::default() };
    server::serve(listener, PortTls::Plaintext, router, shutdown, limits).await
}

const DRAIN: std::time::Duration = std::time::Duration::from_secs(1);

async fn ready(State(readiness): State<Readiness>) -> Response {
    answer(readiness.check())
}

async fn rollout(State(readiness): State<Readiness>) -> Response {
    answer(readiness.check_rollout())
}

fn answer(checked: Result<(), String>) -> Response {
    match checked {
        Ok(()) => Json(json!({ "ready": true })).into_response(),
        Err(reason) => {
            let body = Json(json!({ "ready": false, "reason": reason }));
            (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
        }
    }
}

/// Returns the page of `/metrics`, as protobuf for a scraper that prefers it.
pub async fn page(State(metrics): State<Metrics>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if is_protobuf_preferred(accept) {
        ([(header::CONTENT_TYPE, PROTOBUF_FORMAT)], metrics.protobuf_page()).into_response()
    } else {
        ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], metrics.page()).into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::gate::Gate;
    use crate::net::{Net, TcpNet};
    use crate::task::spawn_guarded;

    /// Sends a plain HTTP/1 request. Returns the status line and the body of the answer.
    async fn fetch(addr: &str, path: &str) -> (String, String) {
        let mut stream = TcpNet.connect(addr).await.expect("the server listens");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
    }

    #[tokio::test]
    async fn pages_table() {
        let (readiness, metrics) = (Readiness::unready("loading weights"), Metrics::new("router"));
        metrics.gauge("running", "Requests.").set(3);
        let own = Router::new().route("/debug/kv", get(|| async { "kv" }));
        let listener = TcpNet.listen("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound").to_string();
        let (gate, shutdown) = (Gate::new("test"), Shutdown::new());
        let router = router(readiness.clone(), metrics.clone()).merge(own);
        let server = spawn_guarded(
            &gate,
            "admin",
            serve(
                listener,
                router,
                shutdown.clone(),
                ConnectionLimits::default(),
                ConnectionCounts::default(),
            ),
        );

        let check = async |path: &str, status: &str, body: &str| {
            assert_eq!(fetch(&addr, path).await, (format!("HTTP/1.1 {status}"), body.to_owned()), "{path}");
        };
        let all = async {
            check("/live", "200 OK", "live\n").await;
            check("/ready", "503 Service Unavailable", r#"{"ready":false,"reason":"loading weights"}"#).await;
            readiness.set_ready();
            check("/ready", "200 OK", r#"{"ready":true}"#).await;
            check("/rollout", "200 OK", r#"{"ready":true}"#).await;
            readiness.set(Some("other weights".into()), None);
            check("/ready", "503 Service Unavailable", r#"{"ready":false,"reason":"other weights"}"#).await;
            check("/rollout", "200 OK", r#"{"ready":true}"#).await;
            readiness.set_unready("draining");
            check("/rollout", "503 Service Unavailable", r#"{"ready":false,"reason":"draining"}"#).await;
            check("/ready", "503 Service Unavailable", r#"{"ready":false,"reason":"draining"}"#).await;
            check("/metrics", "200 OK", &metrics.page()).await;
            check("/debug/kv", "200 OK", "kv").await;
            let (status, body) = fetch(&addr, "/version").await;
            assert_eq!(status, "HTTP/1.1 200 OK");
            let (shown, protocol) =
                (serde_json::from_str::<serde_json::Value>(&body).expect("JSON"), types::node::PROTOCOL);
            let protocol = serde_json::json!({"min": protocol.min, "max": protocol.max});
            let version = env!("CARGO_PKG_VERSION");
            assert_eq!(shown, serde_json::json!({"version": version, "protocol": protocol}));
            check("/nothing", "404 Not Found", "").await;
            shutdown.trigger();
            server.await.expect("the server ran").expect("nothing is late");
        };
        tokio::time::timeout(Duration::from_secs(20), all).await.expect("in time");
    }

    #[tokio::test(start_paused = true)]
    async fn readiness_can_be_waited_for() {
        let readiness = Readiness::unready("starting");
        let setter = readiness.clone();
        let set = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            setter.set_ready();
        };
        tokio::join!(readiness.wait(), set);
        assert_eq!(readiness.check(), Ok(()));
    }
}
