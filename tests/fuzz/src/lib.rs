//! Entry points for bytes from outside, as functions of bytes. The fuzzer calls them, and tests call them over the
//! corpus.
//!
//! Each function panics if a check fails, and otherwise returns. The checks are more than the absence of
//! panics: a parsed value encodes and parses to itself, blocks come back, answers are complete.
//!
//! The tests include this file by its path, so that both run the same code.

mod config;
mod frames;
mod http;
mod identity;
mod receiver;
mod wire;

pub use self::config::config;
pub use self::frames::kv_frame;
pub use self::http::http;
pub use self::identity::identity;
pub use self::receiver::kv_receiver;
pub use self::wire::{landing, proto};

/// Runs `work` with a paused clock: timers fire without waiting.
fn in_paused_time<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without sockets").block_on(work)
}

/// Bytes that decide what happens next; zeros when there are no more.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn number(&mut self) -> u32 {
        self.take(4).iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }

    fn take(&mut self, n: usize) -> &'a [u8] {
        let (taken, left) = self.0.split_at(n.min(self.0.len()));
        self.0 = left;
        taken
    }

    fn is_over(&self) -> bool {
        self.0.is_empty()
    }
}
