//! The accept loop that every port of a process runs: HTTP/1 and HTTP/2, with bounds, ended by a shutdown.

mod bodies;
mod observed;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tower::ServiceExt;
use tracing::{debug, warn};

use self::bodies::Bodies;
pub use self::bodies::BodyBudgetSpent;
use crate::connections::{ConnectionLimits, ConnectionPermit, Connections, TooManyFromAddress};
use crate::gate::{Gate, StillHeld};
use crate::net::{Listener, Stream};
use crate::shutdown::Shutdown;
use crate::task::spawn_guarded;

/// What one port may hold, and how long it may take to let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    pub connections: ConnectionLimits,
    /// Requests at once on one HTTP/2 connection.
    pub streams_max: u32,
    /// A peer that answers no ping sent this often ...
    pub keepalive_interval: Duration,
    /// ... within this time is gone, even if its kernel still acknowledges bytes (a stopped process).
    pub keepalive_timeout: Duration,
    /// How long requests under way may go on after shutdown is requested; then their connections are closed.
    pub drain: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: ConnectionLimits::default(),
            streams_max: 4096,
            keepalive_interval: Duration::from_secs(2),
            keepalive_timeout: Duration::from_secs(3),
            drain: Duration::from_secs(5),
        }
    }
}

/// Serves `router` until shutdown is requested, then lets requests under way end within [`ServerLimits::drain`].
///
/// Handlers find the peer's address as [`ConnectInfo<SocketAddr>`] in the request's extensions.
/// The error names what still ran a second after its connection was closed. Dropping the future stops accepting and
/// leaves open connections to the shutdown.
pub async fn serve(
    mut listener: Box<dyn Listener>,
    router: Router,
    shutdown: Shutdown,
    limits: ServerLimits,
) -> Result<(), StillHeld> {
    let server = Server {
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

struct Server {
    connections: Gate,
    /// The tasks that HTTP/2 makes, one per request. A gate of their own, because a connection that drains may still
    /// open one.
    streams: Gate,
    router: Router,
    shutdown: Shutdown,
    limits: ServerLimits,
}

impl Server {
    /// Time after a failed accept until the next attempt.
    const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
    /// How long after its connection's end a task may need to notice.
    const AFTERMATH: Duration = Duration::from_secs(1);

    async fn accept(&self, listener: &mut dyn Listener) {
        let connections = Connections::new(self.limits.connections);
        let bodies = Bodies::new(self.limits.connections.bodies_max.0 as usize);
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => match connections.place(peer.ip()).await {
                    Ok(place) => self.spawn_connection(stream, peer, place, bodies.clone()),
                    Err(TooManyFromAddress) => debug!(%peer, "connection refused: too many from its address"),
                },
                Err(error) => {
                    let closed = connections.close_one();
                    warn!(%error, idle_connection_closed = closed, "connection was not accepted");
                    tokio::time::sleep(Self::ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn spawn_connection(&self, stream: Stream, peer: SocketAddr, place: ConnectionPermit, bodies: Bodies) {
        let connection = Connection {
            protocol: self.protocol(),
            router: self.router.clone(),
            shutdown: self.shutdown.clone(),
            drain: self.limits.drain,
            peer,
            place,
            bodies,
        };
        spawn_guarded(&self.connections, "connection", connection.serve(stream)).detach();
    }

    fn protocol(&self) -> Builder<GuardedExecutor> {
        let mut builder = Builder::new(GuardedExecutor(self.streams.clone()));
        // The head's time limit is in `connections`: this one would end idle connections too.
        builder.http1().timer(TokioTimer::new()).header_read_timeout(None);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.limits.streams_max)
            // All requests of a router come over one connection. By default 20 that are cancelled before they are looked
            // at end it, and every other request with them: a storm of cancels is no attack on a peer of ours.
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

/// One accepted connection.
struct Connection {
    protocol: Builder<GuardedExecutor>,
    router: Router,
    shutdown: Shutdown,
    drain: Duration,
    peer: SocketAddr,
    place: ConnectionPermit,
    bodies: Bodies,
}

impl Connection {
    async fn serve(self, stream: Stream) {
        let Self { protocol, router, shutdown, drain, peer, place, bodies } = self;
        let activity = place.activity.clone();
        let router = router.map_request(move |mut request: http::Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            request.map(|body| bodies.body(body))
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
        let stream = observed::Reads::new(stream, place.activity.clone());
        let service = TowerToHyperService::new(service);
        let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), service));
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => Some(ended),
            () = shutdown.wait() => {
                connection.as_mut().graceful_shutdown();
                tokio::time::timeout(drain, connection).await.ok()
            }
            reason = place.must_close() => return debug!(%peer, reason, "connection closed"),
        };
        match ended {
            Some(Ok(())) => {}
            Some(Err(error)) => debug!(%peer, error, "connection broke"),
            None => warn!(%peer, "connection closed with requests under way"),
        }
    }
}

/// Gives the tasks that hyper makes a gate.
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
