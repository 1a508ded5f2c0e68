//! The output of log lines: a bounded queue and a thread that writes.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

/// The largest number of lines in the queue. At 300 bytes per line it holds 2.5 MiB.
const QUEUED_LINES_MAX: usize = 8192;

/// The count of lost lines of the first writer: a process logs to one place.
static LOST: OnceLock<LostLines> = OnceLock::new();

/// Returns the number of log lines that this process has lost because its log was not read fast enough, or because a
/// write failed.
pub fn lost_lines() -> u64 {
    LOST.get().map_or(0, LostLines::count)
}

/// Makes a writer that never blocks, and a guard. Dropping the guard writes the queued lines.
pub(super) fn to(writer: impl io::Write + Send + 'static) -> (NonBlocking, WorkerGuard) {
    let (writer, guard, lost) = counted(writer);
    let _ = LOST.set(lost);
    (writer, guard)
}

fn counted(writer: impl io::Write + Send + 'static) -> (NonBlocking, WorkerGuard, LostLines) {
    let unwritten = Arc::<AtomicU64>::default();
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(QUEUED_LINES_MAX)
        .lossy(true)
        .thread_name("log")
        .finish(CountingWriter { inner: writer, unwritten: Arc::clone(&unwritten) });
    let lost = LostLines { unqueued: writer.error_counter(), unwritten };
    (writer, guard, lost)
}

/// The lost lines of one writer.
#[derive(Debug)]
struct LostLines {
    /// The lines that came while the queue was full.
    unqueued: ErrorCounter,
    /// The lines whose write failed.
    unwritten: Arc<AtomicU64>,
}

impl LostLines {
    fn count(&self) -> u64 {
        self.unqueued.dropped_lines() as u64 + self.unwritten.load(Ordering::Relaxed)
    }
}

/// Counts failed writes. The thread of the queue writes each line by one `write_all`, and ignores errors.
struct CountingWriter<W> {
    inner: W,
    unwritten: Arc<AtomicU64>,
}

impl<W: io::Write> io::Write for CountingWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.inner.write(line)
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        self.inner.write_all(line).inspect_err(|_| {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
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

    #[test]
    fn a_line_that_cannot_be_written_is_lost() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
        let (mut writer, guard, lost) = counted(full);
        for _ in 0..3 {
            writer.write_all(b"line\n").expect("a lossy writer takes every line");
        }
        drop(guard);
        assert_eq!(lost.count(), 3);
    }
}
