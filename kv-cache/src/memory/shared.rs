//! What another process, or a device, needs to reach this node's KV where it lies.

use std::os::fd::BorrowedFd;

use device::HostMemory;
use types::GroupIdx;

use super::{KvMemory, Pages, RankMemory};

impl KvMemory {
    /// Whether every rank's memory has a [`file`](RankMemory::file).
    pub fn has_files(&self) -> bool {
        (0..self.n_ranks()).all(|tp_rank| self.rank(tp_rank).file().is_some())
    }
}

impl<'a> RankMemory<'a> {
    /// The file that another process maps to read all of the rank's pages. `None`: the memory is this process's alone, and
    /// KV must be copied for others to see it.
    pub fn file(&self) -> Option<BorrowedFd<'a>> {
        match self.pages {
            Pages::Host(pages) => pages.file(),
            Pages::Device(_) => None,
        }
    }

    /// The memory that all of the rank's pages lie in, for devices that reach it by themselves. `None`: it is a card's.
    pub fn on_host(&self) -> Option<&'a HostMemory> {
        match self.pages {
            Pages::Host(pages) => Some(pages),
            Pages::Device(_) => None,
        }
    }

    /// Which of the memory's regions a layer lies in. Nodes of one layout number them alike.
    ///
    /// # Panics
    /// If the group or the layer does not exist.
    pub fn region(&self, group: GroupIdx, layer_pos: u16) -> u32 {
        self.regions.of_layer(group, layer_pos)
    }

    /// Where one layer's share of a block starts in the rank's memory, and so in its [`file`](Self::file) if it has one.
    /// Neighbouring blocks are neighbours there.
    ///
    /// # Panics
    /// If the group, the layer or the block does not exist.
    pub fn offset(&self, group: GroupIdx, layer_pos: u16, block: u32) -> u64 {
        let region = self.regions.of_layer(group, layer_pos);
        match self.pages {
            Pages::Host(pages) => pages.file_offset(region, block) as u64,
            Pages::Device(pages) => pages.offset(region, block),
        }
    }
}
