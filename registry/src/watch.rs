//! One watch of a registry: events without end, over connections that do end.

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
use crate::known::{AbsentMembers, Known};

/// What a watch needs of a registry: news, in order.
#[async_trait]
pub(crate) trait Feed: Send + 'static {
    /// The next news; connects first when there is no connection. An error ends the connection, so the news after
    /// one begins with [`News::All`].
    ///
    /// Cancel-safe: dropped half-way, no news is lost.
    async fn next(&mut self) -> Result<Vec<News>, RegistryError>;

    /// How long a lease lasts: the time that members are given to announce themselves again after trouble.
    fn ttl(&self) -> Duration;
}

/// What a registry says. Like [`MembershipEvent`], without what only a watch can know.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Everyone. `forgot`: the registry has lost what it knew when this watch last heard from it.
    All {
        nodes: Vec<NodeInfo>,
        forgot: bool,
    },
    Is(NodeInfo),
    Gone(NodeId),
}

/// A registry that was away for this part of a lease may have been away for its members too, and for longer than
/// this watch noticed (a silent peer is found out by pings, some seconds late). Then departures are doubted.
const OUTAGES_PER_TTL: u32 = 4;

/// Turns a feed into the stream that [`crate::Registry::watch`] promises.
pub(crate) fn follow(feed: impl Feed, world: World) -> BoxStream<'static, MembershipEvent> {
    let (known, ready, backoff) = (Known::default(), VecDeque::new(), Backoff::default());
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
    known: Known,
    /// Events that one piece of news made, on their way out. Bounded by what one message can hold.
    ready: VecDeque<MembershipEvent>,
    backoff: Backoff,
    /// Since when there is no connection.
    away_since: Option<Instant>,
}

impl<F: Feed> Follower<F> {
    async fn next(&mut self) -> MembershipEvent {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return event;
            }
            match self.listen().await {
                Heard::News(news) => news.into_iter().for_each(|news| self.take(news)),
                Heard::DoubtsEnd => self.ready.extend(self.known.believe()),
                Heard::Gap(error) => self.pause(&error).await,
            }
        }
    }

    async fn listen(&mut self) -> Heard {
        // While the registry is away no node can come back, so doubts do not end.
        let until = self.known.doubts_end().filter(|_| self.away_since.is_none());
        let news = self.feed.next();
        let answer = match until {
            None => Ok(news.await),
            Some(until) => tokio::time::timeout_at(until, news).await,
        };
        match answer {
            Ok(Ok(news)) => Heard::News(news),
            Ok(Err(gap)) => Heard::Gap(gap),
            Err(_elapsed) => Heard::DoubtsEnd,
        }
    }

    fn take(&mut self, news: News) {
        self.backoff.reset();
        match news {
            News::All { nodes, forgot } => self.take_all(nodes, forgot),
            News::Is(node) => self.ready.extend(self.known.joined(node)),
            News::Gone(id) => self.ready.extend(self.known.left(id)),
        }
    }

    fn take_all(&mut self, nodes: Vec<NodeInfo>, forgot: bool) {
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
                "members are missed, waiting for them"
            );
        } else {
            debug!("watching the registry");
        }
        self.ready.push_back(snapshot);
    }

    async fn pause(&mut self, error: &RegistryError) {
        match (self.backoff.is_fresh(), error) {
            (true, RegistryError::Interrupted { .. }) => info!(error = %Chain(error), "watching again"),
            (true, _) => {
                warn!(error = %Chain(error), "the registry cannot be watched, its members stay known")
            }
            (false, _) => debug!(error = %Chain(error), "the registry still cannot be watched"),
        }
        let now = self.world.now();
        self.away_since.get_or_insert(now);
        let pause = self.backoff.next(self.world.draw());
        tokio::time::sleep(pause).await;
    }
}

enum Heard {
    News(Vec<News>),
    Gap(RegistryError),
    DoubtsEnd,
}

#[cfg(test)]
mod tests;
