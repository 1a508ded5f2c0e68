//! Hot path. A digest per (layer, head, block): the sender computes it, the receiver compares it.
//!
//! A digest covers the valid tokens of one head's K and V in one block, and nothing else. It does not depend on the
//! tensor-parallel rank that holds the head, so two nodes that shard differently compute the same digests.

use std::ops::Range;

use device::xxh3;
use types::KvLayout;
use types::layout::{Attention, GroupIdx};

use crate::reshard::HeadShape;

/// The digest of one head's KV in one block of one layer: XXH3-64 over the XXH3-64 of its K and of its V.
///
/// K and V are hashed apart, as contiguous runs, so that neither side has to gather them first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Digest(pub u64);

impl Digest {
    /// Combines the hashes of a head's K and V, or of its latent vectors alone.
    pub(crate) fn of_parts(hashes: impl Iterator<Item = u64>) -> Self {
        let (mut parts, mut n) = ([0u8; 16], 0);
        for hash in hashes {
            parts[n..n + 8].copy_from_slice(&hash.to_le_bytes());
            n += 8;
        }
        Self(xxh3::hash(&parts[..n]))
    }
}

/// The layout of one layer's page on one rank: `[K|V][kv_head][token][dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// 2 for K and V, 1 for a latent vector.
    pub n_parts: usize,
    /// The number of KV heads on this rank.
    pub n_heads: usize,
    /// The bytes of one head's K or V in one block, for all its tokens.
    pub head_bytes: usize,
    /// The bytes of one token in one head's K or V.
    pub token_bytes: usize,
}

impl PageShape {
    pub fn new(layout: &KvLayout, group: GroupIdx, layer_pos: u16) -> Self {
        let group = layout.group(group);
        let shape = group.layers[usize::from(layer_pos)];
        Self {
            n_parts: if group.attention == Attention::Latent { 1 } else { 2 },
            n_heads: usize::from(layout.rank_heads(shape)),
            head_bytes: layout.head_bytes(shape),
            token_bytes: layout.token_bytes(shape),
        }
    }

    pub fn page_bytes(&self) -> usize {
        self.n_parts * self.n_heads * self.head_bytes
    }

    /// Returns the digest of one head of `page`, over its first `n_tokens` tokens.
    pub fn digest(&self, page: &[u8], head: usize, n_tokens: u16) -> Digest {
        let valid = usize::from(n_tokens) * self.token_bytes;
        let hash = |part| {
            let start = (part * self.n_heads + head) * self.head_bytes;
            xxh3::hash(&page[start..start + valid])
        };
        Digest::of_parts((0..self.n_parts).map(hash))
    }

    /// Appends the digests of all heads of `page` to `digests`.
    pub fn digest_page(&self, page: &[u8], n_tokens: u16, digests: &mut Vec<Digest>) {
        self.digest_heads(page, 0..self.n_heads, n_tokens, digests);
    }

    /// Appends the digests of some heads of `page` to `digests`.
    pub fn digest_heads(&self, page: &[u8], heads: Range<usize>, n_tokens: u16, digests: &mut Vec<Digest>) {
        digests.extend(heads.map(|head| self.digest(page, head, n_tokens)));
    }

    /// Returns whether all heads of `page` match `digests`.
    pub fn verify_page(&self, page: &[u8], n_tokens: u16, digests: &[Digest]) -> bool {
        self.verify_heads(page, 0..self.n_heads, n_tokens, digests)
    }

    /// Returns whether the heads in `heads` match `digests`.
    pub fn verify_heads(&self, page: &[u8], heads: Range<usize>, n_tokens: u16, digests: &[Digest]) -> bool {
        digests.len() == heads.len()
            && heads.zip(digests).all(|(head, digest)| self.digest(page, head, n_tokens) == *digest)
    }

    /// Returns the shape of one head's share of the page.
    pub fn head_shape(&self) -> HeadShape {
        HeadShape { n_parts: self.n_parts, head_bytes: self.head_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::KvDtype;

    fn page(shape: PageShape) -> Vec<u8> {
        (0..shape.page_bytes()).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn shape(n_heads: u16) -> PageShape {
        PageShape::new(&KvLayout::uniform(16, KvDtype::F32, 2, n_heads, 4), GroupIdx(0), 1)
    }

    #[test]
    fn any_flipped_bit_of_a_valid_token_changes_its_digest() {
        let shape = shape(2);
        let good = page(shape);
        let mut digests = Vec::new();
        shape.digest_page(&good, 16, &mut digests);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!shape.verify_page(&bad, 16, &digests), "bit {bit}");
        }
    }

    #[test]
    fn digests_cover_valid_tokens_only() {
        let shape = shape(2);
        let full = page(shape);
        let mut digests = Vec::new();
        shape.digest_page(&full, 5, &mut digests);
        let mut stale = full.clone();
        for run in stale.chunks_exact_mut(shape.head_bytes) {
            run[5 * shape.token_bytes..].fill(0xee);
        }
        assert!(shape.verify_page(&stale, 5, &digests));
        stale[4 * shape.token_bytes] ^= 1;
        assert!(!shape.verify_page(&stale, 5, &digests));
    }

    /// One rank with four heads has the same digests as two ranks with two heads each.
    #[test]
    fn digests_are_independent_of_tensor_parallel_layout() {
        let (whole, half) = (shape(4), shape(2));
        let page = page(whole);
        let mut expected = Vec::new();
        whole.digest_page(&page, 16, &mut expected);
        let mut seen = Vec::new();
        for rank in 0..2 {
            half.digest_page(&shard(&page, whole, rank), 16, &mut seen);
        }
        assert_eq!(seen, expected);
    }

    /// Returns a rank's two runs: its heads of K, then its heads of V.
    fn shard(page: &[u8], whole: PageShape, rank: usize) -> Vec<u8> {
        let run = whole.n_heads / 2 * whole.head_bytes;
        page.chunks_exact(whole.n_heads * whole.head_bytes)
            .flat_map(|part| &part[rank * run..][..run])
            .copied()
            .collect()
    }

    #[test]
    fn k_and_v_cannot_be_swapped() {
        let shape = shape(1);
        let good = page(shape);
        let mut digests = Vec::new();
        shape.digest_page(&good, 16, &mut digests);
        let mut swapped = good.clone();
        swapped.rotate_left(shape.head_bytes);
        assert!(!shape.verify_page(&swapped, 16, &digests));
    }

    #[test]
    fn a_latent_page_has_one_part() {
        let mut layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 8);
        layout.groups[0].attention = Attention::Latent;
        let shape = PageShape::new(&layout, GroupIdx(0), 0);
        assert_eq!(shape.page_bytes(), layout.page_bytes(layout.groups[0].layers[0]));
        assert_eq!(shape.n_parts, 1);
    }
}
