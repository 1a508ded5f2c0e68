//! The description of a node, as the node announces it.

use std::collections::BTreeMap;
use std::fmt;

use crate::block::BlockHashKey;
use crate::ids::{Epoch, NodeId};
use crate::layout::KvLayout;
use crate::transfer::{Scheme, WireAddress};

/// The protocol versions that this build speaks.
pub const PROTOCOL: ProtocolRange = ProtocolRange { min: 3, max: 7 };

/// The size limit of one gRPC message, for both sides. KV never travels over gRPC; the largest message is a prompt
/// of a million tokens, at three bytes per token.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// One node's description: all that a router or a peer must know before it calls the node. It does not include load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    pub id: NodeId,
    pub epoch: Epoch,
    pub role: Role,
    pub pid: u32,
    /// The id of the machine. Nodes with the same value can use shared memory.
    pub host: String,
    /// `host:port` of the node's gRPC services.
    pub address: String,
    /// `host:port` of the admin server: metrics, readiness, debug.
    pub admin: String,
    /// The connectors that can reach the node's KV memory, best first.
    pub wires: Vec<WireAddress>,
    /// The connectors that the node does not offer, with the reason, for display.
    pub without: Vec<MissingWire>,
    pub model: ModelInfo,
    pub protocol: ProtocolRange,
    /// Whether the node refuses every request for another role.
    pub keeps_role: bool,
}

/// A connector that a node does not offer, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingWire {
    pub scheme: Scheme,
    pub why: String,
}

/// The role that a node was started with. Routing and display read it; no crate below the node crates does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Prefill,
    Decode,
    /// A node for prefill and decode, over one worker and one block pool.
    Both,
    /// A node that computes nothing and keeps KV for other nodes. Its model is the one whose KV it keeps.
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

/// The model that a node runs, or whose KV it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    pub name: String,
    /// The longest sequence in tokens: prompt and output together.
    pub context_tokens: u32,
    pub vocab: u32,
    pub eos_tokens: Vec<crate::prompt::TokenId>,
    pub layout: KvLayout,
    pub fingerprint: Fingerprint,
}

/// The properties that two nodes must share to use each other's KV: weights, layout, dtype, rope, tokenizer
/// and the key of block hashes.
///
/// A fingerprint keeps named parts instead of one hash, so that a refusal can list the differences. The processes of
/// one node compare their settings in the same way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    pub fn new(parts: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(parts.into_iter().collect())
    }

    pub fn parts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Returns the value of one part.
    pub fn part(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns the same fingerprint with this key of block hashes.
    #[must_use]
    pub fn hashed_with(mut self, key: &BlockHashKey) -> Self {
        self.0.insert(BLOCK_HASH_KEY.to_owned(), key.id());
        self
    }

    /// Refuses a model whose blocks are hashed with another key.
    pub fn agree_on_key(&self, own: &BlockHashKey) -> Result<(), FingerprintMismatch> {
        let (ours, theirs) = (own.id(), self.0.get(BLOCK_HASH_KEY));
        if theirs == Some(&ours) {
            return Ok(());
        }
        Err(FingerprintMismatch(vec![format!("{BLOCK_HASH_KEY}: {ours} here, {} there", shown(theirs))]))
    }

    /// Returns a short hash of all parts. Equal digests mean equal fingerprints.
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

    /// Checks that a peer has the same fingerprint. The error lists the differences.
    pub fn agree(&self, peer: &Self) -> Result<(), FingerprintMismatch> {
        let differences =
            self.differences(peer, |name, ours, theirs| format!("{name}: {ours} here, {theirs} there"));
        if differences.is_empty() { Ok(()) } else { Err(FingerprintMismatch(differences)) }
    }

    /// Describes the parts that differ, in the order of their names. `text` gets a name and both values; a missing
    /// value is `absent`.
    pub fn differences(&self, peer: &Self, text: impl Fn(&str, &str, &str) -> String) -> Vec<String> {
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(peer.0.keys()).collect();
        let values = names.into_iter().map(|name| (name, self.0.get(name), peer.0.get(name)));
        let differing = values.filter(|(_, ours, theirs)| ours != theirs);
        differing.map(|(name, ours, theirs)| text(name, shown(ours), shown(theirs))).collect()
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
    /// Parses 16 hexadecimal digits, as [`Display`](fmt::Display) writes them. `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let is_digest = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_digest.then(|| u64::from_str_radix(text, 16).ok()).flatten().map(Self)
    }
}

fn shown(value: Option<&String>) -> &str {
    value.map_or("absent", String::as_str)
}

/// The name of the [`Fingerprint`] part with the [id](BlockHashKey::id) of the key of block hashes. Routers
/// and nodes with different keys would not find each other's blocks.
pub const BLOCK_HASH_KEY: &str = "block_hash_key";

/// The name of the [`Fingerprint`] part that identifies the tokenizer. Nodes see no text, but router and
/// nodes must give each token the same number.
pub const TOKENIZER: &str = "tokenizer";

/// The value of [`TOKENIZER`] for the mock, where a token is a byte.
pub const TOKENIZER_BYTES: &str = "bytes";

/// The value of [`TOKENIZER`] for a model without `tokenizer.json`: requests and answers consist of token
/// ids.
pub const TOKENIZER_NONE: &str = "none";

/// Returns the value of [`TOKENIZER`] for a model folder: half of the BLAKE3 hash of `tokenizer.json`. Router
/// and nodes compute it.
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
    /// Returns the newest version that both sides speak.
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
    fn a_fingerprint_names_the_key_of_block_hashes() {
        let (key, other) = (BlockHashKey::default(), BlockHashKey::new([1; 32]));
        let hashed = Fingerprint::default().hashed_with(&key);
        assert_eq!(hashed.agree_on_key(&key), Ok(()));
        assert_ne!(hashed.digest(), Fingerprint::default().hashed_with(&other).digest());
        let error = hashed.agree_on_key(&other).expect_err("another key").to_string();
        let expected = format!("models differ: block_hash_key: {} here, {} there", other.id(), key.id());
        assert_eq!(error, expected);
        Fingerprint::default().agree_on_key(&key).expect_err("no key");
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
