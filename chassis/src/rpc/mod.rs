//! The setup of gRPC: headers and limits of every call between Baton's processes.
//!
//! [`channel`] makes the client's side and [`serve`] the server's. [`standard_services`] makes the services that every
//! server has. Each call has the headers `traceparent`, `baton-request-id` and `baton-protocol`; with a cluster secret
//! also `baton-target` and `baton-signature` ([`crate::identity::call`]). With certificates every connection is TLS
//! ([`crate::identity::tls`]), and each call has callers of certain roles (`roles.rs`).

mod headers;
mod receive;
mod roles;
mod signed;
#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use axum::middleware;
use hyper_util::rt::TokioIo;
use tonic::Status;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Endpoint, Uri};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
pub use tonic_health::server::HealthReporter;
use tonic_health::server::health_reporter;
use tonic_reflection::server::{Builder as Reflection, Error as ReflectionError};
use tracing::warn;

use crate::error::StartError;
use crate::gate::StillHeld;
use crate::identity::ExpectedPeer;
use crate::identity::refusals::RefusedKind;
use crate::net::{Listener, Stream};
use crate::server::{self, PortTls, ServerLimits};
use crate::shutdown::Shutdown;
use crate::world::World;
pub use headers::{CallHeaders, PROTOCOL_HEADER, REQUEST_ID_HEADER, call};
pub use receive::Callers;
pub use signed::SignedChannel;

/// The largest message. Pass it to `max_decoding_message_size` of every client and server: tonic's own limit
/// is 4 MiB.
pub use types::node::MESSAGE_BYTES_MAX;

/// The bytes of one answer's stream that its reader has not taken.
const STREAM_WINDOW: u32 = 256 << 10;
/// The same for all streams of a connection: as much as HTTP/2 allows. A smaller window is used up by streams whose readers
/// are slow, and then all other calls to the peer wait too.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// The services that every server has, for reflection's list.
const STANDARD_SERVICES: [&str; 3] = [
    tonic_health::pb::health_server::SERVICE_NAME,
    tonic_reflection::pb::v1::server_reflection_server::SERVICE_NAME,
    tonic_reflection::pb::v1alpha::server_reflection_server::SERVICE_NAME,
];

/// The limits of one client. The server's limits are [`ServerLimits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RpcLimits {
    pub connect_timeout: Duration,
    /// The interval of HTTP/2 pings on a connection.
    pub keepalive_interval: Duration,
    /// A peer that does not answer a ping in this time is gone, even if its kernel still acknowledges bytes.
    pub keepalive_timeout: Duration,
    /// The limit of concurrent calls on this channel; further calls wait.
    pub calls_max: usize,
}

impl Default for RpcLimits {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            keepalive_interval: Duration::from_secs(2),
            keepalive_timeout: Duration::from_secs(3),
            calls_max: 4096,
        }
    }
}

/// A connection to one peer that adds Baton's headers to every call, and signs it if there is a cluster secret. Clones
/// share the connection.
pub type RpcChannel = InterceptedService<SignedChannel, CallHeaders>;

/// Makes a channel to the peer at `addr` (`host:port`). With certificates, the peer must be the `expected` one.
///
/// The first call connects, and a call after a lost connection reconnects. A malformed address behaves like one without
/// a listener: the call fails with UNAVAILABLE.
pub fn channel(world: &World, addr: &str, expected: ExpectedPeer, limits: RpcLimits) -> RpcChannel {
    let endpoint = Endpoint::from_shared(format!("http://{addr}"))
        .unwrap_or_else(|_| Endpoint::from_static("http://malformed"))
        .http2_keep_alive_interval(limits.keepalive_interval)
        .keep_alive_timeout(limits.keepalive_timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .concurrency_limit(limits.calls_max);
    let connector = {
        let (world, addr) = (world.clone(), addr.to_owned());
        tower::service_fn(move |_: Uri| {
            connect(world.clone(), addr.clone(), expected.clone(), limits.connect_timeout)
        })
    };
    let channel = endpoint.connect_with_connector_lazy(connector);
    InterceptedService::new(SignedChannel::new(channel, world.clone(), addr), CallHeaders)
}

/// Connects to `addr` with a timeout of its own: tonic's timeout surfaces as UNKNOWN, an error from here as UNAVAILABLE.
async fn connect(
    world: World,
    addr: String,
    expected: ExpectedPeer,
    within: Duration,
) -> io::Result<TokioIo<Stream>> {
    let connected = async {
        let (stream, identity) = (world.net().connect(&addr).await?, world.identity());
        let Some(tls) = identity.tls() else { return Ok(stream) };
        let secured = tls.connect(stream, expected).await;
        secured.map_err(|refused| {
            warn!(peer = addr, reason = %refused, "TLS connection to peer refused");
            identity.tls_refused(RefusedKind::Connection, refused)
        })
    };
    tokio::time::timeout(within, connected).await?.map(TokioIo::new)
}

/// Serves `routes` until shutdown is requested; see [`server::serve`] for the end.
///
/// A call whose `baton-protocol` has no version in common with this process is refused with FAILED_PRECONDITION. A call
/// without the header passes: it comes from an ordinary gRPC client, such as grpcurl.
/// With a cluster secret, unsigned calls between Baton's processes are refused with UNAUTHENTICATED; with certificates,
/// also calls without one or of another role.
/// Handlers and their answers' streams run in the request's span. The request's extensions contain a
/// `types::RequestId` if the caller sent one.
pub async fn serve(
    listener: Box<dyn Listener>,
    routes: Routes,
    shutdown: Shutdown,
    limits: ServerLimits,
    callers: Callers,
) -> Result<(), StillHeld> {
    let tls = PortTls::Processes(callers.identity().clone());
    let receive = middleware::from_fn_with_state(callers, receive::receive);
    let router = routes.prepare().into_axum_router().layer(receive);
    server::serve(listener, tls, router, shutdown, limits).await
}

/// Makes the services of every gRPC server: health, and reflection (v1 and v1alpha) over `file_descriptor_sets`.
///
/// The caller adds its own services to the routes, and reports to the reporter when they serve. Reflection lists them by
/// the names in `own`, and no others of the sets.
pub fn standard_services(
    file_descriptor_sets: &[&[u8]],
    own: &[&str],
) -> Result<(Routes, HealthReporter), StartError> {
    let reflection = || {
        let builder = Reflection::configure()
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        let described = file_descriptor_sets
            .iter()
            .fold(builder, |all, set| all.register_encoded_file_descriptor_set(set));
        let listed = STANDARD_SERVICES.iter().chain(own);
        listed.fold(described, |all, service| all.with_service_name(*service))
    };
    let described = |error: ReflectionError| StartError::Reflection(error);
    let (reporter, health) = health_reporter();
    let routes = Routes::new(health)
        .add_service(reflection().build_v1().map_err(described)?)
        .add_service(reflection().build_v1alpha().map_err(described)?);
    Ok((routes, reporter))
}

/// Asks the health service of the peer whether the process serves. The error says why not. Every caller may ask.
pub async fn check_health(channel: RpcChannel, within: Duration) -> Result<(), Status> {
    let mut client = HealthClient::new(channel);
    let answer = tokio::time::timeout(within, client.check(HealthCheckRequest::default())).await;
    let silent = |_| Status::deadline_exceeded(format!("no answer within {within:?}"));
    match answer.map_err(silent)??.into_inner().status() {
        ServingStatus::Serving => Ok(()),
        other => Err(Status::unavailable(format!("its health is {}", other.as_str_name()))),
    }
}
