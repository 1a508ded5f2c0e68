//! A connector that is made of links: who comes in, and whom this side goes to.

use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Task, spawn_guarded};
use rustix::fs::Access;
use types::{Destination, Landing, Scheme, WireAddress};

use super::links::{Links, Makes};
use super::receiver::{Door, Receiver};
use crate::arrival::Arrival;
use crate::connector::{ConnectorParts, KvConnector, KvSender, LandRequest};
use crate::connectors::shm::door::Socket;
use crate::error::TransferError;
use crate::home::Home;
use crate::landings::Landings;

/// What `tcp`, `shm` and `cuda-ipc` are once they listen: they differ in their doors and in what their links go over.
#[derive(Debug)]
pub struct Wire {
    address: WireAddress,
    receiver: Arc<Receiver>,
    links: Links,
    #[expect(dead_code, reason = "held for its Drop")]
    accepting: Task<()>,
    /// Of a wire within one machine: its name in the folder where the processes meet.
    socket: Option<Socket>,
}

impl Wire {
    /// Lets in who comes through `door`; `medium` makes what a link to somebody else goes over.
    pub(in crate::connectors) fn start(
        parts: ConnectorParts,
        home: Home,
        (address, socket): (WireAddress, Option<Socket>),
        door: Box<dyn Door>,
        medium: Box<Makes>,
    ) -> Arc<Self> {
        let landings = Landings::new(parts.clone(), address.clone());
        let receiver = Receiver::new(parts.clone(), home.clone(), landings);
        let accepting = Arc::clone(&receiver).accept_all(door);
        let accepting = home.at(|| spawn_guarded(&parts.gate, "kv listener", accepting));
        Arc::new(Self { address, receiver, links: Links::new(parts, home, medium), accepting, socket })
    }
}

#[async_trait]
impl KvConnector for Wire {
    fn scheme(&self) -> Scheme {
        self.address.scheme.clone()
    }

    fn address(&self) -> WireAddress {
        self.address.clone()
    }

    /// Within one machine: whether the peer's socket is in the folder that this side sees, and may be connected to.
    fn reaches(&self, wire: &WireAddress) -> bool {
        let is_seen = || rustix::fs::access(&wire.endpoint, Access::WRITE_OK).is_ok();
        wire.scheme == self.address.scheme && (self.socket.is_none() || is_seen())
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        self.receiver.landings().land(request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        self.links.open(to, &self.address.scheme).await
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.receiver.close();
    }
}
