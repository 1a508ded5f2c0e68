use types::KvDtype;

use super::*;
use crate::reshard::{Lane, Sharding, Side, reshard};

fn layout() -> KvLayout {
    KvLayout::uniform(16, KvDtype::F32, 3, 1, 4)
}

fn span(layers: Range<u16>, blocks: Range<u32>) -> LaneSpan {
    LaneSpan { lane: Lane::ONLY, span: KvSpan { group: GroupIdx(0), blocks, layers } }
}

/// Locates a span in memory that belongs to one rank.
fn whole(table: &[BlockIdx], span: &LaneSpan) -> Runs {
    Runs::sent(&layout(), &Lanes::only(), of_span(table, span), span)
}

fn table(blocks: &[u32]) -> Vec<BlockIdx> {
    blocks.iter().copied().map(BlockIdx).collect()
}

#[test]
fn neighbours_are_one_run_in_each_layer() {
    let runs = whole(&table(&[9, 4, 5, 6, 2]), &span(1..3, 1..5));
    let seen: Vec<_> = runs.runs.iter().map(|run| (run.layer_pos, run.blocks.clone(), run.start)).collect();
    assert_eq!(seen, [(1, 4..7, 0), (1, 2..3, 1536), (2, 4..7, 2048), (2, 2..3, 3584)]);
    assert_eq!(runs.bytes(), 8 * 512);
}

/// Gathers a span from one memory and scatters it into another, in odd amounts.
#[test]
fn what_is_gathered_is_scattered() {
    let (near, far) = (KvMemory::host(layout(), 8).unwrap(), KvMemory::host(layout(), 8).unwrap());
    for layer in 0..3 {
        let mut pages = near.write(GroupIdx(0), layer, 0..8).unwrap();
        pages.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + usize::from(layer)) as u8);
    }
    let all = span(0..3, 0..4);
    let (out, back) = (table(&[7, 1, 2, 5]), table(&[0, 1, 6, 3]));
    let (out, back) = (whole(&out, &all), whole(&back, &all));
    let mut offset = 0;
    while offset < out.bytes() {
        offset += copy_some(&out.read(&near, offset).unwrap(), &mut back.write(&far, offset).unwrap());
    }
    for layer in 0..3 {
        for (from, to) in [(7, 0), (1, 1), (2, 6), (5, 3)] {
            let (from, to) = (
                near.read(GroupIdx(0), layer, from..from + 1).unwrap(),
                far.read(GroupIdx(0), layer, to..to + 1).unwrap(),
            );
            assert_eq!(*from, *to);
        }
    }
}

/// Copies from the first slice of `from` to the first slice of `to`: what fits, but an odd number of bytes.
fn copy_some(from: &ReadSlices<'_>, to: &mut WriteSlices<'_>) -> usize {
    let mut sources = Vec::new();
    from.append_to(&mut sources);
    let mut targets = to.slices();
    let n = sources[0].len().min(targets[0].len()).min(333);
    targets[0][..n].copy_from_slice(&sources[0][..n]);
    n
}

/// Returns the place of each byte of a part on both sides, computed by [`reshard`] for the whole span: rank,
/// and offset in the layer.
fn moved_by_reshard(tables: (&[BlockIdx], &[BlockIdx]), (from_tp, to_tp): (u16, u16)) -> Vec<[usize; 4]> {
    let (near, far) = (Sharding::tensor_parallel(4, from_tp, 1), Sharding::tensor_parallel(4, to_tp, 1));
    let (from, to) = (Side { sharding: &near, table: tables.0 }, Side { sharding: &far, table: tables.1 });
    let shape = HeadShape { n_parts: 2, head_bytes: HEAD_BYTES };
    let copies = reshard(shape, from, to, 0..tables.0.len() as u32, 0..1).expect("four heads do");
    let bytes = copies.iter().flat_map(|copy| {
        let (from, to) = (usize::from(copy.from.tp_rank), usize::from(copy.to.tp_rank));
        (0..copy.bytes).map(move |at| [from, copy.from_offset + at, to, copy.to_offset + at])
    });
    let mut bytes: Vec<_> = bytes.collect();
    bytes.sort_unstable();
    bytes
}

