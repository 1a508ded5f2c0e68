//! The order to a follower to receive the pages of its layers, and the follower's reports.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use types::{BlockIdx, KvSpan, TransferId};

use crate::connectors::link::code;
use crate::connectors::link::frame::REFETCH_SPANS_MAX;
use crate::error::{FrameError, TransferError};
use crate::fields::{Reader, Writer};
use crate::reshard::Lane;

/// A landing, for a follower of the node that granted it. The sender has shown its credentials to the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LandOrder {
    pub(crate) transfer: TransferId,
    /// The number of the sender's link. The sender has made streams of it to this follower.
    pub(crate) link: u64,
    /// The sender's number of ranks.
    pub(crate) from_tp: u16,
    pub(crate) n_tokens: u32,
    pub(crate) held_tokens: u32,
    /// The node's blocks, one table for each layer group.
    pub(crate) tables: Vec<Vec<BlockIdx>>,
}

/// A follower's report of one landing.
#[derive(Clone, Debug)]
pub struct LandingReport {
    pub transfer: TransferId,
    pub event: LandingEvent,
}

/// Reports of a landing come in this order, without those that do not apply. `Quiet` always comes.
#[derive(Clone, Debug)]
pub enum LandingEvent {
    /// The sender may send.
    Accepted,
    /// Pages arrived wrong. The sender has to send them again.
    Refetch {
        lane: Lane,
        spans: Vec<KvSpan>,
    },
    /// All pages of the follower's layers are verified.
    Landed(LandedPart),
    Failed(TransferError),
    /// The follower writes no more pages of the landing.
    Quiet,
}

/// The part of a landing that a follower has received.
#[derive(Clone, Copy, Debug, Default)]
pub struct LandedPart {
    pub pages: u32,
    pub bytes: u64,
    /// The time from the first byte to the last.
    pub moved: Duration,
}

/// Takes a follower's reports to the head, in order. Never waits.
pub trait ReportLandings: Debug + Send + Sync + 'static {
    fn report(&self, report: LandingReport);
}

/// Reports [`LandingEvent::Quiet`] when it is dropped.
#[derive(Debug)]
pub(crate) struct QuietReport {
    pub(crate) transfer: TransferId,
    pub(crate) reports: Arc<dyn ReportLandings>,
}

impl Drop for QuietReport {
    fn drop(&mut self) {
        self.reports.report(LandingReport { transfer: self.transfer, event: LandingEvent::Quiet });
    }
}

impl LandOrder {
    pub fn transfer(&self) -> TransferId {
        self.transfer
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut fields = Writer::new(&mut bytes);
        fields.bytes(&self.transfer.0.to_le_bytes()).u64(self.link);
        fields.u16(self.from_tp).u32(self.n_tokens).u32(self.held_tokens);
        for table in &self.tables {
            fields.u32(table.len() as u32);
            for block in table {
                fields.u32(block.0);
            }
        }
        bytes
    }

    /// Reads an order. Refuses bytes that are no order, and allocates no more than their length.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let mut fields = Reader::new(bytes);
        let (transfer, link) = (TransferId(fields.u128()?), fields.u64()?);
        let (from_tp, n_tokens, held_tokens) = (fields.u16()?, fields.u32()?, fields.u32()?);
        let mut tables = Vec::new();
        while fields.end().is_err() {
            let n_blocks = fields.u32()?;
            let table = (0..n_blocks).map(|_| fields.u32().map(BlockIdx));
            tables.push(table.collect::<Result<_, FrameError>>()?);
        }
        Ok(Self { transfer, link, from_tp, n_tokens, held_tokens, tables })
    }
}

/// The reports as numbers.
mod kind {
    pub(super) const ACCEPTED: u8 = 0;
    pub(super) const REFETCH: u8 = 1;
    pub(super) const LANDED: u8 = 2;
    pub(super) const FAILED: u8 = 3;
    pub(super) const QUIET: u8 = 4;
}

