//! Hot path. The sender's end of a link's queue pairs: writes KV into the receiver's pages, and announces each frame.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, Task, spawn_guarded};
use device::verbs::{Copy, Room};
use tokio::sync::oneshot;
use types::TransferId;

use super::adapter::Adapter;
use super::greeting::{End, First, PAIRS_MAX, read_answer, write_end, write_first};
use super::pairs::Pairs;
use super::under_way::{FrameOut, Pair, UnderWay};
use super::watch::watch;
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::frame::{Body, Frame, FrameError, KvPlace, Piece};
use crate::connectors::link::pieces::Pieces;
use crate::connectors::link::send_path::KvSendPath;
use crate::connectors::link::span_out::{SpanOut, corrupt_first};
use crate::connectors::link::stream::{FrameWriter, within};
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::faults::FaultKind;
use crate::lanes::LaneSpan;
use crate::pages::FRAME_PAGES_MAX;
use crate::reshard::Lane;
use crate::runs::Runs;

/// Limit of writes in progress on one queue pair: room for a frame of scattered pages, each in a part of K and a part
/// of V.
const WRITES_MAX: u32 = 2 * FRAME_PAGES_MAX as u32;

/// The sender's side of one link.
#[derive(Debug)]
pub(super) struct RdmaSendPath {
    parts: ConnectorParts,
    adapter: Arc<Adapter>,
    /// The queue pairs. Set when the first stream has connected to the receiver.
    connected: OnceLock<ConnectedPairs>,
    under_way: Arc<UnderWay>,
    next: AtomicU32,
}

/// Connected queue pairs, and the receiver's memory.
#[derive(Debug)]
struct ConnectedPairs {
    pairs: Vec<Pair>,
    there: End,
    #[expect(dead_code, reason = "held for its Drop")]
    watching: Task<()>,
}

impl RdmaSendPath {
    pub(super) fn over(parts: &ConnectorParts, adapter: Arc<Adapter>) -> Arc<Self> {
        Arc::new(Self {
            parts: parts.clone(),
            adapter,
            connected: OnceLock::new(),
            under_way: Arc::new(UnderWay::new(n_pairs(parts))),
            next: AtomicU32::new(0),
        })
    }

    /// Creates queue pairs, one for each stream, and connects them to the receiver's.
    async fn meet(&self, stream: &mut Stream) -> Result<(), TransferError> {
        let (world, adapter) = (&self.parts.world, &*self.adapter);
        // Nothing is received here, but some devices do not create an empty receive queue, so there is room
        // for one.
        let room = Room { writes: WRITES_MAX, receives: 1 };
        let n = n_pairs(&self.parts);
        let made = Pairs::new(adapter, n, room, || world.draw())?;
        write_end(stream, &made.end(adapter, Vec::new())).await.map_err(TransferError::lost)?;
        let there = read_answer(stream, n).await.map_err(TransferError::lost)?;
        let n_regions = self.adapter.ranks.first().map_or(0, |rank| rank.starts.len());
        if there.ranks.iter().any(|rank| rank.starts.len() != n_regions) {
            return Err(FrameError::Unexpected("memory of a different layout").into());
        }
        made.connect(adapter, &there)?;
        let (completions, under_way) = (made.completions, Arc::clone(&self.under_way));
        let stall = self.parts.settings.stall();
        let watching = spawn_guarded(&self.parts.gate, "rdma sender", async move {
            let take = |completion| {
                if let Some(done) = under_way.done(completion)?.and_then(|frame| frame.done) {
                    // The waiting task may be gone, so a failed send is ignored.
                    let _ = done.send(());
                }
                Ok(())
            };
            let error = tokio::select! {
                Err(error) = watch(completions, take) => error,
                error = under_way.stalled(stall) => error,
            };
            under_way.lose(error);
        });
        let pairs = made.pairs.into_iter().map(Pair::new).collect();
        let connected = ConnectedPairs { pairs, there, watching };
        self.connected
            .set(connected)
            .map_err(|_| TransferError::lost_because("a link connects to its receiver once"))
    }

    fn connected(&self) -> Result<&ConnectedPairs, TransferError> {
        self.connected.get().ok_or_else(|| TransferError::lost_because("the link has no queue pairs"))
    }

