mod against_model;
mod model;

use std::time::Duration;

use types::layout::{LayerGroup, LayerShape};
use types::{BlockHashKey, BlockIdx, CacheSalt, GroupIdx, KvDtype, RequestId, TenantId, TokenId};

use super::*;
use crate::holder::Holding;
use crate::record::BlockState;

/// Makes a layout with one token per block, so that a prompt of n tokens has n hashes.
pub(crate) fn layout(n_groups: u16) -> KvLayout {
    let mut layout = KvLayout::uniform(1, KvDtype::F32, 0, 1, 1);
    let shape = |layer| LayerShape { layer, n_kv_heads: 1, head_dim: 1 };
    let attention = layout.groups[0].attention;
    layout.groups = (0..n_groups).map(|group| LayerGroup { attention, layers: vec![shape(group)] }).collect();
    layout
}

pub(crate) fn holder() -> Holder {
    Holder { what: Holding::Sequence, request: RequestId::new("r1") }
}

fn pool(n_blocks: u32) -> BlockPool {
    BlockPool::new(&layout(1), n_blocks)
}

fn prompt(tokens: &str) -> Vec<BlockHash> {
    prompt_of("default", tokens)
}

fn prompt_of(tenant: &str, tokens: &str) -> Vec<BlockHash> {
    let tokens: Vec<TokenId> = tokens.bytes().map(|byte| TokenId(byte.into())).collect();
    BlockHashKey::default().hasher(&TenantId::new(tenant), &CacheSalt::default(), 1).hashes(&tokens)
}

/// Leases a whole sequence, the cached blocks first, and publishes all of it.
fn run(pool: &BlockPool, hashes: &[BlockHash]) -> BlockLease {
    let cached = pool.adopt(hashes, holder());
    let fresh = pool.reserve(hashes.len() - cached.n_blocks(), holder()).expect("there is room");
    let lease = cached.join(fresh);
    publish(&lease, hashes);
    lease
}

fn publish(lease: &BlockLease, hashes: &[BlockHash]) {
    for (ordinal, hash) in hashes.iter().enumerate() {
        lease.publish(ordinal, *hash);
    }
}

fn table(lease: &BlockLease) -> Vec<u32> {
    lease.table(GroupIdx(0)).iter().map(|block| block.0).collect()
}

/// Returns the free, leased, cached and quarantined blocks, after an integrity check.
fn counts(pool: &BlockPool) -> [u32; 4] {
    assert_eq!(pool.integrity(), Ok(()));
    let counts = pool.counts();
    assert!(counts.adds_up());
    [counts.free, counts.leased, counts.cached, counts.quarantined]
}

fn cached(pool: &BlockPool, hashes: &[BlockHash]) -> usize {
    pool.adopt(hashes, holder()).n_blocks()
}

#[test]
fn a_dropped_lease_gives_its_blocks_back() {
    let pool = pool(8);
    let lease = pool.reserve(3, holder()).expect("there is room");
    assert_eq!(counts(&pool), [5, 3, 0, 0]);
    drop(lease);
    assert_eq!(counts(&pool), [8, 0, 0, 0]);
}

#[test]
fn no_room_takes_nothing() {
    let pool = pool(4);
    let _lease = pool.reserve(3, holder()).expect("there is room");
    let error = pool.reserve(2, holder()).expect_err("one block is left");
    assert_eq!(error, NoRoom { wanted: 2, available: 1 });
    assert_eq!(error.to_string(), "no room: 2 blocks wanted, 1 available");
    assert_eq!(counts(&pool), [1, 3, 0, 0]);
}

#[test]
fn every_group_has_a_table_of_its_own() {
    let pool = BlockPool::new(&layout(3), 10);
    let lease = pool.reserve(3, holder()).expect("there is room");
    let mut blocks: Vec<BlockIdx> = (0..3).flat_map(|group| lease.table(GroupIdx(group)).to_vec()).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(blocks.len(), 9);
    assert_eq!(counts(&pool), [1, 9, 0, 0]);
    assert_eq!(pool.reserve(1, holder()).expect_err("3 are needed"), NoRoom { wanted: 3, available: 1 });
}

#[test]
fn a_model_without_attention_needs_no_blocks() {
    let pool = BlockPool::new(&layout(0), 1);
    let lease = pool.reserve(100, holder()).expect("nothing is needed");
    lease.publish(0, BlockHash(1));
    assert_eq!(lease.n_blocks(), 100);
    assert_eq!(cached(&pool, &[BlockHash(1)]), 0);
    assert_eq!(counts(&pool), [1, 0, 0, 0]);
}

