//! Hot path.
//! The borrow state of each page, one atomic that works like a `RefCell`.
//!
//! It never blocks. A borrow succeeds or fails at once; a failure is a bug in the caller, which does not hold
//! the block.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// The page has no holder.
const IDLE: u32 = 0;
/// The page is being written.
const WRITTEN: u32 = u32::MAX;
/// The page has no memory at present. Smaller values are numbers of readers.
const AWAY: u32 = WRITTEN - 1;

/// The error of a borrow: another borrow of a page of the run excludes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} page {page} of region {region}, which {held}")]
pub struct PageBusy {
    pub region: u32,
    pub page: u32,
    pub wanted: Access,
    pub held: BorrowRefusal,
}

/// The purpose of a borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// The reason why a page cannot be borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BorrowRefusal {
    ByWriter,
    ByReaders(u32),
    /// The page's GPU is lost.
    OnLostCard,
    /// The page's memory is given back at present.
    Away,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

impl fmt::Display for BorrowRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ByWriter => f.write_str("is being written"),
            Self::ByReaders(n) => write!(f, "{n} others read"),
            Self::OnLostCard => f.write_str("is on a GPU that does not answer"),
            Self::Away => f.write_str("has no memory while the node sleeps"),
        }
    }
}

/// Returns the borrow states of `n_pages`, all idle.
pub(crate) fn idle(n_pages: u32) -> Box<[AtomicU32]> {
    (0..n_pages).map(|_| AtomicU32::new(IDLE)).collect()
}

/// The error for page `nth` of a run, with the state that prevented the borrow.
pub(crate) struct BorrowRefused {
    nth: usize,
    wanted: Access,
    held: BorrowRefusal,
}

impl BorrowRefused {
    pub(crate) fn at(self, region: u32, first: u32) -> PageBusy {
        PageBusy { region, page: first + self.nth as u32, wanted: self.wanted, held: self.held }
    }
}

/// A reader's share of the pages' borrow states. Dropping it returns the pages.
pub(crate) struct ReadBorrow<'a>(&'a [AtomicU32]);

impl<'a> ReadBorrow<'a> {
    pub(crate) fn take(pages: &'a [AtomicU32]) -> Result<Self, BorrowRefused> {
        for (nth, page) in pages.iter().enumerate() {
            if let Err(held) = add_reader(page) {
                drop(Self(&pages[..nth]));
                return Err(BorrowRefused { nth, wanted: Access::Read, held });
            }
        }
        Ok(Self(pages))
    }
}

impl Drop for ReadBorrow<'_> {
    fn drop(&mut self) {
        for page in self.0 {
            page.fetch_sub(1, Ordering::Release);
        }
    }
}

fn add_reader(page: &AtomicU32) -> Result<(), BorrowRefusal> {
    let one_more = |readers: u32| (readers < AWAY - 1).then(|| readers + 1);
    page.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).map(drop).map_err(held)
}

fn held(state: u32) -> BorrowRefusal {
    match state {
        WRITTEN => BorrowRefusal::ByWriter,
        AWAY => BorrowRefusal::Away,
        readers => BorrowRefusal::ByReaders(readers),
    }
}

/// Prevents borrows of these pages until [`bring_back`]: of all pages or none.
pub(crate) fn take_away(pages: &[AtomicU32]) -> Result<(), BorrowRefused> {
    for (nth, page) in pages.iter().enumerate() {
        if let Err(state) = page.compare_exchange(IDLE, AWAY, Ordering::Acquire, Ordering::Relaxed) {
            bring_back(&pages[..nth]);
            return Err(BorrowRefused { nth, wanted: Access::Write, held: held(state) });
        }
    }
    Ok(())
}

/// Allows borrows of these pages again, after [`take_away`].
pub(crate) fn bring_back(pages: &[AtomicU32]) {
    for page in pages {
        page.store(IDLE, Ordering::Release);
    }
}

/// The only writer's hold on the pages' borrow states. Dropping it returns the pages.
pub(crate) struct WriteBorrow<'a>(&'a [AtomicU32]);

impl<'a> WriteBorrow<'a> {
    pub(crate) fn take(pages: &'a [AtomicU32]) -> Result<Self, BorrowRefused> {
        for (nth, page) in pages.iter().enumerate() {
            if let Err(held) = set_writer(page) {
                drop(Self(&pages[..nth]));
                return Err(BorrowRefused { nth, wanted: Access::Write, held });
            }
        }
        Ok(Self(pages))
    }
}

impl Drop for WriteBorrow<'_> {
    fn drop(&mut self) {
        for page in self.0 {
            page.store(IDLE, Ordering::Release);
        }
    }
}

fn set_writer(page: &AtomicU32) -> Result<(), BorrowRefusal> {
    page.compare_exchange(IDLE, WRITTEN, Ordering::Acquire, Ordering::Relaxed).map(drop).map_err(held)
}