    /// Starts the device's writes of a span's pages. Returns the number that announces their completion.
    /// `done` is notified when the writes are complete.
    ///
    /// Waits for room in the queue. If it is dropped while it waits, nothing is written.
    async fn write(&self, span: SpanOut, done: Option<oneshot::Sender<()>>) -> Result<u32, TransferError> {
        let connected = self.connected()?;
        let copies = self.copies(&connected.there, &span);
        let Lane { from, to } = span.piece.lane;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let pair = &connected.pairs[number as usize % connected.pairs.len()];
        let room = pair.room(copies.len() as u32);
        let room = within(self.parts.settings.stall(), "writing KV", room).await?;
        self.under_way.enter(number, FrameOut { span, room, done })?;
        let (region, key) =
            (&self.adapter.ranks[usize::from(from)].region, connected.there.ranks[usize::from(to)].key);
        let written = pair.with(|pair| pair.write(number.into(), region, key, &copies, number));
        if written.is_err() {
            self.under_way.forget(number);
        }
        written.map(|()| number)
    }

    /// Returns the digests, computed where the pages are; none if digests are turned off.
    async fn digests(&self, span: &SpanOut) -> Result<Vec<Digest>, TransferError> {
        let on_card = self.adapter.card.as_ref().filter(|_| self.parts.settings.digests);
        let made = match on_card {
            Some(card) => card.sent(span).await?,
            None => None,
        };
        match made.map_or_else(|| span.digests(&self.parts), Ok) {
            Err(TransferError::Memory(_)) if self.parts.faults.can_be_injected() => {
                self.digests_beside_faults(span).await
            }
            digests => digests,
        }
    }

    /// Returns the digests when no injected fault changes the pages: `flip` changes them for a moment, also pages that
    /// another lane reads.
    async fn digests_beside_faults(&self, span: &SpanOut) -> Result<Vec<Digest>, TransferError> {
        let read = async {
            loop {
                match span.digests(&self.parts) {
                    Err(TransferError::Memory(_)) => tokio::task::yield_now().await,
                    digests => return digests,
                }
            }
        };
        within(self.parts.settings.stall(), "a fault", read).await
    }

    /// Returns the copies from this side's memory to the receiver's. Bytes that are contiguous on both sides
    /// are one copy.
    fn copies(&self, there: &End, span: &SpanOut) -> Vec<Copy> {
        let (group, lane) = (span.piece.group, span.piece.lane);
        let here = span.runs(&self.parts).pieces(&self.parts.memory);
        let landing = &span.out.landing;
        let table = &landing.tables[usize::from(group.0)];
        let wanted = Runs::wanted(&landing.layout, &span.out.lanes, table, &span.piece);
        let (ours, theirs) = (self.parts.memory.rank(lane.from), &there.ranks[usize::from(lane.to)]);
        let start_of = |layer_pos, page| {
            let page_bytes = PageShape::new(&landing.layout, group, layer_pos).page_bytes() as u64;
            theirs.starts[ours.region(group, layer_pos) as usize] + u64::from(page) * page_bytes
        };
        joined(&here, &wanted.places(start_of))
    }

    /// Writes one frame's KV, and then sends the frame.
    async fn send(
        &self,
        writer: &mut FrameWriter,
        span: SpanOut,
        digests: Vec<Digest>,
    ) -> Result<(), TransferError> {
        let (transfer, piece) = (span.out.transfer(), span.piece.clone());
        let number = self.write(span, None).await?;
        writer.write(&frame(transfer, piece, number, digests)).await
    }

