//! A node's announcement: a value that keeps the node a member until it is dropped.

use std::time::Duration;

use async_trait::async_trait;
use chassis::{Gate, Task, World, spawn_guarded};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use types::{Epoch, NodeId, NodeInfo};

use crate::backoff::{Backoff, jittered};
use crate::error::{Chain, RegistryError};

/// The timeout of one call to a registry.
pub(crate) const CALL_WITHIN: Duration = Duration::from_secs(3);

/// One lease in a registry, of a node or of a lock, as an announcement or a [`Lock`](crate::Lock) uses it. An
/// implementation keeps the lease's id and the connection, and reconnects when the connection is broken. [`keep`] and
/// [`take`](crate::lock::take) do the rest: retries, renewals and logs.
///
/// Every call is limited to [`CALL_WITHIN`] and may be dropped before it ends. The next call must then start over.
#[async_trait]
pub(crate) trait Presence: Send + 'static {
    /// Makes the node a member, or takes the lock, under a new lease.
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError>;
    /// Renews the lease. [`RegistryError::LeaseLost`] means that the node is no longer a member, or
    /// that the lock is lost.
    async fn keep_alive(&mut self) -> Result<(), RegistryError>;
    /// Ends the lease if there is one. A later announcement of the node under another lease is not affected.
    async fn withdraw(&mut self) -> Result<(), RegistryError>;
}

/// The lifetime of a lease without renewal, and the interval of renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseTerms {
    pub(crate) ttl: Duration,
    pub(crate) beat: Duration,
}

/// A node's membership. Dropping it withdraws the node in the background.
///
/// A task holds the registry's gate until the withdrawal is sent, so the gate does not close earlier.
#[derive(Debug)]
#[must_use = "dropping an announcement withdraws the node"]
pub struct Announcement {
    id: NodeId,
    epoch: Epoch,
    standing: watch::Receiver<AnnouncementState>,
    task: LeaseTask,
}

/// The task that renews a lease. Dropping it ends the lease in the background.
#[derive(Debug)]
pub(crate) struct LeaseTask {
    stop: CancellationToken,
    /// `None` once the task was detached or aborted.
    task: Option<Task<()>>,
}

/// The state of an announcement, as the node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnouncementState {
    /// The node is not a member, or its lease may have expired. The announcement is being retried.
    Trying,
    Member,
    /// A later life of the node is a member. The announcement is retried in case that life ends.
    Superseded,
    /// The registry answers, and refuses the announcement. It is retried in case an operator changes that.
    Refused,
    Withdrawn,
}

impl Announcement {
    pub fn id(&self) -> &NodeId {
        &self.id
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn standing(&self) -> AnnouncementState {
        *self.standing.borrow()
    }

    /// Returns a receiver of all changes of the standing.
    pub fn standings(&self) -> watch::Receiver<AnnouncementState> {
        self.standing.clone()
    }

    /// Waits until the node is a member, without a timeout. Cancel-safe.
    pub async fn announced(&mut self) {
        // The task holds the sender and outlives `self`, so an error is possible only if the task panicked.
        let _ = self.standing.wait_for(|standing| *standing == AnnouncementState::Member).await;
    }

    /// Withdraws the node. Returns when the registry has confirmed it, or after three seconds; the lease then expires by
    /// itself. If the future is dropped, the withdrawal continues in the background.
    pub async fn withdraw(mut self) {
        self.task.stop.cancel();
        let _ = self.standing.wait_for(|standing| *standing == AnnouncementState::Withdrawn).await;
    }

    /// Stops renewals without withdrawing, as if the process had died: the lease expires by itself.
    pub fn abandon(self) {
        self.task.abandon();
    }
}

impl LeaseTask {
    /// `task` ends the lease and returns when `stop` is cancelled.
    pub(crate) fn new(stop: CancellationToken, task: Task<()>) -> Self {
        Self { stop, task: Some(task) }
    }

    /// Stops renewals without ending the lease, as if the process had died.
    pub(crate) fn abandon(mut self) {
        drop(self.task.take());
    }
}

impl Drop for LeaseTask {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }
}

/// Announces `node` through `presence`, and spawns the task that keeps it announced.
pub(crate) async fn keep(
    node: &NodeInfo,
    presence: impl Presence,
    gate: &Gate,
    world: World,
) -> Result<Announcement, RegistryError> {
    check(node)?;
    let (standing, standings) = watch::channel(AnnouncementState::Trying);
    let (first, first_answer) = oneshot::channel();
    let stop = CancellationToken::new();
    let keeper = Keeper { id: node.id.clone(), presence, world, standing, backoff: Backoff::default() };
    let task = spawn_guarded(gate, "registry announcement", keeper.run(first, stop.clone()));
    let (id, epoch, task) = (node.id.clone(), node.epoch, LeaseTask::new(stop, task));
    let announcement = Announcement { id, epoch, standing: standings, task };
    match first_answer.await {
        Ok(first) => first.map(|()| announcement),
        Err(_not_started) => Err(RegistryError::Stopping),
    }
}

/// The longest node id, in bytes. Ids are part of keys, labels and log lines.
const ID_BYTES_MAX: usize = 128;

/// Checks a node's id and the size of its entry. No registry accepts a node that fails.
pub(crate) fn check(node: &NodeInfo) -> Result<(), RegistryError> {
    let invalid =
        |reason: &str| Err(RegistryError::InvalidNode { id: node.id.clone(), reason: reason.to_owned() });
    let id = node.id.as_str();
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.:".contains(letter);
    if id.is_empty() || id.len() > ID_BYTES_MAX {
        return invalid("an id has 1 to 128 bytes");
    }
    if !id.chars().all(allowed) {
        return invalid("an id has letters, digits and any of - _ . : only");
    }
    if node.address.is_empty() {
        return invalid("it has no address");
    }
    Ok(())
}

