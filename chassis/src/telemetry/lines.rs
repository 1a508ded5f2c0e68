//! The output of log lines: a bounded queue and a thread that writes.

use std::io;
use std::sync::OnceLock;

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

/// The largest number of lines in the queue. At 300 bytes per line it holds 2.5 MiB.
const QUEUED_LINES_MAX: usize = 8192;

/// The counter of lost lines of the first writer: a process logs to one place.
static LOST: OnceLock<ErrorCounter> = OnceLock::new();

/// Returns the number of log lines that this process has lost because its log was not read fast enough.
pub fn lost_lines() -> u64 {
    LOST.get().map_or(0, |lost| lost.dropped_lines() as u64)
}

/// Makes a writer that never blocks, and a guard. Dropping the guard writes the queued lines.
pub(super) fn to(writer: impl io::Write + Send + 'static) -> (NonBlocking, WorkerGuard) {
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(QUEUED_LINES_MAX)
        .lossy(true)
        .thread_name("log")
        .finish(writer);
    let _ = LOST.set(writer.error_counter());
    (writer, guard)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::mpsc;

    use super::*;

    /// An output that blocks: each write waits until the test releases it.
    struct Blocked(mpsc::Receiver<()>);

    impl io::Write for Blocked {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_log_that_is_not_read_loses_lines_and_blocks_no_one() {
        let (release, blocked) = mpsc::channel();
        let (mut writer, guard) = to(Blocked(blocked));
        let n_lines = QUEUED_LINES_MAX + 100;
        for _ in 0..n_lines {
            writer.write_all(b"line\n").expect("a lossy writer takes every line");
        }
        let lost = writer.error_counter().dropped_lines();
        assert!((90..=100).contains(&lost), "{lost} lines lost of {n_lines}");
        assert_eq!(lost_lines(), lost as u64);
        drop(release);
        drop(guard);
    }
}
