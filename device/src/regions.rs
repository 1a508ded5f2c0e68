//! How regions of equal pages lie one after the other in one piece of memory, and where a run of pages is.
//!
//! It knows offsets and borrow states and no address: host memory and a card's memory are divided the same way, and a
//! peer that has mapped this memory finds its pages by the same arithmetic.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use crate::borrow::{PageBusy, bring_back, idle, take_away};
use crate::memory::MemoryError;

/// Where regions start within the memory: a multiple of any vector's width and of a memory page.
const REGION_ALIGN_BYTES: usize = 4096;

/// What one region looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionShape {
    pub page_bytes: usize,
    pub n_pages: u32,
}

/// Where each region lies.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    places: Box<[(RegionShape, usize)]>,
    /// Where the last region ends.
    end: usize,
    /// The bytes of all pages, without the gaps between regions.
    bytes: usize,
}

/// Regions with the borrow states of their pages.
pub(crate) struct Regions {
    places: Places,
    borrows: Box<[Box<[AtomicU32]>]>,
}

/// A run of pages, not borrowed yet.
pub(crate) struct Run<'a> {
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) borrows: &'a [AtomicU32],
}

// === impl RegionShape ===

impl RegionShape {
    fn bytes(self) -> Option<usize> {
        self.page_bytes.checked_mul(self.n_pages as usize)
    }

    /// Where the next region may start.
    fn end(self, offset: usize) -> Option<usize> {
        offset.checked_add(self.bytes()?)?.checked_next_multiple_of(REGION_ALIGN_BYTES)
    }
}

// === impl Places ===

impl Places {
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

    /// Where a run of pages lies: its offset and its length.
    ///
    /// # Panics
    /// If there is no such region, or no such page in it.
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
        Ok(Self { places: Places::new(shapes)?, borrows })
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// # Panics
    /// If there is no such region, or no such page in it.
    pub(crate) fn run(&self, region: u32, pages: &Range<u32>) -> Run<'_> {
        let (offset, len) = self.places.run(region, pages);
        let borrows = &self.borrows[region as usize][pages.start as usize..pages.end as usize];
        Run { offset, len, borrows }
    }

    /// Prevents borrows of all pages until they are [back](Self::bring_back): all of them, or none.
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
    use crate::borrow::{Held, ReadBorrow, WriteBorrow};

    const SHAPES: [RegionShape; 2] =
        [RegionShape { page_bytes: 64, n_pages: 8 }, RegionShape { page_bytes: 100, n_pages: 3 }];

    #[test]
    fn regions_begin_on_edges_and_runs_lie_within_them() {
        let places = Places::new(&SHAPES).expect("a few KiB");
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
        assert!(matches!(Places::new(&[shape]), Err(MemoryError::TooLarge)));
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
            assert_eq!(busy.held, Held::Away);
            for pages in all() {
                assert!(WriteBorrow::take(pages).is_err() && ReadBorrow::take(pages).is_err());
            }
            regions.bring_back();
        }
    }

    #[test]
    #[should_panic(expected = "pages 2..4 are not in a region of 3")]
    fn a_page_that_does_not_exist_is_a_bug() {
        Places::new(&SHAPES).expect("a few KiB").run(1, &(2..4));
    }
}
