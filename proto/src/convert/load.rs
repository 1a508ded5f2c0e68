//! Conversions for a node's status stream.

use bytes::{BufMut as _, Bytes, BytesMut};
use types::{BlockCounts, BlockEvent, BlockHash, NodeLoad};

use super::present;
use crate::error::ConvertError;
use crate::v1;
use crate::v1::block_events::Change;

impl From<BlockCounts> for v1::BlockCounts {
    fn from(counts: BlockCounts) -> Self {
        let BlockCounts { total, free, leased, cached, quarantined } = counts;
        Self { total, free, leased, cached, quarantined }
    }
}

impl From<v1::BlockCounts> for BlockCounts {
    fn from(wire: v1::BlockCounts) -> Self {
        let v1::BlockCounts { total, free, leased, cached, quarantined } = wire;
        Self { total, free, leased, cached, quarantined }
    }
}

impl From<NodeLoad> for v1::NodeLoad {
    fn from(load: NodeLoad) -> Self {
        Self {
            running: load.running,
            waiting: load.waiting,
            arriving: load.arriving,
            queued_tokens: load.queued_tokens,
            queue_ms: load.queue_ms,
            step_ms: load.step_ms,
            steps_total: load.steps_total,
            blocks: Some(load.blocks.into()),
        }
    }
}

impl TryFrom<v1::NodeLoad> for NodeLoad {
    type Error = ConvertError;

    fn try_from(wire: v1::NodeLoad) -> Result<Self, ConvertError> {
        for (field, value) in [("load.queue_ms", wire.queue_ms), ("load.step_ms", wire.step_ms)] {
            if !value.is_finite() || value < 0.0 {
                return Err(ConvertError::range(field, value));
            }
        }
        Ok(Self {
            running: wire.running,
            waiting: wire.waiting,
            arriving: wire.arriving,
            queued_tokens: wire.queued_tokens,
            queue_ms: wire.queue_ms,
            step_ms: wire.step_ms,
            steps_total: wire.steps_total,
            blocks: present(wire.blocks, "load.blocks")?.into(),
        })
    }
}

impl v1::BlockEvents {
    pub fn new(sequence: u64, event: &BlockEvent) -> Self {
        let change = match event {
            BlockEvent::Snapshot(hashes) => Change::Snapshot(hashes_to_wire(hashes)),
            BlockEvent::Stored(hashes) => Change::Stored(hashes_to_wire(hashes)),
            BlockEvent::Evicted(hashes) => Change::Evicted(hashes_to_wire(hashes)),
        };
        Self { sequence, change: Some(change) }
    }
}

impl TryFrom<v1::BlockEvents> for (u64, BlockEvent) {
    type Error = ConvertError;

    fn try_from(wire: v1::BlockEvents) -> Result<Self, ConvertError> {
        let event = match present(wire.change, "blocks.change")? {
            Change::Snapshot(hashes) => BlockEvent::Snapshot(hashes_from_wire(&hashes)?),
            Change::Stored(hashes) => BlockEvent::Stored(hashes_from_wire(&hashes)?),
            Change::Evicted(hashes) => BlockEvent::Evicted(hashes_from_wire(&hashes)?),
        };
        Ok((wire.sequence, event))
    }
}

/// Encodes block hashes: 16 bytes each, concatenated.
fn hashes_to_wire(hashes: &[BlockHash]) -> v1::BlockHashes {
    let mut bytes = BytesMut::with_capacity(hashes.len() * 16);
    for hash in hashes {
        bytes.put_u128(hash.0);
    }
    v1::BlockHashes { hashes: Bytes::from(bytes) }
}

/// Decodes block hashes of 16 bytes each. Refuses a length that is no multiple of 16.
fn hashes_from_wire(wire: &v1::BlockHashes) -> Result<Vec<BlockHash>, ConvertError> {
    let (whole, rest) = wire.hashes.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(ConvertError::Length { field: "blocks.hashes", wanted: 16, found: rest.len() });
    }
    Ok(whole.iter().map(|bytes| BlockHash(u128::from_be_bytes(*bytes))).collect())
}
