//! KV between two processes of one machine: the receiver copies it out of the sender's own pages.
//!
//! A [link](super::link) over Unix sockets, on which frames say where their KV lies instead of bringing it. The sender
//! shows the receiver the memory of its pages, to read and not to write, and the receiver copies from page to page: one
//! copy, made by whoever owns its target. So nobody writes another's pages, proof of quiet is in the receiver's own
//! hands, and a sender that is stopped or killed in the middle of it can do no harm: see
//! `docs/decisions/0007-shared-memory-is-read.md`.
//!
//! Suggested reading order: how two processes find each other (`door`), what the sender shows and how it points at it
//! (`shown`), KV that must be copied to be shown (`stage`), and what the receiver sees (`seen`).

pub(super) mod door;
mod seen;
mod shown;
mod stage;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Task, spawn_guarded};
use rustix::fs::Access;
use tracing::info;
use types::{Destination, Landing, NodeInfo, Scheme, WireAddress};

use self::door::Socket;
use self::shown::Shown;
use super::link::check_pages;
use super::link::links::{Links, MakeMedium};
use super::link::receiver::Receiver;
use crate::arrival::Arrival;
use crate::connector::{ConnectorParts, KvConnector, KvSender, LandRequest};
use crate::error::TransferError;
use crate::landings::Landings;

pub const SCHEME: &str = "shm";

/// Where the sockets are: a folder that all processes see that may share memory. Nothing else is put there.
pub const FOLDER: &str = "/dev/shm";

/// See the module.
#[derive(Debug)]
pub struct Shm {
    address: WireAddress,
    receiver: Arc<Receiver>,
    links: Links,
    #[expect(dead_code, reason = "held for its Drop")]
    accepting: Task<()>,
    #[expect(dead_code, reason = "held for its Drop")]
    socket: Socket,
}

impl Shm {
    /// Listens in [`FOLDER`].
    pub async fn listen(parts: ConnectorParts) -> Result<Arc<Self>, TransferError> {
        let in_place = parts.memory.file().is_some();
        info!(in_place, "kv transfer by shared memory");
        Self::over(parts, Shown::in_place)
    }

    /// The same, but for senders whose KV others cannot see, for whatever reason: all of it goes through a stage.
    pub async fn listen_staged(parts: ConnectorParts) -> Result<Arc<Self>, TransferError> {
        Self::over(parts, Shown::staged)
    }

    fn over(parts: ConnectorParts, medium: MakeMedium) -> Result<Arc<Self>, TransferError> {
        check_pages(&parts)?;
        let refused = |source| TransferError::Listen { addr: FOLDER.to_owned(), source: Arc::new(source) };
        let (listener, socket) = door::bind(Path::new(FOLDER), parts.world.draw()).map_err(refused)?;
        let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint: socket.endpoint() };
        let landings = Landings::new(parts.clone(), address.clone());
        let receiver = Receiver::new(parts.clone(), landings);
        let accepting = Arc::clone(&receiver).accept_all(Box::new(listener));
        let accepting = spawn_guarded(&parts.gate, "kv listener", accepting);
        let links = Links::new(parts, medium);
        Ok(Arc::new(Self { address, receiver, links, accepting, socket }))
    }
}

#[async_trait]
impl KvConnector for Shm {
    fn scheme(&self) -> Scheme {
        self.address.scheme.clone()
    }

    fn address(&self) -> WireAddress {
        self.address.clone()
    }

    /// Whether the peer's socket is in the folder that this side sees, and may be connected to.
    fn reaches(&self, wire: &WireAddress) -> bool {
        wire.scheme == self.address.scheme && rustix::fs::access(&wire.endpoint, Access::WRITE_OK).is_ok()
    }

    async fn meet(&self, peer: &NodeInfo) -> Result<(), TransferError> {
        match peer.wires.iter().find(|wire| wire.scheme == self.address.scheme) {
            Some(wire) => self.links.meet(&wire.endpoint).await,
            None => Ok(()),
        }
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        self.receiver.landings().land(request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        self.links.open(to, &self.address.scheme).await
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.receiver.close();
    }
}
