//! One watch of a registry: an endless stream of events over connections that may break.

use std::collections::VecDeque;
use std::time::Duration;

use async_trait::async_trait;
use chassis::World;
use chassis::guards::{Guard, stands};
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::time::Instant;
use tracing::{debug, info, warn};
use types::{NodeId, NodeInfo};

use crate::MembershipEvent;
use crate::backoff::Backoff;
use crate::error::{Chain, RegistryError};
use crate::known::{AbsentMembers, KnownMembers};

/// The source of a registry's news, in order. A watch consumes them.
#[async_trait]
pub(crate) trait Feed: Send + 'static {
    /// Returns the next news. Connects first if there is no connection. An error ends the connection, so the news after it
    /// begin with [`RegistryMessage::All`].
    ///
    /// Cancel-safe: no news is lost if the future is dropped.
    async fn next(&mut self) -> Result<Vec<RegistryMessage>, RegistryError>;

    /// Returns the lifetime of a lease: after an outage, members have this time to announce themselves again.
    fn ttl(&self) -> Duration;
}

/// One message of a registry. A watch turns it into [`MembershipEvent`]s.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RegistryMessage {
    All(AllNodes),
    Is(NodeInfo),
    Gone(NodeId),
}

/// The complete list of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AllNodes {
    pub(crate) nodes: Vec<NodeInfo>,
    /// Whether the registry has lost its data since this watch's last news.
    pub(crate) forgot: bool,
}

/// A lost connection counts as an outage after `ttl` divided by this number. After an outage departures are
/// doubted, because members may have been cut off too, and longer than this watch noticed: a silent peer is
/// detected by pings, some seconds late.
const OUTAGES_PER_TTL: u32 = 4;

/// Turns a feed into the stream that [`crate::Registry::watch`] returns.
pub(crate) fn follow(feed: impl Feed, world: World) -> BoxStream<'static, MembershipEvent> {
    let (known, ready, backoff) = (KnownMembers::default(), VecDeque::new(), Backoff::default());
    let follower = Follower { feed, world, known, ready, backoff, away_since: None };
    stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await;
        Some((event, follower))
    })
    .boxed()
}

struct Follower<F> {
    feed: F,
    world: World,
    known: KnownMembers,
    /// Events to return before more news are read. One message of the registry limits their number.
    ready: VecDeque<MembershipEvent>,
    backoff: Backoff,
    /// The time at which the connection was lost; `None` while connected.
    away_since: Option<Instant>,
}

impl<F: Feed> Follower<F> {
    async fn next(&mut self) -> MembershipEvent {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return event;
            }
            match self.listen().await {
                WatchInput::Messages(news) => news.into_iter().for_each(|news| self.take(news)),
                WatchInput::DoubtsEnd => self.ready.extend(self.known.believe()),
                WatchInput::Gap(error) => self.pause(&error).await,
            }
        }
    }

    async fn listen(&mut self) -> WatchInput {
        // While the registry is unreachable no node can announce itself, so the doubts do not end and no
        // timeout is set.
        let until = self.known.doubts_end().filter(|_| self.away_since.is_none());
        let news = self.feed.next();
        let answer = match until {
            None => Ok(news.await),
            Some(until) => tokio::time::timeout_at(until, news).await,
        };
        match answer {
            Ok(Ok(news)) => WatchInput::Messages(news),
            Ok(Err(gap)) => WatchInput::Gap(gap),
            Err(_elapsed) => WatchInput::DoubtsEnd,
        }
    }

    fn take(&mut self, news: RegistryMessage) {
        self.backoff.reset();
        match news {
            RegistryMessage::All(all) => self.take_all(all),
            RegistryMessage::Is(node) => self.ready.extend(self.known.joined(node)),
            RegistryMessage::Gone(id) => self.ready.extend(self.known.left(id)),
        }
    }

    fn take_all(&mut self, all: AllNodes) {
        let AllNodes { nodes, forgot } = all;
        if self.away_since.is_some() && !stands(Guard::Resync) {
            self.away_since = None;
            return;
        }
        let (now, ttl) = (self.world.now(), self.feed.ttl());
        let outage = self.away_since.take().map_or(Duration::ZERO, |since| now - since);
        let is_doubted = forgot || outage > ttl / OUTAGES_PER_TTL;
        let absent = if is_doubted { AbsentMembers::MayReturn } else { AbsentMembers::HaveLeft };
        let snapshot = self.known.snapshot(nodes, absent, now + ttl);
        let n_missed = self.known.n_missed();
        if n_missed > 0 {
            warn!(
                n_missed,
                forgot,
                outage_ms = outage.as_millis() as u64,
                "members are missing in the registry, waiting for them to announce again"
            );
        } else {
            debug!("registry watch started");
        }
        self.ready.push_back(snapshot);
    }

    async fn pause(&mut self, error: &RegistryError) {
        match (self.backoff.is_fresh(), error) {
            (true, RegistryError::Interrupted { .. }) => {
                info!(error = %Chain(error), "registry watch interrupted, reconnecting")
            }
            (true, _) => {
                warn!(error = %Chain(error), "registry watch failed, keeping the known members")
            }
            (false, _) => debug!(error = %Chain(error), "registry watch failed again"),
        }
        let now = self.world.now();
        self.away_since.get_or_insert(now);
        let pause = self.backoff.next(self.world.draw());
        tokio::time::sleep(pause).await;
    }
}

enum WatchInput {
    Messages(Vec<RegistryMessage>),
    Gap(RegistryError),
    DoubtsEnd,
}

#[cfg(test)]
mod tests;
