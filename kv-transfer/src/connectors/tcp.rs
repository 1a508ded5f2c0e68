//! KV over TCP. It works on every network, and reads and writes block memory without an intermediate copy.
//!
//! A [link](super::link) whose streams are sockets, and whose frames carry their KV inline.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Listener, Stream, World};
use tracing::info;
use types::{Scheme, WireAddress};

use super::link::accept::{Handshake, Incoming, StreamAcceptor};
use super::link::check_pages;
use super::link::connector::{LinkAddress, LinkConnector};
pub use super::link::frame;
use super::link::frame::KvPlace;
use super::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use super::link::send_path::KvSendPath;
use super::link::span_in::read_span;
use super::link::span_out::{SpanOut, write_span};
use super::link::stream::{FrameReader, FrameWriter};
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "tcp";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::Needed,
};

/// How many times as many streams a link has over TLS: encryption takes as much processor time as all other work of a
/// stream, and each stream has its own core.
const TLS_STREAMS: u16 = 2;

/// Listens on the address in the settings.
pub async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let addr = &parts.settings.listen;
    let refused = |source| TransferError::Listen { addr: addr.clone(), source: Arc::new(source) };
    let listener = parts.world.net().listen(addr).await.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let endpoint = format!("{}:{port}", advertised_host(&parts));
    over(listener, endpoint, parts)
}

/// Serves an address that is already bound.
fn over(
    listener: Box<dyn Listener>,
    endpoint: String,
    mut parts: ConnectorParts,
) -> Result<Arc<LinkConnector>, TransferError> {
    check_pages(&parts)?;
    if parts.world.identity().tls().is_some() {
        parts.settings.streams = parts.settings.streams.saturating_mul(TLS_STREAMS);
    }
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint, within_host: false };
    info!(endpoint = address.endpoint, "tcp connector listens");
    let send_path = |parts: &ConnectorParts| Ok(Arc::new(Sockets { world: parts.world.clone() }) as _);
    let port = Port { listener, world: parts.world.clone() };
    Ok(LinkConnector::start(
        parts,
        WireThreads::shared(),
        LinkAddress { wire: address, socket: None },
        Box::new(port),
        Box::new(send_path),
    ))
}

/// A listening port of this wire.
#[derive(Debug)]
struct Port {
    listener: Box<dyn Listener>,
    world: World,
}

#[async_trait]
impl StreamAcceptor for Port {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (stream, from) = self.listener.accept().await?;
        let world = self.world.clone();
        let admitted = async move {
            let stream = link::admit(&world, stream).await.map_err(TransferError::lost)?;
            let kv_path = Some(Arc::new(InlineKv) as Arc<dyn KvPath>);
            Ok(Incoming { stream, kv_path, handshake_permit: None })
        };
        Ok((from.to_string(), Box::pin(admitted)))
    }
}

/// Returns the host that peers connect to. IPv6 addresses keep their brackets.
pub(super) fn advertised_host(parts: &ConnectorParts) -> String {
    if !parts.settings.advertise.is_empty() {
        return parts.settings.advertise.clone();
    }
    parts.settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host).to_owned()
}

/// The receiver's end: KV follows its frame on the stream.
#[derive(Debug)]
struct InlineKv;

#[async_trait]
impl KvPath for InlineKv {
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place: KvPlace::Inline, payload_bytes } = frame else {
            return Err(wrong_place());
        };
        match landing {
            None => reader.skip(payload_bytes).await.map(|()| Receipt::dropped()),
            Some(landing) => {
                let digests = digests.here()?;
                read_span(reader, &landing, &span, &digests, payload_bytes).await.map(Receipt::Done)
            }
        }
    }
}

/// The sender's end: the KV follows its frame on the stream.
#[derive(Debug)]
struct Sockets {
    world: World,
}

#[async_trait]
impl KvSendPath for Sockets {
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        link::dial(&self.world, endpoint).await
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        write_span(writer, parts, span).await
    }
}
