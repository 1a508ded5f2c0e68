//! Files that a process reads again while it runs.

use std::fmt::Display;
use std::time::Duration;

/// The interval of reading. A change is in force within twice this time.
pub const READ_EVERY: Duration = Duration::from_secs(2);

/// Waits for the interval, then runs `read` on a blocking thread. Returns `None` if it panics.
pub async fn next<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::time::sleep(READ_EVERY).await;
    tokio::task::spawn_blocking(read).await.ok()
}

/// Reads at every interval, until the future is dropped. Passes each result to `changed` that differs from the
/// one before: by its hash, or by the text of its error. `read` makes the function for the next reading.
pub async fn follow<T, E, R>(
    first: blake3::Hash,
    hash: impl Fn(&T) -> blake3::Hash,
    read: impl Fn() -> R,
    mut changed: impl FnMut(Result<T, E>),
) where
    T: Send + 'static,
    E: Display + Send + 'static,
    R: FnOnce() -> Result<T, E> + Send + 'static,
{
    let mut last = Ok(first);
    loop {
        let Some(result) = next(read()).await else { continue };
        let seen = result.as_ref().map(&hash).map_err(E::to_string);
        if seen != last {
            last = seen;
            changed(result);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_change_is_passed_on_once() {
        let contents = Arc::new(Mutex::new(Ok("first")));
        let of_reader = Arc::clone(&contents);
        let read = move || {
            let contents = Arc::clone(&of_reader);
            move || *contents.lock().expect("no reader panics")
        };
        let seen = Mutex::new(Vec::new());
        let hash = |text: &&str| blake3::hash(text.as_bytes());
        let changed = |result: Result<&'static str, &'static str>| {
            seen.lock().expect("nothing panics").push(result);
        };
        let steps = async {
            for step in [Ok("first"), Err("torn"), Err("torn"), Ok("first"), Ok("second"), Ok("second")] {
                *contents.lock().expect("no reader panics") = step;
                // Two readings, and time for the blocking thread.
                tokio::time::sleep(READ_EVERY * 5 / 2).await;
            }
        };
        tokio::select! {
            () = follow(hash(&"first"), hash, read, changed) => {}
            () = steps => {}
        }
        assert_eq!(*seen.lock().expect("nothing panics"), [Err("torn"), Ok("first"), Ok("second")]);
    }
}
