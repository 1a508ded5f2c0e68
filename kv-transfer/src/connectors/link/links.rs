//! A connector's links, one to each peer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// A peer's link, if there is one. The lock is async: the task that makes the link holds it, and other tasks
/// wait for that link instead of making their own.
type LinkSlot = Arc<tokio::sync::Mutex<Option<Arc<Link>>>>;

/// A connector's links, one to each peer.
pub(in crate::connectors) struct Links {
    parts: ConnectorParts,
    wire_threads: WireThreads,
    send_path: Box<MakeSendPath>,
    /// The links, by the peer's endpoint. The table is locked for a look-up, never across an await. An entry's
    /// own lock is held across awaits.
    links: Mutex<HashMap<String, LinkSlot>>,
}

impl Links {
    pub(in crate::connectors) fn new(
        parts: ConnectorParts,
        wire_threads: WireThreads,
        send_path: Box<MakeSendPath>,
    ) -> Self {
        Self { parts, wire_threads, send_path, links: Mutex::default() }
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
        let slot = self.slot(endpoint)?;
        let mut slot = slot.lock().await;
        if let Some(link) = slot.as_ref().filter(|link| !link.is_lost()) {
            return Ok(Arc::clone(link));
        }
        *slot = None;
        let send_path = (self.send_path)(&self.parts)?;
        let (endpoint, parts, wire_threads) =
            (endpoint.to_owned(), self.parts.clone(), self.wire_threads.clone());
        let connect = async move { Link::connect(&endpoint, &parts, wire_threads, send_path).await };
        let link = self.wire_threads.run(&self.parts.gate, "kv connect", connect).await?;
        Ok(Arc::clone(slot.insert(Arc::new(link))))
    }

    /// Returns a working link to the landing's life of the node. A link to an earlier life is replaced at once.
    async fn link_to(&self, landing: &Landing) -> Result<Arc<Link>, TransferError> {
        let wanted = Peer { node: landing.node.clone(), epoch: landing.epoch };
        let endpoint = &landing.wire.endpoint;
        let link = self.link(endpoint).await?;
        if link.peer == wanted {
            return Ok(link);
        }
        self.forget(endpoint, &link).await?;
        let link = self.link(endpoint).await?;
        if link.peer == wanted { Ok(link) } else { Err(TransferError::WrongEpoch) }
    }

    async fn forget(&self, endpoint: &str, link: &Arc<Link>) -> Result<(), TransferError> {
        let slot = self.slot(endpoint)?;
        let mut slot = slot.lock().await;
        if slot.as_ref().is_some_and(|known| Arc::ptr_eq(known, link)) {
            *slot = None;
        }
        Ok(())
    }

    fn slot(&self, endpoint: &str) -> Result<LinkSlot, TransferError> {
        let mut links = self.links();
        if links.len() >= PEERS_MAX && !links.contains_key(endpoint) {
            links.retain(|_, slot| in_use(slot));
            if links.len() >= PEERS_MAX {
                return Err(TransferError::TooMany);
            }
        }
        Ok(Arc::clone(links.entry(endpoint.to_owned()).or_default()))
    }

    fn links(&self) -> MutexGuard<'_, HashMap<String, LinkSlot>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").field("links", &self.links().len()).finish_non_exhaustive()
    }
}

fn in_use(slot: &LinkSlot) -> bool {
    slot.try_lock().map_or(true, |link| link.as_ref().is_some_and(|link| !link.is_lost()))
}
