//! Hot path. One frame whose KV lies elsewhere: copied from there into the landing's pages, and verified while it is in
//! the cache.

use kv_cache::KvMemory;
use types::KvSpan;

use super::frame::{FrameError, Piece};
use super::medium::{Elsewhere, Pieces};
use super::span_in::{Checker, busy};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::runs::Runs;

/// Where a frame says that its KV lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct At<'a> {
    pub(super) elsewhere: &'a dyn Elsewhere,
    /// The sender's.
    pub(super) rank: u16,
    pub(super) slot: Option<u16>,
    pub(super) pieces: &'a [Piece],
}

/// Copies a span's KV. Returns the pages that did not pass, and are to be sent again.
///
/// The copy is this side's own doing, under the landing's lock: once the landing has ended, nobody copies into it, and
/// whether the sender still lives does not matter. What the sender does to its pages in the meantime shows in the
/// digests, which are made from the copy.
pub(super) fn copy_span(
    landing: &OpenLanding,
    span: &LaneSpan,
    digests: &[Digest],
    at: At<'_>,
) -> Result<Vec<KvSpan>, TransferError> {
    let claim = landing.claim(span, digests.len())?;
    let runs = landing.runs(span);
    if runs.bytes() != at.pieces.iter().map(|piece| piece.bytes as usize).sum::<usize>() {
        return Err(FrameError::Body("the pieces are not as long as their span").into());
    }
    if claim == Claim::Skip {
        return Ok(Vec::new());
    }
    let pieces = Pieces::new(at.pieces);
    Copying { landing, at, runs, pieces, checker: Checker::new(span, digests), offset: 0 }.all(span)
}

struct Copying<'a> {
    landing: &'a OpenLanding,
    at: At<'a>,
    runs: Runs,
    pieces: Pieces<'a>,
    checker: Checker<'a>,
    /// Bytes that are in place.
    offset: usize,
}

impl Copying<'_> {
    fn all(mut self, span: &LaneSpan) -> Result<Vec<KvSpan>, TransferError> {
        while self.offset < self.runs.bytes() {
            let landing = self.landing;
            match landing.while_open(|memory| self.some(memory)) {
                None => return Ok(Vec::new()),
                Some(copied) => copied?,
            }
        }
        // A landing that has just failed has nothing to ask for.
        let wrong = self.checker.wrong;
        Ok(self.landing.arrived(span, self.offset, &wrong).map(|()| wrong).unwrap_or_default())
    }

    fn some(&mut self, memory: &KvMemory) -> Result<(), TransferError> {
        let mut pages = self.runs.write(memory, self.offset).map_err(busy)?;
        for mut slice in pages.slices() {
            self.offset += slice.len();
            self.fill(&mut slice)?;
        }
        drop(pages);
        self.checker.check_until(self.offset, self.landing, memory).map_err(busy)
    }

    fn fill(&mut self, mut rest: &mut [u8]) -> Result<(), TransferError> {
        while !rest.is_empty() {
            let (offset, n) = self.pieces.next(rest.len()).expect("the pieces are as long as the span");
            let (now, later) = rest.split_at_mut(n);
            self.at.elsewhere.copy(self.at.rank, self.at.slot, offset, now)?;
            rest = later;
        }
        Ok(())
    }
}
