//! The signature of a registry entry: a MAC over its key and its value, appended to the value.
//!
//! The MAC is encoded as a protobuf field that no message has, so a reader that does not know it can still decode the
//! entry.

use super::Identity;
use super::refusals::{Reason, RefusedKind};
use super::secret::Use;

/// The tag of protobuf field 1000, length-delimited, and its length of 32 bytes.
const FIELD: [u8; 3] = [0xc2, 0x3e, 32];
const SIGNATURE_BYTES: usize = FIELD.len() + blake3::OUT_LEN;

/// The reason why an entry is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryRefused {
    #[error("it is not signed with the cluster's secret")]
    Unsigned,
    #[error("its signature does not match: it was changed, or belongs to another cluster")]
    Signature,
}

impl Identity {
    /// Appends a signature to the value that is written at `key`. Without a secret the value stays as it is.
    pub fn sign_entry(&self, key: &[u8], mut value: Vec<u8>) -> Vec<u8> {
        if let Some(secret) = self.secret() {
            let mac = secret.mac(Use::Entry, &[key, &value]);
            value.extend(FIELD);
            value.extend(mac.as_bytes());
        }
        value
    }

    /// Checks that a process with the secret wrote this value at `key`. Without a secret every value passes.
    pub fn check_entry(&self, key: &[u8], value: &[u8]) -> Result<(), EntryRefused> {
        let Some(secret) = self.secret() else { return Ok(()) };
        let refused = match value.split_last_chunk::<SIGNATURE_BYTES>() {
            Some((signed, signature)) if signature.starts_with(&FIELD) => {
                let shown = signature.last_chunk::<{ blake3::OUT_LEN }>().expect("a signature is longer");
                if secret.mac(Use::Entry, &[key, signed]) == *shown {
                    return Ok(());
                }
                EntryRefused::Signature
            }
            Some(_) | None => EntryRefused::Unsigned,
        };
        let reason = match refused {
            EntryRefused::Unsigned => Reason::Unsigned,
            EntryRefused::Signature => Reason::Signature,
        };
        self.refusals().count(RefusedKind::Entry, reason);
        Err(refused)
    }
}
