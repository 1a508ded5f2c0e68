//! Conversions for a node's status stream.

use bytes::{BufMut as _, Bytes, BytesMut};
use types::{BlockChange, BlockCounts, BlockEvent, BlockHash, LearnedCosts, NodeLoad};

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

impl From<LearnedCosts> for v1::LearnedCosts {
    fn from(costs: LearnedCosts) -> Self {
        Self {
            prompt_token_ms: costs.prompt_token_ms,
            prompt_context_ms: costs.prompt_context_ms,
            prompt_step_ms: costs.prompt_step_ms,
            step_ms: costs.step_ms,
            row_ms: costs.row_ms,
            context_ms: costs.context_ms,
            step_tokens: costs.step_tokens,
            gap_ms_max: costs.gap_ms_max,
        }
    }
}

impl TryFrom<v1::LearnedCosts> for LearnedCosts {
    type Error = ConvertError;

    fn try_from(wire: v1::LearnedCosts) -> Result<Self, ConvertError> {
        Ok(Self {
            prompt_token_ms: milliseconds("load.costs.prompt_token_ms", wire.prompt_token_ms)?,
            prompt_context_ms: milliseconds("load.costs.prompt_context_ms", wire.prompt_context_ms)?,
            prompt_step_ms: milliseconds("load.costs.prompt_step_ms", wire.prompt_step_ms)?,
            step_ms: milliseconds("load.costs.step_ms", wire.step_ms)?,
            row_ms: milliseconds("load.costs.row_ms", wire.row_ms)?,
            context_ms: milliseconds("load.costs.context_ms", wire.context_ms)?,
            step_tokens: wire.step_tokens,
            gap_ms_max: milliseconds("load.costs.gap_ms_max", wire.gap_ms_max)?,
        })
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
            costs: Some(load.costs.into()),
            age_ms: load.age_ms,
        }
    }
}

impl TryFrom<v1::NodeLoad> for NodeLoad {
    type Error = ConvertError;

    fn try_from(wire: v1::NodeLoad) -> Result<Self, ConvertError> {
        Ok(Self {
            running: wire.running,
            waiting: wire.waiting,
            arriving: wire.arriving,
            queued_tokens: wire.queued_tokens,
            queue_ms: milliseconds("load.queue_ms", wire.queue_ms)?,
            step_ms: milliseconds("load.step_ms", wire.step_ms)?,
            steps_total: wire.steps_total,
            blocks: present(wire.blocks, "load.blocks")?.into(),
            costs: wire.costs.map_or(Ok(LearnedCosts::default()), LearnedCosts::try_from)?,
            age_ms: milliseconds("load.age_ms", wire.age_ms)?,
        })
    }
}

fn milliseconds(field: &'static str, value: f32) -> Result<f32, ConvertError> {
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(ConvertError::range(field, value)) }
}

impl v1::BlockEvents {
    pub fn new(sequence: u64, event: &BlockEvent) -> Self {
        let change = match &event.change {
            BlockChange::Snapshot(hashes) => Change::Snapshot(hashes_to_wire(hashes)),
            BlockChange::Stored(hashes) => Change::Stored(hashes_to_wire(hashes)),
            BlockChange::Evicted(hashes) => Change::Evicted(hashes_to_wire(hashes)),
        };
        Self { sequence, change: Some(change), more: !event.is_complete }
    }
}

impl TryFrom<v1::BlockEvents> for (u64, BlockEvent) {
    type Error = ConvertError;

    fn try_from(wire: v1::BlockEvents) -> Result<Self, ConvertError> {
        let change = match present(wire.change, "blocks.change")? {
            Change::Snapshot(hashes) => BlockChange::Snapshot(hashes_from_wire(&hashes)?),
            Change::Stored(hashes) => BlockChange::Stored(hashes_from_wire(&hashes)?),
            Change::Evicted(hashes) => BlockChange::Evicted(hashes_from_wire(&hashes)?),
        };
        Ok((wire.sequence, BlockEvent { change, is_complete: !wire.more }))
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
