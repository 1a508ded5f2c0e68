//! Reads calls to their end.

use std::time::Duration;

use chassis::{Gate, spawn_guarded};
use tokio::time::timeout;
use tonic::Streaming;

/// The longest time that a call takes to end after its last message.
const END_WITHIN: Duration = Duration::from_secs(1);

/// Reads a call to its end after its last message, on a task of its own.
///
/// A dropped call would be reset while its end may be on the way. The HTTP/2 library counts such ends and closes the
/// connection, with all other calls, at the 1,024th.
pub(super) fn let_end<M: Send + 'static>(gate: &Gate, mut messages: Streaming<M>) {
    let end = async move {
        // Nothing depends on how the call ends.
        let _ = timeout(END_WITHIN, async { while let Ok(Some(_)) = messages.message().await {} }).await;
    };
    spawn_guarded(gate, "call end", end).detach();
}
