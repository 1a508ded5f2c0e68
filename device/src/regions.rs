//! The layout of regions of equal pages in one piece of memory, and the position of a run of pages.
//!
//! This module has offsets and borrow states, but no addresses. Host memory and GPU memory have the same
//! layout, and a peer that has mapped the memory finds pages by the same arithmetic.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use crate::borrow::{PageBusy, bring_back, idle, take_away};
use crate::memory::MemoryError;

/// The alignment of regions: a multiple of every vector's width and of a memory page.
const REGION_ALIGN_BYTES: usize = 4096;

/// The page size and the number of pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionShape {
    pub page_bytes: usize,
    pub n_pages: u32,
}

/// The offset of each region.
#[derive(Clone, Debug)]
pub(crate) struct RegionOffsets {
    places: Box<[(RegionShape, usize)]>,
    /// The end of the last region.
    end: usize,
    /// The total bytes of all pages, without the gaps between regions.
    bytes: usize,
}

/// Regions with the borrow states of their pages.
pub(crate) struct Regions {
    places: RegionOffsets,
    borrows: Box<[Box<[AtomicU32]>]>,
}

/// A run of pages, not borrowed yet.
pub(crate) struct MemoryRun<'a> {
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) borrows: &'a [AtomicU32],
}

// === impl RegionShape ===

impl RegionShape {
    fn bytes(self) -> Option<usize> {
        self.page_bytes.checked_mul(self.n_pages as usize)
    }

    /// Returns the next possible start of a region.
    fn end(self, offset: usize) -> Option<usize> {
        offset.checked_add(self.bytes()?)?.checked_next_multiple_of(REGION_ALIGN_BYTES)
    }
}

// === impl Places ===

impl RegionOffsets {
    pub(crate) fn new(shapes: &[RegionShape]) -> Result<Self, MemoryError> {
        let (mut end, mut bytes) = (0, 0);
        let mut places = Vec::with_capacity(shapes.len());
        for shape in shapes {
            places.push((*shape, end));
            end = shape.end(end).ok_or(MemoryError::TooLarge)?;
            bytes += shape.bytes().ok_or(MemoryError::TooLarge)?;
        }
        Ok(Self { places: places.into(), end, bytes })
    }

    pub(crate) fn end(&self) -> usize {
        self.end
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn shape(&self, region: u32) -> RegionShape {
        self.places[region as usize].0
    }

    /// Returns the offset and the length of a run of pages.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub(crate) fn run(&self, region: u32, pages: &Range<u32>) -> (usize, usize) {
        let (shape, offset) = self.places[region as usize];
        assert!(
            pages.start <= pages.end && pages.end <= shape.n_pages,
            "pages {pages:?} are not in a region of {}",
            shape.n_pages
        );
        (offset + pages.start as usize * shape.page_bytes, pages.len() * shape.page_bytes)
    }
}

// === impl Regions ===

impl Regions {
    pub(crate) fn new(shapes: &[RegionShape]) -> Result<Self, MemoryError> {
        let borrows = shapes.iter().map(|shape| idle(shape.n_pages)).collect();
        Ok(Self { places: RegionOffsets::new(shapes)?, borrows })
    }

    pub(crate) fn places(&self) -> &RegionOffsets {
        &self.places
    }

    /// Returns a run of pages, with their borrow states.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub(crate) fn run(&self, region: u32, pages: &Range<u32>) -> MemoryRun<'_> {
        let (offset, len) = self.places.run(region, pages);
        let borrows = &self.borrows[region as usize][pages.start as usize..pages.end as usize];
        MemoryRun { offset, len, borrows }
    }

    /// Prevents borrows of all pages until [`bring_back`](Self::bring_back): of all pages or none.
    pub(crate) fn take_away(&self) -> Result<(), PageBusy> {
        for (nth, pages) in self.borrows.iter().enumerate() {
            if let Err(refused) = take_away(pages) {
                self.borrows[..nth].iter().for_each(|pages| bring_back(pages));
                return Err(refused.at(nth as u32, 0));
            }
        }
        Ok(())
    }

    pub(crate) fn bring_back(&self) {
        self.borrows.iter().for_each(|pages| bring_back(pages));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::borrow::{BorrowRefusal, ReadBorrow, WriteBorrow};

    const SHAPES: [RegionShape; 2] =
        [RegionShape { page_bytes: 64, n_pages: 8 }, RegionShape { page_bytes: 100, n_pages: 3 }];

    #[test]
    fn regions_begin_on_edges_and_runs_lie_within_them() {
        let places = RegionOffsets::new(&SHAPES).expect("a few KiB");
        assert_eq!((places.bytes(), places.end()), (8 * 64 + 300, 8192));
        for (region, pages, place) in
            [(0, 0..8, (0, 512)), (0, 3..5, (192, 128)), (1, 1..3, (4196, 200)), (1, 3..3, (4396, 0))]
        {
            assert_eq!(places.run(region, &pages), place, "pages {pages:?} of region {region}");
        }
    }

    #[test]
    fn sizes_that_no_address_can_name_are_refused() {
        let shape = RegionShape { page_bytes: usize::MAX / 2, n_pages: 3 };
        assert!(matches!(RegionOffsets::new(&[shape]), Err(MemoryError::TooLarge)));
    }

    #[test]
    fn pages_that_are_away_cannot_be_borrowed_and_a_held_one_keeps_all_here() {
        let regions = Regions::new(&SHAPES).expect("a few KiB");
        let all = || [(0, 0..8), (1, 0..3)].map(|(region, pages)| regions.run(region, &pages).borrows);
        let held = ReadBorrow::take(&all()[1][2..3]).map_err(|_| "held").expect("it is idle");
        let busy = regions.take_away().expect_err("one is read");
        assert_eq!(busy.to_string(), "write page 2 of region 1, which 1 others read");
        drop(held);
        for _ in 0..2 {
            for pages in all() {
                assert!(WriteBorrow::take(pages).is_ok() && ReadBorrow::take(pages).is_ok());
            }
            regions.take_away().expect("no page is borrowed");
            let busy = regions.take_away().expect_err("they are away already");
            assert_eq!(busy.held, BorrowRefusal::Away);
            for pages in all() {
                assert!(WriteBorrow::take(pages).is_err() && ReadBorrow::take(pages).is_err());
            }
            regions.bring_back();
        }
    }

    #[test]
    #[should_panic(expected = "pages 2..4 are not in a region of 3")]
    fn a_page_that_does_not_exist_is_a_bug() {
        RegionOffsets::new(&SHAPES).expect("a few KiB").run(1, &(2..4));
    }
}
