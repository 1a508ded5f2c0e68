//! Hot path. A span as runs of neighbouring blocks: where its bytes lie in one node's memory, in the wire's order.
//!
//! The wire's order is layer by layer and block by block. The two sides' tables differ, so each cuts the same bytes
//! into its own runs: where blocks are neighbours, a layer is one slice, however many blocks it has.
//!
//! Pages are borrowed for one attempt to read or write and never while a task waits. So a wire that stands still
//! holds no page, and a landing that is closed between two attempts is quiet at once.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use kv_cache::{KvMemory, PageBusy, PageMut, PageRef};
use types::{BlockIdx, GroupIdx, KvLayout, KvSpan};

use crate::connectors::link::frame::Piece;

/// Slices handed to the kernel in one call. Linux takes at most 1024.
const SLICES_MAX: usize = 64;
/// Bytes moved in one attempt: bounds the time for which a landing's lock is held.
const ATTEMPT_BYTES_MAX: usize = 1 << 20;

/// One slice of memory: one layer of neighbouring blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    layer_pos: u16,
    /// Places in the pool.
    blocks: Range<u32>,
    /// Where it starts in the span's bytes.
    start: usize,
    bytes: usize,
}

/// A span's bytes in one node's memory.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    group: GroupIdx,
    runs: Vec<Run>,
    bytes: usize,
}

impl Runs {
    /// `table` is the sequence's block table of the span's group.
    pub(crate) fn new(layout: &KvLayout, table: &[BlockIdx], span: &KvSpan) -> Self {
        let blocks = &table[span.blocks.start as usize..span.blocks.end as usize];
        let mut runs = Self { group: span.group, runs: Vec::new(), bytes: 0 };
        for layer_pos in span.layers.clone() {
            let page_bytes = layout.page_bytes(layout.group(span.group).layers[usize::from(layer_pos)]);
            for neighbours in blocks.chunk_by(|a, b| a.0 + 1 == b.0) {
                let blocks = neighbours[0].0..neighbours[0].0 + neighbours.len() as u32;
                runs.push(layer_pos, blocks, page_bytes);
            }
        }
        runs
    }

    fn push(&mut self, layer_pos: u16, blocks: Range<u32>, page_bytes: usize) {
        let bytes = page_bytes * blocks.len();
        self.runs.push(Run { layer_pos, blocks, start: self.bytes, bytes });
        self.bytes += bytes;
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the runs lie in the file of `memory`, which must have one.
    pub(crate) fn pieces(&self, memory: &KvMemory) -> Vec<Piece> {
        let piece = |run: &Run| Piece {
            offset: memory.file_offset(self.group, run.layer_pos, run.blocks.start) as u64,
            bytes: run.bytes as u32,
        };
        self.runs.iter().map(piece).collect()
    }

    /// Borrows what lies at `offset` and behind it, as far as one attempt may go.
    pub(crate) fn read<'m>(&self, memory: &'m KvMemory, offset: usize) -> Result<ReadSlices<'m>, PageBusy> {
        let (runs, skip) = self.attempt(offset);
        let pages = runs
            .iter()
            .map(|run| memory.read(self.group, run.layer_pos, run.blocks.clone()))
            .collect::<Result<_, _>>()?;
        Ok(ReadSlices { pages, skip })
    }

    /// As [`read`](Self::read), to write.
    pub(crate) fn write<'m>(&self, memory: &'m KvMemory, offset: usize) -> Result<WriteSlices<'m>, PageBusy> {
        let (runs, skip) = self.attempt(offset);
        let pages = runs
            .iter()
            .map(|run| memory.write(self.group, run.layer_pos, run.blocks.clone()))
            .collect::<Result<_, _>>()?;
        Ok(WriteSlices { pages, skip })
    }

    /// The runs of one attempt, and how many bytes of the first are done.
    fn attempt(&self, offset: usize) -> (&[Run], usize) {
        let first = self.runs.partition_point(|run| run.start + run.bytes <= offset);
        let rest = &self.runs[first..];
        let skip = rest.first().map_or(0, |run| offset - run.start);
        let n_runs =
            rest.iter().take(SLICES_MAX).take_while(|run| run.start < offset + ATTEMPT_BYTES_MAX).count();
        (&rest[..n_runs], skip)
    }
}