// === Keeper ===

/// The state of the task that keeps a node announced.
struct Keeper<P> {
    id: NodeId,
    presence: P,
    world: World,
    standing: watch::Sender<AnnouncementState>,
    backoff: Backoff,
}

/// The sender of one answer: success, or an error that no retry can resolve.
type FirstAnswer = oneshot::Sender<Result<(), RegistryError>>;

fn hand_over(first: FirstAnswer, answer: Result<(), RegistryError>) {
    // Sending fails if the announcement was dropped; its `stop` then ends this task, so the failure is
    // ignored.
    let _ = first.send(answer);
}

impl<P: Presence> Keeper<P> {
    /// Keeps the node a member until `stop`, then withdraws it.
    async fn run(mut self, first: FirstAnswer, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.stay(first) => {}
        }
        if let Err(error) = within("withdraw", self.presence.withdraw()).await {
            warn!(node = %self.id, error = %Chain(&error), "withdrawal from the registry failed, the node stays a member until its lease expires");
        }
        self.stand(AnnouncementState::Withdrawn);
    }

    async fn stay(&mut self, first: FirstAnswer) {
        let answer = within("announce", self.presence.announce()).await;
        let mut terms = match answer {
            Err(error) if error.is_final() => return hand_over(first, Err(error)),
            answer => self.note(&answer),
        };
        hand_over(first, Ok(()));
        loop {
            match terms {
                Some(terms) => self.hold(terms).await,
                None => self.pause().await,
            }
            let answer = within("announce", self.presence.announce()).await;
            terms = self.note(&answer);
        }
    }

    /// Logs the result of an attempt to announce and updates the standing.
    fn note(&mut self, answer: &Result<LeaseTerms, RegistryError>) -> Option<LeaseTerms> {
        match answer {
            Ok(terms) => {
                info!(node = %self.id, ttl_ms = terms.ttl.as_millis() as u64, "node announced in the registry");
                self.backoff.reset();
                self.stand(AnnouncementState::Member);
                Some(*terms)
            }
            Err(error) => {
                self.complain(error);
                None
            }
        }
    }

    fn complain(&self, error: &RegistryError) {
        let cause = Chain(error);
        self.stand(match error {
            RegistryError::Superseded { .. } => AnnouncementState::Superseded,
            error if error.is_final() => AnnouncementState::Refused,
            _ => AnnouncementState::Trying,
        });
        match self.backoff.is_fresh() {
            true if error.is_final() => {
                error!(node = %self.id, error = %cause, "registry refused the announcement")
            }
            true => {
                warn!(node = %self.id, error = %cause, "announcement in the registry failed, trying again")
            }
            false => debug!(node = %self.id, error = %cause, "announcement in the registry failed again"),
        }
    }

    /// Renews the lease until the registry reports it lost. While the registry is unreachable the lease is kept, because
    /// the registry may return before the lease expires.
    async fn hold(&mut self, terms: LeaseTerms) {
        let mut lapses = self.world.now() + terms.ttl;
        let mut pause = jittered(terms.beat, self.world.draw());
        loop {
            tokio::time::sleep(pause).await;
            pause = match within("keep alive", self.presence.keep_alive()).await {
                Ok(()) => {
                    lapses = self.world.now() + terms.ttl;
                    self.registered(terms.beat)
                }
                Err(RegistryError::LeaseLost) => return self.lost(),
                Err(error) => self.unheard(&error, lapses, terms.beat),
            };
        }
    }

    fn registered(&mut self, beat: Duration) -> Duration {
        if !self.backoff.is_fresh() {
            info!(node = %self.id, "registry is reachable again");
        }
        self.backoff.reset();
        self.stand(AnnouncementState::Member);
        jittered(beat, self.world.draw())
    }

    fn lost(&mut self) {
        info!(node = %self.id, "registry has lost the node's lease, announcing the node again");
        self.backoff.reset();
        self.stand(AnnouncementState::Trying);
    }

    /// Returns the pause before the next renewal is tried, at most one renewal interval. A registry that
    /// returns renews all leases, and the node must renew its own before it expires again.
    fn unheard(&mut self, error: &RegistryError, lapses: Instant, beat: Duration) -> Duration {
        if self.backoff.is_fresh() {
            warn!(node = %self.id, error = %Chain(error), "registry is unreachable, the node's lease may expire");
        }
        if lapses <= self.world.now() {
            self.stand(AnnouncementState::Trying);
        }
        self.backoff.next(self.world.draw()).min(beat)
    }

    /// Sets the standing. Receivers are notified only if it has changed.
    fn stand(&self, standing: AnnouncementState) {
        self.standing.send_if_modified(|now| std::mem::replace(now, standing) != standing);
    }

    async fn pause(&mut self) {
        let pause = self.backoff.next(self.world.draw());
        tokio::time::sleep(pause).await;
    }
}

/// Applies [`CALL_WITHIN`] to one call to a registry.
pub(crate) async fn within<T>(
    operation: &'static str,
    call: impl Future<Output = Result<T, RegistryError>>,
) -> Result<T, RegistryError> {
    match tokio::time::timeout(CALL_WITHIN, call).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(RegistryError::TimedOut { operation, within: CALL_WITHIN }),
    }
}

#[cfg(test)]
mod tests;
