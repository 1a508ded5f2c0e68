use proptest::prelude::*;
use types::layout::KvDtype;
use types::{Epoch, Fingerprint, Grant, KvLayout, NodeId, Scheme, TransferId, WireAddress};

use super::*;
use crate::reshard::Lane;

/// Makes a landing with three layers of pages of 512 bytes, and blocks of 16 tokens.
pub(crate) fn landing(n_tokens: u32, held_tokens: u32) -> Landing {
    Landing {
        transfer: TransferId(1),
        node: NodeId::new("d"),
        epoch: Epoch(1),
        grant: Grant::from_bytes([0; 16]),
        bound: false,
        wire: WireAddress { scheme: Scheme::new("tcp"), endpoint: String::new(), within_host: false },
        n_tokens,
        held_tokens,
        tables: vec![],
        layout: KvLayout::uniform(16, KvDtype::F32, 3, 1, 4),
        fingerprint: Fingerprint::default(),
    }
}

fn span(layers: Range<u16>, blocks: Range<u32>) -> KvSpan {
    KvSpan { group: GroupIdx(0), blocks, layers }
}

/// Returns the span as the part of the only lane.
fn only(span: KvSpan) -> LaneSpan {
    LaneSpan { lane: Lane::ONLY, span }
}

fn pages_of(n_tokens: u32, held_tokens: u32) -> Pages {
    Pages::of(&landing(n_tokens, held_tokens), Lanes::only())
}

#[test]
fn a_page_is_claimed_once() {
    let mut pages = pages_of(64, 16);
    assert_eq!(pages.total(), 9);
    assert!(pages.claim(&only(span(0..2, 1..3))));
    assert!(!pages.claim(&only(span(1..3, 2..4))), "one of its pages is on its way");
    assert!(pages.claim(&only(span(2..3, 1..4))));
    assert_eq!(pages.arrived(&only(span(0..2, 1..3)), &[]), 0);
    assert!(!pages.claim(&only(span(0..1, 1..2))), "it has arrived");
    assert_eq!((pages.n_claimed(), pages.n_verified()), (7, 4));
}

#[test]
fn a_wrong_page_has_one_more_chance() {
    let mut pages = pages_of(16, 0);
    let (all, wrong) = (only(span(0..3, 0..1)), only(span(1..2, 0..1)));
    assert!(pages.claim(&all));
    assert_eq!(pages.arrived(&all, std::slice::from_ref(&wrong.span)), 0);
    assert_eq!(pages.n_verified(), 2);
    assert!(pages.claim(&wrong));
    assert_eq!(pages.arrived(&wrong, std::slice::from_ref(&wrong.span)), 1);
    assert!(pages.claim(&wrong));
    assert_eq!(pages.arrived(&wrong, &[]), 0);
    assert!(pages.all_verified());
}

#[test]
fn only_wanted_pages_belong_to_a_transfer() {
    let pages = pages_of(40, 16);
    for (span, inside) in [
        (span(0..3, 1..3), true),
        (span(0..1, 0..1), false),
        (span(0..1, 2..4), false),
        (span(2..4, 1..2), false),
        (KvSpan { group: GroupIdx(1), ..span(0..1, 1..2) }, false),
    ] {
        assert_eq!(pages.contains(&only(span.clone())), inside, "{span:?}");
    }
    assert_eq!(wanted_part(span(0..1, 0..3), &landing(40, 16)), Some(span(0..1, 1..3)));
    assert_eq!(wanted_part(span(0..1, 0..1), &landing(40, 16)), None);
}

/// The receiver's one rank gets half of each page from each of the sender's two ranks, so it waits for both.
#[test]
fn a_page_is_whole_when_all_lanes_have_brought_their_part() {
    let landing = Landing { layout: KvLayout::uniform(16, KvDtype::F32, 3, 2, 4), ..landing(32, 0) };
    let lanes = Lanes::between(2, &landing.layout).expect("two heads do");
    let mut pages = Pages::of(&landing, lanes);
    let on = |from, span| LaneSpan { lane: Lane { from, to: 0 }, span };
    assert_eq!(pages.total(), 2 * 3 * 2);
    let (first, second) = (on(0, span(0..3, 0..2)), on(1, span(0..3, 0..2)));
    assert!(pages.claim(&first) && !pages.claim(&first), "a part is claimed once");
    assert_eq!(pages.arrived(&first, &[]), 0);
    assert!(!pages.all_verified(), "the other half is missing");
    assert!(pages.claim(&second));
    assert_eq!(pages.arrived(&second, &[span(1..2, 1..2)]), 0);
    assert_eq!(pages.n_verified(), 11);
    assert!(!pages.claim(&on(0, span(1..2, 1..2))), "the other lane's part was right");
    assert!(pages.claim(&on(1, span(1..2, 1..2))));
    assert_eq!(pages.arrived(&on(1, span(1..2, 1..2)), &[]), 0);
    assert!(pages.all_verified());
    assert!(!pages.contains(&on(2, span(0..1, 0..1))), "there is no such lane");
}

