//! The HTTP client of upstream servers.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use types::in_full;

use crate::trust;

/// The longest time of a TCP connect. A server that does not answer for it is down.
const CONNECT_WITHIN: Duration = Duration::from_millis(700);
/// How long an idle connection is kept: less than the 5 s after which the engines close it.
const IDLE_WITHIN: Duration = Duration::from_secs(4);
/// The idle connections that are kept for each server.
const IDLE_MAX: usize = 1024;
/// The largest health page.
const HEALTH_BYTES_MAX: usize = 1 << 20;

/// The body of an answer, boxed once per answer.
pub(super) type AnswerBytes = axum::body::Body;

/// Why a server gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unanswered {
    /// No connection was made.
    #[error("no connection: {0}")]
    Unreachable(String),
    #[error("{0}")]
    Broken(String),
    /// The server's health check failed while it had sent no byte.
    #[error("the server's health check failed before the first byte of its answer")]
    Down,
}

/// Sends requests to upstream servers. Dropping a call, or its answer's body, closes its connection. Clones share the
/// connections.
#[derive(Clone, Debug)]
pub(super) struct EngineClient(Client<HttpsConnector<HttpConnector>, Full<Bytes>>);

impl EngineClient {
    /// Makes a client that trusts the machine's authorities, or those that browsers trust if the machine has none.
    pub(super) fn new() -> Self {
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        let connector = trust::tls().https_or_http().enable_http1().wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_WITHIN)
            .pool_max_idle_per_host(IDLE_MAX)
            .build(connector);
        Self(client)
    }

    /// Sends a request. Returns with the head of the answer.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<AnswerBytes>, Unanswered> {
        match self.0.request(request).await {
            Ok(answer) => Ok(answer.map(AnswerBytes::new)),
            Err(error) if error.is_connect() => Err(Unanswered::Unreachable(in_full(&error))),
            Err(error) => Err(Unanswered::Broken(in_full(&error))),
        }
    }

    /// Asks a server for its health. An error is the reason why it is not well.
    pub(super) async fn check_health(&self, base: &str, within: Duration) -> Result<(), String> {
        let page = async {
            let request = Request::get(format!("{base}/health")).body(Full::default());
            let answer = self.send(request.map_err(|error| error.to_string())?).await;
            let (head, body) = answer.map_err(|error| error.to_string())?.into_parts();
            // The connection is used again once its answer is read.
            Limited::new(body, HEALTH_BYTES_MAX).collect().await.map_err(|error| in_full(&*error))?;
            if head.status.is_success() { Ok(()) } else { Err(format!("the server answers {}", head.status)) }
        };
        tokio::time::timeout(within, page).await.map_err(|_| format!("no answer within {within:?}"))?
    }
}
