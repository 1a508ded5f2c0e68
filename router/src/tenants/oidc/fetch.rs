//! The provider's keys by URL: fetched at intervals, and soon after a token names a key that is not known.

use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
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
    let client = client();
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

type KeysClient = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

/// Makes a client that trusts the machine's authorities, or those that browsers trust if the machine has none.
fn client() -> KeysClient {
    let connector = trust::tls().https_or_http().enable_http1().build();
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector)
}

/// Fetches the keys once. An error is its reason.
async fn fetch(client: &KeysClient, url: &Uri) -> Result<KeySet, String> {
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
