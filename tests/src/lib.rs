//! Starts whole clusters of real processes, sends requests as a client, and causes faults.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "tests spawn as they please")]

pub mod executable;
pub mod up;
pub mod logs;
pub mod ports;
pub mod process;
pub mod fleet;
pub mod etcd;
pub mod wire;
pub mod hosts;
pub mod client;
pub mod check;
pub mod calls;
pub mod flood;
pub mod probe;
pub mod stopwatch;
pub mod browser;
pub mod sim;

pub use browser::Browser;
pub use client::{Answer, Ask, Client, Failed};
pub use etcd::Etcd;
pub use executable::python;
pub use fleet::Fleet;
pub use ports::free_addr;
pub use process::Process;
pub use stopwatch::Stopwatch;
pub use up::{Node, Up, undisturbed};
pub use wire::Wire;

use std::time::Duration;

/// The time limit of each wait of a test.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// Runs `work` for at most [`PATIENCE`]. Afterwards panics with a message that names the wait.
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done,
        Err(_) => panic!("waited {PATIENCE:?} for {what}"),
    }
}

/// Calls `look` repeatedly until it returns a value, for at most [`PATIENCE`].
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let mut pause = tokio::time::interval(Duration::from_millis(20));
    in_time(what, async {
        loop {
            pause.tick().await;
            if let Some(found) = look().await {
                return found;
            }
        }
    })
    .await
}