#[test]
fn blocks_behind_a_window_are_given_back() {
    let pool = pool(8);
    let mut lease = pool.reserve(6, holder()).expect("there is room");
    let blocks = table(&lease);
    lease.give_back(GroupIdx(0), 2);
    assert_eq!(counts(&pool), [4, 4, 0, 0]);
    lease.give_back(GroupIdx(0), 2);
    lease.give_back(GroupIdx(0), 1);
    assert_eq!(counts(&pool), [4, 4, 0, 0], "once is enough");
    let gone = BlockIdx::GONE.0;
    assert_eq!(table(&lease), [gone, gone, blocks[2], blocks[3], blocks[4], blocks[5]]);
    let mut lease = lease.join(pool.reserve(2, holder()).expect("there is room"));
    lease.give_back(GroupIdx(0), 5);
    assert_eq!((lease.n_blocks(), counts(&pool)), (8, [5, 3, 0, 0]));
    publish(&lease, &prompt("abcdefgh"));
    assert_eq!(cached(&pool, &prompt("abc")), 0, "what follows on a gap cannot be found");
    drop(lease);
    assert_eq!(counts(&pool), [8, 0, 0, 0]);
}

#[test]
fn published_blocks_behind_a_window_are_cached_when_all_of_them_are() {
    let pool = pool(8);
    let mut lease = pool.reserve(6, holder()).expect("there is room");
    publish(&lease, &prompt("abc"));
    let other = pool.adopt(&prompt("a"), holder());
    lease.give_back(GroupIdx(0), 2);
    assert_eq!(counts(&pool), [2, 6, 0, 0], "the third one is seen still");
    lease.give_back(GroupIdx(0), 4);
    assert_eq!(counts(&pool), [3, 3, 2, 0], "one is gone, two are cached, one of the three is another's too");
    drop(other);
    assert_eq!(counts(&pool), [3, 2, 3, 0]);
    assert_eq!(cached(&pool, &prompt("abcd")), 3, "they can still be found");
    let evicting = pool.reserve(6, holder()).expect("cached blocks make room");
    assert_eq!(counts(&pool), [0, 8, 0, 0]);
    drop((evicting, lease.quarantine("the wire is not quiet")));
    assert_eq!(counts(&pool), [6, 0, 0, 2]);
}

#[test]
fn a_group_that_sees_everything_keeps_the_published_blocks_of_all_groups() {
    let pool = BlockPool::new(&layout(2), 12);
    let mut lease = pool.reserve(6, holder()).expect("there is room");
    publish(&lease, &prompt("ab"));
    lease.give_back(GroupIdx(1), 5);
    assert_eq!(counts(&pool), [3, 9, 0, 0], "three of the windowed group's six");
    assert_eq!(cached(&pool, &prompt("ab")), 2);
    assert!(!lease.table(GroupIdx(0)).contains(&BlockIdx::GONE));
    drop(lease);
    assert_eq!(counts(&pool), [8, 0, 4, 0]);
}

#[test]
fn neighbours_are_preferred() {
    let pool = pool(16);
    let mut leases: Vec<BlockLease> =
        [4, 2, 3, 2, 5].map(|n| pool.reserve(n, holder()).expect("room")).into();
    let five = leases.pop();
    let (_two, three) = (leases.pop(), leases.pop());
    drop((five, three));
    // Blocks 6..9 and 11..16 are free.
    for (n, expected) in [(3, vec![6, 7, 8]), (4, vec![11, 12, 13, 14]), (6, vec![6, 11, 12, 13, 14, 15])] {
        assert_eq!(table(&pool.reserve(n, holder()).expect("room")), expected);
    }
}

#[test]
fn published_blocks_stay_cached() {
    let pool = pool(8);
    let first = run(&pool, &prompt("abc"));
    let blocks = table(&first);
    drop(first);
    assert_eq!(counts(&pool), [5, 0, 3, 0]);
    let again = pool.adopt(&prompt("abx"), holder());
    assert_eq!(table(&again), blocks[..2]);
    assert_eq!(counts(&pool), [5, 2, 1, 0]);
}

#[test]
fn what_was_not_published_is_free() {
    let pool = pool(8);
    let lease = pool.reserve(3, holder()).expect("there is room");
    publish(&lease, &prompt("ab"));
    lease.publish(1, BlockHash(99));
    drop(lease);
    assert_eq!(counts(&pool), [6, 0, 2, 0]);
    assert_eq!(cached(&pool, &prompt("abc")), 2, "a published block keeps its hash");
}

#[test]
fn a_block_without_a_published_predecessor_is_passed_over() {
    let pool = pool(8);
    let lease = pool.reserve(3, holder()).expect("there is room");
    lease.publish(1, prompt("abc")[1]);
    drop(lease);
    assert_eq!(counts(&pool), [8, 0, 0, 0]);
}

