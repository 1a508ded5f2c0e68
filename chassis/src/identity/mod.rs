//! The authentication of processes: one cluster secret authenticates calls, KV links and registry entries.
//!
//! A process holds its [`Identity`] in its [`World`](crate::World). Without a secret the identity is empty: nothing is
//! signed or checked. [`settings`] refuses this on ports that other machines reach.
//!
//! Suggested reading order: the secret and its derived keys (`secret.rs`); signatures of calls, links and entries
//! ([`call`], [`link`], [`entry`]); the protection against replays (`replay.rs`); the count of refusals ([`refusals`]);
//! the settings; and the operators' key ([`admin_key`]).

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
use types::BlockHashKey;

/// The largest allowed difference between two processes' clocks. Nonces are remembered for this time.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(30);

/// The cluster secret of a process, the nonces of calls that it has accepted, and its counts of refused
/// callers. Clones share nonces and counts.
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

    /// Returns the key of the cluster's block hashes. Without a secret the key is public.
    pub fn block_hash_key(&self) -> BlockHashKey {
        self.secret().map(ClusterSecret::block_hash_key).unwrap_or_default()
    }

    /// Returns the counts of refused callers, for the metrics page.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }
}
