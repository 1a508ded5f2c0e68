//! API keys: random texts that clients hold, and their hashes, which the router holds.

use std::fmt;

use types::Grant;

/// A new key. It is shown once, to the operator who makes it.
pub struct ApiKey(String);

/// The hash by which the router knows a key. Two hashes are compared in constant time.
pub type KeyHash = blake3::Hash;

/// Every key of ours begins with it, so that one that leaks is recognised.
pub(super) const PREFIX: &str = "baton-";

impl ApiKey {
    /// 256 random bits.
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

/// A key has 256 random bits, so one plain hash is enough: there is nothing to guess.
pub fn hash(key: &str) -> KeyHash {
    blake3::hash(key.as_bytes())
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}
