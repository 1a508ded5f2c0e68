//! The order to a follower to send some pages.

use types::{BlockIdx, Epoch, NodeId, TransferId};

use crate::error::{FrameError, TransferError};
use crate::fields::{Reader, Writer};
use crate::lanes::LaneSpan;
use crate::pages::FRAME_PAGES_MAX;
use crate::reshard::Lane;

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

/// Returns an order of three blocks on an endpoint where nothing listens.
#[cfg(test)]
pub(crate) fn an_order() -> PutOrder {
    use types::{GroupIdx, KvSpan};

    PutOrder {
        endpoint: "127.0.0.1:1".to_owned(),
        link: 7,
        stream: 2,
        node: NodeId::new("prefill"),
        epoch: Epoch(8),
        transfer: TransferId(9),
        piece: LaneSpan {
            lane: Lane { from: 1, to: 0 },
            span: KvSpan { group: GroupIdx(2), blocks: 4..7, layers: 0..2 },
        },
        peer_tp_size: 1,
        n_tokens: 27,
        blocks: vec![BlockIdx(3), BlockIdx(99), BlockIdx(4)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
