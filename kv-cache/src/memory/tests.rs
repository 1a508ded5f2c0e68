use std::num::NonZero;

use types::layout::{Attention, LayerGroup, LayerShape, Shard};
use types::{KvDtype, StageSplit};

use super::*;

fn group(attention: Attention, layers: &[(u16, u16)]) -> LayerGroup {
    let shape =
        |(layer, head_dim): &(u16, u16)| LayerShape { layer: *layer, n_kv_heads: 2, head_dim: *head_dim };
    LayerGroup { attention, layers: layers.iter().map(shape).collect() }
}

fn layout(groups: Vec<LayerGroup>) -> KvLayout {
    KvLayout { block_tokens: 16, dtype: KvDtype::Bf16, groups, shard: Shard::WHOLE }
}

/// Returns the bytes of one page of two heads of dimension `head_dim`.
fn page(head_dim: usize) -> usize {
    2 * 2 * 16 * head_dim * 2
}

#[test]
fn blocks_that_fit_table() {
    let full = |layers: &[(u16, u16)]| group(Attention::Full, layers);
    let window = |layers: &[(u16, u16)]| group(Attention::SlidingWindow { tokens: 64 }, layers);
    for (name, layout, bytes, expected) in [
        ("uniform: memory / (page x layers)", layout(vec![full(&[(0, 8), (1, 8)])]), 10 * 2 * page(8), 10),
        ("one byte short", layout(vec![full(&[(0, 8), (1, 8)])]), 10 * 2 * page(8) - 1, 9),
        (
            "groups share pages: memory / (page x layers per group)",
            layout(vec![full(&[(0, 8), (2, 8)]), window(&[(1, 8), (3, 8)])]),
            10 * 2 * page(8),
            10,
        ),
        (
            "a group with fewer layers",
            layout(vec![full(&[(0, 8), (2, 8)]), window(&[(1, 8)])]),
            10 * 2 * page(8),
            10,
        ),
        (
            "different width: memory / sum of pages",
            layout(vec![full(&[(0, 8), (1, 24)])]),
            10 * 4 * page(8),
            10,
        ),
        ("no attention", layout(vec![]), 0, 1),
        ("no memory", layout(vec![full(&[(0, 8)])]), 0, 0),
    ] {
        let n_blocks = KvMemory::blocks_within(&layout, &StageLayers::one(), bytes);
        assert_eq!(n_blocks, expected, "{name}");
        let memory = KvMemory::host(layout, n_blocks).expect("a few KiB can be mapped");
        assert!(memory.bytes() <= bytes, "{name}: {} of {bytes} bytes", memory.bytes());
    }
}

/// A case: name, layout, layers of each stage, bytes of a block in each stage, and the regions of each group's layers.
type StageCase = (&'static str, KvLayout, &'static [u16], Vec<usize>, Vec<Vec<u32>>);