#[test]
fn shared_blocks_come_back_with_the_last_lease() {
    let pool = pool(8);
    let one = run(&pool, &prompt("abc"));
    let two = pool.adopt(&prompt("abc"), holder());
    assert_eq!(table(&one), table(&two));
    drop(one);
    assert_eq!(counts(&pool), [5, 3, 0, 0]);
    drop(two);
    assert_eq!(counts(&pool), [5, 0, 3, 0]);
}

#[test]
fn tenants_do_not_share() {
    let pool = pool(8);
    drop(run(&pool, &prompt_of("a", "abc")));
    assert_eq!(cached(&pool, &prompt_of("b", "abc")), 0);
    assert_eq!(cached(&pool, &prompt_of("a", "abc")), 3);
}

#[test]
fn the_longest_unused_leaves_go_first() {
    let pool = pool(6);
    drop(run(&pool, &prompt("abc")));
    drop(run(&pool, &prompt("xyz")));
    assert_eq!(cached(&pool, &prompt("ab")), 2, "and that is a use");
    for (n, abc, xyz) in [(1, 2, 3), (2, 2, 2), (3, 2, 1), (4, 2, 0), (5, 1, 0), (6, 0, 0)] {
        // Evicts one block more than the last call: the blocks that were reserved then are free again.
        drop(pool.reserve(n, holder()).expect("all can be evicted"));
        let known = |prompt: &[BlockHash]| pool.shared.state().index().longest(prompt);
        assert_eq!((known(&prompt("abc")), known(&prompt("xyz"))), (abc, xyz), "after room for {n}");
    }
}

#[test]
fn what_is_read_is_not_evicted() {
    let pool = pool(4);
    let reader = run(&pool, &prompt("ab"));
    drop(run(&pool, &prompt("abcd")));
    assert_eq!(pool.reserve(3, holder()).expect_err("2 are read"), NoRoom { wanted: 3, available: 2 });
    let _fresh = pool.reserve(2, holder()).expect("c and d are evicted");
    drop(reader);
    assert_eq!(cached(&pool, &prompt("abcd")), 2);
}

/// Two sequences compute the same prompt at the same time, because neither finds it cached.
#[test]
fn a_duplicate_is_freed_when_it_ends() {
    let pool = pool(8);
    let one = pool.reserve(2, holder()).expect("there is room");
    let two = pool.reserve(3, holder()).expect("there is room");
    publish(&one, &prompt("ab"));
    publish(&two, &prompt("abc"));
    assert_eq!(counts(&pool), [3, 5, 0, 0]);
    drop(two);
    assert_eq!(counts(&pool), [5, 2, 1, 0]);
    assert_eq!(cached(&pool, &prompt("abc")), 3, "c goes below the other sequence's b");
}

#[test]
fn a_duplicate_replaces_a_block_without_readers() {
    let pool = pool(8);
    let one = pool.reserve(2, holder()).expect("there is room");
    let two = pool.reserve(3, holder()).expect("there is room");
    publish(&one, &prompt("ab"));
    publish(&two, &prompt("ab"));
    drop(one);
    assert_eq!(counts(&pool), [3, 3, 2, 0]);
    two.publish(2, prompt("abc")[2]);
    assert_eq!(counts(&pool), [5, 3, 0, 0], "what is available is as much as before");
    assert_eq!(table(&pool.adopt(&prompt("abc"), holder())), table(&two));
}

#[test]
fn joined_leases_are_one() {
    let pool = pool(8);
    drop(run(&pool, &prompt("ab")));
    let lease = run(&pool, &prompt("abc"));
    let lease = lease.join(pool.reserve(2, holder()).expect("there is room"));
    assert_eq!(lease.n_blocks(), 5);
    publish(&lease, &prompt("abcde"));
    assert_eq!(counts(&pool), [3, 5, 0, 0]);
    drop(lease);
    assert_eq!(counts(&pool), [3, 0, 5, 0]);
    assert_eq!(cached(&pool, &prompt("abcde")), 5);
}

#[test]
fn nothing_joined_to_a_prefix_is_the_prefix() {
    let pool = pool(8);
    drop(run(&pool, &prompt("ab")));
    let nothing = pool.reserve(0, holder()).expect("nothing is needed");
    let prefix = nothing.join(pool.adopt(&prompt("ab"), holder()));
    let lease = prefix.join(pool.reserve(1, holder()).expect("there is room"));
    publish(&lease, &prompt("abc"));
    assert_eq!(cached(&pool, &prompt("abc")), 3);
    assert_eq!(counts(&pool), [5, 3, 0, 0]);
    drop(lease);
    assert_eq!(counts(&pool), [5, 0, 3, 0]);
}

