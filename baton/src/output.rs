//! Writing to the terminal, or to what reads in its place and may have closed the pipe.

use std::io::{ErrorKind, Write as _};

use crate::exit::Failed;

/// Writes to standard output. A reader that has left, as `head` does, is no error.
pub(crate) fn print(text: &str) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failed::work(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a line to standard error from a thread of its own: it may be a pipe that is full and not read.
pub(crate) fn tell_later(text: String) {
    std::thread::spawn(move || tell(&text));
}

/// Writes a line to standard error, and ignores that this fails: there is no other place for it.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
