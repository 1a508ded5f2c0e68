//! How the KV of a link's frames comes in: the trait that each wire implements for the receiver's end.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use types::{KvSpan, TransferId};

use super::frame::{FrameError, KvPlace};
use super::frame_digests::FrameDigests;
use super::stream::FrameReader;
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::lanes::LaneSpan;

/// One frame of KV.
#[derive(Debug)]
pub(in crate::connectors) struct KvFrame {
    pub(in crate::connectors) span: LaneSpan,
    pub(in crate::connectors) digests: FrameDigests,
    pub(in crate::connectors) place: KvPlace,
    /// Bytes of KV behind the frame on its stream.
    pub(in crate::connectors) payload_bytes: usize,
}

/// What has become of a frame's KV. Both end with the pages that did not pass, which the receiver asks for again.
pub(in crate::connectors) enum Receipt {
    /// It is verified, or dropped.
    Done(Vec<KvSpan>),
    /// It is on its way. The receiver waits for it on a task of its own while it reads the next frames.
    Pending(BoxFuture<'static, Result<Vec<KvSpan>, TransferError>>),
}

impl Receipt {
    /// The KV is not wanted any more.
    pub(in crate::connectors) fn dropped() -> Self {
        Self::Done(Vec::new())
    }
}

/// The receiver's end of one wire: what takes KV from where a frame says that it lies, and verifies it.
///
/// One value for each link; the link's first stream brings it. The receiver calls [`receive`](Self::receive) for each
/// frame of KV, from the tasks of all streams of the link. An error ends the link.
///
/// The other methods have defaults for wires whose receiver does the copying: a landing that is closed is quiet then.
/// Where the sender's device writes, [`opened`](Self::opened) gives the landing a proof of quiet, and `sender_is_quiet`
/// and `revoke` make it hold.
#[async_trait]
pub(in crate::connectors) trait KvPath: Debug + Send + Sync + 'static {
    /// Takes one frame's KV into the landing. `None`: the landing is over or unknown, and the KV is dropped.
    ///
    /// Reads the payload off the stream if there is one. Does not wait for KV that is on another way, nor for digests that
    /// follow on the stream: that is what [`Receipt::Pending`] is for. It may wait for room. Not cancel-safe.
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError>;

    /// Pairs of ranks that move KV independently of each other: each may have some frames pending.
    fn n_lanes(&self) -> usize {
        1
    }

    /// A sender was let into this landing. Never waits.
    fn opened(&self, _landing: &OpenLanding) {}

    /// The sender's device is done with the pages of this transfer: its sender has said so, or all KV has arrived.
    fn sender_is_quiet(&self, _transfer: TransferId) {}

    /// The link has ended. When this returns, the sender's device writes nothing here any more.
    fn revoke(&self) {}
}

/// The refusal of KV in a place that a wire does not have.
pub(in crate::connectors) fn wrong_place() -> TransferError {
    FrameError::Unexpected("KV in a place that this wire does not have").into()
}
