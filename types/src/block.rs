//! KV blocks and their chained hashes. Equal hashes mean equal KV, on routers and on nodes.

use std::fmt;

use crate::ids::TenantId;
use crate::prompt::TokenId;

/// The index of a KV block in one node's block pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockIdx(pub u32);

impl BlockIdx {
    /// Marks a table entry whose block was freed after a sliding window passed it. No real block has this index.
    pub const GONE: Self = Self(u32::MAX);
}

impl fmt::Debug for BlockIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b{}", self.0)
    }
}

/// The hash of a full block's tokens, of all tokens before them, and of the tenant.
///
/// The hash is 128 bits of BLAKE3, so that a collision between tenants or prompts cannot be made on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u128);

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Computes the hashes of a sequence's blocks. Each hash covers the hash of the block before it.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    parent: BlockHash,
    block_tokens: usize,
}

impl BlockHasher {
    pub fn new(tenant: &TenantId, block_tokens: usize) -> Self {
        assert!(block_tokens > 0, "a block holds at least one token");
        Self { parent: root(tenant), block_tokens }
    }

    /// Returns the hash of the next block. `tokens` must fill a block exactly.
    pub fn next(&mut self, tokens: &[TokenId]) -> BlockHash {
        assert_eq!(tokens.len(), self.block_tokens, "only full blocks are hashed");
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.parent.0.to_le_bytes());
        for token in tokens {
            hasher.update(&token.0.to_le_bytes());
        }
        self.parent = truncated(&hasher.finalize());
        self.parent
    }

    /// Returns the hashes of all full blocks in `tokens`.
    pub fn hashes(tenant: &TenantId, block_tokens: usize, tokens: &[TokenId]) -> Vec<BlockHash> {
        let mut hasher = Self::new(tenant, block_tokens);
        tokens.chunks_exact(block_tokens).map(|block| hasher.next(block)).collect()
    }
}

/// Returns the parent hash of a tenant's first blocks.
fn root(tenant: &TenantId) -> BlockHash {
    truncated(
        &blake3::Hasher::new_derive_key("baton block hash v1").update(tenant.as_str().as_bytes()).finalize(),
    )
}

fn truncated(hash: &blake3::Hash) -> BlockHash {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_bytes()[..16]);
    BlockHash(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(tenant: &str, tokens: &[u32]) -> Vec<BlockHash> {
        let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
        BlockHasher::hashes(&TenantId::new(tenant), 2, &tokens)
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
    fn tenants_never_share() {
        assert_ne!(hashes("a", &[1, 2]), hashes("b", &[1, 2]));
    }
}
