//! What one wire of streams does in its own way: how a stream is made, and where the KV of a frame goes.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::Stream;
use kernels::{Parts, Stores};
use types::KvSpan;

use super::frame::{FrameError, Piece};
use super::said::Said;
use super::span_out::SpanOut;
use super::stream::FrameWriter;
use crate::connector::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::lanes::LaneSpan;
use crate::reshard::Lane;

/// The first version of the protocol that has frames of KV between GPUs.
pub(in crate::connectors) const BETWEEN_GPUS_SINCE: u16 = 2;

/// The sender's side of one link.
#[async_trait]
pub(in crate::connectors) trait Medium: Debug + Send + Sync + 'static {
    /// Makes one stream. The caller gives it a deadline.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream>;

    /// The first version of the protocol that has words for this medium's frames.
    fn since(&self) -> u16 {
        1
    }

    /// Writes one frame of KV, unless its transfer is over by now; or begins with it, and writes it with one of the next.
    /// Not cancel-safe.
    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError>;

    /// No frame waits for its turn: what was begun with is written. Not cancel-safe.
    async fn write_rest(&self, _writer: &mut FrameWriter) -> Result<(), TransferError> {
        Ok(())
    }

    /// The receiver does not need this slot any more.
    fn taken(&self, slot: u16) -> Result<(), FrameError>;

    /// Whether this side's device writes into the receiver's pages. Then the receiver gives them to nobody before it is
    /// told that the device is done, and a handoff waits for it.
    fn writes(&self) -> bool;

    /// Ends when what the link goes over is broken; never, where the streams are all that there is.
    async fn broken(&self) -> TransferError;

    /// The link is lost: whatever is under way is given up, and holds no lease any more.
    fn close(&self);
}

/// Where the KV of a link's frames is, if it is not in them, and who copies it.
#[derive(Debug)]
pub(in crate::connectors) enum Apart {
    /// In memory that the processor sees.
    Host(Box<dyn Elsewhere>),
    /// In memory that a card sees.
    Card(Arc<dyn Fetch>),
    /// In messages that come in the order of the frames that name them.
    Queue(Box<dyn Posts>),
    /// Where it belongs: the sender's device writes it there.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "no other wire's sender writes"))]
    Here(Arc<dyn WrittenHere>),
}

impl Apart {
    /// Between how many pairs of ranks something goes in its own order.
    pub(in crate::connectors) fn n_lanes(&self) -> usize {
        match self {
            Self::Queue(queue) => queue.n_lanes(),
            Self::Host(_) | Self::Card(_) | Self::Here(_) => 1,
        }
    }
}

/// The receiver's end of queues of messages, one for each lane.
#[async_trait]
pub(in crate::connectors) trait Posts: Debug + Send + Sync + 'static {
    /// Between how many pairs of ranks they go.
    fn n_lanes(&self) -> usize;

    /// Messages will come soon. Never waits.
    fn expect(&self);

    /// Asks for the message of this number, which must be the next one of its lane: of so many bytes. Waits for room, not for the
    /// message. What is answered fetches it; dropped instead, the message comes all the same, and is forgotten.
    async fn post(&self, lane: Lane, number: u64, bytes: u32) -> Result<Arc<dyn Fetch>, TransferError>;
}

/// The receiver's view of pages that a sender's device writes.
#[async_trait]
pub(in crate::connectors) trait WrittenHere: Debug + Send + Sync + 'static {
    /// Waits until the sender's device has given this number: what it wrote before is in place then. Cancel-safe.
    async fn number(&self, number: u32) -> Result<(), TransferError>;

    /// What the pages of a claimed span are, where it is not the processor that looks; `None`: it is. No digests at all:
    /// the landing has ended.
    async fn look(
        &self,
        landing: &OpenLanding,
        span: &LaneSpan,
    ) -> Result<Option<Vec<Digest>>, TransferError>;

    /// Takes the sender's right to write away: when this returns, its device writes nothing here any more.
    fn revoke(&self);
}

/// The receiver's view of KV on a card.
#[async_trait]
pub(in crate::connectors) trait Fetch: Debug + Send + Sync + 'static {
    /// Copies a span into the landing's pages and verifies it. Answers the pages that did not pass. It does not wait for
    /// what is said of them before it copies.
    ///
    /// Dropped in the middle, it leaves the card to its copies, which the landing waits for.
    async fn fetch(
        &self,
        landing: &OpenLanding,
        span: &LaneSpan,
        said: Said,
        pieces: &[Piece],
    ) -> Result<Vec<KvSpan>, TransferError>;
}

/// Where bytes lie at the sender.
#[derive(Clone, Copy, Debug)]
pub(in crate::connectors) struct Place {
    /// In whose pages.
    pub(in crate::connectors) rank: u16,
    /// In a slot of its stage, and not in pages.
    pub(in crate::connectors) slot: Option<u16>,
    pub(in crate::connectors) offset: u64,
}

/// The receiver's view of KV that is not in the frames of a link.
pub(in crate::connectors) trait Elsewhere: Debug + Send + Sync + 'static {
    /// Copies one piece, or a part of it. Never waits.
    fn copy(&self, from: Place, into: &mut [u8]) -> Result<(), TransferError>;

    /// The same, and tells `each` part's XXH3-64 of what was copied.
    fn copy_hashed(
        &self,
        from: Place,
        into: &mut [u8],
        parts: Parts,
        stores: Stores,
        each: &mut dyn FnMut(u64),
    ) -> Result<(), TransferError>;
}

/// A part of a frame's KV that lies in one piece: a place to copy from, and how far one has come.
#[derive(Debug)]
pub(in crate::connectors) struct Pieces<'a> {
    rest: &'a [Piece],
    done: usize,
}

impl<'a> Pieces<'a> {
    pub(in crate::connectors) fn new(pieces: &'a [Piece]) -> Self {
        Self { rest: pieces, done: 0 }
    }

    /// How many bytes lie together from here on; `None` at the end.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "for wires that know both sides' pieces"))]
    pub(in crate::connectors) fn rest(&self) -> Option<usize> {
        Some(self.rest.first()?.bytes as usize - self.done)
    }

    /// The next bytes, at most `bytes` of them: where they are, and how many.
    pub(in crate::connectors) fn next(&mut self, bytes: usize) -> Option<(u64, usize)> {
        let piece = self.rest.first()?;
        let (offset, n) = (piece.offset + self.done as u64, bytes.min(piece.bytes as usize - self.done));
        self.done += n;
        if self.done == piece.bytes as usize {
            (self.rest, self.done) = (&self.rest[1..], 0);
        }
        Some((offset, n))
    }
}
