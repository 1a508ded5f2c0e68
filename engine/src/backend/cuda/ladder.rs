//! Sizes of steps that are recorded: a step takes the next one above.

/// Rows of recorded steps. Closer together where a row more costs a larger share.
const ROWS: &[usize] =
    &[1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256];
/// The shortest length that is told apart.
const LENGTH_MIN: usize = 256;
const STEPS_OF_OCTAVE: usize = 8;

/// Which sizes are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ladder {
    rows: Vec<usize>,
    lengths: Vec<usize>,
}

/// One size: so many rows, of sequences up to so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Rung {
    pub(super) rows: usize,
    pub(super) length: usize,
}

impl Ladder {
    /// For steps of up to `rows` sequences of up to `tokens` tokens.
    pub(super) fn new(rows: usize, tokens: usize) -> Self {
        let below = ROWS.iter().copied().filter(|rung| *rung < rows);
        let last = rows.min(ROWS[ROWS.len() - 1]);
        let rows = below.chain([last]).collect();
        Self { rows, lengths: Self::lengths(tokens) }
    }

    /// Eight lengths in each doubling, whole blocks all of them. What lies beyond a sequence's end costs nothing by itself,
    /// but the parts that a sequence is computed in are as many as the longest one needs.
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

    /// Every size, the smallest first.
    pub(super) fn rungs(&self) -> impl Iterator<Item = Rung> + '_ {
        let of_rows = |rows: usize| self.lengths.iter().map(move |length| Rung { rows, length: *length });
        self.rows.iter().flat_map(move |rows| of_rows(*rows))
    }

    pub(super) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The smallest size that a step fits into, if any does.
    pub(super) fn rung(&self, rows: usize, length: usize) -> Option<Rung> {
        let rows = self.rows.iter().copied().find(|rung| *rung >= rows)?;
        Some(Rung { rows, length: Self::length(&self.lengths, length)? })
    }

    fn length(lengths: &[usize], length: usize) -> Option<usize> {
        lengths.iter().copied().find(|rung| *rung >= length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_next_size_above() {
        let ladder = Ladder::new(100, 4000);
        for (rows, length, expected) in [
            (1, 1, Some((1, 256))),
            (3, 257, Some((4, 288))),
            (65, 1024, Some((72, 1024))),
            (97, 1025, Some((100, 1152))),
            (100, 3999, Some((100, 4000))),
            (101, 10, None),
            (1, 4001, None),
        ] {
            let rung = ladder.rung(rows, length).map(|rung| (rung.rows, rung.length));
            assert_eq!(rung, expected, "{rows} rows of {length}");
        }
    }

    #[test]
    fn sizes_are_whole_blocks_and_within_what_was_asked() {
        for (rows, tokens) in [(1, 16), (256, 131_072), (3, 500), (1000, 2048)] {
            let ladder = Ladder::new(rows, tokens);
            assert!(ladder.rungs().all(|rung| rung.length.is_multiple_of(16) && rung.rows <= rows.min(256)));
            assert_eq!(ladder.rung(rows.min(256), tokens).map(|rung| rung.rows), Some(rows.min(256)));
            assert!(ladder.rows().is_sorted() && ladder.rungs().count() < 2000);
        }
    }
}
