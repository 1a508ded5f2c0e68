//! A node of several processes, as the sender of KV. Each process has the KV of some neighbouring layers.
//!
//! One process, the head, opens landings and does all bookkeeping of transfers. The other processes, the followers, send
//! the pages of their layers straight to the receiver: each on a further stream of the head's link. The head orders them
//! to, frame by frame. For the receiver there is one link with some more streams.
//!
//! The KV of such a node goes over tcp.

use std::fmt::Debug;

use async_trait::async_trait;
use types::layout::LayerShape;
use types::{BlockIdx, Epoch, KvSpan, NodeId, TransferId};

use crate::error::{FrameError, TransferError};
use crate::fields::{Reader, Writer};
use crate::lanes::LaneSpan;
use crate::pages::FRAME_PAGES_MAX;
use crate::reshard::Lane;

/// The other processes of a node of several, seen from the head.
///
/// The connector calls it from the tasks of all its links. Each method may be called from many tasks at once.
#[async_trait]
pub trait OtherProcesses: Debug + Send + Sync + 'static {
    /// Returns the process that has the KV of a layer (number in the model); `None` for this process. The answer for a
    /// layer never changes.
    fn of_layer(&self, layer: u16) -> Option<usize>;

    /// Returns the number of other processes. `of_layer` returns smaller numbers only.
    fn n_processes(&self) -> usize;

    /// Makes a process send some of its pages. Returns when they are written to the wire.
    ///
    /// The pages keep their lease until this returns, so an implementation returns only when the process no longer reads
    /// them, also after an error. It returns in bounded time: [`FollowerStreams::put`](crate::FollowerStreams::put)
    /// does, unless a GPU stands still, and the death of the process is an error. An error loses the link, and fails all
    /// transfers on it.
    async fn put(&self, process: usize, order: PutOrder) -> Result<(), TransferError>;

    /// Makes all processes close their streams of a link, and end their puts on it. Never waits.
    ///
    /// Called when a link is lost or dropped, at least once. A few orders of the link may still follow. They fail, because
    /// the receiver has no such link any more.
    fn close_link(&self, link: u64);
}

/// The pages that a follower sends in one frame, and where to.
#[derive(Clone, Debug, PartialEq)]
pub struct PutOrder {
    pub(crate) endpoint: String,
    pub(crate) link: u64,
    /// The number of the follower's stream of the link.
    pub(crate) stream: u16,
    /// The head's node and epoch, which made the link.
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) transfer: TransferId,
    pub(crate) piece: LaneSpan,
    /// The receiver's number of ranks.
    pub(crate) peer_tp_size: u16,
    /// The number of tokens of the whole sequence.
    pub(crate) n_tokens: u32,
    /// The blocks of the piece, as indices in this node's memory.
    pub(crate) blocks: Vec<BlockIdx>,
}

impl PutOrder {
    /// Returns the number of the link that the pages go over.
    pub fn link(&self) -> u64 {
        self.link
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut fields = Writer::new(&mut bytes);
        fields.text(&self.endpoint).u64(self.link).u16(self.stream).node(&self.node).u64(self.epoch.0);
        fields.bytes(&self.transfer.0.to_le_bytes());
        fields.u16(self.piece.lane.from).u16(self.piece.lane.to).span(&self.piece.span);
        fields.u16(self.peer_tp_size).u32(self.n_tokens);
        for block in &self.blocks {
            fields.u32(block.0);
        }
        bytes
    }

    /// Reads an order. Refuses bytes that are no order, and never allocates more than a frame has blocks.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let mut fields = Reader::new(bytes);
        let order = Self::read(&mut fields)?;
        fields.end()?;
        Ok(order)
    }

    fn read(fields: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (endpoint, link, stream) = (fields.text()?, fields.u64()?, fields.u16()?);
        let (node, epoch) = (fields.node()?, Epoch(fields.u64()?));
        let transfer = TransferId(fields.u128()?);
        let lane = Lane { from: fields.u16()?, to: fields.u16()? };
        let piece = LaneSpan { lane, span: fields.span()? };
        let (peer_tp_size, n_tokens) = (fields.u16()?, fields.u32()?);
        if piece.blocks.len() > FRAME_PAGES_MAX {
            return Err(FrameError::Body("too many blocks"));
        }
        let block = |_| fields.u32().map(BlockIdx);
        let blocks = piece.blocks.clone().map(block).collect::<Result<_, _>>()?;
        Ok(Self { endpoint, link, stream, node, epoch, transfer, piece, peer_tp_size, n_tokens, blocks })
    }
}

