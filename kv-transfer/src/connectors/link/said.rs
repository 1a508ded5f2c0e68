//! What a sender says that pages must be, and what they are.

use tokio::sync::oneshot;
use types::layout::RANKS_MAX;
use types::{KvSpan, TransferId};

use super::frame::FrameError;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding, PageAt};
use crate::lanes::LaneSpan;

/// What a sender says that the pages of one frame must be.
#[derive(Debug)]
pub(in crate::connectors) enum Said {
    /// With the frame; nothing at all where digests are turned off.
    Here(Vec<Digest>),
    /// Soon, on the same stream. It is over with the stream.
    Later(oneshot::Receiver<Vec<Digest>>),
}

impl Said {
    /// Whether there is anything to compare with.
    pub(in crate::connectors) fn is_something(&self) -> bool {
        !matches!(self, Self::Here(digests) if digests.is_empty())
    }

    /// Waits for it; `None` where the stream has ended before.
    pub(in crate::connectors) async fn heard(self) -> Option<Vec<Digest>> {
        match self {
            Self::Here(digests) => Some(digests),
            Self::Later(digests) => digests.await.ok(),
        }
    }
}

/// Frames of one stream of which it has not said what they must be: two on each lane, and one that has just come.
pub(super) const OWED_MAX: usize = 2 * RANKS_MAX as usize + 1;

/// What a stream has shown, and has not said what it must be.
#[derive(Debug)]
pub(super) struct Owed {
    transfer: TransferId,
    span: LaneSpan,
    digests: oneshot::Sender<Vec<Digest>>,
}

impl Owed {
    /// The debt, and where what is paid comes to.
    pub(super) fn of(transfer: TransferId, span: &LaneSpan) -> (Self, Said) {
        let (digests, said) = oneshot::channel();
        (Self { transfer, span: span.clone(), digests }, Said::Later(said))
    }

    pub(super) fn pay(
        self,
        transfer: TransferId,
        span: &LaneSpan,
        digests: Vec<Digest>,
    ) -> Result<(), FrameError> {
        if (self.transfer, &self.span) != (transfer, span) {
            return Err(FrameError::Unexpected("digests of other pages than were shown"));
        }
        // Whoever fetched may have gone away with the landing.
        let _ = self.digests.send(digests);
        Ok(())
    }
}

impl OpenLanding {
    /// Claims a span whose digests are here, or promised.
    pub(in crate::connectors) fn claim_said(
        &self,
        span: &LaneSpan,
        said: &Said,
    ) -> Result<Claim, TransferError> {
        match said {
            Said::Here(digests) => self.claim(span, digests.len()),
            Said::Later(_) => self.claim_promised(span),
        }
    }
}

/// Refuses a promise that was not kept.
pub(in crate::connectors) fn said_as_many(said: &[Digest], here: &[Digest]) -> Result<(), FrameError> {
    match said.len() == here.len() {
        true => Ok(()),
        false => Err(FrameError::Body("not as many digests as were promised")),
    }
}

/// The pages of a span that are not what the sender said. Both have a digest for each head of each page, or none at all.
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
    async fn what_is_owed_is_paid_for_the_same_pages_of_the_same_lane() {
        let said = vec![Digest(1), Digest(2)];
        for (transfer, of, is_paid) in [
            (TransferId(1), pages(1), true),
            (TransferId(2), pages(1), false),
            (TransferId(1), pages(0), false),
        ] {
            let (owed, promised) = Owed::of(TransferId(1), &pages(1));
            assert!(promised.is_something());
            assert_eq!(owed.pay(transfer, &of, said.clone()).is_ok(), is_paid, "{transfer} {of:?}");
            assert_eq!(promised.heard().await, is_paid.then(|| said.clone()));
        }
        assert!(said_as_many(&said, &said).is_ok());
        assert!(said_as_many(&said[..1], &said).is_err() && said_as_many(&[], &said).is_err());
    }
}
