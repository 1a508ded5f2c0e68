//! What another process needs to read this node's KV where it lies.

use std::os::fd::BorrowedFd;

use types::GroupIdx;

use super::{KvMemory, Pages};

impl KvMemory {
    /// The file that another process maps to read all pages. `None`: the memory is this process's alone, and KV must be
    /// copied for others to see it.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.inner.pages {
            Pages::Host(pages) => pages.file(),
            Pages::Device(_) => None,
        }
    }

    /// Where one layer's share of a block starts in [`file`](Self::file). Neighbouring blocks are neighbours there.
    ///
    /// # Panics
    /// If the group, the layer or the block does not exist, or there is no file.
    pub fn file_offset(&self, group: GroupIdx, layer_pos: u16, block: u32) -> usize {
        let Pages::Host(pages) = &self.inner.pages else { panic!("memory of a card has no file") };
        pages.file_offset(self.inner.regions.of_layer(group, layer_pos), block)
    }
}
