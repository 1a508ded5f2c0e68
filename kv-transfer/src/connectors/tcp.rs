//! KV over TCP: works everywhere, and straight out of and into block memory.
//!
//! A [link](super::link) whose streams are sockets, and whose frames bring their KV along.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Listener, Stream, Task, World, spawn_guarded};
use tracing::info;
use types::{Destination, Landing, NodeInfo, Scheme, WireAddress};

use super::link::check_pages;
pub use super::link::frame;
use super::link::frame::FrameError;
use super::link::links::Links;
use super::link::medium::Medium;
use super::link::receiver::{Arriving, Door, Incoming, Receiver};
use super::link::span_out::{SpanOut, write_span};
use super::link::stream::FrameWriter;
use crate::arrival::Arrival;
use crate::connector::{ConnectorParts, KvConnector, KvSender, LandRequest};
use crate::error::TransferError;
use crate::landings::Landings;

pub const SCHEME: &str = "tcp";

/// See the module.
#[derive(Debug)]
pub struct Tcp {
    address: WireAddress,
    receiver: Arc<Receiver>,
    links: Links,
    #[expect(dead_code, reason = "held for its Drop")]
    accepting: Task<()>,
}

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
        let accepting = spawn_guarded(
            &parts.gate,
            "kv listener",
            Arc::clone(&receiver).accept_all(Box::new(Port(listener))),
        );
        info!(endpoint = address.endpoint, "kv transfer by tcp");
        let links = Links::new(parts, |parts| Ok(Arc::new(Sockets { world: parts.world.clone() })));
        Ok(Arc::new(Self { address, receiver, links, accepting }))
    }
}

/// A port on which streams come in.
#[derive(Debug)]
struct Port(Box<dyn Listener>);

#[async_trait]
impl Door for Port {
    async fn accept(&mut self) -> io::Result<(String, Arriving)> {
        let (stream, from) = self.0.accept().await?;
        Ok((from.to_string(), Box::pin(async { Ok(Incoming { stream, elsewhere: None }) })))
    }
}

/// The host that peers are told; IPv6 addresses keep their brackets.
fn advertised_host(parts: &ConnectorParts) -> String {
    if !parts.settings.advertise.is_empty() {
        return parts.settings.advertise.clone();
    }
    parts.settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host).to_owned()
}

#[async_trait]
impl KvConnector for Tcp {
    fn scheme(&self) -> Scheme {
        self.address.scheme.clone()
    }

    fn address(&self) -> WireAddress {
        self.address.clone()
    }

    fn reaches(&self, wire: &WireAddress) -> bool {
        wire.scheme == self.address.scheme
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

impl Drop for Tcp {
    fn drop(&mut self) {
        self.receiver.close();
    }
}

/// Streams that carry KV themselves.
#[derive(Debug)]
struct Sockets {
    world: World,
}

#[async_trait]
impl Medium for Sockets {
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        self.world.net().connect(endpoint).await
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        write_span(writer, parts, span).await
    }

    fn taken(&self, _slot: u16) -> Result<(), FrameError> {
        Err(FrameError::Unexpected("a slot of a stage that this wire does not have"))
    }
}
