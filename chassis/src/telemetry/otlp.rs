//! Ended spans on their way to a collector: OTLP, as protobuf over plain HTTP.
//!
//! A thread of the exporter's own collects spans into batches and sends them; a process never waits for its collector.
//! While there is none, spans are lost, and that is one line in the log.

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

/// What everybody's exporters read when nothing else is said.
pub const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// How long a collector may take to take a batch.
const SENT_WITHIN: Duration = Duration::from_secs(5);
/// What a collector may answer.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Where spans go: the setting, or else the variable. `None`: nowhere.
pub(super) fn endpoint(setting: &str) -> Option<String> {
    let said = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    said(setting).or_else(|| said(&std::env::var(ENDPOINT_VARIABLE).unwrap_or_default()))
}

/// Sends to `endpoint`, which is a collector's address without a path.
pub(super) fn exporter(endpoint: &str) -> Result<SpanExporter, StartError> {
    let refused = |reason: String| StartError::Otlp { endpoint: endpoint.to_owned(), reason };
    let uri: Uri = endpoint.parse().map_err(|error| refused(format!("{error}")))?;
    if uri.scheme_str() != Some("http") || uri.host().is_none() {
        return Err(refused("it is not http://host:port".to_owned()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| refused(error.to_string()))?;
    let postman = BatchSender { runtime, was_accepted: AtomicBool::new(true) };
    let exporter = SpanExporter::builder().with_http().with_http_client(postman);
    let exporter = exporter.with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')));
    exporter.build().map_err(|error| refused(error.to_string()))
}

/// What a collector is told of the process.
pub(super) fn resource(process: &'static str) -> Resource {
    Resource::builder().with_service_name(format!("baton-{process}")).build()
}

/// Sends batches, one connection for each: there is one every few seconds.
#[derive(Debug)]
struct BatchSender {
    /// The exporter's thread is in no runtime; this one lives only while it sends.
    runtime: Runtime,
    /// The last batch was taken.
    was_accepted: AtomicBool,
}

#[async_trait]
impl HttpClient for BatchSender {
    /// Blocks: only the exporter's own thread calls it.
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
            (Some(error), true) => warn!(%error, "the collector takes no spans, they are lost"),
            (None, false) => info!("the collector takes spans again"),
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
        // What it has brought is still to be read.
        _ = connection => exchange.await,
    }
}
