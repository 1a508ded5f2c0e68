//! Who is in the cluster: what a node says of itself when it announces itself.

use std::collections::BTreeMap;
use std::fmt;

use crate::ids::{Epoch, NodeId};
use crate::layout::KvLayout;
use crate::transfer::{Scheme, WireAddress};

/// The versions of Baton's wire that this build speaks. N and N-1 always overlap.
pub const PROTOCOL: ProtocolRange = ProtocolRange { min: 3, max: 3 };

/// The largest message on any of our gRPC connections, on both sides. KV never travels in one; the longest is a prompt
/// of a million tokens, which takes three bytes a token.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// One process that computes KV or keeps it. Everything a router or a peer must know before it speaks to it; never how busy it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    pub id: NodeId,
    pub epoch: Epoch,
    pub role: Role,
    pub pid: u32,
    /// Tells whether two nodes share a machine, and with it shared memory.
    pub host: String,
    /// `host:port` of the node's gRPC services.
    pub address: String,
    /// `host:port` of its admin page: metrics, readiness, debug.
    pub admin: String,
    /// The wires on which KV can reach it, best first.
    pub wires: Vec<WireAddress>,
    /// The wires that it does without, and why: for humans.
    pub without: Vec<MissingWire>,
    pub model: ModelInfo,
    pub protocol: ProtocolRange,
}

/// A connector that a node has not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingWire {
    pub scheme: Scheme,
    pub why: String,
}

/// What a node was started to do. Routing and display read it; nothing below the two node crates does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Prefill,
    Decode,
    /// Both services over one worker and one pool.
    Both,
    /// Computes nothing: it keeps KV for all of them. Its model is the one whose KV that is.
    Pool,
}

impl Role {
    pub fn prefills(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    pub fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }

