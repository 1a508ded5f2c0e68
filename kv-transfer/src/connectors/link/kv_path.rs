//! The receiver's end of KV in frames: the trait that each wire implements.

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

/// One KV frame, without its KV.
#[derive(Debug)]
pub(in crate::connectors) struct KvFrame {
    pub(in crate::connectors) span: LaneSpan,
    pub(in crate::connectors) digests: FrameDigests,
    pub(in crate::connectors) place: KvPlace,
    /// Bytes of KV that follow the frame on its stream.
    pub(in crate::connectors) payload_bytes: usize,
}

/// The result of receiving a frame's KV. Both variants end with the pages that failed verification, which the
/// receiver requests again.
pub(in crate::connectors) enum Receipt {
    /// The KV is verified, or dropped.
    Done(Vec<KvSpan>),
    /// The KV is on its way. A task awaits the future while the receiver reads the next frames.
    Pending(BoxFuture<'static, Result<Vec<KvSpan>, TransferError>>),
}

impl Receipt {
    /// Returns the receipt of KV that is no longer wanted.
    pub(in crate::connectors) fn dropped() -> Self {
        Self::Done(Vec::new())
    }
}

/// The receiver's end of one wire: takes KV from the place that a frame names, and verifies it.
///
/// There is one value for each link, made by the link's first stream. The receiver calls [`receive`](Self::receive)
/// for each KV frame, from the tasks of all streams of the link. An error ends the link.
///
/// All methods but `receive` have defaults for wires where the receiver copies: a closed landing is then
/// quiet. If the sender's device writes, [`opened`](Self::opened) gives the landing a proof of quiet, and
/// `sender_is_quiet` and `revoke` fulfil it.
#[async_trait]
pub(in crate::connectors) trait KvPath: Debug + Send + Sync + 'static {
    /// Takes one frame's KV into the landing. If `landing` is `None`, the landing is over or unknown, and the KV is
    /// dropped.
    ///
    /// Reads the payload, if any, from the stream. Does not wait for KV outside of the stream or for digests that
    /// come later: it returns [`Receipt::Pending`] for these. It may wait for room. Not cancel-safe.
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError>;

    /// Returns the number of pairs of ranks that move KV independently. Each pair may have some frames
    /// pending.
    fn n_lanes(&self) -> usize {
        1
    }

    /// Called when a sender was admitted to `landing`. Never waits.
    fn opened(&self, _landing: &OpenLanding) {}

    /// Called when the sender's device no longer writes pages of `transfer`: the sender has reported it, or
    /// all KV has arrived.
    fn sender_is_quiet(&self, _transfer: TransferId) {}

    /// Called when the link has ended. Revokes the access of the sender's device: when the call returns, it
    /// can no longer write.
    fn revoke(&self) {}
}

/// Returns the error for KV in a place that a wire does not support.
pub(in crate::connectors) fn wrong_place() -> TransferError {
    FrameError::Unexpected("KV in a place that this wire does not have").into()
}
