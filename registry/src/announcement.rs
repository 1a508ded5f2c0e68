//! A node's announcement: a value that keeps the node a member for as long as it lives.

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

/// How long one call to a registry may take before it counts as lost.
pub(crate) const CALL_WITHIN: Duration = Duration::from_secs(3);

/// What an announcement needs of a registry: one node's lease there. An implementation keeps the lease's id and
/// the connection, and makes a new connection when the old one is broken; the rest is done here.
///
/// Every call gets [`CALL_WITHIN`] and may be dropped half-way: the next call must then start over.
#[async_trait]
pub(crate) trait Presence: Send + 'static {
    /// Makes the node a member under a new lease.
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError>;
    /// One sign of life. [`RegistryError::LeaseLost`] means that the node is not a member any more.
    async fn keep_alive(&mut self) -> Result<(), RegistryError>;
    /// Ends the lease if there is one. A later announcement of the node, under another lease, is left alone.
    async fn withdraw(&mut self) -> Result<(), RegistryError>;
}

/// How long a lease lasts without a sign of life, and how often one is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseTerms {
    pub(crate) ttl: Duration,
    pub(crate) beat: Duration,
}

/// Keeps one node a member. Dropping it withdraws the node, in the background.
///
/// The work is done by a task inside the gate that the registry was made with, so the gate closes only after the
/// withdrawal is sent.
#[derive(Debug)]
#[must_use = "dropping an announcement withdraws the node"]
pub struct Announcement {
    id: NodeId,
    epoch: Epoch,
    standing: watch::Receiver<Standing>,
    stop: CancellationToken,
    /// `None` once it was waited for or let go.
    task: Option<Task<()>>,
}

/// Where an announcement stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Not a member, or perhaps not any more; it is being tried.
    Trying,
    Member,
    /// A later life of the node is a member. It is still being tried, should that one go.
    Superseded,
    Withdrawn,
}

impl Announcement {
    pub fn id(&self) -> &NodeId {
        &self.id
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn standing(&self) -> Standing {
        *self.standing.borrow()
    }

    /// Changes whenever the standing does.
    pub fn standings(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// Waits until the node is a member. No deadline of its own. Cancel-safe.
    pub async fn announced(&mut self) {
        // The sender lives in the task, which outlives `self`, so the channel is closed only by a task that panicked.
        let _ = self.standing.wait_for(|standing| *standing == Standing::Member).await;
    }

    /// Withdraws the node, and returns when the registry knows it or cannot be told (three seconds at most; the
    /// lease then lapses by itself). Dropped half-way, the withdrawal goes on in the background.
    pub async fn withdraw(mut self) {
        self.stop.cancel();
        let _ = self.standing.wait_for(|standing| *standing == Standing::Withdrawn).await;
    }

    /// Stops without withdrawing, as if the process had died: the lease lapses when its time is up.
    pub fn abandon(mut self) {
        drop(self.task.take());
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }
}

/// Announces `node` through `presence`, and keeps it announced.
pub(crate) async fn keep(
    node: &NodeInfo,
    presence: impl Presence,
    gate: &Gate,
    world: World,
) -> Result<Announcement, RegistryError> {
    check(node)?;
    let (standing, standings) = watch::channel(Standing::Trying);
    let (first, first_answer) = oneshot::channel();
    let stop = CancellationToken::new();
    let keeper = Keeper { id: node.id.clone(), presence, world, standing, backoff: Backoff::default() };
    let task = spawn_guarded(gate, "registry announcement", keeper.run(first, stop.clone()));
    let (id, epoch) = (node.id.clone(), node.epoch);
    let announcement = Announcement { id, epoch, standing: standings, stop, task: Some(task) };
    match first_answer.await {
        Ok(first) => first.map(|()| announcement),
        Err(_not_started) => Err(RegistryError::Stopping),
    }
}

/// An id is part of keys, labels and log lines.
const ID_BYTES_MAX: usize = 128;

/// Refuses what could never be a member.
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

/// The task behind an announcement.
struct Keeper<P> {
    id: NodeId,
    presence: P,
    world: World,
    standing: watch::Sender<Standing>,
    backoff: Backoff,
}

/// Hears once whether there is any point in trying.
type FirstAnswer = oneshot::Sender<Result<(), RegistryError>>;

fn hand_over(first: FirstAnswer, answer: Result<(), RegistryError>) {
    // If the receiver is gone, the announcement was dropped, and its `stop` ends the task.
    let _ = first.send(answer);
}

impl<P: Presence> Keeper<P> {
    /// Stays a member until `stop`, and then withdraws.
    async fn run(mut self, first: FirstAnswer, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.stay(first) => {}
        }
        if let Err(error) = within("withdraw", self.presence.withdraw()).await {
            warn!(node = %self.id, error = %Chain(&error), "not withdrawn, the lease will lapse");
        }
        self.stand(Standing::Withdrawn);
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

    /// Tells how an attempt to announce went.
    fn note(&mut self, answer: &Result<LeaseTerms, RegistryError>) -> Option<LeaseTerms> {
        match answer {
            Ok(terms) => {
                info!(node = %self.id, ttl_ms = terms.ttl.as_millis() as u64, "announced");
                self.backoff.reset();
                self.stand(Standing::Member);
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
        let superseded = matches!(error, RegistryError::Superseded { .. });
        self.stand(if superseded { Standing::Superseded } else { Standing::Trying });
        match self.backoff.is_fresh() {
            true if error.is_final() => {
                error!(node = %self.id, error = %cause, "the registry takes no announcement")
            }
            true => warn!(node = %self.id, error = %cause, "announcement failed, trying again"),
            false => debug!(node = %self.id, error = %cause, "announcement failed again"),
        }
    }

    /// Gives signs of life until the lease is lost. A registry that is away may come back in time, so the lease is
    /// given up only when the registry says that it is gone.
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
            info!(node = %self.id, "the registry is back");
        }
        self.backoff.reset();
        self.stand(Standing::Member);
        jittered(beat, self.world.draw())
    }

    fn lost(&mut self) {
        info!(node = %self.id, "the registry has lost the lease, announcing again");
        self.backoff.reset();
        self.stand(Standing::Trying);
    }

    /// The next attempt comes sooner than a beat, and never later: a registry that comes back gives every lease its
    /// full time once more, and must hear of it within that.
    fn unheard(&mut self, error: &RegistryError, lapses: Instant, beat: Duration) -> Duration {
        if self.backoff.is_fresh() {
            warn!(node = %self.id, error = %Chain(error), "the registry is away");
        }
        if lapses <= self.world.now() {
            self.stand(Standing::Trying);
        }
        self.backoff.next(self.world.draw()).min(beat)
    }

    /// Wakes those who wait for a change only if there is one.
    fn stand(&self, standing: Standing) {
        self.standing.send_if_modified(|now| std::mem::replace(now, standing) != standing);
    }

    async fn pause(&mut self) {
        let pause = self.backoff.next(self.world.draw());
        tokio::time::sleep(pause).await;
    }
}

/// Bounds one call to a registry.
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