    async fn send_with(
        &self,
        fault: FaultKind,
        writer: &mut FrameWriter,
        span: SpanOut,
        mut digests: Vec<Digest>,
    ) -> Result<(), TransferError> {
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::Duplicate => {
                self.send(writer, span.page(span.piece.span.clone()), digests.clone()).await?
            }
            FaultKind::FlipBit(bit) => return self.send_flipped(bit, writer, span, digests).await,
            FaultKind::WrongDigest => corrupt_first(&mut digests),
        }
        self.send(writer, span, digests).await
    }

    /// Flips one bit of this side's pages, for an injected fault. Waits until no digest of another lane reads them.
    async fn flip(&self, runs: &Runs, bit: u64) -> Result<(), TransferError> {
        let byte = (bit / 8) as usize % runs.bytes();
        let flip_now = || {
            let mut pages = runs.write(&self.parts.memory, byte).ok()?;
            pages.slices()[0][0] ^= 1 << (bit % 8);
            Some(())
        };
        let flip = async {
            while flip_now().is_none() {
                tokio::task::yield_now().await;
            }
            Ok(())
        };
        within(self.parts.settings.stall(), "a fault", flip).await
    }

    /// Sends KV with one flipped bit. The device reads the KV from the pages, so the bit is flipped there,
    /// and flipped back after the read.
    async fn send_flipped(
        &self,
        bit: u64,
        writer: &mut FrameWriter,
        span: SpanOut,
        digests: Vec<Digest>,
    ) -> Result<(), TransferError> {
        let (transfer, piece, runs) = (span.out.transfer(), span.piece.clone(), span.runs(&self.parts));
        let _kept = span.from.clone();
        self.flip(&runs, bit).await?;
        let (done, is_done) = oneshot::channel();
        let number = self.write(span, Some(done)).await;
        // The bit is flipped back even if the write failed, because the pages must be right for other
        // readers.
        let _ = is_done.await;
        self.flip(&runs, bit).await?;
        writer.write(&frame(transfer, piece, number?, digests)).await
    }
}

/// The queue pairs of a link: one for each stream.
fn n_pairs(parts: &ConnectorParts) -> u16 {
    parts.settings.streams.clamp(1, PAIRS_MAX)
}

fn frame(transfer: TransferId, piece: LaneSpan, number: u32, digests: Vec<Digest>) -> Frame {
    let LaneSpan { lane, span } = piece;
    Frame::new(transfer, Body::Kv { span, digests: Some(digests), place: KvPlace::Written { number } })
        .on(lane)
}

/// Matches two lists of pieces that name the same bytes here and there, and cuts at the end of every piece of
/// either list.
fn joined(here: &[Piece], there: &[Piece]) -> Vec<Copy> {
    let (mut here, mut there) = (Pieces::new(here), Pieces::new(there));
    let mut copies = Vec::new();
    while let (Some(ours), Some(theirs)) = (here.rest(), there.rest()) {
        let bytes = ours.min(theirs);
        let (from, _) = here.next(bytes).expect("the rest is not empty");
        let (to, _) = there.next(bytes).expect("the rest is not empty");
        copies.push(Copy { from, to, bytes: bytes as u32 });
    }
    copies
}

#[async_trait]
impl KvSendPath for RdmaSendPath {
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream> {
        let mut connection = link::dial(&self.parts.world, endpoint).await?;
        match stream {
            0 => self.meet(&mut connection).await.map_err(io::Error::other)?,
            n => write_first(&mut connection, First { n, pairs: 0 }).await?,
        }
        Ok(connection)
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        // This check comes after the span's pending copy has begun, so that an ended transfer is not reported
        // quiet while this call writes.
        if span.out.is_over() {
            return Ok(());
        }
        let digests = self.digests(&span).await?;
        match parts.faults.next(span.runs(parts).bytes()) {
            None => self.send(writer, span, digests).await,
            Some(fault) => self.send_with(fault, writer, span, digests).await,
        }
    }

    fn writes(&self) -> bool {
        true
    }

    async fn broken(&self) -> TransferError {
        self.under_way.broken().await
    }

    /// Destroys the queue pairs before the frames in progress are released, because the device reads their
    /// pages as long as a queue pair exists.
    fn close(&self) {
        self.under_way.lose(TransferError::Closed);
        self.connected.get().into_iter().flat_map(|connected| &connected.pairs).for_each(Pair::destroy);
        self.under_way.give_up();
    }
}

impl Drop for RdmaSendPath {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(pieces: &[(u64, u32)]) -> Vec<Piece> {
        pieces.iter().map(|(offset, bytes)| Piece { offset: *offset, bytes: *bytes }).collect()
    }

    #[test]
    fn what_lies_together_on_both_sides_is_one_copy() {
        let (here, there) = (pieces(&[(0, 128), (512, 192)]), pieces(&[(1000, 64), (3000, 192), (5000, 64)]));
        let copies = joined(&here, &there);
        let copies: Vec<_> = copies.iter().map(|copy| (copy.from, copy.to, copy.bytes)).collect();
        assert_eq!(copies, [(0, 1000, 64), (64, 3000, 64), (512, 3064, 128), (640, 5000, 64)]);
        assert_eq!(joined(&here, &here).len(), 2);
    }
}
