//! Merges pages into rectangles for the copy engines. A row is a run of neighbouring pages; the rows are
//! layers at equal distances.
//!
//! Memory is `[layer][block]`. Blocks that are neighbours on both sides form one run of bytes, and the same
//! run exists in every layer. An engine copies such a rectangle in one call: a block without neighbours costs
//! one call for 32 layers, not 32 calls.

/// The largest distance between rows that every driver accepts.
const PITCH_MAX: u64 = (1 << 31) - 1;

/// The source and destination addresses of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageMove {
    pub(super) from: u64,
    pub(super) to: u64,
}

/// `n_rows` runs of `row_bytes`, with a fixed distance between rows on each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rectangle {
    pub(super) first: PageMove,
    pub(super) row_bytes: usize,
    pub(super) n_rows: usize,
    pub(super) pitch: PageMove,
}

impl Rectangle {
    fn bytes(&self) -> usize {
        self.row_bytes * self.n_rows
    }
}

/// Merges pages into rectangles. The pages are in layer order, with `n_of_layer` in each layer.
pub(super) fn rectangles(pages: &[PageMove], n_of_layer: usize, page_bytes: usize) -> Vec<Rectangle> {
    let layers: Vec<&[PageMove]> = pages.chunks(n_of_layer).collect();
    if let Some(pitch) = common_pitch(&layers) {
        return runs(layers[0], page_bytes, layers.len(), pitch).collect();
    }
    let alone = PageMove { from: 0, to: 0 };
    layers.iter().flat_map(|layer| runs(layer, page_bytes, 1, alone)).collect()
}

/// Returns the mean size of a rectangle in bytes; 0 if there is none.
pub(super) fn mean_bytes(rectangles: &[Rectangle]) -> usize {
    rectangles.iter().map(Rectangle::bytes).sum::<usize>() / rectangles.len().max(1)
}

/// Returns the distance between layers, if it is equal for all layers and all pages.
fn common_pitch(layers: &[&[PageMove]]) -> Option<PageMove> {
    let (first, second) = (layers.first()?, layers.get(1)?);
    let between = |above: &PageMove, below: &PageMove| {
        let pitch =
            PageMove { from: below.from.checked_sub(above.from)?, to: below.to.checked_sub(above.to)? };
        (pitch.from.max(pitch.to) <= PITCH_MAX).then_some(pitch)
    };
    let pitch = between(first.first()?, second.first()?)?;
    let is_even = |pair: &[&[PageMove]]| {
        pair[0].len() == pair[1].len()
            && pair[0].iter().zip(pair[1]).all(|(above, below)| between(above, below) == Some(pitch))
    };
    layers.windows(2).all(is_even).then_some(pitch)
}

/// Returns the runs of neighbouring pages in one layer.
fn runs(
    layer: &[PageMove],
    page_bytes: usize,
    n_rows: usize,
    pitch: PageMove,
) -> impl Iterator<Item = Rectangle> {
    let bytes = page_bytes as u64;
    let follows = move |one: &PageMove, next: &PageMove| {
        next.from.checked_sub(one.from) == Some(bytes) && next.to.checked_sub(one.to) == Some(bytes)
    };
    layer.chunk_by(follows).map(move |run| Rectangle {
        first: run[0],
        row_bytes: run.len() * page_bytes,
        n_rows,
        pitch,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 64 << 10;
    const LAYER: (u64, u64) = (1 << 30, 1 << 28);

    /// Makes the pages of `n_layers` layers. Each block is given as its source and destination index.
    fn pages(n_layers: u64, blocks: &[(u64, u64)]) -> Vec<PageMove> {
        let at = |layer: u64, (from, to): &(u64, u64)| PageMove {
            from: layer * LAYER.0 + from * PAGE as u64,
            to: layer * LAYER.1 + to * PAGE as u64,
        };
        (0..n_layers).flat_map(|layer| blocks.iter().map(move |block| at(layer, block))).collect()
    }

    #[test]
    fn neighbours_of_all_layers_are_one_rectangle() {
        let found = rectangles(&pages(4, &[(3, 7), (4, 8)]), 2, PAGE);
        let first = PageMove { from: 3 * PAGE as u64, to: 7 * PAGE as u64 };
        let pitch = PageMove { from: LAYER.0, to: LAYER.1 };
        assert_eq!(found, [Rectangle { first, row_bytes: 2 * PAGE, n_rows: 4, pitch }]);
    }

    #[test]
    fn each_block_without_a_neighbour_is_a_rectangle() {
        let blocks = [(3, 7), (5, 8), (6, 20)];
        let found = rectangles(&pages(8, &blocks), 3, PAGE);
        assert_eq!(found.iter().map(|one| (one.row_bytes, one.n_rows)).collect::<Vec<_>>(), [(PAGE, 8); 3]);
        assert_eq!(mean_bytes(&found), 8 * PAGE);
    }

    #[test]
    fn layers_that_lie_unevenly_are_taken_one_by_one() {
        let blocks: Vec<_> = (0..8).map(|block| (block, block)).collect();
        let mut uneven = pages(3, &blocks);
        uneven[2 * 8..].iter_mut().for_each(|page| page.to += 4096);
        let found = rectangles(&uneven, 8, PAGE);
        assert_eq!(
            found.iter().map(|one| (one.row_bytes, one.n_rows)).collect::<Vec<_>>(),
            [(8 * PAGE, 1); 3]
        );
    }

    #[test]
    fn no_pages_are_no_rectangle() {
        assert_eq!(mean_bytes(&rectangles(&[], 1, PAGE)), 0);
    }

    #[test]
    fn layers_too_far_from_each_other_are_no_rectangle() {
        let page = |nth: u64| PageMove { from: nth << 32, to: nth << 20 };
        assert_eq!(common_pitch(&[&[page(0)], &[page(1)]]), None);
    }
}
