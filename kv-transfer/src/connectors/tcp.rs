//! KV over TCP: works everywhere, and straight out of and into block memory.
//!
//! A [link](super::link) whose streams are sockets, and whose frames bring their KV along.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Listener, Stream, World};
use tracing::info;
use types::{Scheme, WireAddress};

use super::link::check_pages;
pub use super::link::frame;
use super::link::frame::FrameError;
use super::link::medium::Medium;
use super::link::receiver::{Arriving, Door, Incoming};
use super::link::span_out::{SpanOut, write_span};
use super::link::stream::FrameWriter;
use super::link::wire::Wire;
use crate::connector::ConnectorParts;
use crate::error::TransferError;
use crate::home::Home;

pub const SCHEME: &str = "tcp";

/// Listens as the settings say.
pub async fn listen(parts: ConnectorParts) -> Result<Arc<Wire>, TransferError> {
    let addr = &parts.settings.listen;
    let refused = |source| TransferError::Listen { addr: addr.clone(), source: Arc::new(source) };
    let listener = parts.world.net().listen(addr).await.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let endpoint = format!("{}:{port}", advertised_host(&parts));
    over(listener, endpoint, parts)
}

/// Serves an address that is bound already.
fn over(
    listener: Box<dyn Listener>,
    endpoint: String,
    parts: ConnectorParts,
) -> Result<Arc<Wire>, TransferError> {
    check_pages(&parts)?;
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint };
    info!(endpoint = address.endpoint, "kv transfer by tcp");
    let medium = |parts: &ConnectorParts| Ok(Arc::new(Sockets { world: parts.world.clone() }) as _);
    Ok(Wire::start(parts, Home::shared(), (address, None), Box::new(Port(listener)), Box::new(medium)))
}

/// A port on which streams come in.
#[derive(Debug)]
struct Port(Box<dyn Listener>);

#[async_trait]
impl Door for Port {
    async fn accept(&mut self) -> io::Result<(String, Arriving)> {
        let (stream, from) = self.0.accept().await?;
        Ok((
            from.to_string(),
            Box::pin(async { Ok(Incoming { stream, elsewhere: None, at_the_door: None }) }),
        ))
    }
}

/// The host that peers are told; IPv6 addresses keep their brackets.
pub(super) fn advertised_host(parts: &ConnectorParts) -> String {
    if !parts.settings.advertise.is_empty() {
        return parts.settings.advertise.clone();
    }
    parts.settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host).to_owned()
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

    fn writes(&self) -> bool {
        false
    }

    async fn broken(&self) -> TransferError {
        std::future::pending().await
    }

    fn close(&self) {}
}
