//! Handles Ctrl-C in commands that send a request to a process: they report the interruption.

use chassis::shutdown::EXIT_FORCED;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::CommandError;
use crate::output;

/// Installs a handler: SIGINT writes `sentence` to standard error and ends the process.
pub(crate) fn says(sentence: &'static str) -> Result<(), CommandError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::start)?;
    let mut interrupts =
        runtime.block_on(async { signal(SignalKind::interrupt()) }).map_err(CommandError::start)?;
    let wait = move || {
        runtime.block_on(interrupts.recv());
        // The leading newline ends the line with the terminal's `^C`.
        output::tell(&format!("\n{sentence}"));
        std::process::exit(EXIT_FORCED);
    };
    std::thread::Builder::new().name("interrupt".to_owned()).spawn(wait).map_err(CommandError::start)?;
    Ok(())
}
