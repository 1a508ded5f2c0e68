//! The request that a process stops, as a value for every task that obeys it.

use std::io::{self, Read};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::gate::Gate;
use crate::task::spawn_guarded;

/// The exit code of a process that is asked twice to stop.
pub const EXIT_FORCED: i32 = 130;

/// A request to stop, shared by clones. It is made once and never withdrawn.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    token: CancellationToken,
}

impl Shutdown {
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a shutdown that SIGTERM or SIGINT triggers. A second signal ends the process at once.
    ///
    /// The signal handlers are in place when the function returns.
    pub fn from_signals() -> io::Result<Self> {
        let shutdown = Self::new();
        let signals = Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        };
        spawn_guarded(&Gate::new("signals"), "signals", shutdown.clone().obey(signals)).detach();
        Ok(shutdown)
    }

    /// Triggers the shutdown when `reader` ends. A thread reads it.
    ///
    /// A parent keeps the other end of its child's stdin open. The kernel closes it when the parent dies, even by
    /// SIGKILL, so no child outlives its parent. The thread is never joined, so it does not delay the process's end.
    pub fn request_at_end_of(&self, mut reader: impl Read + Send + 'static) -> io::Result<()> {
        let shutdown = self.clone();
        std::thread::Builder::new().name("parent-watch".to_owned()).spawn(move || {
            let end = io::copy(&mut reader, &mut io::sink());
            info!(error = end.err().map(tracing::field::display), "parent process has ended");
            shutdown.trigger();
        })?;
        Ok(())
    }

    /// Makes a shutdown that signals trigger, as [`Shutdown::from_signals`] does, and also the end of this
    /// process's stdin.
    pub fn from_signals_and_stdin() -> io::Result<Self> {
        let shutdown = Self::from_signals()?;
        shutdown.request_at_end_of(io::stdin())?;
        Ok(shutdown)
    }

    pub fn trigger(&self) {
        self.token.cancel();
    }

    pub fn requested(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits until shutdown is requested. Cancel-safe.
    pub async fn wait(&self) {
        self.token.cancelled().await;
    }

    /// Makes a shutdown that is triggered with this one but can be triggered earlier, for a part that stops
    /// before the whole.
    pub fn child(&self) -> Self {
        Self { token: self.token.child_token() }
    }

    /// Runs `future` until it ends, or until `grace` after shutdown is requested. Then the future is dropped,
    /// and the result is `None`.
    pub async fn bound<F: Future>(&self, grace: Duration, future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = async { self.wait().await; tokio::time::sleep(grace).await } => None,
        }
    }

    async fn obey(self, mut signals: Signals) {
        let signal = signals.next().await;
        info!(signal, "shutdown requested by a signal");
        self.trigger();
        let signal = signals.next().await;
        warn!(signal, "second signal received, exiting at once");
        std::process::exit(EXIT_FORCED);
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn every_clone_hears_it() {
        let shutdown = Shutdown::new();
        let (clone, child) = (shutdown.clone(), shutdown.child());
        assert!(!clone.requested());
        shutdown.trigger();
        clone.wait().await;
        child.wait().await;
        assert!(clone.requested() && child.requested());
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_may_stop_earlier() {
        let shutdown = Shutdown::new();
        shutdown.child().trigger();
        assert!(!shutdown.requested());
    }

    #[tokio::test(start_paused = true)]
    async fn grace_has_an_end() {
        let shutdown = Shutdown::new();
        assert_eq!(shutdown.bound(SECOND, async { 1 }).await, Some(1));
        shutdown.trigger();
        assert_eq!(shutdown.bound(SECOND, tokio::time::sleep(SECOND / 2)).await, Some(()));
        assert_eq!(shutdown.bound(SECOND, tokio::time::sleep(SECOND * 2)).await, None);
    }

    #[tokio::test]
    async fn a_closed_stdin_requests_it() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let shutdown = Shutdown::new();
        shutdown.request_at_end_of(reader).expect("a thread");
        assert!(!shutdown.requested());
        drop(writer);
        tokio::time::timeout(SECOND * 10, shutdown.wait()).await.expect("the pipe ended");
    }
}
