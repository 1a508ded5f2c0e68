//! A connector's links, one to each peer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared, WeakShared};
use types::{Destination, Landing, Scheme};

use super::connect::Peer;
use super::link_out::Link;
use super::send_path::KvSendPath;
use crate::connector::KvSender;
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::outgoing::{Outgoing, Sender, landing_of};
use crate::wire_threads::WireThreads;

/// Limit of peers that this side sends to.
const PEERS_MAX: usize = 4096;

/// Makes the send path of a new link.
pub(in crate::connectors) type MakeSendPath =
    dyn Fn(&ConnectorParts) -> Result<Arc<dyn KvSendPath>, TransferError> + Send + Sync;

/// An attempt to make a link. All transfers that wait for it share its result, and it ends when the last of them is
/// dropped.
type Connecting = BoxFuture<'static, Result<Arc<Link>, TransferError>>;

/// A peer's link, or the last attempt to make it.
enum LinkSlot {
    Connecting(WeakShared<Connecting>),
    Open(Arc<Link>),
}

/// The slots by the peer's endpoint. Locked for a look-up or a change, never across an await.
type LinkTable = Arc<Mutex<HashMap<String, LinkSlot>>>;

/// A connector's links, one to each peer.
pub(in crate::connectors) struct Links {
    parts: ConnectorParts,
    wire_threads: WireThreads,
    send_path: Arc<MakeSendPath>,
    links: LinkTable,
}

impl Links {
    pub(in crate::connectors) fn new(
        parts: ConnectorParts,
        wire_threads: WireThreads,
        send_path: Box<MakeSendPath>,
    ) -> Self {
        Self { parts, wire_threads, send_path: send_path.into(), links: LinkTable::default() }
    }

    /// Opens a landing over a link to its node.
    pub(in crate::connectors) async fn open(
        &self,
        to: &Destination,
        scheme: &Scheme,
    ) -> Result<Box<dyn KvSender>, TransferError> {
        let (landing, lanes) = landing_of(to, scheme, &self.parts)?;
        let link = self.link_to(&landing).await?;
        let (out, refetches) = Outgoing::new(landing, lanes);
        // The sender is made before the answer comes. So if this future is dropped, the drop of the sender notifies
        // the receiver.
        let start = || Sender::start(Arc::clone(&out), refetches, Arc::clone(&link) as _, &self.parts);
        let sender = self.wire_threads.at(start);
        match link.open(&out).await {
            Ok(()) => Ok(sender),
            Err(error) => {
                out.settle(Err(error.clone()));
                Err(error)
            }
        }
    }

    /// Returns a working link to the node that listens at `endpoint` now.
    async fn link(&self, endpoint: &str) -> Result<Arc<Link>, TransferError> {
        match self.known(endpoint)? {
            Known::Open(link) => Ok(link),
            Known::Connecting(connecting) => connecting.await,
        }
    }

    /// Returns the endpoint's link, or the attempt to make it, which this call starts if none is under way.
    fn known(&self, endpoint: &str) -> Result<Known, TransferError> {
        let mut links = lock(&self.links);
        match links.get(endpoint) {
            Some(LinkSlot::Open(link)) if !link.is_lost() => return Ok(Known::Open(Arc::clone(link))),
            Some(LinkSlot::Connecting(attempt)) => {
                if let Some(connecting) = attempt.upgrade().filter(|attempt| attempt.peek().is_none()) {
                    return Ok(Known::Connecting(connecting));
                }
            }
            _ => {}
        }
        if links.len() >= PEERS_MAX && !links.contains_key(endpoint) {
            links.retain(|_, slot| slot.is_in_use());
            if links.len() >= PEERS_MAX {
                return Err(TransferError::TooMany);
            }
        }
        let connecting = self.connect(endpoint.to_owned()).shared();
        let attempt = connecting.downgrade().expect("it has not been polled");
        links.insert(endpoint.to_owned(), LinkSlot::Connecting(attempt));
        Ok(Known::Connecting(connecting))
    }

