//! Which pool nodes keep a sequence: rendezvous hashing.
//!
//! Every node that knows the members comes to the same answer without asking anyone. When a node joins or leaves, only
//! the sequences that it keeps, or kept, move.

use twox_hash::XxHash3_64;
use types::{BlockHash, NodeId};

/// The nodes that keep a sequence, the first choice first: as many as there are, at most `n_max`.
///
/// A sequence is known by the hash of its first block, so that all sequences with a common beginning meet on one node,
/// and a sequence is one transfer from one node.
pub fn keepers(nodes: &[NodeId], first: BlockHash, n_max: usize) -> Vec<&NodeId> {
    let mut ranked: Vec<(u64, &NodeId)> = nodes.iter().map(|node| (rank(node, first), node)).collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.into_iter().take(n_max).map(|(_, node)| node).collect()
}

fn rank(node: &NodeId, first: BlockHash) -> u64 {
    let seed = XxHash3_64::oneshot(&first.0.to_le_bytes());
    XxHash3_64::oneshot_with_seed(seed, node.as_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
            let n_kept = (0..10_000).filter(|nth| keepers(&nodes, hash(*nth), 1)[0] == node).count();
            assert!((1_800..2_200).contains(&n_kept), "{node} keeps {n_kept} of 10000");
        }
    }

    #[test]
    fn nobody_keeps_where_nobody_is() {
        assert!(keepers(&[], hash(1), 3).is_empty());
        assert_eq!(keepers(&nodes(2), hash(1), 3).len(), 2);
    }

    proptest! {
        /// Whoever kept a sequence keeps it, unless it is the one that left; and the order of the members is nothing.
        #[test]
        fn only_what_the_leaver_kept_moves(n in 2..12usize, leaver in 0..12usize, nth in any::<u64>()) {
            let before = nodes(n);
            let mut after = before.clone();
            let left = after.remove(leaver % n);
            after.reverse();
            let kept: Vec<_> = keepers(&before, hash(nth), n).into_iter().filter(|node| **node != left).collect();
            prop_assert_eq!(kept, keepers(&after, hash(nth), n));
        }
    }
}
