//! What a sender says that pages must be, and what they are.

use tokio::sync::oneshot;
use types::KvSpan;

use crate::digest::Digest;
use crate::landing::{OpenLanding, PageAt};
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

/// The pages of a span that are not what the sender said. Both have a digest for each head of each page, or none at all.
pub(in crate::connectors) fn differing(
    landing: &OpenLanding,
    span: &LaneSpan,
    said: &[Digest],
    here: &[Digest],
) -> Vec<KvSpan> {
    let (mut wrong, mut rest) = (Vec::new(), (said, here));
    if said.is_empty() {
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
