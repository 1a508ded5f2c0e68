//! The accept loop of every port of a process: HTTP/1 and HTTP/2, with limits, until a shutdown.

mod bodies;
mod observed;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;
use tracing::{debug, warn};

use self::bodies::Bodies;
pub use self::bodies::BodyBudgetSpent;
use crate::connections::{
    ConnectionCounts, ConnectionLimits, ConnectionPermit, ConnectionRefusal, Connections, NEEDED,
    TooManyFromAddress,
};
use crate::gate::{Gate, StillHeld};
use crate::identity::refusals::RefusedKind;
use crate::identity::{CertName, Identity, TlsRefused};
use crate::net::{Listener, Stream};
use crate::shutdown::Shutdown;
use crate::task::spawn_guarded;
use crate::telemetry::RareLines;

/// The limits of one port, with the counts of their refusals, and the time that it may take to stop.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    pub connections: ConnectionLimits,
    pub counts: ConnectionCounts,
    /// The limit of concurrent requests on one HTTP/2 connection.
    pub streams_max: u32,
    /// The interval of HTTP/2 pings.
    pub keepalive_interval: Duration,
    /// A peer that does not answer a ping in this time is gone, even if its kernel still acknowledges bytes.
    pub keepalive_timeout: Duration,
    /// The time that running requests have after a shutdown request. Then their connections are closed.
    pub drain: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: ConnectionLimits::default(),
            counts: ConnectionCounts::default(),
            streams_max: 4096,
            keepalive_interval: Duration::from_secs(2),
            keepalive_timeout: Duration::from_secs(3),
            drain: Duration::from_secs(5),
        }
    }
}

/// The TLS of one port.
#[derive(Clone, Debug)]
pub enum PortTls {
    Plaintext,
    /// TLS for clients, which show no certificate.
    Clients(Arc<rustls::ServerConfig>),
    /// TLS between processes, if the identity has certificates; otherwise plaintext. The request's extensions contain
    /// the [`CertName`] of a caller that shows a certificate.
    Processes(Identity),
}

/// Serves `router` until shutdown is requested, then lets running requests end within [`ServerLimits::drain`].
///
/// The request's extensions contain the peer's address as [`ConnectInfo<SocketAddr>`].
/// The error names work that still runs a second after its connection was closed. Dropping the future stops accepting;
/// open connections then end with the shutdown.
pub async fn serve(
    mut listener: Box<dyn Listener>,
    tls: PortTls,
    router: Router,
    shutdown: Shutdown,
    limits: ServerLimits,
) -> Result<(), StillHeld> {
    let server = Server {
        tls,
        connections: Gate::new("connections"),
        streams: Gate::new("http streams"),
        router,
        shutdown: shutdown.clone(),
        limits,
    };
    tokio::select! {
        biased;
        () = shutdown.wait() => {}
        () = server.accept(&mut *listener) => {}
    }
    drop(listener);
    server.drain().await
}

static ACCEPT_FAILED: RareLines = RareLines::new();
static TLS_REFUSED: RareLines = RareLines::new();

struct Server {
    connections: Gate,
    /// The tasks of HTTP/2, one per request. They have their own gate, because a draining connection may still start
    /// one.
    streams: Gate,
    tls: PortTls,
    router: Router,
    shutdown: Shutdown,
    limits: ServerLimits,
}

impl Server {
    /// The pause after a failed accept.
    const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
    /// The time that a task may take to end after its connection is closed.
    const AFTERMATH: Duration = Duration::from_secs(1);

