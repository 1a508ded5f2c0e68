//! Access to this node's KV for other processes and for devices.

use std::os::fd::BorrowedFd;

use device::HostMemory;
use types::GroupIdx;

use super::{KvMemory, Pages, RankMemory};

impl KvMemory {
    /// Returns whether every rank's memory has a [`file`](RankMemory::file).
    pub fn has_files(&self) -> bool {
        self.ranks().all(|tp_rank| self.rank(tp_rank).file().is_some())
    }
}

impl<'a> RankMemory<'a> {
    /// Returns the file that another process maps to read all of the rank's pages. `None` if the memory
    /// cannot be shared: then KV must be copied for others.
    pub fn file(&self) -> Option<BorrowedFd<'a>> {
        match self.pages {
            Pages::Host(pages) => pages.file(),
            Pages::Device(_) => None,
        }
    }

    /// Returns the host memory of all of the rank's pages, for devices that access it directly. `None` if it
    /// is GPU memory.
    pub fn on_host(&self) -> Option<&'a HostMemory> {
        match self.pages {
            Pages::Host(pages) => Some(pages),
            Pages::Device(_) => None,
        }
    }

    /// Returns the index of the memory region of a layer. Nodes with the same layout use the same indexes.
    ///
    /// # Panics
    /// If the group or the layer does not exist.
    pub fn region(&self, group: GroupIdx, layer_pos: u16) -> u32 {
        self.regions.of_layer(group, layer_pos)
    }

    /// Returns the offset of one layer's share of a block in the rank's memory, and in its
    /// [`file`](Self::file) if it has one. Neighbouring blocks have neighbouring offsets.
    ///
    /// # Panics
    /// If the group, the layer or the block does not exist.
    pub fn offset(&self, group: GroupIdx, layer_pos: u16, block: u32) -> u64 {
        let region = self.regions.of_layer(group, layer_pos);
        match self.pages {
            Pages::Host(pages) => pages.file_offset(region, block) as u64,
            Pages::Device(stages) => {
                let (stage, region) = self.regions.in_stage(region);
                stages[stage].offset(region, block)
            }
        }
    }
}
