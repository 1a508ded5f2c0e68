//! The authentication of processes: one cluster secret authenticates calls, KV links and registry entries, and
//! certificates authenticate connections.
//!
//! A process holds its [`Identity`] in its [`World`](crate::World). With neither a secret nor certificates the identity
//! is empty: nothing is signed or checked. [`settings`] refuses this on ports that other machines reach.
//!
//! Suggested reading order: the secret and its derived keys (`secret.rs`); signatures of calls, links and entries
//! ([`call`], [`link`], [`entry`]); the protection against replays (`replay.rs`); names in certificates
//! ([`certificate`]) and TLS ([`tls`]); the count of refusals ([`refusals`]); the settings; and the operators' key
//! ([`admin_key`]).

pub mod admin_key;
pub mod call;
pub mod certificate;
pub mod entry;
pub mod link;
pub mod refusals;
mod replay;
mod secret;
pub mod settings;
#[cfg(test)]
mod tests;
pub mod tls;
#[cfg(test)]
mod tls_tests;

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use certificate::{CertName, CertRole, ExpectedPeer, Expiry};
pub use refusals::Refusals;
use refusals::RefusedKind;
use replay::SeenNonces;
pub use secret::{ClusterSecret, SecretError};
pub use tls::{Tls, TlsFileError, TlsFiles, TlsPem, TlsRefused};
use types::BlockHashKey;

/// The largest allowed difference between two processes' clocks. Nonces are remembered for this time.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(30);

/// The cluster secret and the certificates of a process, the nonces of calls that it has accepted, and its
/// counts of refused callers. Clones share all of it.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    secret: Option<Arc<ClusterSecret>>,
    tls: Option<Tls>,
    seen: Arc<SeenNonces>,
    refusals: Refusals,
}

impl Identity {
    pub fn of_cluster(secret: ClusterSecret) -> Self {
        Self { secret: Some(Arc::new(secret)), ..Self::default() }
    }

    /// The same identity, with these certificates.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    pub fn secret(&self) -> Option<&ClusterSecret> {
        self.secret.as_deref()
    }

    /// Returns the key of the cluster's block hashes. Without a secret the key is public.
    pub fn block_hash_key(&self) -> BlockHashKey {
        self.secret().map(ClusterSecret::block_hash_key).unwrap_or_default()
    }

    pub fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Returns the ends of the certificates' validity.
    pub fn expiries(&self) -> Vec<Expiry> {
        self.tls.as_ref().map(Tls::expiries).unwrap_or_default()
    }

    /// Counts a refused handshake, and returns it as the error of its connection.
    pub(crate) fn tls_refused(&self, what: RefusedKind, refused: TlsRefused) -> io::Error {
        if let Some(reason) = refused.reason() {
            self.refusals.count(what, reason);
        }
        refused.into_io()
    }

    /// Returns the counts of refused callers, for the metrics page.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }
}
