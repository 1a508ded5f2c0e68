//! The state of each page of a transfer: missing, on its way, or verified.
//!
//! A page is one layer's share of a block. Only wanted pages count; held pages are not part of the transfer, and the
//! other processes of the receiver count their own pages. With several lanes, a page counts once for each lane that
//! carries a part of it.

use std::ops::Range;

use types::{GroupIdx, KvSpan, Landing};

use crate::lanes::{LaneSpan, Lanes};
use crate::reshard::Lane;
use crate::settings::FrameSizes;

/// Limit of pages in one frame, which bounds its digests.
pub(crate) const FRAME_PAGES_MAX: usize = 1024;
/// Limit of digests in one frame: eight bytes each must fit into the frame's body.
pub(crate) const FRAME_DIGESTS_MAX: usize = 8192;

/// Numbers the wanted pages of a landing: `[group][layer][lane][block]`.
#[derive(Clone, Debug)]
struct PageIndex {
    wanted: Range<u32>,
    lanes: Lanes,
    /// The lanes to ranks of this process, by their positions.
    here: Range<usize>,
    /// For each group the numbers of its layers, counted over all groups; `None` for a layer of another process.
    layers: Vec<Vec<Option<usize>>>,
    n_layers: usize,
}

impl PageIndex {
    fn of(
        landing: &Landing,
        lanes: Lanes,
        ranks: &Range<u16>,
        has_layer: impl Fn(GroupIdx, u16) -> bool,
    ) -> Self {
        let mut n_layers = 0;
        let mut number = |is_here: bool| {
            n_layers += usize::from(is_here);
            is_here.then(|| n_layers - 1)
        };
        let layout = &landing.layout;
        let layers = layout.group_indices().map(|group| {
            let n_layers = layout.group(group).layers.len() as u16;
            (0..n_layers).map(|layer_pos| number(has_layer(group, layer_pos))).collect()
        });
        let layers = layers.collect();
        let here = lanes.to_ranks(ranks);
        Self { wanted: landing.wanted_blocks(), lanes, here, layers, n_layers }
    }

    fn n_pages(&self) -> usize {
        self.wanted.len() * self.here.len() * self.n_layers
    }

    fn contains(&self, span: &LaneSpan) -> bool {
        let layers = span.layers.start.into()..span.layers.end.into();
        let layers = self.layers.get(usize::from(span.group.0)).and_then(|of_group| of_group.get(layers));
        self.lane(span.lane).is_some()
            && layers.is_some_and(|layers| layers.iter().all(Option::is_some))
            && self.wanted.start <= span.blocks.start
            && span.blocks.end <= self.wanted.end
    }

    /// Returns the number of a lane among those to ranks of this process.
    fn lane(&self, lane: Lane) -> Option<usize> {
        let position = self.lanes.position(lane).filter(|position| self.here.contains(position))?;
        Some(position - self.here.start)
    }

    /// Returns the page numbers of one layer of a span, which the index contains.
    fn row(&self, lane: usize, group: GroupIdx, layer_pos: u16, blocks: &Range<u32>) -> Range<usize> {
        let layer = self.layers[usize::from(group.0)][usize::from(layer_pos)];
        let layer = layer.expect("a span is checked before its pages are looked up");
        let row = layer * self.here.len() + lane;
        let start = row * self.wanted.len() + (blocks.start - self.wanted.start) as usize;
        start..start + blocks.len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum PageState {
    Missing,
    OnItsWay,
    /// Arrived wrong once, and was requested again.
    MissingAgain,
    OnItsWayAgain,
    Verified,
}

/// The state of every wanted page of one transfer.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    index: PageIndex,
    states: Vec<PageState>,
    n_claimed: usize,
    n_verified: usize,
}

impl Pages {
    /// Returns all wanted pages of a landing.
    pub(crate) fn of(landing: &Landing, lanes: Lanes) -> Self {
        Self::of_process(landing, lanes, &(0..u16::MAX), |_, _| true)
    }

    /// Returns the wanted pages of one process: of some layers on some ranks.
    pub(crate) fn of_process(
        landing: &Landing,
        lanes: Lanes,
        ranks: &Range<u16>,
        has_layer: impl Fn(GroupIdx, u16) -> bool,
    ) -> Self {
        let index = PageIndex::of(landing, lanes, ranks, has_layer);
        let states = vec![PageState::Missing; index.n_pages()];
        Self { index, states, n_claimed: 0, n_verified: 0 }
    }