    /// Makes a link, and enters it into the table. Takes at most the link's own limits.
    fn connect(&self, endpoint: String) -> Connecting {
        let (parts, wire_threads, links) =
            (self.parts.clone(), self.wire_threads.clone(), Arc::clone(&self.links));
        let make_send_path = Arc::clone(&self.send_path);
        Box::pin(async move {
            let send_path = make_send_path(&parts)?;
            let (gate, threads, addr) = (parts.gate.clone(), wire_threads.clone(), endpoint.clone());
            let connect = async move { Link::connect(&addr, &parts, threads, send_path).await };
            let link = Arc::new(wire_threads.run(&gate, "kv connect", connect).await?);
            lock(&links).insert(endpoint, LinkSlot::Open(Arc::clone(&link)));
            Ok(link)
        })
    }

    /// Returns a working link to the landing's life of the node. A link to an earlier life is replaced at once.
    async fn link_to(&self, landing: &Landing) -> Result<Arc<Link>, TransferError> {
        let wanted = Peer { node: landing.node.clone(), epoch: landing.epoch };
        let endpoint = &landing.wire.endpoint;
        let link = self.link(endpoint).await?;
        if link.peer == wanted {
            return Ok(link);
        }
        self.forget(endpoint, &link);
        let link = self.link(endpoint).await?;
        if link.peer == wanted { Ok(link) } else { Err(TransferError::WrongEpoch) }
    }

    fn forget(&self, endpoint: &str, link: &Arc<Link>) {
        let mut links = lock(&self.links);
        if matches!(links.get(endpoint), Some(LinkSlot::Open(known)) if Arc::ptr_eq(known, link)) {
            links.remove(endpoint);
        }
    }
}

/// The table's entry for an endpoint.
enum Known {
    Open(Arc<Link>),
    Connecting(Shared<Connecting>),
}

impl LinkSlot {
    fn is_in_use(&self) -> bool {
        match self {
            Self::Connecting(attempt) => attempt.upgrade().is_some_and(|attempt| attempt.peek().is_none()),
            Self::Open(link) => !link.is_lost(),
        }
    }
}

fn lock(links: &LinkTable) -> MutexGuard<'_, HashMap<String, LinkSlot>> {
    links.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").field("links", &lock(&self.links).len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use chassis::Stream;
    use futures::future::join_all;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::conformance::node::{Node, layout};
    use crate::connectors::link::span_out::SpanOut;
    use crate::connectors::link::stream::FrameWriter;

    /// The wire to peers that never answer. Counts the connects.
    #[derive(Debug, Default)]
    struct Unreachable(AtomicU32);

    #[async_trait]
    impl KvSendPath for Unreachable {
        async fn connect(&self, _: &str, _: u16) -> io::Result<Stream> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        }

        async fn write_span(
            &self,
            _: &mut FrameWriter,
            _: &ConnectorParts,
            _: SpanOut,
        ) -> Result<(), TransferError> {
            unreachable!("there is no stream")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_that_wait_for_one_connect_share_its_failure() {
        let (wire, parts) = (Arc::<Unreachable>::default(), Node::parts("prefill", layout()));
        let (limit, path) = (parts.settings.stall(), Arc::clone(&wire));
        let limits = |halves: u32| (limit * halves / 2).as_secs();
        let make = move |_: &ConnectorParts| Ok(Arc::clone(&path) as Arc<dyn KvSendPath>);
        let links = Links::new(parts, WireThreads::shared(), Box::new(make));
        let n_connects = || wire.0.load(Ordering::Relaxed);
        let refused = async || links.link("d:1").await.map(drop).expect_err("no peer answers");
        let began = Instant::now();
        let so_far = || (began.elapsed().as_secs(), n_connects());
        let all = async { tokio::join!(timeout(limit / 2, refused()), join_all((0..12).map(|_| refused()))) };
        let (first, errors) = all.await;
        first.expect_err("it is dropped before the end");
        assert!(errors.iter().all(|error| matches!(error, TransferError::Stalled { .. })), "{errors:?}");
        assert_eq!(so_far(), (limits(2), 1), "the others keep the attempt of the first");
        refused().await;
        assert_eq!(so_far(), (limits(4), 2), "a later one tries again");
        timeout(limit / 2, refused()).await.expect_err("it is dropped before the end");
        refused().await;
        assert_eq!(so_far(), (limits(7), 4), "an attempt ends with its last waiter");
    }
}
