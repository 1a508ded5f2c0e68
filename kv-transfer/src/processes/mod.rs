//! A node of several processes, as the sender and the receiver of KV. Each process has the KV of some neighbouring layers, or
//! that of some ranks of them.
//!
//! One process, the head, opens and grants landings and does all bookkeeping of transfers. The other processes, the
//! followers, send and receive their pages themselves. A follower sends over a further stream of the head's
//! link, frame by frame as the head orders. A sender makes further streams to each follower of the receiver, and the
//! head sends the follower the blocks of each landing.
//!
//! The KV of such a node goes over tcp.

mod land_order;
mod landing_queues;
mod put_order;

use std::fmt::Debug;

use async_trait::async_trait;
use tokio::sync::mpsc;
use types::layout::LayerShape;
use types::{KvSpan, TransferId};

pub(crate) use self::land_order::QuietReport;
pub use self::land_order::{LandOrder, LandedPart, LandingEvent, LandingReport, ReportLandings};
pub use self::landing_queues::LandingQueues;
pub use self::put_order::PutOrder;
#[cfg(test)]
pub(crate) use self::put_order::an_order;
use crate::error::TransferError;

/// The followers of a node with several processes, as the head calls them.
///
/// The connector calls it from the tasks of all its links. Each method may be called from many tasks at once.
#[async_trait]
pub trait OtherProcesses: Debug + Send + Sync + 'static {
    /// Returns the process that has a rank's KV of a layer (number in the model); `None` for this process. The answer never
    /// changes. Layers that have the same process for the first rank have it for every rank.
    fn process_of(&self, layer: u16, rank: u16) -> Option<usize>;

    /// Returns the number of other processes. `process_of` returns smaller numbers only.
    fn n_processes(&self) -> usize;

    /// Makes a process send some of its pages. Returns when they are written to the wire.
    ///
    /// The pages keep their lease until this returns, so an implementation returns only when the process no longer reads
    /// them, also after an error. It returns in bounded time: [`FollowerStreams::put`](crate::FollowerStreams::put)
    /// does, unless a GPU stands still, and the death of the process is an error. An error loses the link, and fails all
    /// transfers on it.
    async fn put(&self, process: usize, order: PutOrder) -> Result<(), TransferError>;

    /// Returns where a process receives KV: `host:port`. It never changes.
    fn endpoint(&self, process: usize) -> String;

    /// Makes a process receive its pages of a landing. Never waits.
    ///
    /// Returns the reports of the process. The last one is [`LandingEvent::Quiet`]; if the queue ends without it,
    /// the process is lost, and the node with it.
    fn land(&self, process: usize, order: LandOrder) -> mpsc::Receiver<LandingEvent>;

    /// Makes a process end a landing. Never waits. Without effect if it has ended.
    fn end_landing(&self, process: usize, link: u64, transfer: TransferId);

    /// Makes all processes close their streams of a link, and end their puts on it. Never waits.
    ///
    /// Called when a link is lost or dropped, at least once. A few orders of the link may still follow. They fail, because
    /// the receiver has no such link any more.
    fn close_link(&self, link: u64);
}

/// Splits a span so that the layers of each part have the same `owner`. It gets numbers in the model; `layers` are those of
/// the span's group.
pub(crate) fn split<O: PartialEq>(
    span: &KvSpan,
    layers: &[LayerShape],
    owner: impl Fn(u16) -> O,
) -> Vec<KvSpan> {
    let owner = |pos: &u16| owner(layers[usize::from(*pos)].layer);
    let positions: Vec<u16> = span.layers.clone().collect();
    let parts = positions.chunk_by(|one, next| owner(one) == owner(next));
    parts.map(|part| KvSpan { layers: part[0]..part[0] + part.len() as u16, ..span.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use types::GroupIdx;

    use super::*;

    #[test]
    fn a_span_is_cut_where_another_process_begins() {
        let layers: Vec<_> =
            [0, 2, 4, 6, 8].map(|layer| LayerShape { layer, n_kv_heads: 1, head_dim: 1 }).into();
        let split_at = |parts: &[Range<u16>], positions: Range<u16>| {
            let span = KvSpan { group: GroupIdx(0), blocks: 1..3, layers: positions };
            let owner = |layer| parts.iter().position(|part| part.contains(&layer));
            let parts = split(&span, &layers, owner);
            parts.into_iter().map(|part| (part.layers.start, part.layers.end)).collect::<Vec<_>>()
        };
        assert_eq!(split_at(&[], 0..5), [(0, 5)]);
        assert_eq!(split_at(&[5..9, 9..10], 0..5), [(0, 3), (3, 5)]);
        assert_eq!(split_at(&[3..5, 5..9], 0..5), [(0, 2), (2, 3), (3, 5)]);
        assert_eq!(split_at(&[3..5, 5..9], 2..3), [(2, 3)]);
        assert_eq!(split_at(&[0..3, 3..9], 2..4), [(2, 4)]);
    }
}
