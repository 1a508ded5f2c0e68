//! KV blocks and their chained hashes. Equal hashes mean equal KV, on routers and on nodes.

use std::fmt;

use crate::ids::TenantId;
use crate::prompt::{CacheSalt, TokenId};

/// The index of a KV block in one node's block pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockIdx(pub u32);

impl BlockIdx {
    /// Marks a table entry whose block was freed after a sliding window passed it. No real block has this
    /// index.
    pub const GONE: Self = Self(u32::MAX);
}

impl fmt::Debug for BlockIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b{}", self.0)
    }
}

/// The hash of a full block's tokens, of all tokens before them, of the tenant and of the cache salt, with
/// the cluster's key.
///
/// The hash is 128 bits of BLAKE3, so that a collision between tenants or prompts cannot be made on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u128);

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The key of a cluster's block hashes. Without it, a hash does not show whether a guessed prompt is right.
///
/// Routers and nodes derive the key from the cluster's secret. The default is a public key, for clusters
/// without a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BlockHashKey([u8; blake3::KEY_LEN]);

impl BlockHashKey {
    pub fn new(key: [u8; blake3::KEY_LEN]) -> Self {
        Self(key)
    }

    /// Returns a short hash of the key. The hash is public: each node's fingerprint contains it.
    pub fn id(&self) -> String {
        let id = blake3::derive_key("baton 2026 id of a block hash key", &self.0);
        blake3::Hash::from(id).to_hex()[..16].to_owned()
    }

    /// Returns the hasher for the prompts of one tenant with one salt.
    pub fn hasher(&self, tenant: &TenantId, salt: &CacheSalt, block_tokens: usize) -> BlockHasher {
        assert!(block_tokens > 0, "a block holds at least one token");
        BlockHasher { key: *self, parent: self.root(tenant, salt), block_tokens, bytes: Vec::new() }
    }

    /// Returns the parent hash of the first blocks of a tenant's prompts with this salt.
    fn root(&self, tenant: &TenantId, salt: &CacheSalt) -> BlockHash {
        let mut hasher = blake3::Hasher::new_derive_key("baton 2026 root of block hashes");
        hasher.update(&self.0);
        for text in [tenant.as_str(), salt.as_str()] {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        truncated(&hasher.finalize())
    }
}

impl Default for BlockHashKey {
    fn default() -> Self {
        Self(blake3::derive_key("baton 2026 public block hash key", b""))
    }
}

impl fmt::Debug for BlockHashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHashKey({})", self.id())
    }
}

/// Computes the hashes of a sequence's blocks. Each hash covers the hash of the block before it.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    key: BlockHashKey,
    parent: BlockHash,
    block_tokens: usize,
    /// The bytes of one block, kept to save an allocation per block.
    bytes: Vec<u8>,
}

impl BlockHasher {
    /// Returns the hash of the next block. `tokens` must fill a block exactly.
    pub fn next(&mut self, tokens: &[TokenId]) -> BlockHash {
        assert_eq!(tokens.len(), self.block_tokens, "only full blocks are hashed");
        self.bytes.clear();
        self.bytes.extend(self.parent.0.to_le_bytes());
        tokens.iter().for_each(|token| self.bytes.extend(token.0.to_le_bytes()));
        self.parent = truncated(&blake3::keyed_hash(&self.key.0, &self.bytes));
        self.parent
    }

    /// Returns the hashes of all full blocks in `tokens`.
    pub fn hashes(mut self, tokens: &[TokenId]) -> Vec<BlockHash> {
        tokens.chunks_exact(self.block_tokens).map(|block| self.next(block)).collect()
    }
}

fn truncated(hash: &blake3::Hash) -> BlockHash {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_bytes()[..16]);
    BlockHash(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyed(key: BlockHashKey, tenant: &str, salt: &str, tokens: &[u32]) -> Vec<BlockHash> {
        let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
        key.hasher(&TenantId::new(tenant), &CacheSalt::new(salt), 2).hashes(&tokens)
    }

    fn hashes(tenant: &str, tokens: &[u32]) -> Vec<BlockHash> {
        keyed(BlockHashKey::default(), tenant, "", tokens)
    }

    #[test]
    fn only_full_blocks_have_a_hash() {
        assert_eq!(hashes("a", &[1, 2, 3]).len(), 1);
        assert_eq!(hashes("a", &[1]).len(), 0);
    }

    #[test]
    fn a_hash_depends_on_all_that_came_before() {
        let (one, two) = (hashes("a", &[1, 2, 3, 4]), hashes("a", &[9, 2, 3, 4]));
        assert_ne!(one[0], two[0]);
        assert_ne!(one[1], two[1], "same tokens, other predecessor");
        assert_eq!(one, hashes("a", &[1, 2, 3, 4]));
    }

    #[test]
    fn keys_tenants_and_salts_never_share() {
        let key = |byte| BlockHashKey::new([byte; blake3::KEY_LEN]);
        let all = [
            keyed(key(1), "a", "", &[1, 2]),
            keyed(key(2), "a", "", &[1, 2]),
            keyed(BlockHashKey::default(), "a", "", &[1, 2]),
            keyed(key(1), "b", "", &[1, 2]),
            keyed(key(1), "a", "b", &[1, 2]),
            keyed(key(1), "ab", "", &[1, 2]),
            keyed(key(1), "", "ab", &[1, 2]),
        ];
        for (nth, one) in all.iter().enumerate() {
            all[..nth].iter().for_each(|other| assert_ne!(one, other));
        }
    }

    /// A hash that is shown does not allow tests of guesses of the next block: each block needs the key.
    #[test]
    fn the_next_block_cannot_be_guessed_from_the_one_before() {
        let tokens = [1, 2, 3, 4];
        let [first, second] = keyed(BlockHashKey::new([7; blake3::KEY_LEN]), "a", "", &tokens)[..] else {
            panic!("two blocks")
        };
        let mut guess =
            BlockHasher { key: BlockHashKey::default(), parent: first, block_tokens: 2, bytes: Vec::new() };
        assert_ne!(guess.next(&[TokenId(3), TokenId(4)]), second);
    }

    #[test]
    fn an_id_tells_keys_apart_and_does_not_show_them() {
        let (one, other) = (BlockHashKey::new([1; blake3::KEY_LEN]), BlockHashKey::new([2; blake3::KEY_LEN]));
        assert_ne!(one.id(), other.id());
        assert_eq!(one.id().len(), 16);
        assert_eq!(format!("{one:?}"), format!("BlockHashKey({})", one.id()));
    }
}