#[test]
fn stages_have_regions_of_their_own() {
    let full = |layers: &[(u16, u16)]| group(Attention::Full, layers);
    let window = |layers: &[(u16, u16)]| group(Attention::SlidingWindow { tokens: 64 }, layers);
    let by_turns = || layout(vec![full(&[(0, 8), (2, 8)]), window(&[(1, 8), (3, 8)])]);
    let windows_last = || layout(vec![full(&[(0, 8), (1, 8)]), window(&[(2, 8), (3, 8)])]);
    let latents = group(Attention::Latent, &[(0, 24), (1, 24), (2, 24)]);
    let p = page(8);
    let cases: Vec<StageCase> = vec![
        (
            "uneven layers",
            layout(vec![full(&[(0, 8), (1, 8), (2, 8)])]),
            &[2, 1],
            vec![2 * p, p],
            vec![vec![0, 1, 2]],
        ),
        ("one stage: groups share", by_turns(), &[4], vec![2 * p], vec![vec![0, 1], vec![0, 1]]),
        ("groups share within a stage", by_turns(), &[2, 2], vec![p, p], vec![vec![0, 1], vec![0, 1]]),
        ("and never across stages", by_turns(), &[1, 3], vec![p, 2 * p], vec![vec![0, 1], vec![1, 2]]),
        (
            "nothing but windowed layers",
            windows_last(),
            &[2, 2],
            vec![2 * p, 2 * p],
            vec![vec![0, 1], vec![2, 3]],
        ),
        ("a layer in each", by_turns(), &[1, 1, 1, 1], vec![p; 4], vec![vec![0, 2], vec![1, 3]]),
        ("a latent group", layout(vec![latents]), &[1, 2], vec![page(24) / 2, page(24)], vec![vec![0, 1, 2]]),
        (
            "layers of another width",
            layout(vec![full(&[(0, 8), (2, 8)]), window(&[(1, 24), (3, 24)])]),
            &[2, 2],
            vec![4 * p, 4 * p],
            vec![vec![0, 2], vec![1, 3]],
        ),
    ];
    for (name, layout, counts, block_bytes, regions) in cases {
        let n_stages = NonZero::new(counts.len() as u16).expect("some");
        let split = StageSplit { n_stages, layers: counts.to_vec() };
        let stages = split.over(counts.iter().sum()).expect("they add up");
        let of_all: usize = block_bytes.iter().sum();
        assert_eq!(KvMemory::block_bytes(&layout, &stages), of_all, "{name}");
        assert_eq!(KvMemory::blocks_within(&layout, &stages, 3 * of_all + of_all - 1), 3, "{name}");
        let found = Regions::of(&layout, &stages);
        assert_eq!(found.by_layer, regions, "{name}");
        let is_as_one = regions == Regions::of(&layout, &StageLayers::one()).by_layer;
        let memory = KvMemory::host_of_stages(layout, &stages, 3).expect("a few KiB can be mapped");
        assert_eq!(memory.stage_bytes(), block_bytes.iter().map(|bytes| 3 * bytes).collect::<Vec<_>>());
        assert_eq!(memory.has_regions_of_one_stage(), is_as_one, "{name}");
        assert_eq!(memory.bytes(), 3 * of_all, "{name}");
    }
}

