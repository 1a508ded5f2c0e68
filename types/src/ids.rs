//! Identifiers. Each has its own type, so that the compiler refuses one kind in place of another.

use std::fmt;
use std::sync::Arc;

/// Defines an identifier that holds a short text and is cheap to clone.
macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn new(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id! {
    /// The name of a node, chosen by its operator. A restart keeps the name and changes the [`Epoch`].
    NodeId
}
text_id! {
    /// The id of a request, from its arrival at the router to the last token. The client sees it as `x-request-id`.
    RequestId
}
text_id! {
    /// The id of a tenant. Only prompts of the same tenant share cached KV: the id is part of every block hash.
    TenantId
}

impl Default for TenantId {
    fn default() -> Self {
        Self::new("default")
    }
}

/// The number of one life of a node, new at every start. A node that restarts at the same address is a new node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The id of one transfer of a sequence's KV from one node to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u128);

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The right to write into one landing: 128 random bits.
///
/// Grants are compared in constant time and never printed.
#[derive(Clone, Copy)]
pub struct Grant([u8; 16]);

impl Grant {
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// Encrypts the grant with a prompt's digest, or decrypts an encrypted one. A wrong digest yields a wrong
    /// grant.
    pub(crate) fn sealed(self, with: [u8; 16]) -> Self {
        let key = blake3::derive_key("baton landing grant v1", &with);
        Self(std::array::from_fn(|idx| self.0[idx] ^ key[idx]))
    }
}

impl PartialEq for Grant {
    fn eq(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(other.0).fold(0u8, |seen, (a, b)| seen | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

impl Eq for Grant {}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grant(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_never_printed() {
        assert_eq!(format!("{:?}", Grant::from_bytes([7; 16])), "Grant(…)");
    }

    #[test]
    fn grants_differ_in_any_bit() {
        let grant = Grant::from_bytes([0; 16]);
        for bit in 0..128 {
            let mut bytes = [0u8; 16];
            bytes[bit / 8] = 1 << (bit % 8);
            assert_ne!(grant, Grant::from_bytes(bytes), "bit {bit}");
        }
    }
}