/// Borrowed pages to read from.
#[derive(Debug)]
pub(crate) struct ReadSlices<'m> {
    pages: Vec<PageRef<'m>>,
    skip: usize,
}

impl ReadSlices<'_> {
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(crate) fn append_to<'s>(&'s self, slices: &mut Vec<IoSlice<'s>>) {
        for (nth, page) in self.pages.iter().enumerate() {
            slices.push(IoSlice::new(&page[if nth == 0 { self.skip } else { 0 }..]));
        }
    }
}

/// Borrowed pages to write into.
#[derive(Debug)]
pub(crate) struct WriteSlices<'m> {
    pages: Vec<PageMut<'m>>,
    skip: usize,
}

impl WriteSlices<'_> {
    pub(crate) fn slices(&mut self) -> Vec<IoSliceMut<'_>> {
        let skip = self.skip;
        let from = |nth| if nth == 0 { skip } else { 0 };
        self.pages.iter_mut().enumerate().map(|(nth, page)| IoSliceMut::new(&mut page[from(nth)..])).collect()
    }
}

#[cfg(test)]
mod tests {
    use types::KvDtype;

    use super::*;

    fn layout() -> KvLayout {
        KvLayout::uniform(16, KvDtype::F32, 3, 1, 4)
    }

    fn span(layers: Range<u16>, blocks: Range<u32>) -> KvSpan {
        KvSpan { group: GroupIdx(0), blocks, layers }
    }

    fn table(blocks: &[u32]) -> Vec<BlockIdx> {
        blocks.iter().copied().map(BlockIdx).collect()
    }

    #[test]
    fn neighbours_are_one_run_in_each_layer() {
        let runs = Runs::new(&layout(), &table(&[9, 4, 5, 6, 2]), &span(1..3, 1..5));
        let seen: Vec<_> =
            runs.runs.iter().map(|run| (run.layer_pos, run.blocks.clone(), run.start)).collect();
        assert_eq!(seen, [(1, 4..7, 0), (1, 2..3, 1536), (2, 4..7, 2048), (2, 2..3, 3584)]);
        assert_eq!(runs.bytes(), 8 * 512);
    }

    /// Gathers a span from one memory and scatters it into another, in odd bites.
    #[test]
    fn what_is_gathered_is_scattered() {
        let (near, far) = (KvMemory::host(layout(), 8).unwrap(), KvMemory::host(layout(), 8).unwrap());
        for layer in 0..3 {
            let mut pages = near.write(GroupIdx(0), layer, 0..8).unwrap();
            pages.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + usize::from(layer)) as u8);
        }
        let whole = span(0..3, 0..4);
        let (out, back) = (table(&[7, 1, 2, 5]), table(&[0, 1, 6, 3]));
        let (out, back) = (Runs::new(&layout(), &out, &whole), Runs::new(&layout(), &back, &whole));
        let mut offset = 0;
        while offset < out.bytes() {
            offset += copy_some(&out.read(&near, offset).unwrap(), &mut back.write(&far, offset).unwrap());
        }
        for layer in 0..3 {
            for (from, to) in [(7, 0), (1, 1), (2, 6), (5, 3)] {
                let (from, to) = (
                    near.read(GroupIdx(0), layer, from..from + 1).unwrap(),
                    far.read(GroupIdx(0), layer, to..to + 1).unwrap(),
                );
                assert_eq!(*from, *to);
            }
        }
    }

    /// As much as fits from the first slice into the first slice, but an odd number of bytes.
    fn copy_some(from: &ReadSlices<'_>, to: &mut WriteSlices<'_>) -> usize {
        let mut sources = Vec::new();
        from.append_to(&mut sources);
        let mut targets = to.slices();
        let n = sources[0].len().min(targets[0].len()).min(333);
        targets[0][..n].copy_from_slice(&sources[0][..n]);
        n
    }
}
