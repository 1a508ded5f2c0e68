//! Who a caller is: one secret of the cluster authenticates calls, KV links and registry entries.
//!
//! A process holds its [`Identity`] in its [`World`](crate::World). Without a secret the identity is empty: nothing is
//! signed and nothing is checked. [`settings`] refuses that on ports that other machines reach.
//!
//! Reading order: the secret and its keys (`secret.rs`), what is signed ([`call`], [`link`], [`entry`]), the memory against replays
//! (`replay.rs`), the count of refusals ([`refusals`]), the settings, and the key of operators ([`admin_key`]).

pub mod admin_key;
pub mod call;
pub mod entry;
pub mod link;
pub mod refusals;
mod replay;
mod secret;
pub mod settings;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub use refusals::Refusals;
use replay::SeenNonces;
pub use secret::{ClusterSecret, SecretError};

/// The largest difference between the clocks of two processes, and the time for which a call's nonce is remembered.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(30);

/// What a process shows to others and asks of them. Clones share the memory of nonces and the counts.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    secret: Option<Arc<ClusterSecret>>,
    seen: Arc<SeenNonces>,
    refusals: Refusals,
}

impl Identity {
    pub fn of_cluster(secret: ClusterSecret) -> Self {
        Self { secret: Some(Arc::new(secret)), ..Self::default() }
    }

    pub fn secret(&self) -> Option<&ClusterSecret> {
        self.secret.as_deref()
    }

    /// The refused callers so far, for the metrics page.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }
}
