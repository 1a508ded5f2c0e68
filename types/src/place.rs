//! The choice of the pool nodes that keep a sequence, by rendezvous hashing.
//!
//! All processes that know the same members compute the same result. When a node joins or leaves, only the
//! sequences that this node keeps or kept are moved.

use crate::block::BlockHash;
use crate::ids::NodeId;

/// Returns the nodes in order of preference for keeping a sequence, the first choice first.
///
/// The order depends on the hash of the sequence's first block. One node keeps all sequences with a common beginning,
/// so all KV of a sequence comes from one node.
pub fn keepers<'a>(nodes: impl IntoIterator<Item = &'a NodeId>, first: BlockHash) -> Vec<&'a NodeId> {
    let mut ranked: Vec<([u8; 32], &NodeId)> =
        nodes.into_iter().map(|node| (rank(node, first), node)).collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.into_iter().map(|(_, node)| node).collect()
}

fn rank(node: &NodeId, first: BlockHash) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&first.0.to_le_bytes());
    hasher.update(node.as_str().as_bytes());
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(n: usize) -> Vec<NodeId> {
        (0..n).map(|nth| NodeId::new(format!("pool-{nth}"))).collect()
    }

    fn hash(nth: u64) -> BlockHash {
        BlockHash(u128::from(nth).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    #[test]
    fn every_node_keeps_its_share() {
        let nodes = nodes(5);
        for node in &nodes {
            let n_kept = (0..10_000).filter(|nth| keepers(&nodes, hash(*nth))[0] == node).count();
            assert!((1_800..2_200).contains(&n_kept), "{node} keeps {n_kept} of 10000");
        }
    }

    #[test]
    fn without_members_no_node_keeps_a_sequence() {
        assert!(keepers(&[], hash(1)).is_empty());
        assert_eq!(keepers(&nodes(2), hash(1)).len(), 2);
    }

    /// Removes each pool node in turn: only the sequences that it kept move.
    #[test]
    fn only_what_the_leaver_kept_moves() {
        for n in 2..8 {
            for (leaver, nth) in (0..n).flat_map(|leaver| (0..50).map(move |nth| (leaver, nth))) {
                let before = nodes(n);
                let mut after = before.clone();
                let left = after.remove(leaver);
                after.reverse();
                let kept: Vec<_> =
                    keepers(&before, hash(nth)).into_iter().filter(|node| **node != left).collect();
                assert_eq!(kept, keepers(&after, hash(nth)));
            }
        }
    }
}