    pub(crate) fn total(&self) -> usize {
        self.states.len()
    }

    /// Returns the number of pages that were claimed at least once.
    pub(crate) fn n_claimed(&self) -> usize {
        self.n_claimed
    }

    pub(crate) fn n_verified(&self) -> usize {
        self.n_verified
    }

    pub(crate) fn all_verified(&self) -> bool {
        self.n_verified == self.total()
    }

    /// Returns whether the span names wanted pages only, on a lane of this transfer.
    pub(crate) fn contains(&self, span: &LaneSpan) -> bool {
        self.index.contains(span)
    }

    /// Marks the pages as on their way and returns true. If any of them is on its way already or has arrived, changes
    /// nothing and returns false.
    pub(crate) fn claim(&mut self, span: &LaneSpan) -> bool {
        let rows = self.rows(span);
        let is_free = |row: &Range<usize>| {
            let (once, again) = (self.n_in(row, PageState::Missing), self.n_in(row, PageState::MissingAgain));
            once + again == row.len()
        };
        if !rows.iter().all(is_free) {
            return false;
        }
        for row in rows {
            self.n_claimed += self.n_in(&row, PageState::Missing);
            for state in &mut self.states[row] {
                let again = *state == PageState::MissingAgain;
                *state = if again { PageState::OnItsWayAgain } else { PageState::OnItsWay };
            }
        }
        true
    }

    /// Marks the pages of a span, which was claimed before, as verified, except those in `wrong`. `wrong` must be on
    /// the span's lane.
    ///
    /// Returns how many pages have now been wrong twice.
    pub(crate) fn arrived(&mut self, span: &LaneSpan, wrong: &[KvSpan]) -> usize {
        let of_lane = |wrong: &KvSpan| self.rows(&LaneSpan { lane: span.lane, span: wrong.clone() });
        let wrong: Vec<usize> = wrong.iter().flat_map(of_lane).flatten().collect();
        let again = wrong.iter().filter(|page| self.states[**page] == PageState::OnItsWayAgain).count();
        for page in wrong {
            self.states[page] = PageState::MissingAgain;
        }
        for row in self.rows(span) {
            self.n_verified +=
                self.n_in(&row, PageState::OnItsWay) + self.n_in(&row, PageState::OnItsWayAgain);
            for state in &mut self.states[row] {
                let came = matches!(*state, PageState::OnItsWay | PageState::OnItsWayAgain);
                *state = if came { PageState::Verified } else { *state };
            }
        }
        again
    }

    /// Returns the number of pages in one state. Counting all is faster than stopping at the first mismatch.
    fn n_in(&self, row: &Range<usize>, state: PageState) -> usize {
        self.states[row.clone()].iter().filter(|one| **one == state).count()
    }

    /// Returns the page numbers of a span, layer by layer.
    fn rows(&self, span: &LaneSpan) -> Vec<Range<usize>> {
        let lane = self.index.lane(span.lane).unwrap_or(0);
        let row = |layer_pos| self.index.row(lane, span.group, layer_pos, &span.blocks);
        span.layers.clone().map(row).collect()
    }
}

/// Returns the part of a span that the receiver wants; `None` if it holds all of it.
pub(crate) fn wanted_part(span: KvSpan, landing: &Landing) -> Option<KvSpan> {
    let wanted = landing.wanted_blocks();
    let blocks = span.blocks.start.max(wanted.start)..span.blocks.end;
    (!blocks.is_empty() && !span.layers.is_empty()).then_some(KvSpan { blocks, ..span })
}

/// The limits of a piece of a span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceMax {
    pub(crate) bytes: usize,
    pub(crate) pages: usize,
}

