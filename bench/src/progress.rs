//! The progress bar of a run. It has its own thread, so that a slow terminal does not delay the load.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::load::live::{Live, LiveSnapshot, SHOWN};
use crate::span::show_ms;

const REFRESH: Duration = Duration::from_millis(250);

/// The progress bar of one run. Dropping it removes the bar.
#[derive(Debug)]
pub struct Progress {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Shows a progress bar. `n_total` is the number of planned requests, if it is known.
    pub fn start(label: &str, n_total: Option<u64>, live: Arc<Live>) -> Self {
        let bar = bar(label, n_total);
        let (stop, stopped) = sync_channel::<()>(1);
        let draw = move || {
            let mut tokens = 0;
            while stopped.recv_timeout(REFRESH) == Err(RecvTimeoutError::Timeout) {
                let glance = live.glance();
                bar.set_position(glance.ended);
                bar.set_message(line(&glance, glance.tokens - tokens));
                tokens = glance.tokens;
            }
            bar.finish_and_clear();
        };
        let thread = std::thread::Builder::new().name("progress".to_owned()).spawn(draw).ok();
        Self { stop: Some(stop), thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn bar(label: &str, n_total: Option<u64>) -> ProgressBar {
    let (bar, template) = match n_total {
        Some(n) => (ProgressBar::new(n), "{prefix} {elapsed_precise} {bar:24} {pos}/{len}\n  {wide_msg}"),
        None => (ProgressBar::new_spinner(), "{prefix} {elapsed_precise} {spinner} {pos} done\n  {wide_msg}"),
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style).with_prefix(label.to_owned())
}

/// Returns the text of the bar: `12 under way · 840 tokens/s · ttft 25 ms/80 ms · …`, with medians and 99th
/// percentiles of the latest requests.
fn line(glance: &LiveSnapshot, new_tokens: u64) -> String {
    let mut parts = vec![
        format!("{} under way", glance.sent - glance.ended),
        format!("{:.0} tokens/s", new_tokens as f64 / REFRESH.as_secs_f64()),
    ];
    for (metric, (p50, p99)) in SHOWN.iter().zip(glance.percentiles) {
        parts.push(format!("{} {}/{}", metric.name(), show_ms(p50), show_ms(p99)));
    }
    if glance.failed > 0 {
        parts.push(format!("{} FAILED", glance.failed));
    }
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_matters() {
        let percentiles = [(25.0, 80.0), (1.5, 9.0), (f64::NAN, f64::INFINITY)];
        let glance = LiveSnapshot { sent: 20, ended: 8, failed: 1, tokens: 300, percentiles };
        let expected = "12 under way · 400 tokens/s · ttft 25.0 ms/80.0 ms · handover_gap 1.50 ms/9.00 ms · \
                        worst_gap -/never · 1 FAILED";
        assert_eq!(line(&glance, 100), expected);
    }
}
