//! Sends ended spans to a collector: OTLP, as protobuf over plain HTTP.
//!
//! The exporter's own thread collects spans into batches and sends them, so a process never waits for its collector.
//! While the collector is unreachable, spans are lost; this is logged once.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use tokio::runtime::Runtime;
use tracing::{info, warn};

use crate::error::StartError;
use crate::net::{Net, TcpNet};

/// The standard variable for the endpoint, used if the setting is empty.
pub const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// The timeout for sending one batch.
const SENT_WITHIN: Duration = Duration::from_secs(5);
/// The largest answer of a collector, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Returns the collector's endpoint from the setting, or else from the variable; `None` if neither is set.
pub(super) fn endpoint(setting: &str) -> Option<String> {
    let said = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    said(setting).or_else(|| said(&std::env::var(ENDPOINT_VARIABLE).unwrap_or_default()))
}

/// Makes an exporter to `endpoint`, a collector's address without a path.
pub(super) fn exporter(endpoint: &str) -> Result<SpanExporter, StartError> {
    let refused = |reason: String| StartError::Otlp { endpoint: endpoint.to_owned(), reason };
    let uri: Uri = endpoint.parse().map_err(|error| refused(format!("{error}")))?;
    if uri.scheme_str() != Some("http") || uri.host().is_none() {
        return Err(refused("it must be http://host:port".to_owned()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| refused(error.to_string()))?;
    let postman = BatchSender { runtime, was_accepted: AtomicBool::new(true) };
    let exporter = SpanExporter::builder().with_http().with_http_client(postman);
    let exporter = exporter.with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')));
    exporter.build().map_err(|error| refused(error.to_string()))
}

/// Returns the description of the process that the collector gets with each batch.
pub(super) fn resource(process: &'static str) -> Resource {
    Resource::builder().with_service_name(format!("baton-{process}")).build()
}

/// The HTTP client of the exporter. It opens one connection per batch: there is one batch every few seconds.
#[derive(Debug)]
struct BatchSender {
    /// The runtime for sending, because the exporter's thread has none.
    runtime: Runtime,
    /// Whether the last batch was accepted. A warning is logged only when this changes.
    was_accepted: AtomicBool,
}

#[async_trait]
impl HttpClient for BatchSender {
    /// Sends a batch and blocks the calling thread: only the exporter's own thread calls this.
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.runtime.block_on(async { tokio::time::timeout(SENT_WITHIN, post(request)).await });
        let sent = sent.unwrap_or_else(|late| Err(late.into()));
        self.note(sent.as_ref().err());
        sent
    }
}

impl BatchSender {
    fn note(&self, error: Option<&HttpError>) {
        match (error, self.was_accepted.swap(error.is_none(), Ordering::Relaxed)) {
            (Some(error), true) => {
                warn!(%error, "sending trace spans to the collector failed, the spans are lost")
            }
            (None, false) => info!("sending trace spans to the collector works again"),
            _ => {}
        }
    }
}

async fn post(request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let (mut parts, body) = request.into_parts();
    let authority =
        parts.uri.authority().cloned().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let addr = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80));
    parts.uri = parts.uri.path().parse()?;
    parts.headers.insert(header::HOST, authority.as_str().parse()?);
    let (mut sender, connection) = handshake(TokioIo::new(TcpNet.connect(&addr).await?)).await?;
    let exchange = async {
        let response = sender.send_request(Request::from_parts(parts, Full::new(body))).await?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await?.to_bytes();
        Ok(Response::from_parts(parts, body))
    };
    tokio::pin!(exchange);
    tokio::select! {
        biased;
        answered = &mut exchange => answered,
        // The connection has ended, but its buffered answer is still to be read, so this waits for the
        // answer.
        _ = connection => exchange.await,
    }
}