#[test]
#[should_panic(expected = "blocks that were published come first")]
fn a_cached_block_cannot_follow_a_fresh_one() {
    let pool = pool(8);
    drop(run(&pool, &prompt("ab")));
    let fresh = pool.reserve(1, holder()).expect("there is room");
    let _ = fresh.join(pool.adopt(&prompt("ab"), holder()));
}

#[test]
#[should_panic(expected = "a lease covers blocks of one pool")]
fn leases_of_two_pools_cannot_be_joined() {
    let (one, two) = (pool(8), pool(8));
    let lease = one.reserve(1, holder()).expect("there is room");
    let _ = lease.join(two.reserve(1, holder()).expect("there is room"));
}

#[test]
fn quarantined_blocks_have_no_holder() {
    let pool = pool(4);
    let lease = pool.reserve(3, holder()).expect("there is room");
    let quarantine = lease.quarantine("the peer is silent");
    assert_eq!(counts(&pool), [1, 0, 0, 3]);
    assert!(pool.reserve(2, holder()).is_err());
    assert_eq!(quarantine.table(GroupIdx(0)).len(), quarantine.n_blocks());
    quarantine.release();
    assert_eq!(counts(&pool), [4, 0, 0, 0]);
}

#[test]
fn a_quarantine_that_is_dropped_stays() {
    let pool = pool(4);
    drop(pool.reserve(3, holder()).expect("there is room").quarantine("the peer is silent"));
    assert_eq!(counts(&pool), [1, 0, 0, 3]);
    let holders: Vec<String> = pool.ledger().into_iter().filter_map(|entry| entry.holder).collect();
    assert_eq!(holders, ["sequence of r1: the peer is silent"; 3]);
}

#[test]
fn a_quarantined_prefix_serves_others_but_is_not_evicted() {
    let pool = pool(4);
    let lease = run(&pool, &prompt("ab")).join(pool.reserve(1, holder()).expect("there is room"));
    let quarantine = lease.quarantine("the peer is silent");
    assert_eq!(counts(&pool), [1, 0, 0, 3]);
    let reader = pool.adopt(&prompt("ab"), holder());
    assert_eq!(counts(&pool), [1, 2, 0, 1]);
    drop(reader);
    assert!(pool.reserve(2, holder()).is_err(), "a wire may still read them");
    quarantine.release();
    assert_eq!(counts(&pool), [2, 0, 2, 0]);
}

#[tokio::test(start_paused = true)]
async fn the_ledger_says_who_and_for_how_long() {
    let pool = pool(4);
    drop(run(&pool, &prompt("ab")));
    let mut lease = pool.adopt(&prompt("a"), holder());
    let _other = pool.adopt(&prompt("a"), holder());
    lease.rename(Holder { what: Holding::Landing, request: RequestId::new("r2") });
    tokio::time::advance(Duration::from_secs(3)).await;
    let _fresh = pool.reserve(1, holder()).expect("there is room");
    let ledger = pool.ledger();
    let line = |block: usize| {
        let entry = &ledger[block];
        (entry.state, entry.holder.as_deref(), entry.readers, entry.hash, entry.age.as_secs())
    };
    let hashes = prompt("ab");
    assert_eq!(line(0), (BlockState::Leased, Some("landing of r2"), 2, Some(hashes[0]), 3));
    assert_eq!(line(1), (BlockState::Cached, None, 0, Some(hashes[1]), 3));
    assert_eq!(line(2), (BlockState::Leased, Some("sequence of r1"), 1, None, 0));
    assert_eq!(line(3), (BlockState::Free, None, 0, None, 3));
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_room_is_woken() {
    let pool = pool(2);
    let lease = pool.reserve(2, holder()).expect("there is room");
    let mut freed = pool.freed();
    assert!(pool.reserve(1, holder()).is_err());
    let wait = tokio::time::timeout(Duration::from_secs(1), freed.changed());
    let (woken, ()) = tokio::join!(wait, async { drop(lease) });
    assert!(matches!(woken, Ok(Ok(()))));
    assert!(pool.reserve(2, holder()).is_ok());
}

/// Threads adopt, publish, share and drop. At the end no block is missing.
#[test]
fn threads_leave_the_pool_whole() {
    let pool = pool(32);
    std::thread::scope(|scope| {
        for name in ["ab", "abc", "xyz", "xyzw"] {
            let pool = &pool;
            scope.spawn(move || (0..200).for_each(|_| drop(run(pool, &prompt(name)))));
        }
    });
    let [free, leased, cached, quarantined] = counts(&pool);
    assert_eq!((free + cached, leased, quarantined), (32, 0, 0));
    assert_eq!(cached, 7, "abc and xyzw");
}
