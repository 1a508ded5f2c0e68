//! The follower's end of a node of several processes: streams of the head's links, and the KV of this process's layers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use chassis::spawn_guarded;
use tokio_util::sync::CancellationToken;
use tracing::info;
use types::in_full;

use super::follower_landings::FollowerLandings;
use super::gpu::double::DoubleStaging;
use super::gpu::staging::{HostStaging, of_cards};
use super::link::connect::{Met, STREAMS_MAX, StreamParams};
use super::link::frame::{FrameError, PAYLOAD_BYTES_MAX};
use super::link::span_out::PagesOut;
use super::link::stream::{FrameHalves, FrameReader, FrameWriter};
use super::tcp::{FilledSlot, Sockets, Staged, write_frame};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::bad_request;
use crate::lanes::Lanes;
use crate::pages::{FRAME_DIGESTS_MAX, FRAME_PAGES_MAX};
use crate::processes::{PutOrder, ReportLandings};
use crate::quiet::Quiet as _;

/// Limit of links that this process has a stream of.
const LINKS_MAX: usize = 4096;

/// The streams of a follower: at most one for each link of the head and process of its receiver. Dropping it closes all of
/// them.
#[derive(Debug)]
pub struct FollowerStreams {
    parts: ConnectorParts,
    /// Makes the slots of each link; `None` if the processor copies the KV.
    staged: Option<Staged>,
    links: Arc<Links>,
}

/// The links that this process has a stream of, or makes one of, by number.
#[derive(Debug, Default)]
struct Links {
    /// Held for a look-up, never across an await.
    open: Mutex<HashMap<LinkKey, Arc<FollowerLink>>>,
}

/// One process of the receiver of a link.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LinkKey {
    link: u64,
    endpoint: String,
}

/// This process's stream of one link, to one process of the receiver.
#[derive(Debug)]
struct FollowerLink {
    key: LinkKey,
    /// A link has slots of its own, as at the head, so that a slow receiver holds no slot of another link. The setting
    /// limits their number.
    sockets: Sockets,
    /// The stream. `None` before it is connected, and while the holder of the lock writes. The lock is async: puts wait
    /// for their turn.
    writer: tokio::sync::Mutex<Option<FrameWriter>>,
    why_closed: OnceLock<TransferError>,
    closed: CancellationToken,
}

/// Closes the link when it is dropped. A stream with a part of a frame is of no use.
struct FrameGuard<'a> {
    links: &'a Links,
    link: &'a Arc<FollowerLink>,
}

impl FollowerStreams {
    /// Makes the follower's end. The node and the epoch of `parts` are the head's, and its memory has only this process's
    /// layers. Fails if the machine has no room for the slots of one link.
    pub async fn start(parts: ConnectorParts) -> Result<Self, TransferError> {
        let staging = of_cards(&parts)?;
        Self::start_with(parts, staging).await
    }

    /// Like [`start`](Self::start), but KV in host memory goes through slots, as on GPUs.
    pub async fn start_double(parts: ConnectorParts) -> Result<Self, TransferError> {
        let staging: Arc<dyn HostStaging> = Arc::new(DoubleStaging(parts.memory.clone()));
        Self::start_with(parts, Some(staging)).await
    }

    async fn start_with(
        mut parts: ConnectorParts,
        staging: Option<Arc<dyn HostStaging>>,
    ) -> Result<Self, TransferError> {
        let staged = Staged::check(staging, &mut parts).await?;
        Ok(Self { parts, staged, links: Arc::default() })
    }

    /// Listens for KV of this process's layers, on the address in the settings. Its links have slots as those of the streams
    /// have. The head gets the reports.
    pub async fn listen(&self, reports: Arc<dyn ReportLandings>) -> Result<FollowerLandings, TransferError> {
        FollowerLandings::listen(self.parts.clone(), self.staged.clone(), reports).await
    }

