//! A gate counts running work by name. It can be closed, and then waits for the work to end.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// A count of running work. Every unit of work enters a gate and holds a guard until it ends.
///
/// [`Gate::close`] is the end of a drain: the gate refuses new work and waits for running work. Unlike a task tracker, a
/// gate names the work that is late. Clones are handles to the same gate.
#[derive(Clone)]
pub struct Gate {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    /// The mutex is held for a few instructions, never across an await.
    inside: Mutex<Inside>,
    /// Notified when the last holder leaves a closed gate.
    emptied: Notify,
}

#[derive(Default)]
struct Inside {
    closed: bool,
    next_key: u64,
    holders: BTreeMap<u64, Holder>,
}

/// The entry of one guard: the name of the work and its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub what: Cow<'static, str>,
    pub since: Instant,
}

impl Gate {
    pub fn new(name: &'static str) -> Self {
        Self { shared: Arc::new(Shared { name, inside: Mutex::default(), emptied: Notify::new() }) }
    }

    /// Enters the gate. An error of [`Gate::close`] names late work by `what`.
    pub fn enter(&self, what: impl Into<Cow<'static, str>>) -> Result<GateGuard, GateClosed> {
        let mut inside = self.shared.inside();
        if inside.closed {
            return Err(GateClosed { gate: self.shared.name });
        }
        let key = inside.next_key;
        inside.next_key += 1;
        inside.holders.insert(key, Holder { what: what.into(), since: Instant::now() });
        Ok(GateGuard { shared: Arc::clone(&self.shared), key })
    }

    /// Refuses new work and waits until all guards are dropped.
    ///
    /// Cancel-safe: the gate stays closed, and another call continues to wait.
    pub async fn close(&self, within: Duration) -> Result<(), StillHeld> {
        self.shared.inside().closed = true;
        match tokio::time::timeout(within, self.shared.wait_until_empty()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(StillHeld { gate: self.shared.name, holders: self.holders() }),
        }
    }

    /// Returns the current holders, the oldest first.
    pub fn holders(&self) -> Vec<Holder> {
        self.shared.inside().holders.values().cloned().collect()
    }

    pub fn is_closed(&self) -> bool {
        self.shared.inside().closed
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = self.shared.inside();
        let (closed, n_holders) = (inside.closed, inside.holders.len());
        f.debug_struct("Gate")
            .field("name", &self.shared.name)
            .field("closed", &closed)
            .field("n_holders", &n_holders)
            .finish()
    }
}

impl Shared {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait_until_empty(&self) {
        loop {
            // The future is created before the check, so that a holder who leaves between check and wait is
            // not missed.
            let emptied = self.emptied.notified();
            if self.inside().holders.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    fn leave(&self, key: u64) {
        let mut inside = self.inside();
        inside.holders.remove(&key);
        if inside.closed && inside.holders.is_empty() {
            self.emptied.notify_waiters();
        }
    }
}

/// One unit of work in a gate. A closed gate waits until its guards are dropped.
#[must_use = "a guard that is dropped at once guards nothing"]
pub struct GateGuard {
    shared: Arc<Shared>,
    key: u64,
}

impl Drop for GateGuard {
    fn drop(&mut self) {
        self.shared.leave(self.key);
    }
}

impl fmt::Debug for GateGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.shared.inside().holders.get(&self.key).map(|holder| holder.what.clone());
        write!(f, "GateGuard({} of {})", what.unwrap_or_default(), self.shared.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the gate `{gate}` is closed")]
pub struct GateClosed {
    pub gate: &'static str,
}

/// The error of a drain that timed out: the work that was still running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StillHeld {
    pub gate: &'static str,
    pub holders: Vec<Holder>,
}

impl StillHeld {
    /// The limit of holders that the error names; further holders are only counted.
    const NAMED_MAX: usize = 8;
}

impl fmt::Display for StillHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the gate `{}` is still held by", self.gate)?;
        for (place, holder) in self.holders.iter().take(Self::NAMED_MAX).enumerate() {
            let comma = if place == 0 { "" } else { "," };
            write!(f, "{comma} {} ({} ms)", holder.what, holder.since.elapsed().as_millis())?;
        }
        match self.holders.len().saturating_sub(Self::NAMED_MAX) {
            0 => Ok(()),
            n_unnamed => write!(f, " and {n_unnamed} more"),
        }
    }
}

impl std::error::Error for StillHeld {}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn an_empty_gate_closes_at_once() {
        let gate = Gate::new("g");
        gate.close(Duration::ZERO).await.expect("no guard is held");
        assert_eq!(gate.enter("late").map(drop), Err(GateClosed { gate: "g" }));
    }

    #[tokio::test(start_paused = true)]
    async fn closing_waits_for_the_last_one_out() {
        let gate = Gate::new("g");
        let guards = [gate.enter("one").expect("open"), gate.enter("two").expect("open")];
        let leave = async {
            for guard in guards {
                tokio::time::sleep(SECOND).await;
                drop(guard);
            }
        };
        let start = Instant::now();
        let (closed, ()) = tokio::join!(gate.close(SECOND * 10), leave);
        assert_eq!(closed, Ok(()));
        assert_eq!(start.elapsed(), SECOND * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_drain_names_who_holds_it() {
        let gate = Gate::new("requests");
        let _stream = gate.enter("decode stream").expect("open");
        let _task = gate.enter(format!("transfer {}", 7)).expect("open");
        let late = gate.close(SECOND * 2).await.expect_err("two are inside");
        assert_eq!(
            late.to_string(),
            "the gate `requests` is still held by decode stream (2000 ms), transfer 7 (2000 ms)"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn many_holders_are_counted() {
        let gate = Gate::new("g");
        let _guards: Vec<GateGuard> = (0..10).map(|_| gate.enter("x").expect("open")).collect();
        let late = gate.close(Duration::ZERO).await.expect_err("ten are inside");
        assert!(late.to_string().ends_with(" and 2 more"), "{late}");
    }
}
