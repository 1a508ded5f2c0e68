//! The provider's keys by URL: fetched at intervals, and soon after a token names a key that is not known.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use http::uri::Scheme;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tower::Service as _;
use tracing::{error, info};
use types::in_full;

use super::{KeySet, Oidc};
use crate::metrics::RouterMetrics;
use crate::trust;

/// The longest time of a fetch, with the connection.
const FETCH_WITHIN: Duration = Duration::from_secs(10);
/// The largest key set, in bytes.
const KEYS_BYTES_MAX: usize = 1 << 20;

/// How often the keys are fetched.
#[derive(Clone, Copy, Debug)]
pub(in crate::tenants) struct FetchTimes {
    /// The longest time between two fetches.
    pub(in crate::tenants) every: Duration,
    /// The shortest time between two fetches, however many tokens name unknown keys.
    pub(in crate::tenants) pause: Duration,
}

impl Default for FetchTimes {
    fn default() -> Self {
        Self { every: Duration::from_secs(300), pause: Duration::from_secs(5) }
    }
}

/// Fetches the keys until the future is dropped. After an error the provider's previous keys stay in use, and the
/// keys are fetched again after the pause.
pub(in crate::tenants) async fn follow(oidc: &Oidc, url: &Uri, times: FetchTimes, metrics: &RouterMetrics) {
    let client = client(Matcher::from_env());
    let mut last = Ok(oidc.keys().text_hash());
    loop {
        let fetched = fetch(&client, url).await;
        let outcome = if fetched.is_ok() { "fetched" } else { "failed" };
        metrics.keys_fetches.with_label_values(&[outcome]).inc();
        let seen = fetched.as_ref().map(KeySet::text_hash).map_err(Clone::clone);
        let is_new = seen != last;
        last = seen;
        match fetched {
            Ok(new) if is_new => {
                info!(%url, n_keys = new.n_keys(), "provider keys fetched");
                oidc.replace_keys(new);
            }
            Err(reason) if is_new => {
                error!(%url, reason, "provider keys were not fetched, the previous ones stay in use");
            }
            _ => {}
        }
        tokio::time::sleep(times.pause).await;
        if last.is_ok() {
            let _ = tokio::time::timeout(times.every.saturating_sub(times.pause), oidc.unknown_key()).await;
        }
    }
}

/// Makes a client that trusts the machine's authorities, or those that browsers trust if the machine has none.
fn client(proxies: Matcher) -> Client<impl Connect + Clone + Send + Sync + 'static, Empty<Bytes>> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let proxies = Arc::new(proxies);
    let connector = tower::service_fn(move |to| connect(tcp.clone(), Arc::clone(&proxies), to));
    let connector = trust::tls().https_or_http().enable_http1().wrap_connector(connector);
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector)
}

/// Connects to a provider: through a tunnel of its proxy, if it has one. `http` is on this machine, and has none.
async fn connect(
    mut tcp: HttpConnector,
    proxies: Arc<Matcher>,
    to: Uri,
) -> Result<TokioIo<TcpStream>, Box<dyn Error + Send + Sync>> {
    let proxy = proxies.intercept(&to).filter(|_| to.scheme() == Some(&Scheme::HTTPS));
    let Some(proxy) = proxy else { return Ok(tcp.call(to).await?) };
    let address = proxy.uri().clone();
    if address.scheme() != Some(&Scheme::HTTP) {
        return Err(format!("the proxy {address} is not supported: it must begin with http://").into());
    }
    let tunnel = Tunnel::new(address.clone(), tcp);
    let mut tunnel = match proxy.basic_auth() {
        Some(authorization) => tunnel.with_auth(authorization.clone()),
        None => tunnel,
    };
    tunnel.call(to).await.map_err(|error| format!("the proxy {address}: {}", in_full(&error)).into())
}

/// Fetches the keys once. An error is its reason.
async fn fetch(
    client: &Client<impl Connect + Clone + Send + Sync + 'static, Empty<Bytes>>,
    url: &Uri,
) -> Result<KeySet, String> {
    let whole = async {
        let response = client.get(url.clone()).await.map_err(|error| in_full(&error))?;
        if !response.status().is_success() {
            return Err(format!("the provider answered {}", response.status()));
        }
        let body = Limited::new(response.into_body(), KEYS_BYTES_MAX).collect().await;
        KeySet::parse(&body.map_err(|error| in_full(&*error))?.to_bytes())
    };
    let late = || format!("the provider did not answer within {FETCH_WITHIN:?}");
    tokio::time::timeout(FETCH_WITHIN, whole).await.map_err(|_| late())?
}

#[cfg(test)]
mod tests;
