//! The follower's end of a node of several processes: streams of the head's links, and the KV of this process's layers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use chassis::spawn_guarded;
use tokio_util::sync::CancellationToken;
use tracing::info;
use types::in_full;

use super::link::check_pages;
use super::link::connect::{STREAMS_MAX, StreamParams};
use super::link::frame::{FrameError, PAYLOAD_BYTES_MAX};
use super::link::span_out::{PagesOut, write_span};
use super::link::stream::{FrameHalves, FrameReader, FrameWriter};
use super::tcp::Sockets;
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::bad_request;
use crate::lanes::Lanes;
use crate::pages::{FRAME_DIGESTS_MAX, FRAME_PAGES_MAX};
use crate::processes::{PutOrder, check_host};

/// Limit of links that this process has a stream of.
const LINKS_MAX: usize = 4096;

/// The streams of a follower: at most one for each link of the head. Dropping it closes all of them.
#[derive(Debug)]
pub struct FollowerStreams {
    parts: ConnectorParts,
    send_path: Sockets,
    links: Arc<Links>,
}

/// The links that this process has a stream of, or makes one of, by number.
#[derive(Debug, Default)]
struct Links {
    /// Held for a look-up, never across an await.
    open: Mutex<HashMap<u64, Arc<FollowerLink>>>,
}

/// This process's stream of one link.
#[derive(Debug)]
struct FollowerLink {
    id: u64,
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
    /// layers.
    pub fn new(parts: ConnectorParts) -> Result<Self, TransferError> {
        check_pages(&parts)?;
        check_host(&parts.memory)?;
        let send_path = Sockets::of_host(parts.world.clone());
        Ok(Self { parts, send_path, links: Arc::default() })
    }

    /// Sends the pages of one order in one frame, with their digests. The first order of a link connects the stream.
    ///
    /// Returns when the frame is written. Waits for earlier orders of the same link. Without progress for the stall time,
    /// it fails. Not cancel-safe: dropping the future while it writes closes the stream, and with it the link.
    pub async fn put(&self, order: PutOrder) -> Result<(), TransferError> {
        let lanes = self.check(&order)?;
        let link = self.links.link(order.link)?;
        let put = link.closed.run_until_cancelled(self.write(&link, &order, &lanes)).await;
        put.unwrap_or_else(|| Err(link.why_closed()))
    }

