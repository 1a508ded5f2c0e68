//! Lists of servers that other programs keep in etcd: followed, and applied to the pools.
//!
//! Each key below `/baton/<cluster>/upstream/prefill/` and `…/decode/` has the URL of one server. A key that is put with a
//! lease is there as long as its server renews the lease.

use chassis::World;
use registry::backoff::Backoff;
use registry::etcd::{EtcdSettings, EtcdValues};
use registry::url::RegistryUrl;
use tracing::{info, warn};
use types::in_full;

use super::members::{LegRole, Pool, SourceState};
use super::settings::MemberAddress;
use crate::metrics::RouterMetrics;

/// The largest number of servers in a pool. Further ones are ignored.
const SERVERS_MAX: usize = 4096;

/// A list of servers in etcd that is not followed yet.
#[derive(Debug)]
pub(super) struct Source {
    url: String,
    values: EtcdValues,
}

impl Source {
    /// Parses the URL. An error is the reason why it cannot be used.
    pub(super) fn open(role: LegRole, url: &str) -> Result<Self, String> {
        let parsed = RegistryUrl::parse(url).map_err(|error| in_full(&error))?;
        if parsed.user.as_ref().is_some_and(|user| !user.password.is_empty()) {
            return Err("the URL of an etcd with servers has no password, use `password_file`".to_owned());
        }
        let name = format!("upstream/{}", role.as_str());
        let values = EtcdSettings::from_url(&parsed).and_then(|settings| EtcdValues::new(settings, &name));
        Ok(Self { url: url.to_owned(), values: values.map_err(|error| in_full(&error))? })
    }

    /// Keeps the pool's servers as etcd lists them, until the future is dropped. While etcd cannot be read, the last list
    /// stays in use.
    pub(super) async fn follow(mut self, pool: Pool, world: World, metrics: RouterMetrics) {
        let (role, mut backoff) = (pool.role().as_str(), Backoff::default());
        let state = |failure| SourceState { url: Some(self.url.clone()), failure };
        pool.set_source(state(Some("its list in etcd is not read yet".to_owned())));
        let mut last = None;
        loop {
            match self.values.next().await {
                Ok(values) => {
                    backoff.reset();
                    pool.set_source(state(None));
                    let addresses = addresses(role, &values);
                    if last.as_ref() != Some(&addresses) {
                        info!(role, n_servers = addresses.len(), "list of upstream servers changed");
                        pool.set(addresses.clone());
                        last = Some(addresses);
                    }
                }
                Err(error) => {
                    let reason = in_full(&error);
                    if backoff.is_fresh() {
                        warn!(
                            role,
                            reason, "upstream servers are not read from etcd, the last list stays in use"
                        );
                    }
                    metrics.upstream_source_failures.with_label_values(&[role]).inc();
                    pool.set_source(state(Some(format!("its list in etcd cannot be read: {reason}"))));
                    tokio::time::sleep(backoff.next(world.draw())).await;
                }
            }
        }
    }
}

/// Reads the servers' addresses. Equal ones count once. Values that are no addresses are logged and ignored.
fn addresses(role: &str, values: &[Vec<u8>]) -> Vec<MemberAddress> {
    let mut addresses: Vec<MemberAddress> = Vec::with_capacity(values.len());
    for value in values.iter().take(SERVERS_MAX) {
        let text = String::from_utf8_lossy(value);
        match MemberAddress::parse(text.trim()) {
            Some(address) if !addresses.contains(&address) => addresses.push(address),
            Some(_) => {}
            None => {
                warn!(role, value = %text, "upstream server ignored: its value in etcd is no URL of a server")
            }
        }
    }
    if values.len() > SERVERS_MAX {
        warn!(role, n_servers = values.len(), "upstream servers above {SERVERS_MAX} are ignored");
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
        let found = addresses("prefill", &values);
        let found: Vec<_> = found.iter().map(|one| (one.base.as_str(), one.bootstrap_port)).collect();
        assert_eq!(found, [("http://b:1", 8998), ("http://a:1", 7)]);
        let many: Vec<Vec<u8>> = (0..5000).map(|nth| format!("http://a:{nth}").into_bytes()).collect();
        assert_eq!(addresses("prefill", &many).len(), SERVERS_MAX);
    }

    #[test]
    fn a_url_with_a_password_is_refused() {
        for (url, is_right) in [
            ("etcd://10.0.0.1:2379/pools", true),
            ("etcd://user:secret@10.0.0.1/pools", false),
            ("etcd://10.0.0.1/pools?color=red", false),
        ] {
            assert_eq!(Source::open(LegRole::Prefill, url).is_ok(), is_right, "{url}");
        }
    }
}