#[test]
fn a_part_has_its_own_layers_only() {
    let full = group(Attention::Full, &[(0, 8), (2, 8), (4, 24)]);
    let window = group(Attention::SlidingWindow { tokens: 64 }, &[(1, 8), (3, 8)]);
    let (layout, p) = (layout(vec![full, window]), page(8));
    for (layers, regions, block_bytes) in [
        (0..2, vec![vec![0, NO_REGION, NO_REGION], vec![0, NO_REGION]], p),
        (2..5, vec![vec![NO_REGION, 0, 1], vec![NO_REGION, 0]], p + 3 * p),
        (4..5, vec![vec![NO_REGION, NO_REGION, 0], vec![NO_REGION, NO_REGION]], 3 * p),
        (5..9, vec![vec![NO_REGION; 3], vec![NO_REGION; 2]], 0),
    ] {
        let part = StageLayers::part(layers);
        assert_eq!(Regions::of(&layout, &part).by_layer, regions);
        assert_eq!(KvMemory::block_bytes(&layout, &part), block_bytes);
        assert_eq!(KvMemory::stage_block_bytes(&layout, &part), [block_bytes]);
        let memory = KvMemory::host_of_stages(layout.clone(), &part, 3).expect("a few KiB can be mapped");
        assert_eq!((memory.n_stages(), memory.bytes()), (1, 3 * block_bytes));
        assert!(!memory.has_regions_of_one_stage());
        for group in layout.group_indices() {
            for (pos, shape) in (0..).zip(&layout.group(group).layers) {
                let is_here = regions[usize::from(group.0)][usize::from(pos)] != NO_REGION;
                assert_eq!(memory.has_layer(group, pos), is_here, "layer {}", shape.layer);
                if is_here {
                    let page = memory.read(group, pos, 2..3).expect("nothing writes it");
                    assert_eq!(page.len(), layout.rank_page_bytes(*shape));
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "index out of bounds")]
fn a_page_of_another_process_does_not_exist() {
    let layout = layout(vec![group(Attention::Full, &[(0, 8), (1, 8)])]);
    let part = StageLayers::part(0..1);
    let memory = KvMemory::host_of_stages(layout, &part, 3).expect("a few KiB can be mapped");
    let _ = memory.read(GroupIdx(0), 1, 0..1);
}

#[test]
fn layers_do_not_share_bytes() {
    let layout = layout(vec![group(Attention::Full, &[(0, 8), (1, 8), (2, 24)])]);
    let memory = KvMemory::host(layout, 4).expect("a few KiB can be mapped");
    for layer in 0..3 {
        memory.write(GroupIdx(0), layer, 0..4).expect("idle").fill(layer as u8 + 1);
    }
    for layer in 0..3 {
        let pages = memory.read(GroupIdx(0), layer, 1..3).expect("idle");
        assert_eq!(pages.len(), 2 * page(if layer == 2 { 24 } else { 8 }));
        assert!(pages.iter().all(|byte| *byte == layer as u8 + 1));
    }
}

#[test]
fn ranks_have_memory_of_their_own() {
    let whole = layout(vec![group(Attention::Full, &[(0, 8), (1, 8)])]);
    for (tp_size, of_a_rank) in [(1, page(8)), (2, page(8) / 2), (4, page(8) / 2)] {
        let spread = whole.clone().over_ranks(tp_size).expect("two heads do");
        let bytes = 3 * 2 * of_a_rank * usize::from(tp_size);
        assert_eq!(KvMemory::blocks_within(&spread, &StageLayers::one(), bytes), 3, "tp {tp_size}");
        let memory = KvMemory::host(spread, 3).expect("a few KiB can be mapped");
        assert_eq!((memory.bytes(), memory.n_ranks()), (bytes, tp_size));
        let all: Vec<_> = (0..tp_size).map(|nth| memory.rank(nth).write(GroupIdx(0), 1, 0..3)).collect();
        for (mut pages, nth) in all.into_iter().map(|pages| pages.expect("idle")).zip(1u8..) {
            assert_eq!(pages.len(), 3 * of_a_rank);
            pages.fill(nth);
        }
        for nth in 0..tp_size {
            let pages = memory.rank(nth).read(GroupIdx(0), 1, 1..2).expect("idle");
            assert!(pages.iter().all(|byte| u16::from(*byte) == nth + 1), "tp {tp_size}, rank {nth}");
        }
    }
}

#[test]
#[should_panic(expected = "memory of several ranks is reached rank by rank")]
fn a_page_of_several_ranks_is_none() {
    let spread = layout(vec![group(Attention::Full, &[(0, 8)])]).over_ranks(2).expect("two heads do");
    let memory = KvMemory::host(spread, 1).expect("a few KiB can be mapped");
    let _ = memory.read(GroupIdx(0), 0, 0..1);
}

#[test]
fn clones_are_one_memory() {
    let memory =
        KvMemory::host(KvLayout::uniform(16, KvDtype::F32, 1, 1, 4), 2).expect("a page can be mapped");
    let clone = memory.clone();
    let _writer = memory.write(GroupIdx(0), 0, 1..2).expect("idle");
    assert!(clone.read(GroupIdx(0), 0, 0..2).is_err());
    assert!(clone.read(GroupIdx(0), 0, 0..1).is_ok());
}

#[test]
fn a_card_has_the_regions_of_one_rank_of_one_stage() {
    let by_turns = layout(vec![
        group(Attention::Full, &[(0, 8), (2, 8), (4, 8)]),
        group(Attention::SlidingWindow { tokens: 64 }, &[(1, 8), (3, 8)]),
    ]);
    for (counts, in_stages) in [
        (&[5][..], [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]),
        (&[2, 3], [(0, 0), (1, 0), (1, 1), (0, 0), (1, 0)]),
        (&[1, 3, 1], [(0, 0), (1, 0), (2, 0), (1, 0), (1, 1)]),
    ] {
        let n_stages = NonZero::new(counts.len() as u16).expect("some");
        let split = StageSplit { n_stages, layers: counts.to_vec() };
        let regions = Regions::of(&by_turns, &split.over(5).expect("they add up"));
        let layers = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)];
        let found =
            layers.map(|(group, layer_pos)| regions.in_stage(regions.of_layer(GroupIdx(group), layer_pos)));
        assert_eq!(found, in_stages, "{counts:?}");
        let ends: Vec<usize> = (0..counts.len()).map(|stage| regions.of_stage(stage).end).collect();
        assert_eq!(ends, regions.stage_ends, "{counts:?}");
    }
    let cards: Vec<usize> =
        (0..3).flat_map(|stage| (0..2).map(move |rank| card_of(rank, stage, 2))).collect();
    assert_eq!(cards, [0, 1, 2, 3, 4, 5], "all ranks of a stage, then the next stage");
}
