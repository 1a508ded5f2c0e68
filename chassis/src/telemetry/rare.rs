//! A bound for log lines that strangers can cause.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The lines that one place of the code writes about callers: at most one per cause and minute. It is a `static` next to
/// the line, because a process has one log.
///
/// ```
/// # use baton_chassis::telemetry::RareLines;
/// static REFUSED: RareLines = RareLines::new();
/// if let Some(left_out) = REFUSED.line("not a frame of this protocol") {
///     tracing::warn!(left_out, "stream from peer refused");
/// }
/// ```
#[derive(Debug)]
pub struct RareLines(Mutex<Minute>);

/// The lines of one place since its first line of this minute.
#[derive(Debug)]
struct Minute {
    since: Option<Instant>,
    causes: Vec<String>,
    left_out: u64,
}

impl RareLines {
    /// The limit of lines per minute. A stranger may choose a part of the cause.
    const CAUSES_MAX: usize = 8;
    const MINUTE: Duration = Duration::from_secs(60);

    #[expect(clippy::new_without_default, reason = "a static needs a const function")]
    pub const fn new() -> Self {
        Self(Mutex::new(Minute { since: None, causes: Vec::new(), left_out: 0 }))
    }

    /// Returns `None` if the line about `cause` must not be written: one was written in this minute. Otherwise returns the
    /// value of the line's field `left_out`: how many lines were not written since the last one.
    pub fn line(&self, cause: &str) -> Option<u64> {
        let mut minute = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if minute.since.is_none_or(|since| now >= since + Self::MINUTE) {
            minute.since = Some(now);
            minute.causes.clear();
        }
        if minute.causes.len() == Self::CAUSES_MAX || minute.causes.iter().any(|known| known == cause) {
            minute.left_out += 1;
            return None;
        }
        minute.causes.push(cause.to_owned());
        Some(std::mem::take(&mut minute.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_cause_has_one_line_per_minute() {
        let lines = RareLines::new();
        let of = |cause: &str| (0..1000).filter_map(|_| lines.line(cause)).collect::<Vec<_>>();
        assert_eq!((of("plaintext"), of("expired")), (vec![0], vec![999]));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(of("plaintext"), [0; 0]);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(of("plaintext"), [1999]);
    }

    #[tokio::test(start_paused = true)]
    async fn causes_that_strangers_make_up_are_bounded() {
        let lines = RareLines::new();
        let made_up = || (0..1000).filter_map(|n| lines.line(&format!("protocol {n}"))).collect::<Vec<_>>();
        assert_eq!(made_up(), [0; RareLines::CAUSES_MAX]);
        tokio::time::advance(RareLines::MINUTE).await;
        assert_eq!(made_up().first(), Some(&992));
    }
}
