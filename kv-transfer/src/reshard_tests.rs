use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const SHAPE: HeadShape = HeadShape { n_parts: 2, head_bytes: 4 };

fn table(places: impl IntoIterator<Item = u32>) -> Vec<BlockIdx> {
    places.into_iter().map(BlockIdx).collect()
}

/// The regions of all ranks of one side, by rank and layer.
type Memory = BTreeMap<(RankIdx, u16), Vec<u16>>;

/// Returns the content of a cell of a page: it identifies the layer, block, part, head and byte. Zero is
/// empty.
fn mark(layer: u16, block: usize, part: usize, head: u16, byte: usize) -> u16 {
    let place = [usize::from(layer), block, part, usize::from(head), byte];
    let hash = place.iter().fold(7u64, |hash, n| (hash ^ *n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (hash >> 48) as u16 | 1
}

fn n_places(table: &[BlockIdx]) -> usize {
    table.iter().map(|place| place.0 as usize + 1).max().unwrap_or(0)
}

/// Makes the regions of one side. Every wanted cell has the content of `cell`, and all others are zero.
fn memory(
    shape: HeadShape,
    side: Side<'_>,
    blocks: &Range<u32>,
    layers: &Range<u16>,
    filled: bool,
) -> Memory {
    let mut memory = Memory::new();
    for layer in layers.clone() {
        let stage = side.sharding.stage_of(layer).expect("all layers are in a stage");
        for tp_rank in 0..side.sharding.tp_size {
            let heads = side.sharding.spread().heads_of(tp_rank);
            let page = shape.n_parts * heads.len() * shape.head_bytes;
            let mut region = vec![0; page * n_places(side.table)];
            if filled {
                for block in blocks.start as usize..blocks.end as usize {
                    let start = side.table[block].0 as usize * page;
                    fill(shape, &heads, layer, block, &mut region[start..start + page]);
                }
            }
            memory.insert((RankIdx { stage, tp_rank }, layer), region);
        }
    }
    memory
}

fn fill(shape: HeadShape, heads: &Range<u16>, layer: u16, block: usize, page: &mut [u16]) {
    for part in 0..shape.n_parts {
        for (nth, head) in heads.clone().enumerate() {
            for byte in 0..shape.head_bytes {
                page[(part * heads.len() + nth) * shape.head_bytes + byte] =
                    mark(layer, block, part, head, byte);
            }
        }
    }
}

/// Executes the copies, and counts the writes to each cell.
fn carry_out(copies: &[Copy], near: &Memory, far: &mut Memory) {
    for copy in copies {
        let source = &near[&(copy.from, copy.layer)][copy.from_offset..copy.from_offset + copy.bytes];
        let target = far.get_mut(&(copy.to, copy.layer)).expect("a rank of the receiver");
        let target = &mut target[copy.to_offset..copy.to_offset + copy.bytes];
        assert!(target.iter().all(|cell| *cell == 0), "a byte arrives twice: {copy:?}");
        target.copy_from_slice(source);
    }
}

fn arrives(
    shape: HeadShape,
    from: Side<'_>,
    to: Side<'_>,
    blocks: Range<u32>,
    layers: Range<u16>,
) -> Vec<Copy> {
    let copies = reshard(shape, from, to, blocks.clone(), layers.clone()).expect("they can");
    let near = memory(shape, from, &blocks, &layers, true);
    let mut far = memory(shape, to, &blocks, &layers, false);
    carry_out(&copies, &near, &mut far);
    assert_eq!(far, memory(shape, to, &blocks, &layers, true));
    for pair in copies.windows(2) {
        assert!(!pair[0].goes_on_with(&pair[1]), "not merged: {pair:?}");
    }
    copies
}

#[test]
fn copies_table() {
    let tables = (table(3..11), table(20..28));
    let holes = table([1, 2, 5, 6, 9, 12, 13, 14]);
    for (from_tp, to_tp, to_table, expected) in [
        (1, 1, &tables.1, 1),
        (4, 4, &tables.1, 4),
        (2, 1, &tables.1, 2 * 2 * 8),
        (1, 2, &tables.1, 2 * 2 * 8),
        (4, 2, &tables.1, 4 * 2 * 8),
        (16, 1, &tables.1, 8 * 2 * 8),
        (1, 16, &tables.1, 16 * 2 * 8),
        (16, 16, &tables.1, 16),
        (1, 1, &holes, 4),
    ] {
        let (near, far) = (Sharding::tensor_parallel(8, from_tp, 1), Sharding::tensor_parallel(8, to_tp, 1));
        let (from, to) =
            (Side { sharding: &near, table: &tables.0 }, Side { sharding: &far, table: to_table });
        let copies = arrives(SHAPE, from, to, 0..8, 0..1);
        assert_eq!(copies.len(), expected, "tp {from_tp} to tp {to_tp}");
    }
}

#[test]
fn ranks_that_hold_the_same_head_take_turns() {
    let (near, far) = (Sharding::tensor_parallel(2, 4, 1), Sharding::tensor_parallel(2, 4, 1));
    let table = table(0..1);
    let (from, to) = (Side { sharding: &near, table: &table }, Side { sharding: &far, table: &table });
    let senders: Vec<u16> =
        arrives(SHAPE, from, to, 0..1, 0..1).iter().map(|copy| copy.from.tp_rank).collect();
    assert_eq!(senders, [0, 1, 2, 3]);
}

#[test]
fn layers_find_their_stage_on_both_sides() {
    let near = Sharding { n_heads: 2, tp_size: 2, stages: vec![0..3, 3..4] };
    let far = Sharding { n_heads: 2, tp_size: 1, stages: vec![0..1, 1..4] };
    let table = table(0..2);
    let (from, to) = (Side { sharding: &near, table: &table }, Side { sharding: &far, table: &table });
    let copies = arrives(SHAPE, from, to, 0..2, 0..4);
    let stages: Vec<_> = copies.iter().map(|copy| (copy.layer, copy.from.stage, copy.to.stage)).collect();
    for (layer, stages_of) in [(0, (0, 0)), (1, (0, 1)), (2, (0, 1)), (3, (1, 1))] {
        assert!(stages.contains(&(layer, stages_of.0, stages_of.1)), "{stages:?}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let table = table(0..2);
    let side = |sharding| Side { sharding, table: &table };
    let (eight, uneven) = (Sharding::whole(8, 2), Sharding::tensor_parallel(8, 3, 2));
    let refused =
        |from, to, blocks, layers| reshard(SHAPE, side(from), side(to), blocks, layers).expect_err("no");
    assert_eq!(refused(&eight, &uneven, 0..1, 0..1), ReshardError::Uneven { n_heads: 8, tp_size: 3 });
    let four = Sharding::whole(4, 2);
    assert_eq!(refused(&eight, &four, 0..1, 0..1), ReshardError::OtherHeads { from: 8, to: 4 });
    assert_eq!(refused(&eight, &eight, 0..3, 0..1), ReshardError::NoSuchBlocks { blocks: 0..3 });
    assert_eq!(refused(&eight, &eight, 0..1, 1..3), ReshardError::NoSuchLayer(2));
}

/// Returns a number of heads, and a number of ranks that divides it or is a multiple of it.
fn sharding(n_heads: u16, n_layers: u16) -> impl Strategy<Value = Sharding> {
    let sizes: Vec<u16> =
        (1..=4 * n_heads).filter(|tp| n_heads.is_multiple_of(*tp) || tp.is_multiple_of(n_heads)).collect();
    (proptest::sample::select(sizes), 0..=n_layers).prop_map(move |(tp_size, cut)| Sharding {
        n_heads,
        tp_size,
        stages: vec![0..cut, cut..n_layers],
    })
}

/// Returns a sequence's blocks: runs of neighbours, at any place, without repetition.
fn places(n_blocks: usize) -> impl Strategy<Value = Vec<BlockIdx>> {
    (Just((0..n_blocks as u32 + 6).collect::<Vec<_>>()), any::<bool>()).prop_flat_map(
        move |(all, shuffled)| {
            let chosen = proptest::sample::subsequence(all, n_blocks);
            if shuffled {
                chosen.prop_shuffle().prop_map(table).boxed()
            } else {
                chosen.prop_map(table).boxed()
            }
        },
    )
}

type Case = (HeadShape, (Sharding, Vec<BlockIdx>), (Sharding, Vec<BlockIdx>), Range<u32>, Range<u16>);

fn case() -> impl Strategy<Value = Case> {
    let sizes =
        (1..=2usize, 1..=3usize, proptest::sample::select(vec![1, 2, 3, 4, 6, 8]), 1..=3u16, 1..=9usize);
    sizes.prop_flat_map(|(n_parts, head_bytes, n_heads, n_layers, n_blocks)| {
        let side = move || (sharding(n_heads, n_layers), places(n_blocks));
        let blocks = (0..=n_blocks as u32).prop_flat_map(move |start| (Just(start), start..=n_blocks as u32));
        let layers = (0..=n_layers).prop_flat_map(move |start| (Just(start), start..=n_layers));
        let shape = HeadShape { n_parts, head_bytes };
        (Just(shape), side(), side(), blocks, layers).prop_map(|(shape, from, to, blocks, layers)| {
            (shape, from, to, blocks.0..blocks.1, layers.0..layers.1)
        })
    })
}

proptest! {
    /// For any two shardings, any blocks and any layers: every wanted byte is in its place and was written once, and
    /// nothing else was written.
    #[test]
    fn every_byte_arrives_exactly_once((shape, from, to, blocks, layers) in case()) {
        let (from, to) = (Side { sharding: &from.0, table: &from.1 }, Side { sharding: &to.0, table: &to.1 });
        arrives(shape, from, to, blocks, layers);
    }
}
