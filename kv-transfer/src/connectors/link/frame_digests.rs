//! The digests of a frame, which come with it or later, and their comparison with the pages.

use device::cuda::PageDigests;
use tokio::sync::oneshot;
use types::layout::RANKS_MAX;
use types::{KvSpan, TransferId};

use super::frame::FrameError;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding, PageAt};
use crate::lanes::LaneSpan;

/// The sender's digests of one frame's pages.
#[derive(Debug)]
pub(in crate::connectors) enum FrameDigests {
    /// The digests came with the frame. Empty if digests are turned off.
    Here(Vec<Digest>),
    /// The digests follow on the same stream. The channel closes with the stream.
    Later(oneshot::Receiver<Vec<Digest>>),
}

impl FrameDigests {
    /// Returns whether the receiver has to make digests too, to verify its pages.
    pub(in crate::connectors) fn wanted_here(&self) -> PageDigests {
        match self {
            Self::Here(digests) if digests.is_empty() => PageDigests::Skip,
            Self::Here(_) | Self::Later(_) => PageDigests::Make,
        }
    }

    /// Returns the digests that came with the frame; an error if they follow after it.
    pub(in crate::connectors) fn here(self) -> Result<Vec<Digest>, FrameError> {
        match self {
            Self::Here(digests) => Ok(digests),
            Self::Later(_) => Err(FrameError::Unexpected("KV without digests on this wire")),
        }
    }

    /// Waits for the digests; `None` if the stream ended first.
    pub(in crate::connectors) async fn wait(self) -> Option<Vec<Digest>> {
        match self {
            Self::Here(digests) => Some(digests),
            Self::Later(digests) => digests.await.ok(),
        }
    }
}

/// Limit of frames of one stream whose digests are outstanding: two on each lane, and the newest one.
pub(super) const PENDING_DIGESTS_MAX: usize = 2 * RANKS_MAX as usize + 1;

/// A frame whose digests have not come yet.
#[derive(Debug)]
pub(super) struct PendingDigests {
    transfer: TransferId,
    span: LaneSpan,
    digests: oneshot::Sender<Vec<Digest>>,
}

impl PendingDigests {
    /// Returns the frame's entry in the stream's queue, and the digests that its fetch waits for.
    pub(super) fn of(transfer: TransferId, span: &LaneSpan) -> (Self, FrameDigests) {
        let (digests, said) = oneshot::channel();
        (Self { transfer, span: span.clone(), digests }, FrameDigests::Later(said))
    }

    pub(super) fn deliver(
        self,
        transfer: TransferId,
        span: &LaneSpan,
        digests: Vec<Digest>,
    ) -> Result<(), FrameError> {
        if (self.transfer, &self.span) != (transfer, span) {
            return Err(FrameError::Unexpected("digests of pages other than those of the oldest KV frame"));
        }
        // The receiver of the digests may have ended with the landing, so a failed send is ignored.
        let _ = self.digests.send(digests);
        Ok(())
    }
}

impl OpenLanding {
    /// Claims a span whose digests came with the frame or come later.
    pub(in crate::connectors) fn claim_frame(
        &self,
        span: &LaneSpan,
        said: &FrameDigests,
    ) -> Result<Claim, TransferError> {
        match said {
            FrameDigests::Here(digests) => self.claim(span, digests.len()),
            FrameDigests::Later(_) => self.claim_promised(span),
        }
    }
}

/// Refuses digests whose number differs from the number of heads in the frame.
pub(in crate::connectors) fn check_count(said: &[Digest], here: &[Digest]) -> Result<(), FrameError> {
    match said.len() == here.len() {
        true => Ok(()),
        false => Err(FrameError::Body("the number of digests is wrong")),
    }
}

/// Returns the pages of a span whose digests differ from the sender's. Each list is empty, or has one digest
/// for each head in each page.
pub(in crate::connectors) fn differing(
    landing: &OpenLanding,
    span: &LaneSpan,
    said: &[Digest],
    here: &[Digest],
) -> Vec<KvSpan> {
    let (mut wrong, mut rest) = (Vec::new(), (said, here));
    if said.is_empty() || said == here {
        return wrong;
    }
    for page in PageAt::all(span) {
        let n_heads = landing.heads(span.lane, page.group, page.layer_pos).range().len();
        let (said, here) = (rest.0.split_at(n_heads), rest.1.split_at(n_heads));
        if said.0 != here.0 {
            wrong.push(page.span());
        }
        rest = (said.1, here.1);
    }
    wrong
}

#[cfg(test)]
mod tests {
    use types::GroupIdx;

    use super::*;
    use crate::reshard::Lane;

    fn pages(from: u16) -> LaneSpan {
        let span = KvSpan { group: GroupIdx(0), blocks: 0..2, layers: 0..1 };
        LaneSpan { lane: Lane { from, to: 0 }, span }
    }

    #[tokio::test]
    async fn pending_digests_are_delivered_for_the_same_pages_of_the_same_lane() {
        let said = vec![Digest(1), Digest(2)];
        for (transfer, of, is_delivered) in [
            (TransferId(1), pages(1), true),
            (TransferId(2), pages(1), false),
            (TransferId(1), pages(0), false),
        ] {
            let (pending, promised) = PendingDigests::of(TransferId(1), &pages(1));
            assert_eq!(promised.wanted_here(), PageDigests::Make);
            assert_eq!(
                pending.deliver(transfer, &of, said.clone()).is_ok(),
                is_delivered,
                "{transfer} {of:?}"
            );
            assert_eq!(promised.wait().await, is_delivered.then(|| said.clone()));
        }
        assert!(check_count(&said, &said).is_ok());
        assert!(check_count(&said[..1], &said).is_err() && check_count(&[], &said).is_err());
    }
}