impl LandingReport {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut fields = Writer::new(&mut bytes);
        fields.bytes(&self.transfer.0.to_le_bytes());
        match &self.event {
            LandingEvent::Accepted => fields.u8(kind::ACCEPTED),
            LandingEvent::Refetch { lane, spans } => {
                fields.u8(kind::REFETCH).u16(lane.from).u16(lane.to).spans(spans)
            }
            LandingEvent::Landed(LandedPart { pages, bytes, moved }) => {
                fields.u8(kind::LANDED).u32(*pages).u64(*bytes).u64(moved.as_micros() as u64)
            }
            LandingEvent::Failed(error) => {
                let (code, detail) = code::encode(error);
                fields.u8(kind::FAILED).u8(code).text(&detail)
            }
            LandingEvent::Quiet => fields.u8(kind::QUIET),
        };
        bytes
    }

    /// Reads a report. Refuses bytes that are no report.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let mut fields = Reader::new(bytes);
        let transfer = TransferId(fields.u128()?);
        let event = match fields.u8()? {
            kind::ACCEPTED => LandingEvent::Accepted,
            kind::REFETCH => {
                let lane = Lane { from: fields.u16()?, to: fields.u16()? };
                LandingEvent::Refetch { lane, spans: fields.spans(REFETCH_SPANS_MAX)? }
            }
            kind::LANDED => {
                let (pages, bytes) = (fields.u32()?, fields.u64()?);
                let moved = Duration::from_micros(fields.u64()?);
                LandingEvent::Landed(LandedPart { pages, bytes, moved })
            }
            kind::FAILED => LandingEvent::Failed(code::decode(fields.u8()?, fields.text()?)),
            kind::QUIET => LandingEvent::Quiet,
            _ => return Err(FrameError::Body("an unknown report").into()),
        };
        fields.end()?;
        Ok(Self { transfer, event })
    }
}

#[cfg(test)]
mod tests {
    use types::GroupIdx;

    use super::*;

    #[test]
    fn an_order_is_read_as_it_was_written_and_only_whole() {
        let order = LandOrder {
            transfer: TransferId(9),
            link: 7,
            from_tp: 2,
            n_tokens: 27,
            held_tokens: 16,
            tables: vec![vec![BlockIdx(3), BlockIdx(99)], Vec::new(), vec![BlockIdx(0), BlockIdx(1)]],
        };
        let bytes = order.encode();
        assert_eq!(LandOrder::decode(&bytes).expect("it is whole"), order);
        let header = 16 + 8 + 2 + 4 + 4;
        let tables_end = [header, header + 12, header + 16, bytes.len()];
        for n_bytes in (0..bytes.len()).filter(|n_bytes| !tables_end.contains(n_bytes)) {
            LandOrder::decode(&bytes[..n_bytes]).expect_err("bytes are missing");
        }
    }

    #[test]
    fn reports_are_read_as_they_were_written_and_only_whole() {
        let spans = vec![KvSpan { group: GroupIdx(2), blocks: 4..7, layers: 0..2 }];
        for event in [
            LandingEvent::Accepted,
            LandingEvent::Refetch { lane: Lane { from: 1, to: 0 }, spans },
            LandingEvent::Landed(LandedPart { pages: 7, bytes: 1 << 40, moved: Duration::from_micros(1234) }),
            LandingEvent::Failed(TransferError::Corrupted { pages: 3 }),
            LandingEvent::Failed(TransferError::Mismatch("two sides".to_owned())),
            LandingEvent::Quiet,
        ] {
            let report = LandingReport { transfer: TransferId(5), event };
            let bytes = report.encode();
            let read = LandingReport::decode(&bytes).expect("it is whole");
            assert_eq!(format!("{read:?}"), format!("{report:?}"));
            for n_bytes in 0..bytes.len() {
                LandingReport::decode(&bytes[..n_bytes]).expect_err("bytes are missing");
            }
            LandingReport::decode(&[&bytes[..], &[0]].concat()).expect_err("a byte too many");
        }
    }
}
