//! Accepts streams of rdma links. The first stream of a link exchanges the two sides' queue pairs.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Listener, Stream};

use super::adapter::Adapter;
use super::greeting::{read_end, read_first, write_end};
use super::receive::RdmaKvPath;
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::accept::{Handshake, Incoming, StreamAcceptor};
use crate::connectors::link::frame::FrameError;
use crate::error::TransferError;

/// A port that accepts streams.
#[derive(Debug)]
pub(super) struct Port {
    listener: Box<dyn Listener>,
    adapter: Arc<Adapter>,
    parts: ConnectorParts,
}

impl Port {
    pub(super) fn new(listener: Box<dyn Listener>, adapter: Arc<Adapter>, parts: &ConnectorParts) -> Self {
        Self { listener, adapter, parts: parts.clone() }
    }
}

#[async_trait]
impl StreamAcceptor for Port {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (stream, from) = self.listener.accept().await?;
        let greeted = greeted(stream, Arc::clone(&self.adapter), self.parts.clone());
        Ok((from.to_string(), Box::pin(greeted)))
    }
}

async fn greeted(
    stream: Stream,
    adapter: Arc<Adapter>,
    parts: ConnectorParts,
) -> Result<Incoming, TransferError> {
    let mut stream = link::admit(&parts.world, stream).await.map_err(TransferError::lost)?;
    let first = read_first(&mut stream).await.map_err(TransferError::lost)?;
    if first.n > 0 {
        return Ok(Incoming { stream, kv_path: None, handshake_permit: None });
    }
    if first.pairs == 0 {
        return Err(FrameError::Unexpected("a link without queue pairs").into());
    }
    let sender = read_end(&mut stream, first.pairs).await.map_err(TransferError::lost)?;
    let (written, end) = RdmaKvPath::of(&adapter, &parts, &sender)?;
    write_end(&mut stream, &end).await.map_err(TransferError::lost)?;
    Ok(Incoming { stream, kv_path: Some(Arc::new(written)), handshake_permit: None })
}