    /// Closes the stream of a link, and fails the puts on it. Never waits.
    pub fn close_link(&self, link: u64) {
        if let Some(link) = self.links.open().remove(&link) {
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
        if lanes.position(piece.lane).is_none() {
            return Err(bad_request("an order on an unknown lane"));
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

    /// Writes the frame of an order, after those of earlier orders. Connects the stream first if it is new.
    async fn write(
        &self,
        link: &Arc<FollowerLink>,
        order: &PutOrder,
        lanes: &Lanes,
    ) -> Result<(), TransferError> {
        let mut stream = link.writer.lock().await;
        let guard = FrameGuard { links: &self.links, link };
        let mut writer = match stream.take() {
            Some(writer) => writer,
            None => self.connect(link, order).await?,
        };
        write_span(&mut writer, &self.parts, order.pages(lanes)).await?;
        *stream = Some(writer);
        guard.written();
        Ok(())
    }

    async fn connect(
        &self,
        link: &Arc<FollowerLink>,
        order: &PutOrder,
    ) -> Result<FrameWriter, TransferError> {
        let (endpoint, parts, send_path) = (&*order.endpoint, &self.parts, &self.send_path);
        let params = StreamParams { endpoint, parts, send_path, link: order.link };
        let (peer, FrameHalves { reader, writer }) = params.stream(order.stream).await?;
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
    fn link(&self, id: u64) -> Result<Arc<FollowerLink>, TransferError> {
        let mut open = self.open();
        if open.len() >= LINKS_MAX && !open.contains_key(&id) {
            return Err(TransferError::TooMany);
        }
        Ok(Arc::clone(open.entry(id).or_insert_with(|| Arc::new(FollowerLink::new(id)))))
    }

    /// Closes a link, unless it is closed already.
    fn close(&self, link: &Arc<FollowerLink>, why: TransferError) {
        link.close(why);
        let mut open = self.open();
        if open.get(&link.id).is_some_and(|known| Arc::ptr_eq(known, link)) {
            open.remove(&link.id);
        }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, Arc<FollowerLink>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FollowerLink {
    fn new(id: u64) -> Self {
        let (why_closed, closed) = (OnceLock::new(), CancellationToken::new());
        Self { id, writer: tokio::sync::Mutex::default(), why_closed, closed }
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
mod tests {
    use types::{BlockIdx, Epoch, GroupIdx, NodeId, StageLayers};

    use super::*;
    use crate::conformance::node::{Node, spread_layout};
    use crate::processes::an_order;

    /// Returns the follower with layers 3 to 6 of the suite's layout, and an order that it accepts.
    fn follower() -> (FollowerStreams, PutOrder) {
        let parts = Node::parts_of("prefill", spread_layout(2), &StageLayers::part(3..7));
        let order = PutOrder { node: parts.node.clone(), epoch: parts.epoch, ..an_order() };
        (FollowerStreams::new(parts).expect("host memory"), order)
    }

    #[tokio::test]
    async fn an_order_that_this_process_cannot_serve_is_refused() {
        let (follower, order) = follower();
        follower.check(&order).expect("it can be served");
        type Spoil = fn(&mut PutOrder);
        let cases: [(&str, Spoil); 16] = [
            ("another node", |order| order.node = NodeId::new("other")),
            ("another life", |order| order.epoch = Epoch(order.epoch.0 ^ 1)),
            ("stream 0", |order| order.stream = 0),
            ("a stream too far", |order| order.stream = STREAMS_MAX),
            ("an unknown group", |order| order.piece.span.group = GroupIdx(3)),
            ("a layer too far", |order| order.piece.span.layers = 1..3),
            ("another process's layers", |order| order.piece.span.group = GroupIdx(0)),
            ("a block too few", |order| order.blocks.truncate(2)),
            ("a block too many", |order| order.blocks.push(BlockIdx(5))),
            ("a block outside the memory", |order| order.blocks[2] = BlockIdx(u32::MAX)),
            ("a block behind the sequence", |order| order.n_tokens = 24),
            ("an empty sequence", |order| order.n_tokens = 0),
            ("an unknown lane", |order| order.piece.lane.to = 1),
            ("an unknown rank", |order| order.piece.lane.from = 2),
            ("no ranks", |order| order.peer_tp_size = 0),
            ("ranks that cannot share the heads", |order| order.peer_tp_size = 3),
        ];
        for (name, spoil) in cases {
            let mut wrong = order.clone();
            spoil(&mut wrong);
            let error = follower.put(wrong).await.expect_err(name);
            assert!(
                matches!(error, TransferError::BadRequest(_) | TransferError::Layout(_)),
                "{name}: {error}"
            );
        }
        let mut large = order.clone();
        large.piece.span.blocks = 0..1000;
        (large.blocks, large.n_tokens) = (vec![BlockIdx(3); 1000], 4_000);
        let error = follower.put(large).await.expect_err("2000 pages");
        assert!(error.to_string().contains("more pages than a frame may have"), "{error}");
        assert!(follower.links.open().is_empty(), "no link was made for a refused order");
    }

    #[tokio::test]
    async fn a_stream_that_cannot_be_connected_leaves_nothing() {
        let (follower, order) = follower();
        let error = follower.put(order).await.expect_err("nothing listens");
        assert!(matches!(error, TransferError::Connect { .. }), "{error}");
        assert!(follower.links.open().is_empty());
    }

    #[tokio::test]
    async fn links_are_bounded() {
        let (follower, order) = follower();
        for id in 100..100 + LINKS_MAX as u64 {
            follower.links.link(id).expect("there is room");
        }
        let error = follower.put(order).await.expect_err("too many");
        assert!(matches!(error, TransferError::TooMany), "{error}");
        follower.close_link(100);
        follower.links.link(7).expect("there is room again");
    }
}
