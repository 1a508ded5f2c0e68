//! Connections to a hub, directly or through a proxy.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{BoxFuture, FutureExt as _};
use http::uri::Scheme;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower::Service;

use crate::settings::Proxies;

/// Connects to servers. `https` goes through a tunnel of the proxy, and `http` is asked of the proxy itself.
#[derive(Clone, Debug)]
pub(crate) struct ProxyConnector {
    tcp: HttpConnector,
    proxies: Arc<Matcher>,
}

/// The error of a proxy.
#[derive(Debug, thiserror::Error)]
enum ProxyError {
    #[error("the proxy {0} is not supported: it must begin with http://")]
    Scheme(Uri),
    #[error("the proxy {proxy}")]
    Failed { proxy: Uri, source: Box<dyn std::error::Error + Send + Sync> },
}

impl ProxyConnector {
    pub(crate) fn new(tcp: HttpConnector, proxies: &Proxies) -> Self {
        let Proxies { all, http, https, none_for } = proxies.clone();
        let proxies = Matcher::builder().all(all).http(http).https(https).no(none_for).build();
        Self { tcp, proxies: Arc::new(proxies) }
    }

    /// Returns the user and password for the proxy that is asked for `url`. A tunnel gets them when it begins.
    pub(crate) fn authorization(&self, url: &Uri) -> Option<HeaderValue> {
        let is_asked = url.scheme() == Some(&Scheme::HTTP);
        self.proxies.intercept(url).filter(|_| is_asked)?.basic_auth().cloned()
    }
}

impl Service<Uri> for ProxyConnector {
    type Response = HubStream;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let mut tcp = self.tcp.clone();
        let Some(found) = self.proxies.intercept(&to) else {
            return async move { Ok(HubStream { tcp: tcp.call(to).await?, asks: Asks::Server }) }.boxed();
        };
        let proxy = found.uri().clone();
        async move {
            if proxy.scheme() != Some(&Scheme::HTTP) {
                return Err(ProxyError::Scheme(proxy).into());
            }
            if to.scheme() == Some(&Scheme::HTTP) {
                let tcp = tcp.call(proxy.clone()).await;
                let tcp = tcp.map_err(|error| ProxyError::Failed { proxy, source: error.into() })?;
                return Ok(HubStream { tcp, asks: Asks::Proxy });
            }
            let tunnel = Tunnel::new(proxy.clone(), tcp);
            let mut tunnel = match found.basic_auth() {
                Some(authorization) => tunnel.with_auth(authorization.clone()),
                None => tunnel,
            };
            let tcp = tunnel.call(to).await;
            let tcp = tcp.map_err(|error| ProxyError::Failed { proxy, source: error.into() })?;
            Ok(HubStream { tcp, asks: Asks::Server })
        }
        .boxed()
    }
}

/// A connection over which a server, or a proxy, is asked.
#[derive(Debug)]
pub(crate) struct HubStream {
    tcp: TokioIo<TcpStream>,
    asks: Asks,
}

/// The receiver of requests. A proxy needs the whole address in each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Server,
    Proxy,
}

impl Connection for HubStream {
    fn connected(&self) -> Connected {
        self.tcp.connected().proxy(self.asks == Asks::Proxy)
    }
}

impl Read for HubStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl Write for HubStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
