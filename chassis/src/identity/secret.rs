//! The cluster's secret, and a derived key for each use.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use types::BlockHashKey;

/// A message authentication code.
pub(super) type Mac = blake3::Hash;

/// The shortest allowed secret. A shorter one could be guessed.
const SECRET_BYTES_MIN: usize = 16;

/// Keys derived from one secret, so that a MAC for one use is not valid for another.
pub struct ClusterSecret {
    call: [u8; 32],
    link: [u8; 32],
    entry: [u8; 32],
    block_hashes: BlockHashKey,
}

/// The reason why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error("read the secret in {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error(
        "the secret in {} has {bytes} bytes, at least {SECRET_BYTES_MIN} are needed: write 32 random bytes, as `openssl \
         rand -hex 32` makes them",
        file.display()
    )]
    TooShort { file: PathBuf, bytes: usize },
}

/// The purpose of a MAC. Each purpose has its own derived key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    Call,
    Link,
    Entry,
}

impl ClusterSecret {
    /// Reads the secret. White space at the file's ends is ignored, because editors add a line end.
    pub fn read(file: &Path) -> Result<Self, SecretError> {
        let text =
            std::fs::read(file).map_err(|source| SecretError::Read { file: file.to_owned(), source })?;
        let secret = text.trim_ascii();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(SecretError::TooShort { file: file.to_owned(), bytes: secret.len() });
        }
        Ok(Self::new(secret))
    }

    pub fn new(secret: &[u8]) -> Self {
        Self {
            call: blake3::derive_key("baton 2026 grpc calls", secret),
            link: blake3::derive_key("baton 2026 kv links", secret),
            entry: blake3::derive_key("baton 2026 registry entries", secret),
            block_hashes: BlockHashKey::new(blake3::derive_key("baton 2026 block hashes", secret)),
        }
    }

    /// Returns the key of the cluster's block hashes.
    pub(super) fn block_hash_key(&self) -> BlockHashKey {
        self.block_hashes
    }

    /// Computes the MAC over `fields`. Each field is preceded by its length, so different lists never give
    /// equal bytes.
    pub(super) fn mac(&self, used_for: Use, fields: &[&[u8]]) -> Mac {
        let key = match used_for {
            Use::Call => &self.call,
            Use::Link => &self.link,
            Use::Entry => &self.entry,
        };
        let mut hasher = blake3::Hasher::new_keyed(key);
        for field in fields {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        hasher.finalize()
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterSecret")
    }
}
