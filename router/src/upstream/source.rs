//! Lists of servers that other programs keep, in etcd or Kubernetes: followed, and applied to the pools.
//!
//! In etcd each key below `/baton/<cluster>/upstream/prefill/` and `…/decode/` has the URL of one server. A key that is
//! put with a lease is there as long as its server renews the lease. `kubernetes` has the other kind.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use chassis::World;
use registry::backoff::Backoff;
use registry::etcd::{EtcdSettings, EtcdValues};
use registry::url::RegistryUrl;
use tokio::time::Instant;
use tracing::{info, warn};
use types::in_full;

use super::kubernetes::{SERVICE_ACCOUNT, ServiceUrl, ServiceWatch};
use super::members::{LegRole, Pool, SourceState};
use super::settings::MemberAddress;
use crate::metrics::RouterMetrics;

/// The largest number of servers in a pool. Further ones are ignored.
pub(super) const SERVERS_MAX: usize = 4096;
/// How long a list must be followed without a failure until the next failure is a new one: it is logged, and the pauses
/// are short again.
const STEADY: Duration = Duration::from_secs(5);

/// A list of servers that is not followed yet.
#[derive(Debug)]
pub(super) struct Source {
    url: String,
    list: ServerList,
}

#[derive(Debug)]
enum ServerList {
    Etcd(Box<EtcdValues>),
    Kubernetes(Box<ServiceWatch>),
}

impl Source {
    /// Parses the URL of an etcd. An error is the reason why it cannot be used.
    pub(super) fn etcd(role: LegRole, url: &str) -> Result<Self, String> {
        let parsed = RegistryUrl::parse(url).map_err(|error| in_full(&error))?;
        if parsed.user.as_ref().is_some_and(|user| !user.password.is_empty()) {
            return Err("the URL of an etcd with servers has no password, use `password_file`".to_owned());
        }
        let name = format!("upstream/{}", role.as_str());
        let values = EtcdSettings::from_url(&parsed).and_then(|settings| EtcdValues::new(settings, &name));
        let list = ServerList::Etcd(Box::new(values.map_err(|error| in_full(&error))?));
        Ok(Self { url: url.to_owned(), list })
    }

    /// Checks that this process can call the API server. An error is the reason why it cannot.
    pub(super) fn kubernetes(service: &ServiceUrl) -> Result<Self, String> {
        let watch = ServiceWatch::new(service.clone(), Path::new(SERVICE_ACCOUNT));
        let list = watch.map_err(|reason| format!("{service}: {reason}"))?;
        Ok(Self { url: service.to_string(), list: ServerList::Kubernetes(Box::new(list)) })
    }

    /// Keeps the pool's servers as they are listed, until the future is dropped. While the list cannot be read, the last
    /// one stays in use.
    pub(super) async fn follow(mut self, pool: Pool, world: World, metrics: RouterMetrics) {
        let (role, url, mut backoff) = (pool.role().as_str(), self.url, Backoff::default());
        let state = |failure| SourceState { url: Some(url.clone()), failure };
        pool.set_source(state(Some("its list is not read yet".to_owned())));
        let (mut last, mut well_since) = (None, None);
        loop {
            match self.list.next(role).await {
                Ok(found) => {
                    well_since.get_or_insert_with(Instant::now);
                    pool.set_source(state(None));
                    let addresses = distinct(role, found);
                    if last.as_ref() != Some(&addresses) {
                        info!(role, n_servers = addresses.len(), "list of upstream servers changed");
                        pool.set(addresses.clone());
                        last = Some(addresses);
                    }
                }
                Err(reason) => {
                    if well_since.take().is_some_and(|since| since.elapsed() >= STEADY) {
                        backoff.reset();
                    }
                    if backoff.is_fresh() {
                        warn!(
                            role,
                            url, reason, "list of upstream servers was not read, the last list stays in use"
                        );
                    }
                    metrics.upstream_source_failures.with_label_values(&[role]).inc();
                    pool.set_source(state(Some(format!("its list cannot be read: {reason}"))));
                    tokio::time::sleep(backoff.next(world.draw())).await;
                }
            }
        }
    }
}

impl ServerList {
    /// Returns the servers: at once the first time and after an error, then after each change. The caller waits after an
    /// error.
    async fn next(&mut self, role: &str) -> Result<Vec<MemberAddress>, String> {
        match self {
            Self::Etcd(values) => match values.next().await {
                Ok(values) => Ok(addresses(role, &values)),
                Err(error) => Err(in_full(&error)),
            },
            Self::Kubernetes(watch) => watch.next().await,
        }
    }
}

/// Reads the servers' addresses in etcd. Values that are no addresses are logged and ignored.
fn addresses(role: &str, values: &[Vec<u8>]) -> Vec<MemberAddress> {
    let address = |value: &Vec<u8>| {
        let text = String::from_utf8_lossy(value);
        let address = MemberAddress::parse(text.trim());
        if address.is_none() {
            warn!(role, value = %text, "upstream server ignored: its value in etcd is not the URL of a server");
        }
        address
    };
    values.iter().filter_map(address).collect()
}

/// Leaves out equal addresses, and those above the largest number.
fn distinct(role: &str, mut addresses: Vec<MemberAddress>) -> Vec<MemberAddress> {
    let mut known = HashSet::new();
    addresses.retain(|address| known.insert(address.clone()));
    if addresses.len() > SERVERS_MAX {
        warn!(role, n_servers = addresses.len(), "upstream servers above {SERVERS_MAX} are ignored");
        addresses.truncate(SERVERS_MAX);
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_urls() {
        let values = ["http://b:1", "nonsense", "http://a:1?bootstrap_port=7\n", "http://b:1"];
        let values: Vec<Vec<u8>> = values.iter().map(|value| value.as_bytes().to_vec()).collect();
        let found = distinct("prefill", addresses("prefill", &values));
        let found: Vec<_> = found.iter().map(|one| (one.base.as_str(), one.bootstrap_port)).collect();
        assert_eq!(found, [("http://b:1", 8998), ("http://a:1", 7)]);
        let many: Vec<Vec<u8>> = (0..5000).map(|nth| format!("http://a:{nth}").into_bytes()).collect();
        assert_eq!(distinct("prefill", addresses("prefill", &many)).len(), SERVERS_MAX);
    }

    #[test]
    fn a_url_with_a_password_is_refused() {
        for (url, is_right) in [
            ("etcd://10.0.0.1:2379/pools", true),
            ("etcd://user:secret@10.0.0.1/pools", false),
            ("etcd://10.0.0.1/pools?color=red", false),
        ] {
            assert_eq!(Source::etcd(LegRole::Prefill, url).is_ok(), is_right, "{url}");
        }
    }
}
