//! How far weights have come: a bar, or a line now and then where nobody watches a terminal.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressStyle};
use tracing::info;

const BAR: &str = "{msg} {bar:30} {bytes:>11} of {total_bytes:>11}  {bytes_per_sec:>12}  {eta:>4}";
/// Lines of one load.
const LINES: usize = 10;

/// How much of so many bytes is there. Its bar goes away with it.
#[derive(Debug)]
pub(crate) struct Meter {
    total: usize,
    done: usize,
    n_said: usize,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Bar(ProgressBar),
    Lines,
    /// Somebody else tells of the same.
    Nothing,
}

impl Meter {
    /// On standard error if that is a terminal.
    pub(crate) fn new(total: usize) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        Self::shown(total, if is_terminal { Shown::Bar(bar(total)) } else { Shown::Lines })
    }

    pub(crate) fn silent(total: usize) -> Self {
        Self::shown(total, Shown::Nothing)
    }

    fn shown(total: usize, shown: Shown) -> Self {
        Self { total, done: 0, n_said: 0, shown }
    }

    /// Bytes of all of it.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn add(&mut self, bytes: usize) {
        self.done += bytes;
        let is_due = self.is_due();
        match &self.shown {
            Shown::Bar(bar) => bar.set_position(self.done as u64),
            Shown::Lines if is_due => {
                info!(mib = self.done >> 20, of_mib = self.total >> 20, "load weights onto the GPU");
            }
            Shown::Lines | Shown::Nothing => {}
        }
    }

    /// Whether another tenth is there since the last line.
    fn is_due(&mut self) -> bool {
        let tenths = LINES * self.done / self.total.max(1);
        let is_due = tenths > self.n_said;
        self.n_said = self.n_said.max(tenths);
        is_due
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn bar(total: usize) -> ProgressBar {
    let style = ProgressStyle::with_template(BAR).expect("it is a constant").progress_chars("=> ");
    ProgressBar::new(total as u64).with_style(style).with_message("weights onto the GPU")
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressDrawTarget;

    use super::*;

    #[test]
    fn a_line_is_due_with_every_tenth() {
        for (total, pieces, expected) in [
            (100, vec![5, 5, 1, 20, 69], [false, true, false, true, true]),
            (3, vec![1, 0, 1, 1, 0], [true, false, true, true, false]),
            // Norms are not counted beforehand.
            (10, vec![10, 1, 1, 1, 1], [true, true, true, true, true]),
        ] {
            let mut meter = Meter::shown(total, Shown::Lines);
            let mut due = Vec::new();
            for bytes in pieces {
                meter.done += bytes;
                due.push(meter.is_due());
            }
            assert_eq!(due, expected, "of {total}");
        }
    }

    #[test]
    fn a_bar_follows_and_goes_away() {
        let bar = bar(16 << 30);
        bar.set_draw_target(ProgressDrawTarget::hidden());
        let mut meter = Meter::shown(16 << 30, Shown::Bar(bar.clone()));
        meter.add(4 << 30);
        meter.add(1 << 30);
        assert_eq!((bar.position(), bar.length()), (5 << 30, Some(16 << 30)));
        assert!(!bar.is_finished());
        drop(meter);
        assert!(bar.is_finished());
    }
}
