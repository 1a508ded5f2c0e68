//! Ctrl-C in the commands that ask a process something: they say that they were interrupted.

use chassis::shutdown::EXIT_FORCED;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::Failed;
use crate::output;

/// From now on SIGINT writes `sentence` to standard error and ends the process.
pub(crate) fn says(sentence: &'static str) -> Result<(), Failed> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failed::start)?;
    let mut interrupts =
        runtime.block_on(async { signal(SignalKind::interrupt()) }).map_err(Failed::start)?;
    let wait = move || {
        runtime.block_on(interrupts.recv());
        // The first line ends the one that the terminal's `^C` is in.
        output::tell(&format!("\n{sentence}"));
        std::process::exit(EXIT_FORCED);
    };
    std::thread::Builder::new().name("interrupt".to_owned()).spawn(wait).map_err(Failed::start)?;
    Ok(())
}
