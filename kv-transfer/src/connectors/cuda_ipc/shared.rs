//! The memory that a sender shares with a receiver: a file for each GPU, and the places in them.
//!
//! A piece of a frame names a place in the memory of one rank. If the rank has several pipeline stages, their memories
//! count as one, stage after stage, so a receiver need not know which stage has a layer.

use std::io;
use std::os::fd::OwnedFd;

use kv_cache::KvMemory;

use crate::connectors::gpu::pages::card_of;
use crate::connectors::link::frame::FrameError;
use crate::error::TransferError;

/// A file for each GPU of a sender, and the sizes of their memories.
#[derive(Debug)]
pub(super) struct SharedFiles {
    pub(super) sizes: StageSizes,
    /// Those of all ranks of the first stage, then those of the next.
    pub(super) files: Vec<OwnedFd>,
}

/// The size of a rank's shared memory on each pipeline stage. All ranks of a stage share memory of the same size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StageSizes {
    /// For each stage, the bytes of it and of all earlier stages.
    ends: Vec<u64>,
}

/// The place of a page: the stage whose memory has it, and the offset there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedPlace {
    pub(super) stage: usize,
    pub(super) offset: u64,
}

// === impl SharedFiles ===

impl SharedFiles {
    /// Exports the memory of all GPUs of this node.
    pub(super) fn of(memory: &KvMemory) -> io::Result<Self> {
        let (mut files, mut bytes) = (Vec::new(), Vec::new());
        for card in memory.on_cards() {
            let (file, size) = card.memory().export().map_err(io::Error::other)?;
            files.push(file);
            bytes.push(size as u64);
        }
        let sizes = StageSizes::of_cards(&bytes, memory.n_ranks().into())?;
        Ok(Self { sizes, files })
    }

    pub(super) fn n_ranks(&self) -> usize {
        self.files.len() / self.sizes.n_stages()
    }

    /// Returns the file of a rank of a stage.
    pub(super) fn file(&self, rank: u16, stage: usize) -> &OwnedFd {
        &self.files[stage * self.n_ranks() + usize::from(rank)]
    }
}

// === impl StageSizes ===

impl StageSizes {
    /// Adds up the sizes of the stages. Fails if a stage has no memory, or if the sum is out of range.
    pub(super) fn new(of_stages: impl IntoIterator<Item = u64>) -> Result<Self, FrameError> {
        let mut ends: Vec<u64> = Vec::new();
        for bytes in of_stages {
            let end = ends.last().copied().unwrap_or(0).checked_add(bytes);
            let end = end.filter(|end| bytes > 0 && usize::try_from(*end).is_ok());
            ends.push(end.ok_or(FrameError::Body("a size of shared GPU memory is out of range"))?);
        }
        Ok(Self { ends })
    }

    /// Makes the sizes of this node's stages from those of its GPUs.
    fn of_cards(bytes: &[u64], n_ranks: usize) -> io::Result<Self> {
        let of_stages = bytes.chunks(n_ranks);
        if of_stages.clone().any(|ranks| ranks.iter().any(|bytes| *bytes != ranks[0])) {
            return Err(io::Error::other("the ranks' shares of the KV differ in size"));
        }
        Self::new(of_stages.map(|ranks| ranks[0])).map_err(io::Error::other)
    }

    /// Returns the sizes of this node's stages.
    pub(super) fn here(memory: &KvMemory) -> Result<Self, TransferError> {
        let bytes = |stage| Ok(card_of(memory, 0, stage)?.memory().mapped_bytes() as u64);
        let bytes: Vec<u64> = (0..memory.n_stages()).map(bytes).collect::<Result<_, TransferError>>()?;
        Ok(Self::new(bytes)?)
    }

    pub(super) fn n_stages(&self) -> usize {
        self.ends.len()
    }

    /// Returns the place of a stage's memory in that of its rank.
    pub(super) fn start(&self, stage: usize) -> u64 {
        if stage == 0 { 0 } else { self.ends[stage - 1] }
    }

    pub(super) fn bytes(&self, stage: usize) -> u64 {
        self.ends[stage] - self.start(stage)
    }

    /// Returns the sizes of the stages.
    pub(super) fn all(&self) -> impl Iterator<Item = u64> {
        (0..self.n_stages()).map(|stage| self.bytes(stage))
    }

    /// Returns the place of `bytes` bytes at an offset in the memory of a rank; `None` if no stage has all of them.
    pub(super) fn place(&self, offset: u64, bytes: usize) -> Option<SharedPlace> {
        let stage = self.ends.partition_point(|end| *end <= offset);
        let end = offset.checked_add(bytes as u64)?;
        (end <= *self.ends.get(stage)?).then(|| SharedPlace { stage, offset: offset - self.start(stage) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_in_the_memory_of_one_stage() {
        let place = |stage, offset| Some(SharedPlace { stage, offset });
        for (sizes, offset, bytes, expected) in [
            (&[100][..], 0, 100, place(0, 0)),
            (&[100], 60, 40, place(0, 60)),
            (&[100], 60, 41, None),
            (&[100], 100, 1, None),
            (&[100], u64::MAX, 16, None),
            (&[100, 50], 84, 16, place(0, 84)),
            (&[100, 50], 100, 16, place(1, 0)),
            (&[100, 50], 134, 16, place(1, 34)),
            (&[100, 50], 92, 16, None),
            (&[100, 50], 135, 16, None),
            (&[100, 50, 20], 150, 20, place(2, 0)),
        ] {
            let sizes = StageSizes::new(sizes.iter().copied()).expect("small");
            assert_eq!(sizes.place(offset, bytes), expected, "{bytes} bytes at {offset} of {sizes:?}");
        }
    }

    #[test]
    fn sizes_of_cards_are_those_of_the_stages() {
        for (bytes, n_ranks, expected) in [
            (&[8][..], 1, Some(vec![8])),
            (&[8, 8], 2, Some(vec![8])),
            (&[8, 6], 1, Some(vec![8, 6])),
            (&[8, 8, 6, 6], 2, Some(vec![8, 6])),
            (&[8, 6, 8, 6], 2, None),
            (&[8, 0], 1, None),
            (&[u64::MAX, 1], 1, None),
        ] {
            let sizes =
                StageSizes::of_cards(bytes, n_ranks).ok().map(|sizes| sizes.all().collect::<Vec<_>>());
            assert_eq!(sizes, expected, "{bytes:?} of {n_ranks} ranks");
        }
    }
}