/// Splits a span so that each part has layers of one process only. `layers` are those of the span's group.
pub(crate) fn split(span: &KvSpan, layers: &[LayerShape], processes: &dyn OtherProcesses) -> Vec<KvSpan> {
    let process = |pos: &u16| processes.of_layer(layers[usize::from(*pos)].layer);
    let positions: Vec<u16> = span.layers.clone().collect();
    let parts = positions.chunk_by(|one, next| process(one) == process(next));
    parts.map(|part| KvSpan { layers: part[0]..part[0] + part.len() as u16, ..span.clone() }).collect()
}

/// Returns an order of three blocks on an endpoint where nothing listens.
#[cfg(test)]
pub(crate) fn an_order() -> PutOrder {
    PutOrder {
        endpoint: "127.0.0.1:1".to_owned(),
        link: 7,
        stream: 2,
        node: NodeId::new("prefill"),
        epoch: Epoch(8),
        transfer: TransferId(9),
        piece: LaneSpan {
            lane: Lane { from: 1, to: 0 },
            span: KvSpan { group: types::GroupIdx(2), blocks: 4..7, layers: 0..2 },
        },
        peer_tp_size: 1,
        n_tokens: 27,
        blocks: vec![BlockIdx(3), BlockIdx(99), BlockIdx(4)],
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use types::GroupIdx;

    use super::*;

    /// Has the processes of these layers; the head has all others.
    #[derive(Debug)]
    struct Parts(Vec<Range<u16>>);

    #[async_trait]
    impl OtherProcesses for Parts {
        fn of_layer(&self, layer: u16) -> Option<usize> {
            self.0.iter().position(|layers| layers.contains(&layer))
        }

        fn n_processes(&self) -> usize {
            self.0.len()
        }

        async fn put(&self, _process: usize, _order: PutOrder) -> Result<(), TransferError> {
            Err(TransferError::Closed)
        }

        fn close_link(&self, _link: u64) {}
    }

    #[test]
    fn an_order_is_read_as_it_was_written() {
        let order = an_order();
        assert_eq!(PutOrder::decode(&order.encode()).expect("it is whole"), order);
        assert_eq!(order.link(), 7);
    }

    #[test]
    fn an_order_that_is_not_whole_is_refused() {
        let bytes = an_order().encode();
        for n_bytes in 0..bytes.len() {
            let error = PutOrder::decode(&bytes[..n_bytes]).expect_err("bytes are missing");
            assert!(matches!(error, TransferError::Frame(FrameError::Body(_))), "{error}");
        }
        PutOrder::decode(&[&bytes[..], &[0]].concat()).expect_err("a byte too many");
    }

    #[test]
    fn an_order_of_too_many_blocks_is_refused() {
        let mut order = an_order();
        order.piece.span.blocks = 0..FRAME_PAGES_MAX as u32 + 1;
        order.blocks = (0..FRAME_PAGES_MAX as u32 + 1).map(BlockIdx).collect();
        let error = PutOrder::decode(&order.encode()).expect_err("no frame has as many");
        assert!(matches!(error, TransferError::Frame(FrameError::Body("too many blocks"))), "{error}");
    }

    #[test]
    fn a_span_is_cut_where_another_process_begins() {
        let layers: Vec<_> =
            [0, 2, 4, 6, 8].map(|layer| LayerShape { layer, n_kv_heads: 1, head_dim: 1 }).into();
        let split_at = |parts: &[Range<u16>], positions: Range<u16>| {
            let span = KvSpan { group: GroupIdx(0), blocks: 1..3, layers: positions };
            let parts = split(&span, &layers, &Parts(parts.to_vec()));
            parts.into_iter().map(|part| (part.layers.start, part.layers.end)).collect::<Vec<_>>()
        };
        assert_eq!(split_at(&[], 0..5), [(0, 5)]);
        assert_eq!(split_at(&[5..9, 9..10], 0..5), [(0, 3), (3, 5)]);
        assert_eq!(split_at(&[3..5, 5..9], 0..5), [(0, 2), (2, 3), (3, 5)]);
        assert_eq!(split_at(&[3..5, 5..9], 2..3), [(2, 3)]);
        assert_eq!(split_at(&[0..3, 3..9], 2..4), [(2, 4)]);
    }
}