    async fn accept(&self, listener: &mut dyn Listener) {
        let connections = Connections::new(self.limits.connections);
        let bodies = Bodies::new(self.limits.connections.bodies_max.0 as usize);
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => match connections.place(peer.ip()).await {
                    Ok(place) => self.spawn_connection(stream, peer, place, bodies.clone()),
                    Err(TooManyFromAddress) => {
                        self.limits.counts.refused(ConnectionRefusal::Address);
                        debug!(%peer, "client connection refused: too many connections from its address");
                    }
                },
                Err(error) => {
                    self.limits.counts.refused(ConnectionRefusal::Accept);
                    let closed = connections.close_one();
                    if let Some(left_out) = ACCEPT_FAILED.line(&error.to_string()) {
                        warn!(%error, idle_connection_closed = closed, left_out, "accepting a client connection failed");
                    }
                    tokio::time::sleep(Self::ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn spawn_connection(&self, stream: Stream, peer: SocketAddr, place: ConnectionPermit, bodies: Bodies) {
        let connection = Connection {
            tls: self.tls.clone(),
            protocol: self.protocol(),
            router: self.router.clone(),
            shutdown: self.shutdown.clone(),
            drain: self.limits.drain,
            counts: self.limits.counts.clone(),
            peer,
            place,
            bodies,
        };
        spawn_guarded(&self.connections, "connection", connection.run(stream)).detach();
    }

    fn protocol(&self) -> Builder<GuardedExecutor> {
        let mut builder = Builder::new(GuardedExecutor(self.streams.clone()));
        // hyper's own limit for a request's head would close idle connections too, so it is off;
        // `connections` enforces one.
        builder.http1().timer(TokioTimer::new()).header_read_timeout(None);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.limits.streams_max)
            // hyper closes a connection after 20 requests that are cancelled before they are handled. All
            // requests of a router share one connection and clients cancel often, so the limit is raised to
            // the number of streams.
            .max_pending_accept_reset_streams(self.limits.streams_max as usize)
            .keep_alive_interval(self.limits.keepalive_interval)
            .keep_alive_timeout(self.limits.keepalive_timeout);
        builder
    }

    async fn drain(&self) -> Result<(), StillHeld> {
        self.connections.close(self.limits.drain + Self::AFTERMATH).await?;
        self.streams.close(Self::AFTERMATH).await
    }
}

/// One accepted connection, with what its task needs to serve it.
struct Connection {
    tls: PortTls,
    protocol: Builder<GuardedExecutor>,
    router: Router,
    shutdown: Shutdown,
    drain: Duration,
    counts: ConnectionCounts,
    peer: SocketAddr,
    place: ConnectionPermit,
    bodies: Bodies,
}

impl Connection {
    async fn run(self, stream: Stream) {
        let secured = tokio::select! {
            secured = secured(&self.tls, stream, self.peer) => secured,
            () = self.shutdown.wait() => return,
            reason = self.place.must_close() => return closed(self.peer, reason, &self.counts),
        };
        if let Some((stream, caller)) = secured {
            self.serve(stream, caller).await;
        }
    }

    async fn serve(self, stream: Stream, caller: Option<CertName>) {
        let Self { tls: _, protocol, router, shutdown, drain, counts, peer, place, bodies } = self;
        let activity = place.activity.clone();
        let of_body = activity.clone();
        let router = router.map_request(move |mut request: http::Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            if let Some(caller) = &caller {
                request.extensions_mut().insert(caller.clone());
            }
            request.map(|body| observed::asked(bodies.body(body), &of_body))
        });
        let service = tower::service_fn(move |request: http::Request<Incoming>| {
            let under_way = activity.request(request.version());
            let answer = router.clone().oneshot(request);
            async move {
                Ok::<_, Infallible>(
                    answer.await?.map(|body| Body::new(observed::Answer::new(body, under_way))),
                )
            }
        });
        let stream = observed::ReadObserver::new(stream, place.activity.clone());
        let service = TowerToHyperService::new(service);
        let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), service));
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => Some(ended),
            () = shutdown.wait() => {
                connection.as_mut().graceful_shutdown();
                tokio::time::timeout(drain, connection).await.ok()
            }
            reason = place.must_close() => return closed(peer, reason, &counts),
        };
        match ended {
            Some(Ok(())) => {}
            Some(Err(error)) => debug!(%peer, error, "client connection failed"),
            None => warn!(%peer, "client connection closed with unfinished requests"),
        }
    }
}

/// Notes that this server closes a connection without a request.
fn closed(peer: SocketAddr, reason: &'static str, counts: &ConnectionCounts) {
    if reason == NEEDED {
        counts.refused(ConnectionRefusal::Displaced);
    }
    debug!(%peer, reason, "client connection closed by this server");
}

/// A stream after the port's TLS handshake, with the caller's name if it shows a certificate.
type SecuredStream = (Stream, Option<CertName>);

/// Runs the port's TLS handshake. Returns `None` if the connection is refused.
async fn secured(tls: &PortTls, stream: Stream, peer: SocketAddr) -> Option<SecuredStream> {
    match tls {
        PortTls::Plaintext => Some((stream, None)),
        PortTls::Clients(config) => {
            let accepted = TlsAcceptor::from(Arc::clone(config)).accept(stream).await;
            let accepted = accepted.inspect_err(|error| debug!(%peer, %error, "client connection failed"));
            Some((Stream::other(accepted.ok()?), None))
        }
        PortTls::Processes(identity) => between_processes(identity, stream, peer).await,
    }
}

async fn between_processes(identity: &Identity, stream: Stream, peer: SocketAddr) -> Option<SecuredStream> {
    let Some(tls) = identity.tls() else { return Some((stream, None)) };
    match tls.accept_calls(stream).await {
        Ok(secured) => return Some(secured),
        // A port scan, or a check whether the port is open.
        Err(refused @ TlsRefused::Closed) => {
            debug!(%peer, reason = %refused, "TLS connection from peer refused");
        }
        Err(refused) => {
            if let Some(left_out) = TLS_REFUSED.line(&refused.to_string()) {
                warn!(%peer, reason = %refused, left_out, "TLS connection from peer refused");
            }
            identity.tls_refused(RefusedKind::Connection, refused);
        }
    }
    None
}

/// Runs the tasks that hyper spawns inside a gate.
#[derive(Clone)]
struct GuardedExecutor(Gate);

impl<F> hyper::rt::Executor<F> for GuardedExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        spawn_guarded(&self.0, "http stream", future).detach();
    }
}
