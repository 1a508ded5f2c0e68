//! Output to the terminal, or to a reader that may have closed the pipe.

use std::io::{ErrorKind, Write as _};

use crate::exit::CommandError;

/// Writes to standard output. A reader that has closed the pipe, as `head` does, is no error.
pub(crate) fn print(text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CommandError::work(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a line to standard error from another thread, because a full pipe without a reader would block.
pub(crate) fn tell_later(text: String) {
    std::thread::spawn(move || tell(&text));
}

/// Writes a line to standard error. Errors are ignored, because there is no other output.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
