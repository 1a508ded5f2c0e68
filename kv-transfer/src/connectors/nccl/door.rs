//! How the two ends of a pair find each other: with the first bytes of their link's stream.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chassis::{Listener, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::cable::Cable;
use super::fabric::{End, Fabric, ID_BYTES, PairId};
use super::receiving::Receiving;
use crate::connector::ConnectorParts;
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::medium::Apart;
use crate::connectors::link::receiver::{Arriving, Door, Incoming};
use crate::error::TransferError;

/// What a stream begins with. The pair's id follows.
const GREETING: u8 = b'N';

/// Says who the other end of the pair is.
pub(super) async fn greet(stream: &mut Stream, id: &PairId) -> io::Result<()> {
    let mut greeting = [GREETING; 1 + ID_BYTES];
    greeting[1..].copy_from_slice(id);
    stream.write_all(&greeting).await
}

/// Where streams come in.
#[derive(Debug)]
pub(super) struct PairDoor {
    listener: Box<dyn Listener>,
    fabric: Arc<dyn Fabric>,
    stall: Duration,
}

impl PairDoor {
    pub(super) fn new(listener: Box<dyn Listener>, fabric: Arc<dyn Fabric>, parts: &ConnectorParts) -> Self {
        Self { listener, fabric, stall: parts.settings.stall() }
    }
}

#[async_trait]
impl Door for PairDoor {
    async fn accept(&mut self) -> io::Result<(String, Arriving)> {
        let (stream, from) = self.listener.accept().await?;
        Ok((from.to_string(), Box::pin(greeted(stream, Arc::clone(&self.fabric), self.stall))))
    }
}

async fn greeted(
    mut stream: Stream,
    fabric: Arc<dyn Fabric>,
    stall: Duration,
) -> Result<Incoming, TransferError> {
    let mut greeting = [0; 1 + ID_BYTES];
    stream.read_exact(&mut greeting).await.map_err(TransferError::lost)?;
    let (first, id) = greeting.split_first_chunk::<1>().expect("a greeting is longer");
    if *first != [GREETING] {
        return Err(FrameError::Unexpected("another greeting").into());
    }
    let id: PairId = id.try_into().expect("the rest is the id");
    let cable = Cable::start(fabric.stage()?, id, End::Receiver, stall)?;
    Ok(Incoming { stream, elsewhere: Some(Apart::Queue(Box::new(Receiving::over(cable)))) })
}