/// Cuts a span into pieces within `max`, but of at least one page each.
/// `page_bytes` returns the page size of a layer.
///
/// Pieces keep the order of layers. If a layer's part is small, one piece holds several layers.
///
/// | layers × blocks, 4 pages a piece | pieces |
/// |---|---|
/// | 1 × 10 | 1 × 4, 1 × 4, 1 × 2 |
/// | 5 × 2  | 2 × 2, 2 × 2, 1 × 2 |
/// | 2 × 5  | 1 × 4, 1 × 1, 1 × 4, 1 × 1 |
pub(crate) fn cut(page_bytes: impl Fn(u16) -> usize, span: &KvSpan, max: PieceMax) -> Vec<KvSpan> {
    let mut pieces = Vec::new();
    let mut layer = span.layers.start;
    while layer < span.layers.end {
        let n_blocks = (max.bytes / page_bytes(layer).max(1)).min(max.pages).max(1);
        if n_blocks < span.blocks.len() {
            pieces.extend(one_layer(span, layer, n_blocks));
            layer += 1;
        } else {
            let layers = layer..last_layer(&page_bytes, span, layer, max);
            layer = layers.end;
            pieces.push(KvSpan { layers, ..span.clone() });
        }
    }
    pieces
}

/// Like [`cut`], but each piece has few blocks and all layers. Falls back to [`cut`] if one block of all layers does
/// not fit.
///
/// | 40 blocks, at most 8 a piece | pieces |
/// |---|---|
/// | without a taper | 8, 8, 8, 8, 8 |
/// | first piece: 1/4 of 8; later ones: at most 1/3 of the rest, at least 1/4 of 8 | 2, 4, 8, 8, 6, 4, 2, 2, 2, 2 |
pub(crate) fn cut_tall(
    page_bytes: impl Fn(u16) -> usize,
    span: &KvSpan,
    max: PieceMax,
    taper: Option<FrameSizes>,
) -> Vec<KvSpan> {
    let column: usize = span.layers.clone().map(&page_bytes).sum();
    let blocks_max = (max.bytes / column.max(1)).min(max.pages / span.layers.len().max(1));
    if blocks_max == 0 {
        return cut(page_bytes, span, max);
    }
    let mut sizes = Sizes::new(blocks_max as u32, span.blocks.len() as u32, taper);
    let (mut pieces, mut start) = (Vec::new(), span.blocks.start);
    while start < span.blocks.end {
        let end = start + sizes.next(span.blocks.end - start);
        pieces.push(KvSpan { blocks: start..end, ..span.clone() });
        start = end;
    }
    pieces
}

/// Computes the number of blocks of each piece.
struct Sizes {
    max: u32,
    least: u32,
    /// The limit of the next piece. It doubles with each piece, up to `max`.
    grown: u32,
    share: u32,
}

impl Sizes {
    /// Computes the sizes for a span of `n_blocks`. The taper applies only if there are more than two full
    /// pieces.
    fn new(max: u32, n_blocks: u32, taper: Option<FrameSizes>) -> Self {
        match taper.filter(|_| n_blocks > 2 * max) {
            None => Self { max, least: max, grown: max, share: 1 },
            Some(FrameSizes { first_part, least_part, share }) => {
                let part = |of: u32| (max / of.max(1)).max(1);
                Self { max, least: part(least_part), grown: part(first_part), share: share.max(1) }
            }
        }
    }

    fn next(&mut self, rest: u32) -> u32 {
        let size = self.grown.min((rest / self.share).max(self.least)).min(rest);
        self.grown = (2 * self.grown).min(self.max);
        size
    }
}

fn one_layer(span: &KvSpan, layer: u16, n_blocks: usize) -> impl Iterator<Item = KvSpan> {
    let end = span.blocks.end;
    span.blocks.clone().step_by(n_blocks).map(move |start| KvSpan {
        group: span.group,
        blocks: start..end.min(start + n_blocks as u32),
        layers: layer..layer + 1,
    })
}

/// Returns the end of the longest run of layers from `first` that fits into one piece.
fn last_layer(page_bytes: impl Fn(u16) -> usize, span: &KvSpan, first: u16, max: PieceMax) -> u16 {
    let (mut bytes, mut pages) = (0, 0);
    for layer in first..span.layers.end {
        bytes += page_bytes(layer) * span.blocks.len();
        pages += span.blocks.len();
        if layer > first && (bytes > max.bytes || pages > max.pages) {
            return layer;
        }
    }
    span.layers.end
}

#[cfg(test)]
#[path = "pages_tests.rs"]
pub(crate) mod tests;