const HEAD_BYTES: usize = 16 * 2 * 4;

fn spread(tp_size: u16) -> KvLayout {
    KvLayout::uniform(16, KvDtype::F32, 1, 4, 2).over_ranks(tp_size).expect("four heads do")
}

/// Returns the places of all bytes of one side's runs, in the wire's order.
fn places(layout: &KvLayout, runs: &Runs) -> Vec<[usize; 2]> {
    let page_bytes = layout.rank_page_bytes(layout.groups[0].layers[0]);
    let of_run = |run: &PageRun| {
        let start = run.blocks.start as usize * page_bytes;
        run.slices(0)
            .into_iter()
            .flatten()
            .map(move |at| [usize::from(runs.rank), start + at])
            .collect::<Vec<_>>()
    };
    runs.runs.iter().flat_map(of_run).collect()
}

#[test]
fn both_sides_runs_are_what_reshard_says() {
    let tables = (table(&[3, 4, 5, 9]), table(&[7, 8, 1, 2]));
    for (from_tp, to_tp) in [1, 2, 4].iter().flat_map(|from| [1, 2, 4, 8].map(|to| (*from, to))) {
        let (near, far) = (spread(from_tp), spread(to_tp));
        let lanes = Lanes::between(from_tp, &far).expect("four heads do");
        let mut moved = Vec::new();
        for lane in lanes.all() {
            let part = LaneSpan { lane: *lane, ..span(0..1, 0..4) };
            let sent = places(&near, &Runs::sent(&near, &lanes, of_span(&tables.0, &part), &part));
            let wanted = places(&far, &Runs::wanted(&far, &lanes, &tables.1, &part));
            assert_eq!(sent.len(), wanted.len());
            moved.extend(sent.iter().zip(wanted).map(|(from, to)| [from[0], from[1], to[0], to[1]]));
        }
        moved.sort_unstable();
        assert_eq!(moved, moved_by_reshard((&tables.0, &tables.1), (from_tp, to_tp)), "{from_tp} to {to_tp}");
    }
}

#[test]
fn equal_ranks_send_runs_as_one_rank_does() {
    let (layout, table) = (spread(4), table(&[3, 4, 5, 6]));
    let lanes = Lanes::between(4, &layout).expect("four heads do");
    for lane in lanes.all() {
        let runs = Runs::sent(&layout, &lanes, &table, &LaneSpan { lane: *lane, ..span(0..1, 0..4) });
        assert_eq!((runs.runs.len(), runs.rank), (1, lane.from), "neighbours are one run");
    }
}

/// Copies half of the heads of one memory into a rank of another, in odd amounts.
#[test]
fn some_heads_are_gathered_and_scattered() {
    let (near, far) = (spread(1), spread(2));
    let lanes = Lanes::between(1, &far).expect("four heads do");
    let part = LaneSpan { lane: Lane { from: 0, to: 1 }, ..span(0..1, 0..2) };
    let (out, back) = (table(&[5, 2]), table(&[0, 3]));
    let (out, back) =
        (Runs::sent(&near, &lanes, of_span(&out, &part), &part), Runs::wanted(&far, &lanes, &back, &part));
    let (near, far) = (KvMemory::host(near, 6).unwrap(), KvMemory::host(far, 6).unwrap());
    let mut pages = near.write(GroupIdx(0), 0, 0..6).unwrap();
    pages.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((at * 7) >> 3) as u8);
    drop(pages);
    let mut offset = 0;
    while offset < out.bytes() {
        offset += copy_some(&out.read(&near, offset).unwrap(), &mut back.write(&far, offset).unwrap());
    }
    for (from, to) in [(5, 0), (2, 3)] {
        let page = near.read(GroupIdx(0), 0, from..from + 1).unwrap();
        let share = far.rank(1).read(GroupIdx(0), 0, to..to + 1).unwrap();
        // The share is heads 2 and 3 of K, and of V.
        let (k, v) = (&page[2 * HEAD_BYTES..4 * HEAD_BYTES], &page[6 * HEAD_BYTES..]);
        assert_eq!(*share, [k, v].concat());
    }
}
