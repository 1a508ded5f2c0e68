//! How the two ends of a pair find each other: with the first bytes of their link's stream.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Listener, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use types::KvLayout;
use types::layout::Shard;

use super::cable::Terms;
use super::cables::Cables;
use super::fabric::{End, Fabric, ID_BYTES, PairId};
use super::receiving::Receiving;
use crate::connector::ConnectorParts;
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::medium::Apart;
use crate::connectors::link::receiver::{Arriving, Door, Incoming};
use crate::error::TransferError;
use crate::lanes::Lanes;

/// What a stream begins with. How many ranks the sender has follows; the receiver says how many it has; and then come the
/// ids of the pairs, one for each lane between them, in their order.
const GREETING: u8 = b'N';
const GREETING_BYTES: usize = 3;

/// Learns which lanes there are, and says who the other ends of their pairs are.
pub(super) async fn greet(
    stream: &mut Stream,
    layout: &KvLayout,
    fabric: &dyn Fabric,
) -> io::Result<(Lanes, Vec<PairId>)> {
    let ours = layout.shard.tp_size;
    let [low, high] = ours.to_le_bytes();
    stream.write_all(&[GREETING, low, high]).await?;
    let mut theirs = [0; 2];
    stream.read_exact(&mut theirs).await?;
    let shard = Shard { tp_size: u16::from_le_bytes(theirs), ..layout.shard };
    let lanes = Lanes::between(ours, &KvLayout { shard, ..layout.clone() }).map_err(io::Error::other)?;
    let ids: Vec<PairId> =
        (0..lanes.len()).map(|_| fabric.id().map_err(io::Error::other)).collect::<io::Result<_>>()?;
    stream.write_all(&ids.concat()).await?;
    Ok((lanes, ids))
}

/// Where streams come in.
#[derive(Debug)]
pub(super) struct PairDoor {
    listener: Box<dyn Listener>,
    fabric: Arc<dyn Fabric>,
    layout: KvLayout,
    terms: Terms,
}

impl PairDoor {
    pub(super) fn new(listener: Box<dyn Listener>, fabric: Arc<dyn Fabric>, parts: &ConnectorParts) -> Self {
        let layout = parts.memory.layout().clone();
        Self { listener, fabric, layout, terms: Terms::of(parts) }
    }
}

#[async_trait]
impl Door for PairDoor {
    async fn accept(&mut self) -> io::Result<(String, Arriving)> {
        let (stream, from) = self.listener.accept().await?;
        Ok((
            from.to_string(),
            Box::pin(greeted(stream, Arc::clone(&self.fabric), self.layout.clone(), self.terms.clone())),
        ))
    }
}

async fn greeted(
    mut stream: Stream,
    fabric: Arc<dyn Fabric>,
    layout: KvLayout,
    terms: Terms,
) -> Result<Incoming, TransferError> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting).await.map_err(TransferError::lost)?;
    let [GREETING, low, high] = greeting else {
        return Err(FrameError::Unexpected("another greeting").into());
    };
    let lanes = Lanes::between(u16::from_le_bytes([low, high]), &layout)
        .map_err(|error| TransferError::Layout(error.to_string()))?;
    stream.write_all(&layout.shard.tp_size.to_le_bytes()).await.map_err(TransferError::lost)?;
    let mut ids = vec![[0; ID_BYTES]; lanes.len()];
    for id in &mut ids {
        stream.read_exact(id).await.map_err(TransferError::lost)?;
    }
    let cables = Cables::start(&*fabric, (&lanes, &ids), End::Receiver, &terms)?;
    Ok(Incoming { stream, elsewhere: Some(Apart::Queue(Box::new(Receiving(cables)))) })
}
