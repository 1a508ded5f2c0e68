//! Shows the progress of downloads: a bar for each file, or a line per file if there is no terminal.

use std::io::IsTerminal as _;

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

const BAR: &str = "{msg:30!} {bar:30} {bytes:>11} of {total_bytes:>11}  {bytes_per_sec:>12}  {eta:>4}";

/// The progress of one model's download, on standard error.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    bars: MultiProgress,
    terminal: bool,
}

/// The bar of one file. Dropping it removes the bar.
#[derive(Debug)]
pub(crate) struct Meter(ProgressBar);

impl Progress {
    pub(crate) fn new() -> Self {
        Self { bars: MultiProgress::new(), terminal: std::io::stderr().is_terminal() }
    }

    /// Begins to show a file. `n_there` of its `n_bytes` were already downloaded by an earlier attempt.
    pub(crate) fn file(&self, name: &str, n_bytes: u64, n_there: u64) -> Meter {
        if !self.terminal {
            let rest = HumanBytes(n_bytes - n_there.min(n_bytes));
            let more = if n_there > 0 { "the rest of " } else { "" };
            eprintln!("fetching {more}{name}, {rest}");
        }
        let bar = self.bars.add(ProgressBar::new(n_bytes).with_position(n_there));
        bar.reset_eta();
        bar.set_style(
            ProgressStyle::with_template(BAR).expect("the template is valid").progress_chars("=> "),
        );
        bar.set_message(name.to_owned());
        Meter(bar)
    }
}

impl Meter {
    pub(crate) fn at(&self, n_bytes: u64) {
        self.0.set_position(n_bytes);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