    /// Sends the pages of one order in one frame, with their digests. The first order of a link connects the stream.
    ///
    /// Returns when the frame is written, or after an error, and no GPU reads the pages any more. Other orders of the same
    /// link may go first. Without progress for the stall time, it fails. Not cancel-safe: dropping the future while it
    /// writes closes the stream, and with it the link.
    pub async fn put(&self, order: PutOrder) -> Result<(), TransferError> {
        let lanes = self.check(&order)?;
        let link = self.link(&order)?;
        let (pages, reads) = (order.pages(&lanes), Arc::default());
        let put = async {
            let filled = link.sockets.gather(&self.parts, pages, &reads).await?;
            self.write(&link, &order, pages, filled).await
        };
        let put = link.closed.run_until_cancelled(put).await;
        // Copy jobs take some milliseconds, and cannot be stopped. If a GPU stands still, the head's deadline ends its wait
        // for this put.
        reads.proven().await;
        let put = put.unwrap_or_else(|| Err(link.why_closed()));
        put.inspect_err(|error| self.links.close(&link, error.clone()))
    }

    /// Closes the streams of a link, and fails the puts on them. Never waits.
    pub fn close_link(&self, link: u64) {
        for (_, link) in self.links.open().extract_if(|key, _| key.link == link) {
            link.close(TransferError::Closed);
        }
    }

    /// Checks that this process can send the pages of an order, and returns the transfer's lanes.
    fn check(&self, order: &PutOrder) -> Result<Lanes, TransferError> {
        let (memory, piece) = (&self.parts.memory, &order.piece);
        let layout = memory.layout();
        if (&order.node, order.epoch) != (&self.parts.node, self.parts.epoch) {
            return Err(bad_request("an order of another node, or of another life of this node"));
        }
        if !(1..STREAMS_MAX).contains(&order.stream) {
            return Err(bad_request("an order on a stream that a link does not have"));
        }
        let group = layout.groups.get(usize::from(piece.group.0));
        let n_layers = group.map_or(0, |group| group.layers.len());
        if usize::from(piece.layers.end) > n_layers
            || !piece.layers.clone().all(|layer_pos| memory.has_layer(piece.group, layer_pos))
        {
            return Err(bad_request("an order of layers that this process does not have"));
        }
        let is_block = |index: u32| index < memory.n_blocks();
        if order.blocks.len() != piece.blocks.len()
            || piece.blocks.end as usize > layout.blocks_for(order.n_tokens as usize)
            || !order.blocks.iter().all(|block| is_block(block.0))
        {
            return Err(bad_request("an order of blocks that the sequence or this process does not have"));
        }
        let mut to = layout.clone();
        to.shard.tp_size = order.peer_tp_size;
        let lanes = Lanes::between(layout.shard.tp_size, &to);
        let lanes = lanes.map_err(|error| TransferError::Layout(error.to_string()))?;
        if lanes.position(piece.lane).is_none() || !memory.ranks().contains(&piece.lane.from) {
            return Err(bad_request("an order on an unknown lane, or on one of another process"));
        }
        self.check_frame(&order.pages(&lanes)).map(|()| lanes)
    }

    /// Refuses pages that do not fit into one frame.
    fn check_frame(&self, pages: &PagesOut<'_>) -> Result<(), TransferError> {
        let layout = self.parts.memory.layout();
        let heads = |layer_pos| pages.heads(layout, layer_pos).len();
        let n_digests: usize = pages.piece.layers.clone().map(heads).sum::<usize>() * pages.blocks.len();
        let n_pages = pages.piece.layers.len() * pages.blocks.len();
        match n_pages > FRAME_PAGES_MAX
            || n_digests > FRAME_DIGESTS_MAX
            || pages.bytes(layout) > PAYLOAD_BYTES_MAX
        {
            true => Err(bad_request("an order of more pages than a frame may have")),
            false => Ok(()),
        }
    }

    /// Returns a link, which is made if it is new.
    fn link(&self, order: &PutOrder) -> Result<Arc<FollowerLink>, TransferError> {
        let sockets = || Sockets::new(self.parts.world.clone(), self.staged.as_ref());
        self.links.link(LinkKey { link: order.link, endpoint: order.endpoint.clone() }, sockets)
    }

