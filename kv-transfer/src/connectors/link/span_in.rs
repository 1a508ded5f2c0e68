//! Hot path. Receives one KV frame: reads it into the landing's pages, and verifies it while it is in the cache.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use chassis::StreamReader;
use kv_cache::KvMemory;
use types::KvSpan;

use super::frame::FrameError;
use super::stream::{FrameReader, not_zero, within};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding, PageAt};
use crate::lanes::LaneSpan;
use crate::runs::Runs;

/// Reads a span's KV. Returns the pages that failed verification, which must be sent again.
///
/// Each attempt borrows its pages, reads the bytes that are available, verifies the pages that are now complete, and
/// returns all pages before it waits for more. It does this under the landing's lock. So when the landing ends, even
/// in the middle of a frame, no page is in use. The rest of the frame is read into a scratch buffer.
pub(in crate::connectors) async fn read_span(
    reader: &mut FrameReader,
    landing: &OpenLanding,
    span: &LaneSpan,
    digests: &[Digest],
    payload_bytes: usize,
) -> Result<Vec<KvSpan>, TransferError> {
    let claim = landing.claim(span, digests.len())?;
    let runs = landing.runs(span);
    if runs.bytes() != payload_bytes {
        return Err(FrameError::Body("the payload does not have the length of its span").into());
    }
    if claim == Claim::Skip {
        reader.skip(payload_bytes).await?;
        return Ok(Vec::new());
    }
    SpanIn { landing, runs, checker: Checker::new(span, digests), offset: 0 }.read(reader, span).await
}

struct SpanIn<'a> {
    landing: &'a OpenLanding,
    runs: Runs,
    checker: Checker<'a>,
    /// The number of bytes that are in place.
    offset: usize,
}

impl SpanIn<'_> {
    async fn read(mut self, reader: &mut FrameReader, span: &LaneSpan) -> Result<Vec<KvSpan>, TransferError> {
        let stall = reader.stall();
        while self.offset < self.runs.bytes() {
            let step = poll_fn(|cx| self.poll_some(cx, reader.half()));
            if within(stall, "reading KV", step).await?.is_none() {
                reader.skip(self.runs.bytes() - self.offset).await?;
                return Ok(Vec::new());
            }
        }
        // A landing that has just failed requests no page again, so the list is empty then.
        let wrong = self.checker.wrong;
        Ok(self.landing.arrived(span, self.offset, &wrong).map(|()| wrong).unwrap_or_default())
    }

    /// Reads some bytes; `None` once the landing is closed.
    fn poll_some(
        &mut self,
        cx: &mut Context<'_>,
        half: &mut StreamReader,
    ) -> Poll<Result<Option<()>, TransferError>> {
        let landing = self.landing;
        match landing.while_open(|memory| self.poll_into(cx, half, memory)) {
            None => Poll::Ready(Ok(None)),
            Some(read) => read.map_ok(Some),
        }
    }

    fn poll_into(
        &mut self,
        cx: &mut Context<'_>,
        half: &mut StreamReader,
        memory: &KvMemory,
    ) -> Poll<Result<(), TransferError>> {
        let mut pages = self.runs.write(memory, self.offset).map_err(busy)?;
        let read = half.poll_read_vectored(cx, &mut pages.slices());
        drop(pages);
        self.offset += ready!(read).and_then(not_zero).map_err(TransferError::lost)?;
        Poll::Ready(self.checker.check_until(self.offset, self.landing, memory).map_err(busy))
    }
}

pub(in crate::connectors) fn busy(busy: kv_cache::PageBusy) -> TransferError {
    TransferError::Memory(busy.to_string())
}

/// Verifies a span's pages, in order, as they become complete.
pub(in crate::connectors) struct Checker<'a> {
    span: &'a LaneSpan,
    digests: &'a [Digest],
    /// The number of checked pages, and the number of bytes up to the end of the last of them.
    n_checked: usize,
    bytes_checked: usize,
    /// The hashes of the parts of heads of the next pages, in the wire's order, for data that was hashed during its
    /// copy.
    hashed: VecDeque<Option<u64>>,
    /// The hashes of the parts of the next page, reused for each page.
    of_page: Vec<u64>,
    pub(in crate::connectors) wrong: Vec<KvSpan>,
}

impl<'a> Checker<'a> {
    pub(in crate::connectors) fn new(span: &'a LaneSpan, digests: &'a [Digest]) -> Self {
        let (hashed, of_page, wrong) = (VecDeque::new(), Vec::new(), Vec::new());
        Self { span, digests, n_checked: 0, bytes_checked: 0, hashed, of_page, wrong }
    }

    /// Returns whether there are digests to compare with.
    pub(in crate::connectors) fn verifies(&self) -> bool {
        !self.digests.is_empty()
    }

    /// Adds the hash of the next part of a head; `None` if it was not hashed during its copy. Call it for all parts
    /// of a span, or for none.
    pub(in crate::connectors) fn hashed(&mut self, hash: Option<u64>) {
        if self.hashed.is_empty() {
            // A span has K and V of each head at most, so one allocation is enough.
            self.hashed.reserve(2 * self.digests.len());
        }
        self.hashed.push_back(hash);
    }

    /// Verifies the pages that end at or before `offset`. Does nothing without digests.
    pub(in crate::connectors) fn check_until(
        &mut self,
        offset: usize,
        landing: &OpenLanding,
        memory: &KvMemory,
    ) -> Result<(), kv_cache::PageBusy> {
        if self.digests.is_empty() {
            return Ok(());
        }
        let n_pages = self.span.layers.len() * self.span.blocks.len();
        while self.n_checked < n_pages {
            let page = self.page();
            let shape = landing.shape(page.group, page.layer_pos);
            let n_heads = landing.heads(self.span.lane, page.group, page.layer_pos).range().len();
            let bytes = shape.n_parts * n_heads * shape.head_bytes;
            if self.bytes_checked + bytes > offset {
                break;
            }
            let (digests, rest) = self.digests.split_at(n_heads);
            let passes = match self.passes_as_hashed(shape.n_parts, digests) {
                Some(passes) => passes,
                None => landing.verify(memory, self.span.lane, page, digests)?,
            };
            if !passes {
                self.wrong.push(page.span());
            }
            self.digests = rest;
            self.n_checked += 1;
            self.bytes_checked += bytes;
        }
        Ok(())
    }

    /// Returns whether the next page matches its digests; `None` if a part of it was not hashed during its
    /// copy.
    fn passes_as_hashed(&mut self, n_parts: usize, digests: &[Digest]) -> Option<bool> {
        let n_heads = digests.len();
        self.of_page.clear();
        for hash in self.hashed.drain(..self.hashed.len().min(n_parts * n_heads)) {
            self.of_page.push(hash?);
        }
        let of = |head: usize| Digest::of_parts(self.of_page.iter().skip(head).step_by(n_heads).copied());
        let all = || digests.iter().enumerate().all(|(head, digest)| of(head) == *digest);
        (self.of_page.len() == n_parts * n_heads).then(all)
    }

    /// Returns the next page in the wire's order.
    fn page(&self) -> PageAt {
        let n_blocks = self.span.blocks.len();
        let (layer, block) = (self.n_checked / n_blocks, self.n_checked % n_blocks);
        PageAt {
            group: self.span.group,
            layer_pos: self.span.layers.start + layer as u16,
            block: self.span.blocks.start + block as u32,
        }
    }
}
