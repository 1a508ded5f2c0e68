use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn hashes(numbers: impl IntoIterator<Item = u128>) -> Vec<BlockHash> {
    // Distinct in both halves, as hashes are.
    let spread = |number: u128| number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    numbers.into_iter().map(|number| BlockHash(spread(number))).collect()
}

fn known(index: &PrefixIndex, numbers: impl IntoIterator<Item = u128>) -> IndexedNode {
    let node = index.node();
    node.begin();
    assert!(node.store(&hashes(numbers)));
    node.set_complete();
    node
}

#[test]
fn a_prompt_matches_up_to_the_first_block_that_a_node_lacks() {
    let (index, now) = (PrefixIndex::default(), Instant::now());
    let nodes = [vec![1, 2, 3], vec![1, 2], vec![2, 3], vec![9]].map(|numbers| known(&index, numbers));
    for (prompt, expected) in [
        (vec![1, 2, 3], [3, 2, 0, 0]),
        (vec![1, 2, 3, 4], [3, 2, 0, 0]),
        (vec![1], [1, 1, 0, 0]),
        (vec![2, 3], [2, 1, 2, 0]),
        (vec![9, 1], [0, 0, 0, 1]),
        (vec![7], [0; 4]),
        (vec![], [0; 4]),
    ] {
        let matches = index.matches(&hashes(prompt.clone()), now);
        assert_eq!(nodes.each_ref().map(|node| node.n_matched(&matches)), expected, "{prompt:?}");
    }
}

#[test]
fn a_node_that_leaves_leaves_no_block_and_no_slot_behind() {
    let (index, now) = (PrefixIndex::default(), Instant::now());
    let stays = known(&index, [1, 2]);
    for _ in 0..2 * usize::from(NODES_MAX) {
        let leaves = known(&index, [1, 2, 3]);
        leaves.expect(&hashes([4]), now);
        assert_eq!(leaves.n_cached(), Some(3));
    }
    let fresh = index.node();
    let matches = index.matches(&hashes([4]), now);
    assert_eq!(fresh.n_matched(&matches), 0, "the slot has nothing of the node that left");
    assert_eq!((index.n_blocks(), stays.n_cached()), (2, Some(2)));
}

#[test]
fn nodes_beyond_the_limit_are_blind() {
    let index = PrefixIndex::default();
    let nodes: Vec<IndexedNode> = (0..NODES_MAX).map(|_| index.node()).collect();
    let further = known_or_blind(&index);
    assert_eq!((further.knowledge(), further.n_cached()), (CacheKnowledge::Blind, None));
    drop(nodes);
    assert_eq!(known(&index, [1]).knowledge(), CacheKnowledge::Exact);
}

fn known_or_blind(index: &PrefixIndex) -> IndexedNode {
    let node = index.node();
    node.begin();
    assert!(!node.store(&hashes([1])), "there is no room");
    node
}

#[test]
fn blocks_of_an_unknown_cache_do_not_match() {
    let (index, now) = (PrefixIndex::default(), Instant::now());
    let node = known(&index, [1, 2]);
    node.forget();
    assert_eq!(node.n_matched(&index.matches(&hashes([1, 2]), now)), 0);
    assert_eq!((node.knowledge(), index.n_blocks()), (CacheKnowledge::Blind, 0));
}

/// A conversation's next turn may come before the node reports the blocks of the last one.
#[test]
fn routed_prompts_count_for_a_short_time_even_while_the_cache_is_unknown() {
    let (index, start) = (PrefixIndex::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    let (node, blind) = (known(&index, [1]), index.node());
    node.expect(&hashes([2, 3]), start);
    blind.expect(&hashes([1]), start);
    let matched = |now| {
        let matches = index.matches(&hashes([1, 2, 3]), now);
        (node.n_matched(&matches), blind.n_matched(&matches))
    };
    assert_eq!(matched(at(0)), (3, 1));
    assert_eq!(matched(at(19)), (3, 1));
    assert_eq!(matched(at(20)), (1, 0), "nothing was routed since");
    node.expect(&hashes([2]), at(25));
    assert_eq!(matched(at(25)), (2, 0));
    node.expect(&hashes([3]), at(40));
    assert_eq!(matched(at(40)), (3, 0), "of two generations");
    node.expect(&hashes([7]), at(52));
    assert_eq!(matched(at(52)), (1, 0), "the older one has ended");
}

proptest! {
    /// Compares the index with one plain set of blocks per node: the beginning of one of two sequences that share
    /// three blocks.
    #[test]
    fn the_index_is_a_set_of_blocks_per_node(
        changes in prop::collection::vec((0_usize..6, any::<bool>(), 0_usize..9, any::<bool>()), 0..60),
    ) {
        let sequences = [vec![0, 1, 2, 3, 4, 5, 6, 7], vec![0, 1, 2, 13, 14, 15, 16, 17]];
        let index = PrefixIndex::default();
        let nodes: Vec<IndexedNode> = (0..6).map(|_| known(&index, [])).collect();
        let mut truth: Vec<BTreeSet<u128>> = vec![BTreeSet::new(); 6];
        for (nth, which, n_blocks, is_list) in changes {
            let blocks = &sequences[usize::from(which)][..n_blocks.min(8)];
            if is_list {
                nodes[nth].begin();
                nodes[nth].set_complete();
                truth[nth].clear();
            }
            let wanted: BTreeSet<u128> = blocks.iter().copied().collect();
            nodes[nth].store(&hashes(wanted.difference(&truth[nth]).copied()));
            nodes[nth].evict(&hashes(truth[nth].difference(&wanted).copied()));
            truth[nth] = wanted;
            for sequence in &sequences {
                let matches = index.matches(&hashes(sequence.iter().copied()), Instant::now());
                for (node, truth) in nodes.iter().zip(&truth) {
                    prop_assert!(node.has_exactly(&hashes(truth.iter().copied())));
                    let n_leading = sequence.iter().take_while(|block| truth.contains(block)).count();
                    prop_assert_eq!(node.n_matched(&matches), n_leading as u32);
                }
            }
        }
    }
}