    /// Writes the frame of an order, after the frames that were gathered earlier. Connects the stream first if it is new.
    async fn write(
        &self,
        link: &Arc<FollowerLink>,
        order: &PutOrder,
        pages: PagesOut<'_>,
        filled: Option<FilledSlot>,
    ) -> Result<(), TransferError> {
        let mut stream = link.writer.lock().await;
        let guard = FrameGuard { links: &self.links, link };
        let mut writer = match stream.take() {
            Some(writer) => writer,
            None => self.connect(link, order).await?,
        };
        write_frame(&mut writer, &self.parts, pages, filled).await?;
        *stream = Some(writer);
        guard.written();
        Ok(())
    }

    async fn connect(
        &self,
        link: &Arc<FollowerLink>,
        order: &PutOrder,
    ) -> Result<FrameWriter, TransferError> {
        let (endpoint, parts, send_path) = (&*order.endpoint, &self.parts, &link.sockets);
        let params = StreamParams { endpoint, parts, send_path, link: order.link };
        let (Met { peer, .. }, FrameHalves { reader, writer }) = params.stream(order.stream).await?;
        info!(peer = %peer.node, endpoint, stream = order.stream, "stream of this process's KV to peer opened");
        let (links, link) = (Arc::clone(&self.links), Arc::clone(link));
        let read = async move {
            let closed = link.closed.clone();
            if let Some(error) = closed.run_until_cancelled(ended(reader)).await {
                info!(peer = %peer.node, error = in_full(&error), "stream of this process's KV to peer lost");
                links.close(&link, error);
            }
        };
        spawn_guarded(&self.parts.gate, "kv stream of a follower", read).detach();
        Ok(writer)
    }
}

impl Drop for FollowerStreams {
    fn drop(&mut self) {
        for (_, link) in self.links.open().drain() {
            link.close(TransferError::Closed);
        }
    }
}

impl PutOrder {
    fn pages<'a>(&'a self, lanes: &'a Lanes) -> PagesOut<'a> {
        let Self { transfer, piece, blocks, n_tokens, .. } = self;
        PagesOut { transfer: *transfer, lanes, piece, blocks, n_tokens: *n_tokens }
    }
}

impl Links {
    /// Returns a link, which is made with `sockets` if it is new.
    fn link(
        &self,
        key: LinkKey,
        sockets: impl FnOnce() -> Result<Sockets, TransferError>,
    ) -> Result<Arc<FollowerLink>, TransferError> {
        let mut open = self.open();
        if let Some(link) = open.get(&key) {
            return Ok(Arc::clone(link));
        }
        if open.len() >= LINKS_MAX {
            return Err(TransferError::TooMany);
        }
        let link = Arc::new(FollowerLink::new(key.clone(), sockets()?));
        open.insert(key, Arc::clone(&link));
        Ok(link)
    }

    /// Closes a link, unless it is closed already.
    fn close(&self, link: &Arc<FollowerLink>, why: TransferError) {
        link.close(why);
        let mut open = self.open();
        if open.get(&link.key).is_some_and(|known| Arc::ptr_eq(known, link)) {
            open.remove(&link.key);
        }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<LinkKey, Arc<FollowerLink>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FollowerLink {
    fn new(key: LinkKey, sockets: Sockets) -> Self {
        let (why_closed, closed) = (OnceLock::new(), CancellationToken::new());
        Self { key, sockets, writer: tokio::sync::Mutex::default(), why_closed, closed }
    }

    /// Ends the stream, its reader and all puts on it. The first reason is kept.
    fn close(&self, why: TransferError) {
        self.why_closed.get_or_init(|| why);
        self.closed.cancel();
    }

    fn why_closed(&self) -> TransferError {
        self.why_closed.get().cloned().unwrap_or(TransferError::Closed)
    }
}

impl FrameGuard<'_> {
    /// Leaves the link open.
    fn written(self) {
        std::mem::forget(self);
    }
}

impl Drop for FrameGuard<'_> {
    fn drop(&mut self) {
        self.links.close(self.link, TransferError::lost_because("a frame was not written whole"));
    }
}

/// Waits for the end of a stream. The peer sends nothing on it after its welcome.
async fn ended(mut reader: FrameReader) -> TransferError {
    match reader.next().await {
        Ok(None) => TransferError::lost_because("the peer closed the stream"),
        Ok(Some(_)) => FrameError::Unexpected("a frame on a stream without answers").into(),
        Err(error) => error,
    }
}

#[cfg(test)]
#[path = "follower_tests.rs"]
mod tests;
