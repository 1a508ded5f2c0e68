//! KV over TCP: works everywhere, and straight out of and into block memory.
//!
//! Suggested reading order: what travels ([`frame`]), how it is read and written (`stream`), the sender's end
//! (`link`, `span_out`) and the receiver's (`receiver`, `span_in`).
//!
//! The receiver does the writing, so proof of quiet is in its own hands: see
//! [`OpenLanding::while_open`](crate::landing::OpenLanding).

pub mod frame;
mod fields;
mod code;
mod stream;
mod link;
mod span_out;
mod receiver;
mod span_in;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chassis::{Listener, Task, spawn_guarded};
use tracing::info;
use types::{Destination, Landing, NodeInfo, Scheme, WireAddress};

use self::frame::PAYLOAD_BYTES_MAX;
use self::link::{Link, Peer};
use self::receiver::Receiver;
use crate::arrival::Arrival;
use crate::connector::{ConnectorParts, KvConnector, KvSender, LandRequest};
use crate::error::TransferError;
use crate::landing::bad_request;
use crate::landings::Landings;
use crate::outgoing::{Outgoing, Sender, landing_of};

pub const SCHEME: &str = "tcp";

/// Streams of one link.
const STREAMS_MAX: u16 = 64;
/// Peers that this side sends to.
const PEERS_MAX: usize = 4096;

/// See the module.
#[derive(Debug)]
pub struct Tcp {
    parts: ConnectorParts,
    address: WireAddress,
    receiver: Arc<Receiver>,
    /// By endpoint. Held for a look-up, never across an await; what is in an entry is.
    links: Mutex<HashMap<String, LinkSlot>>,
    #[expect(dead_code, reason = "held for its Drop")]
    accepting: Task<()>,
}

/// A peer's link, if there is one. The lock is async: whoever makes the link holds it, and the others wait for it
/// instead of making their own.
type LinkSlot = Arc<tokio::sync::Mutex<Option<Arc<Link>>>>;

impl Tcp {
    /// Listens as the settings say.
    pub async fn listen(parts: ConnectorParts) -> Result<Arc<Self>, TransferError> {
        let addr = &parts.settings.listen;
        let refused = |source| TransferError::Listen { addr: addr.clone(), source: Arc::new(source) };
        let listener = parts.world.net().listen(addr).await.map_err(refused)?;
        let port = listener.local_addr().map_err(refused)?.port();
        let endpoint = format!("{}:{port}", advertised_host(&parts));
        Self::over(listener, endpoint, parts)
    }

    /// Serves an address that is bound already.
    fn over(
        listener: Box<dyn Listener>,
        endpoint: String,
        parts: ConnectorParts,
    ) -> Result<Arc<Self>, TransferError> {
        check_pages(&parts)?;
        let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint };
        let landings = Landings::new(parts.clone(), address.clone());
        let receiver = Receiver::new(parts.clone(), landings);
        let accepting = spawn_guarded(&parts.gate, "kv listener", Arc::clone(&receiver).accept_all(listener));
        info!(endpoint = address.endpoint, "kv transfer by tcp");
        Ok(Arc::new(Self { parts, address, receiver, links: Mutex::default(), accepting }))
    }

    /// A living link to whoever listens at `endpoint` now.
    async fn link(&self, endpoint: &str) -> Result<Arc<Link>, TransferError> {
        let slot = self.slot(endpoint)?;
        let mut slot = slot.lock().await;
        if let Some(link) = slot.as_ref().filter(|link| !link.is_lost()) {
            return Ok(Arc::clone(link));
        }
        *slot = None;
        let link = Arc::new(Link::connect(endpoint, &self.parts).await?);
        Ok(Arc::clone(slot.insert(link)))
    }

    /// A living link to this very life of the node. One to an earlier life is not waited for: it is made anew.
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

fn in_use(slot: &LinkSlot) -> bool {
    slot.try_lock().map_or(true, |link| link.as_ref().is_some_and(|link| !link.is_lost()))
}

/// The host that peers are told; IPv6 addresses keep their brackets.
fn advertised_host(parts: &ConnectorParts) -> String {
    if !parts.settings.advertise.is_empty() {
        return parts.settings.advertise.clone();
    }
    parts.settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host).to_owned()
}

/// A page must fit into one frame.
fn check_pages(parts: &ConnectorParts) -> Result<(), TransferError> {
    let layout = parts.memory.layout();
    let shapes = layout.groups.iter().flat_map(|group| &group.layers);
    let largest = shapes.map(|shape| layout.page_bytes(*shape)).max().unwrap_or(0);
    if largest > PAYLOAD_BYTES_MAX || parts.settings.frame_bytes > PAYLOAD_BYTES_MAX {
        return Err(bad_request("a page, or frame_bytes, is larger than a frame may be"));
    }
    Ok(())
}

#[async_trait]
impl KvConnector for Tcp {
    fn scheme(&self) -> Scheme {
        self.address.scheme.clone()
    }

    fn address(&self) -> WireAddress {
        self.address.clone()
    }

    async fn meet(&self, peer: &NodeInfo) -> Result<(), TransferError> {
        match peer.wires.iter().find(|wire| wire.scheme == self.address.scheme) {
            Some(wire) => self.link(&wire.endpoint).await.map(|_| ()),
            None => Ok(()),
        }
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        self.receiver.landings.land(request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        let landing = landing_of(to, &self.address.scheme, &self.parts)?;
        let link = self.link_to(&landing).await?;
        let (out, refetches) = Outgoing::new(landing);
        // Made before the answer is there: if this future is dropped, the sender's drop tells the receiver.
        let sender = Sender::start(Arc::clone(&out), refetches, Arc::clone(&link) as _, &self.parts);
        match link.open(&out).await {
            Ok(()) => Ok(sender),
            Err(error) => {
                out.settle(Err(error.clone()));
                Err(error)
            }
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // In this order: a stream that ends must not be the first to say why its landings fail.
        self.receiver.landings.close();
        self.receiver.closed.cancel();
    }
}
