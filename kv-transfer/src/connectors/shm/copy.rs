//! Hot path. Copies the KV of one frame from the sender's memory into the landing's pages, and verifies it during the
//! copy.

use device::{Parts, PeerMemory, PeerMemoryRangeError, Stores};
use kv_cache::KvMemory;
use types::KvSpan;

use crate::connectors::link::frame::{FrameError, Piece};
use crate::connectors::link::pieces::Pieces;
use crate::connectors::link::span_in::{Checker, busy};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding, PageAt};
use crate::lanes::LaneSpan;
use crate::metrics::wanted_bytes;
use crate::runs::Runs;

/// The largest landing that stays in the CPU caches until it is read, in bytes.
const CACHED_MAX: u64 = 8 << 20;

/// The pieces of a sender's shared memory that hold a frame's KV.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedPieces<'a> {
    pub(super) memory: &'a PeerMemory,
    pub(super) pieces: &'a [Piece],
}

/// Copies a span's KV. Returns the pages that failed verification, which must be sent again.
///
/// This process copies, under the landing's lock. So no copy begins after the landing has ended, and it does not
/// matter whether the sender is still alive. If the sender changes its pages meanwhile, the digests differ, because
/// they are computed from the copied bytes.
pub(super) fn copy_span(
    landing: &OpenLanding,
    span: &LaneSpan,
    digests: &[Digest],
    from: SharedPieces<'_>,
) -> Result<Vec<KvSpan>, TransferError> {
    let claim = landing.claim(span, digests.len())?;
    let runs = landing.runs(span);
    if runs.bytes() != from.pieces.iter().map(|piece| piece.bytes as usize).sum::<usize>() {
        return Err(FrameError::Body("the pieces do not have the length of their span").into());
    }
    if claim == Claim::Skip {
        return Ok(Vec::new());
    }
    let (pieces, checker) = (Pieces::new(from.pieces), Checker::new(span, digests));
    let verifies = checker.verifies();
    let pages = pages(landing, span).filter(|_| verifies);
    let stores = if wanted_bytes(landing.landing()) > CACHED_MAX { Stores::Streamed } else { Stores::Cached };
    Copying {
        landing,
        from: from.memory,
        runs,
        pieces,
        pages,
        page: None,
        in_part: 0,
        stores,
        checker,
        offset: 0,
    }
    .all(span)
}

/// The heads of one page, as parts: K and V of each head are one part each.
#[derive(Clone, Copy, Debug)]
struct Page {
    parts: Parts,
    n: usize,
}

/// Returns the pages of a span, in the wire's order.
fn pages<'a>(landing: &'a OpenLanding, span: &'a LaneSpan) -> impl Iterator<Item = Page> + use<'a> {
    PageAt::all(span).map(|page| {
        let shape = landing.shape(page.group, page.layer_pos);
        let n_heads = landing.heads(span.lane, page.group, page.layer_pos).range().len();
        let hashed = usize::from(landing.landing().valid_tokens(page.block)) * shape.token_bytes;
        Page { parts: Parts { bytes: shape.head_bytes, hashed }, n: shape.n_parts * n_heads }
    })
}

struct Copying<'a, P> {
    landing: &'a OpenLanding,
    from: &'a PeerMemory,
    runs: Runs,
    pieces: Pieces<'a>,
    /// The pages whose copy has not started; none if nothing is verified.
    pages: P,
    /// The rest of the page that is being copied.
    page: Option<Page>,
    /// The number of bytes of the page's next part that are in place.
    in_part: usize,
    stores: Stores,
    checker: Checker<'a>,
    /// The number of the span's bytes that are in place.
    offset: usize,
}

impl<P: Iterator<Item = Page>> Copying<'_, P> {
    fn all(mut self, span: &LaneSpan) -> Result<Vec<KvSpan>, TransferError> {
        while self.offset < self.runs.bytes() {
            let landing = self.landing;
            match landing.while_open(|memory| self.some(memory)) {
                None => return Ok(Vec::new()),
                Some(copied) => copied?,
            }
        }
        // A landing that has just failed requests no page again, so the list is empty then.
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
            let page = self.page();
            let of_page = page.map_or(usize::MAX, |page| page.n * page.parts.bytes - self.in_part);
            let most = rest.len().min(of_page);
            let (offset, n) = self.pieces.next(most).expect("the pieces are as long as the span");
            let (now, later) = rest.split_at_mut(n);
            match page {
                None => self.copy(offset, now)?,
                Some(page) if self.in_part == 0 && n.is_multiple_of(page.parts.bytes) => {
                    self.copy_hashed(page, offset, now)?;
                }
                Some(page) => self.copy_pieces(page, offset, now)?,
            }
            rest = later;
        }
        Ok(())
    }

    /// Returns the rest of the page to copy next; `None` if pages are not verified.
    fn page(&mut self) -> Option<Page> {
        if self.page.is_none_or(|page| page.n == 0) {
            self.page = self.pages.next();
        }
        self.page
    }

    fn copy(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.from.copy(offset, into).map_err(outside)
    }

    /// Copies and hashes whole parts of a page.
    fn copy_hashed(&mut self, page: Page, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let n = into.len() / page.parts.bytes;
        let each = &mut |hash| self.checker.hashed(Some(hash));
        self.from.copy_hashed(offset, into, page.parts, self.stores, each).map_err(outside)?;
        self.page = Some(Page { n: page.n - n, ..page });
        Ok(())
    }

    /// Copies pieces of parts. Our senders do not cut parts, so this is rare; the page is hashed after the copy.
    fn copy_pieces(&mut self, page: Page, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.copy(offset, into)?;
        let bytes = self.in_part + into.len();
        let n = bytes / page.parts.bytes;
        (0..n).for_each(|_| self.checker.hashed(None));
        self.in_part = bytes % page.parts.bytes;
        self.page = Some(Page { n: page.n - n, ..page });
        Ok(())
    }
}

fn outside(_: PeerMemoryRangeError) -> TransferError {
    FrameError::Body("a piece lies outside of the shared memory").into()
}
