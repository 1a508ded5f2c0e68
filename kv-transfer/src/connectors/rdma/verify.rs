//! Hot path. Verifies one frame that the sender's device has written into the pages.

use types::KvSpan;

use super::card::CardLook;
use crate::connectors::link::frame_digests::differing;
use crate::connectors::link::span_in::{Checker, busy};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;

/// Bytes that are verified before other tasks run.
const BYTES_AT_ONCE: usize = 1 << 20;

/// Verifies a span whose KV is in place. Returns the pages that failed verification, which must be written again.
///
/// A span is claimed once it is in place. So if a page is written for the second time while its first copy is
/// verified, it fails and is written again. `card` computes the digests of pages on a GPU.
pub(super) async fn take_written(
    landing: &OpenLanding,
    span: &LaneSpan,
    digests: &[Digest],
    card: Option<&CardLook>,
) -> Result<Vec<KvSpan>, TransferError> {
    if landing.claim(span, digests.len())? == Claim::Skip {
        return Ok(Vec::new());
    }
    let bytes = landing.runs(span).bytes();
    if let Some(card) = card.filter(|_| !digests.is_empty())
        && let Some(seen) = card.written(landing, span).await?
    {
        return Ok(compared(landing, span, digests, &seen, bytes));
    }
    let mut checker = Checker::new(span, digests);
    let mut checked = 0;
    while checked < bytes {
        checked = bytes.min(checked + BYTES_AT_ONCE);
        match landing.while_open(|memory| checker.check_until(checked, landing, memory)) {
            None => return Ok(Vec::new()),
            Some(looked) => looked.map_err(busy)?,
        }
        tokio::task::yield_now().await;
    }
    // A landing that has just failed requests no page again, so the list is empty then.
    let wrong = checker.wrong;
    Ok(landing.arrived(span, bytes, &wrong).map(|()| wrong).unwrap_or_default())
}

/// Compares the sender's digests with those that this side's GPU computed.
fn compared(
    landing: &OpenLanding,
    span: &LaneSpan,
    said: &[Digest],
    seen: &[Digest],
    bytes: usize,
) -> Vec<KvSpan> {
    if seen.is_empty() {
        return Vec::new();
    }
    let wrong = differing(landing, span, said, seen);
    // A landing that has just failed requests no page again, so the list is empty then.
    landing.arrived(span, bytes, &wrong).map(|()| wrong).unwrap_or_default()
}