fn max(bytes: usize, pages: usize) -> PieceMax {
    PieceMax { bytes, pages }
}

#[test]
fn cutting_table() {
    let page_bytes = |_| 512;
    for (whole, pieces) in [
        (span(0..1, 0..10), vec![span(0..1, 0..4), span(0..1, 4..8), span(0..1, 8..10)]),
        (span(0..3, 0..2), vec![span(0..2, 0..2), span(2..3, 0..2)]),
        (span(1..3, 3..8), vec![span(1..2, 3..7), span(1..2, 7..8), span(2..3, 3..7), span(2..3, 7..8)]),
    ] {
        assert_eq!(cut(page_bytes, &whole, max(4 * 512, 100)), pieces, "by bytes");
        assert_eq!(cut(page_bytes, &whole, max(1 << 20, 4)), pieces, "by pages");
    }
    assert_eq!(cut(page_bytes, &span(0..1, 0..2), max(1, 100)).len(), 2, "one page at least");
}

proptest! {
    #[test]
    fn pieces_are_the_span(layers in 0u16..3, n_blocks in 1u32..40, bytes in 1usize..20_000, n_pages in 1usize..50) {
        let landing = landing(40 * 16, 0);
        let whole = span(layers..3, 0..n_blocks);
        let mut pages = Pages::of(&landing, Lanes::only());
        for piece in cut(|_| 512, &whole, max(bytes, n_pages)).into_iter().map(only) {
            prop_assert!(pages.contains(&piece));
            prop_assert!(pages.claim(&piece), "twice: {piece:?}");
        }
        prop_assert_eq!(pages.n_claimed(), whole.layers.len() * whole.blocks.len());
    }
}

#[test]
fn tall_pieces_have_all_layers_of_few_blocks() {
    let column = 3 * 512;
    for (n_blocks, blocks_max, expected) in
        [(37, 16, &[16, 16, 5][..]), (8, 16, &[8]), (3, 1, &[1, 1, 1]), (1, 100, &[1])]
    {
        let pieces = cut_tall(|_| 512, &span(0..3, 2..2 + n_blocks), max(blocks_max * column, 1000), None);
        let lengths: Vec<usize> = pieces.iter().map(|piece| piece.blocks.len()).collect();
        assert_eq!(lengths, expected, "{n_blocks} blocks, {blocks_max} a piece");
        let mut next = 2;
        for piece in pieces {
            assert_eq!((piece.blocks.start, piece.layers), (next, 0..3));
            next = piece.blocks.end;
        }
    }
    let few_pages = cut_tall(|_| 512, &span(0..3, 2..4), max(1 << 20, 4), None);
    assert_eq!(few_pages, [span(0..3, 2..3), span(0..3, 3..4)]);
    // One block of all layers does not fit, so the span is cut as in `cut`.
    assert_eq!(
        cut_tall(|_| 512, &span(0..2, 2..4), max(512, 100), None),
        cut(|_| 512, &span(0..2, 2..4), max(512, 100))
    );
}

#[test]
fn of_many_pieces_the_first_and_the_last_are_small() {
    let tapered = |n_blocks: u32, taper: FrameSizes| -> Vec<usize> {
        let taper = Some(taper);
        let pieces = cut_tall(|_| 512, &span(0..3, 7..7 + n_blocks), max(8 * 3 * 512, 1000), taper);
        let starts: Vec<u32> = pieces.iter().map(|piece| piece.blocks.start).collect();
        let ends = std::iter::once(7).chain(pieces.iter().map(|piece| piece.blocks.end));
        assert_eq!(starts, ends.take(pieces.len()).collect::<Vec<_>>(), "without a gap");
        pieces.iter().map(|piece| piece.blocks.len()).collect()
    };
    let sizes_of = |n_blocks, share| tapered(n_blocks, FrameSizes { first_part: 4, least_part: 4, share });
    assert_eq!(sizes_of(40, 3), [2, 4, 8, 8, 6, 4, 2, 2, 2, 2]);
    assert_eq!(sizes_of(40, 1), [2, 4, 8, 8, 8, 8, 2]);
    assert_eq!(sizes_of(17, 2), [2, 4, 5, 3, 2, 1]);
    // A span of two pieces is not tapered.
    assert_eq!(sizes_of(16, 3), [8, 8]);
    assert_eq!(sizes_of(1, 3), [1]);
    assert!(sizes_of(0, 3).is_empty());
    for (first_part, least_part, expected) in [
        (1, 4, &[8, 8, 8, 8, 4, 2, 2][..]),
        (2, 4, &[4, 8, 8, 8, 6, 3, 2, 1]),
        (4, 1, &[2, 4, 8, 8, 8, 8, 2]),
        (8, 4, &[1, 2, 4, 8, 8, 8, 4, 2, 2, 1]),
    ] {
        let taper = FrameSizes { first_part, least_part, share: 2 };
        assert_eq!(tapered(40, taper), expected, "{taper:?}");
    }
}
