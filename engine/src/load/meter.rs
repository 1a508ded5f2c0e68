//! Progress of loading weights: a bar on a terminal, otherwise log lines.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressStyle};
use tracing::info;

const BAR: &str = "{msg} {bar:30} {bytes:>11} of {total_bytes:>11}  {bytes_per_sec:>12}  {eta:>4}";
/// The number of log lines for one load.
const LINES: usize = 10;

/// Counts the loaded bytes. Dropping it removes its bar.
#[derive(Debug)]
pub(crate) struct Meter {
    total: usize,
    done: usize,
    n_logged: usize,
    display: ProgressDisplay,
}

#[derive(Debug)]
enum ProgressDisplay {
    Bar(ProgressBar),
    Lines,
    /// No display, because another meter shows the same load.
    Nothing,
}

impl Meter {
    /// Makes a meter that shows a bar if standard error is a terminal, and otherwise log lines.
    pub(crate) fn new(total: usize) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        Self::with_display(
            total,
            if is_terminal { ProgressDisplay::Bar(bar(total)) } else { ProgressDisplay::Lines },
        )
    }

    pub(crate) fn silent(total: usize) -> Self {
        Self::with_display(total, ProgressDisplay::Nothing)
    }

    fn with_display(total: usize, display: ProgressDisplay) -> Self {
        Self { total, done: 0, n_logged: 0, display }
    }

    /// Returns the total bytes of the load.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn add(&mut self, bytes: usize) {
        self.done += bytes;
        let is_due = self.is_due();
        match &self.display {
            ProgressDisplay::Bar(bar) => bar.set_position(self.done as u64),
            ProgressDisplay::Lines if is_due => {
                info!(
                    mib = self.done >> 20,
                    of_mib = self.total >> 20,
                    "weights are being loaded onto the GPU"
                );
            }
            ProgressDisplay::Lines | ProgressDisplay::Nothing => {}
        }
    }

    /// Returns whether another tenth was loaded since the last log line.
    fn is_due(&mut self) -> bool {
        let tenths = LINES * self.done / self.total.max(1);
        let is_due = tenths > self.n_logged;
        self.n_logged = self.n_logged.max(tenths);
        is_due
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let ProgressDisplay::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

fn bar(total: usize) -> ProgressBar {
    let style = ProgressStyle::with_template(BAR).expect("the template is valid").progress_chars("=> ");
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
            // The parts exceed the total, because norms are not part of the expected total.
            (10, vec![10, 1, 1, 1, 1], [true, true, true, true, true]),
        ] {
            let mut meter = Meter::with_display(total, ProgressDisplay::Lines);
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
        let mut meter = Meter::with_display(16 << 30, ProgressDisplay::Bar(bar.clone()));
        meter.add(4 << 30);
        meter.add(1 << 30);
        assert_eq!((bar.position(), bar.length()), (5 << 30, Some(16 << 30)));
        assert!(!bar.is_finished());
        drop(meter);
        assert!(bar.is_finished());
    }
}
