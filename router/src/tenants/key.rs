//! API keys: random texts that clients hold, and their hashes, which the router holds.

use std::fmt;

use types::Grant;

/// A new API key. It is shown once, to the operator who makes it.
pub struct ApiKey(String);

/// The hash of an API key, which the router stores. Hashes are compared in constant time.
pub type KeyHash = blake3::Hash;

/// The prefix of every API key, by which a leaked key is recognised.
pub(super) const PREFIX: &str = "baton-";

impl ApiKey {
    /// Makes a key from 256 random bits.
    pub fn random(halves: [Grant; 2]) -> Self {
        let bits = halves.iter().flat_map(|half| half.to_bytes());
        Self(bits.fold(PREFIX.to_owned(), |key, byte| key + &format!("{byte:02x}")))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> KeyHash {
        hash(&self.0)
    }
}

/// Hashes a key. A plain hash is enough, because a key with 256 random bits cannot be guessed.
pub fn hash(key: &str) -> KeyHash {
    blake3::hash(key.as_bytes())
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}
