//! Sizes of recorded steps. A step uses the next larger size.

/// The numbers of rows of recorded steps. Small numbers are closer together, because for them padding costs a
/// larger share.
const ROWS: &[usize] =
    &[1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256];
/// The shortest recorded length, in tokens.
const LENGTH_MIN: usize = 256;
const STEPS_OF_OCTAVE: usize = 8;

/// All recorded sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GraphSizes {
    rows: Vec<usize>,
    lengths: Vec<usize>,
}

/// One size: a number of rows, with sequences up to a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct GraphSize {
    pub(super) rows: usize,
    pub(super) length: usize,
}

impl GraphSizes {
    /// Chooses the sizes for steps of up to `rows` sequences of up to `tokens` tokens.
    pub(super) fn new(rows: usize, tokens: usize) -> Self {
        let below = ROWS.iter().copied().filter(|graph_size| *graph_size < rows);
        let last = rows.min(ROWS[ROWS.len() - 1]);
        let rows = below.chain([last]).collect();
        Self { rows, lengths: Self::lengths(tokens) }
    }

    /// Returns the recorded lengths: eight in each doubling, all in whole blocks. Positions after a
    /// sequence's end cost nothing, but every sequence is computed in as many parts as the longest one needs.
    pub(super) fn lengths(tokens: usize) -> Vec<usize> {
        let mut lengths = vec![];
        let mut octave = LENGTH_MIN;
        while octave < tokens {
            lengths.extend((0..STEPS_OF_OCTAVE).map(|step| octave + step * octave / STEPS_OF_OCTAVE));
            octave *= 2;
        }
        lengths.retain(|length| *length < tokens);
        lengths.push(tokens.next_multiple_of(16).max(16));
        lengths
    }

    /// Returns all sizes, the smallest first.
    pub(super) fn sizes(&self) -> impl Iterator<Item = GraphSize> + '_ {
        let of_rows =
            |rows: usize| self.lengths.iter().map(move |length| GraphSize { rows, length: *length });
        self.rows.iter().flat_map(move |rows| of_rows(*rows))
    }

    pub(super) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Returns the smallest size that fits the step; `None` if no size does.
    pub(super) fn graph_size(&self, rows: usize, length: usize) -> Option<GraphSize> {
        let rows = self.rows.iter().copied().find(|graph_size| *graph_size >= rows)?;
        Some(GraphSize { rows, length: Self::length(&self.lengths, length)? })
    }

    fn length(lengths: &[usize], length: usize) -> Option<usize> {
        lengths.iter().copied().find(|graph_size| *graph_size >= length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_next_size_above() {
        let graph_sizes = GraphSizes::new(100, 4000);
        for (rows, length, expected) in [
            (1, 1, Some((1, 256))),
            (3, 257, Some((4, 288))),
            (65, 1024, Some((72, 1024))),
            (97, 1025, Some((100, 1152))),
            (100, 3999, Some((100, 4000))),
            (101, 10, None),
            (1, 4001, None),
        ] {
            let graph_size =
                graph_sizes.graph_size(rows, length).map(|graph_size| (graph_size.rows, graph_size.length));
            assert_eq!(graph_size, expected, "{rows} rows of {length}");
        }
    }

    #[test]
    fn sizes_are_whole_blocks_and_within_what_was_asked() {
        for (rows, tokens) in [(1, 16), (256, 131_072), (3, 500), (1000, 2048)] {
            let graph_sizes = GraphSizes::new(rows, tokens);
            assert!(
                graph_sizes.sizes().all(
                    |graph_size| graph_size.length.is_multiple_of(16) && graph_size.rows <= rows.min(256)
                )
            );
            assert_eq!(
                graph_sizes.graph_size(rows.min(256), tokens).map(|graph_size| graph_size.rows),
                Some(rows.min(256))
            );
            assert!(graph_sizes.rows().is_sorted() && graph_sizes.sizes().count() < 2000);
        }
    }
}
