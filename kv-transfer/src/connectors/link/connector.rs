//! A connector made of links: it accepts links from peers and makes links to peers.

use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Task, spawn_guarded};
use rustix::fs::Access;
use types::{Destination, Landing, Scheme, WireAddress};

use super::accept::StreamAcceptor;
use super::links::{Links, MakeSendPath};
use super::receiver::{Grants, Receiver};
use crate::arrival::Arrival;
use crate::connector::{KvConnector, KvSender};
use crate::connector_parts::ConnectorParts;
use crate::connectors::unix::Socket;
use crate::error::TransferError;
use crate::landings::{LandRequest, Landings};
use crate::wire_threads::WireThreads;

/// The connector of every wire that uses links. Wires differ in their acceptors and in their send paths.
#[derive(Debug)]
pub struct LinkConnector {
    receiver: Arc<Receiver>,
    landings: Landings,
    links: Links,
    #[expect(dead_code, reason = "held for its Drop")]
    accepting: Task<()>,
    address: LinkAddress,
}

/// The address of a connector.
#[derive(Debug)]
pub(in crate::connectors) struct LinkAddress {
    pub(in crate::connectors) wire: WireAddress,
    /// The Unix socket of a wire within one machine; `None` for other wires.
    pub(in crate::connectors) socket: Option<Socket>,
}

impl LinkConnector {
    /// Accepts streams from `acceptor`; `send_path` makes the sender's side of each new link.
    pub(in crate::connectors) fn start(
        parts: ConnectorParts,
        wire_threads: WireThreads,
        address: LinkAddress,
        door: Box<dyn StreamAcceptor>,
        send_path: Box<MakeSendPath>,
    ) -> Arc<Self> {
        let landings = Landings::new(parts.clone(), address.wire.clone());
        let grants = Grants::Here(landings.clone());
        let receiver = Receiver::new(parts.clone(), wire_threads.clone(), grants);
        let accepting = Arc::clone(&receiver).accept_all(door);
        let accepting = wire_threads.at(|| spawn_guarded(&parts.gate, "kv listener", accepting));
        Arc::new(Self {
            receiver,
            landings,
            links: Links::new(parts, wire_threads, send_path),
            accepting,
            address,
        })
    }
}

#[async_trait]
impl KvConnector for LinkConnector {
    fn scheme(&self) -> Scheme {
        self.address.wire.scheme.clone()
    }

    fn address(&self) -> WireAddress {
        self.address.wire.clone()
    }

    /// Checks the scheme. For a wire within one machine, also checks that this process sees the peer's socket
    /// and may connect to it.
    fn reaches(&self, wire: &WireAddress) -> bool {
        let is_seen = || rustix::fs::access(&wire.endpoint, Access::WRITE_OK).is_ok();
        wire.scheme == self.address.wire.scheme && (self.address.socket.is_none() || is_seen())
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        Arrival::of(&self.landings, request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        self.links.open(to, &self.address.wire.scheme).await
    }
}

impl Drop for LinkConnector {
    fn drop(&mut self) {
        self.receiver.close();
    }
}