    pub fn pools(self) -> bool {
        self == Self::Pool
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
            Self::Pool => "pool",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The model that a node runs, or keeps KV of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    pub name: String,
    /// The longest sequence, prompt and output together.
    pub context_tokens: u32,
    pub vocab: u32,
    pub eos_tokens: Vec<crate::prompt::TokenId>,
    pub layout: KvLayout,
    pub fingerprint: Fingerprint,
}

/// What must be the same on two nodes for KV of one to mean the same on the other: weights, layout, dtype, rope, tokenizer.
///
/// Named parts instead of one hash, so that a refusal can spell the difference out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    pub fn new(parts: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(parts.into_iter().collect())
    }

    pub fn parts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// A short form of all parts. Equal digests mean equal fingerprints.
    pub fn digest(&self) -> FingerprintDigest {
        let mut hasher = blake3::Hasher::new();
        for (name, value) in self.parts() {
            for text in [name, value] {
                hasher.update(&(text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        FingerprintDigest(u64::from_le_bytes(first))
    }

    /// Refuses a peer that would read the same bytes in another way.
    pub fn agree(&self, peer: &Self) -> Result<(), FingerprintMismatch> {
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(peer.0.keys()).collect();
        let differences: Vec<String> = names
            .into_iter()
            .filter(|name| self.0.get(*name) != peer.0.get(*name))
            .map(|name| {
                format!("{name}: {} here, {} there", shown(self.0.get(name)), shown(peer.0.get(name)))
            })
            .collect();
        if differences.is_empty() { Ok(()) } else { Err(FingerprintMismatch(differences)) }
    }
}

/// The digest of a [`Fingerprint`]: 16 hexadecimal digits in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FingerprintDigest(pub u64);

impl fmt::Display for FingerprintDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FingerprintDigest {
    /// Reads what [`Display`](fmt::Display) writes.
    pub fn parse(text: &str) -> Option<Self> {
        let is_digest = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_digest.then(|| u64::from_str_radix(text, 16).ok()).flatten().map(Self)
    }
}

fn shown(value: Option<&String>) -> &str {
    value.map_or("absent", String::as_str)
}

/// The part of a [`Fingerprint`] that says how text becomes tokens. Nodes never see text, but a router and a node that
/// number tokens differently would understand each other word for word and mean something else.
pub const TOKENIZER: &str = "tokenizer";

/// [`TOKENIZER`] of the mock: a token is a byte.
pub const TOKENIZER_BYTES: &str = "bytes";

/// [`TOKENIZER`] of a model without `tokenizer.json`: it is asked with token ids, and answers with them.
pub const TOKENIZER_NONE: &str = "none";

/// [`TOKENIZER`] of a model's folder: half of the BLAKE3 hash of its `tokenizer.json`. Router and nodes compute it alike.
pub fn tokenizer_digest(bytes: &[u8]) -> String {
    format!("blake3:{}", &blake3::hash(bytes).to_hex()[..32])
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("models differ: {}", .0.join("; "))]
pub struct FingerprintMismatch(pub Vec<String>);

/// The protocol versions that a peer speaks, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolRange {
    pub min: u16,
    pub max: u16,
}

impl ProtocolRange {
    /// The newest version that both sides speak.
    pub fn agree(self, peer: Self) -> Result<u16, ProtocolMismatch> {
        let newest = self.max.min(peer.max);
        if newest >= self.min && newest >= peer.min {
            Ok(newest)
        } else {
            Err(ProtocolMismatch { ours: self, theirs: peer })
        }
    }
}

impl fmt::Display for ProtocolRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.min, self.max)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no common protocol version: this side speaks {ours}, the peer {theirs}")]
pub struct ProtocolMismatch {
    pub ours: ProtocolRange,
    pub theirs: ProtocolRange,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(min: u16, max: u16) -> ProtocolRange {
        ProtocolRange { min, max }
    }

    #[test]
    fn protocol_table() {
        for (ours, theirs, expected) in [
            (range(1, 1), range(1, 1), Some(1)),
            (range(1, 1), range(1, 2), Some(1)),
            (range(1, 2), range(1, 1), Some(1)),
            (range(2, 3), range(1, 2), Some(2)),
            (range(1, 1), range(0, 0), None),
            (range(2, 3), range(1, 1), None),
        ] {
            assert_eq!(ours.agree(theirs).ok(), expected, "{ours} with {theirs}");
        }
    }

    #[test]
    fn a_refusal_names_both_ranges() {
        let error = range(1, 1).agree(range(0, 0)).expect_err("0 is not spoken");
        assert_eq!(error.to_string(), "no common protocol version: this side speaks 1..1, the peer 0..0");
    }

    #[test]
    fn a_tokenizer_is_known_by_every_byte_of_its_file() {
        assert!(tokenizer_digest(b"{}").starts_with("blake3:"));
        assert_eq!(tokenizer_digest(b"{}"), tokenizer_digest(b"{}"));
        assert_ne!(tokenizer_digest(b"{}"), tokenizer_digest(b"{} "));
    }

    #[test]
    fn a_digest_stands_for_all_parts() {
        let of = |parts: &[(&str, &str)]| {
            Fingerprint::new(parts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
                .digest()
        };
        assert_eq!(of(&[("a", "1"), ("b", "2")]), of(&[("b", "2"), ("a", "1")]));
        assert_ne!(of(&[("a", "1")]), of(&[("a", "2")]));
        assert_ne!(of(&[("a", "1b")]), of(&[("a1", "b")]));
        let digest = of(&[("a", "1")]);
        assert_eq!(FingerprintDigest::parse(&digest.to_string()), Some(digest));
        assert_eq!(FingerprintDigest::parse("+23456789abcdef0"), None);
        assert_eq!(FingerprintDigest::parse("0"), None);
    }

    #[test]
    fn a_fingerprint_spells_the_difference_out() {
        let part = |value: &str| Fingerprint::new([("rope".to_owned(), value.to_owned())]);
        assert_eq!(part("10000").agree(&part("10000")), Ok(()));
        let error = part("10000").agree(&part("500000")).expect_err("rope differs");
        assert_eq!(error.to_string(), "models differ: rope: 10000 here, 500000 there");
        let error = part("10000").agree(&Fingerprint::default()).expect_err("rope is absent");
        assert_eq!(error.to_string(), "models differ: rope: 10000 here, absent there");
    }
}
