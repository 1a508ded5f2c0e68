//! Fills the near side before a transfer, and compares the far side with it afterwards.
//!
//! All threads of the machine take part, because filling and comparing gigabytes takes longer than moving
//! them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kv_cache::KvMemory;

use crate::bench_transfer::ends::{GROUP, Run, failed};
use crate::exit::CommandError;

/// The largest number of blocks of a layer that are read or written at once, in one copy from or to a GPU.
const BLOCKS_AT_ONCE: u32 = 256;

/// Fills every page of the memory with bytes that differ from page to page.
pub(super) fn fill(memory: &KvMemory) -> Result<(), CommandError> {
    write_all(memory, |layer, first, bytes| {
        let seed = u64::from(layer) << 32 | u64::from(first);
        // The chunks have no remainder, because a page has at least one head of 128 numbers.
        for (word, nth) in bytes.chunks_exact_mut(8).zip(seed << 16..) {
            word.copy_from_slice(&mixed(nth).to_le_bytes());
        }
    })
}

/// Writes every page of the memory, so that no page is touched for the first time during the measurement.
pub(super) fn touch(memory: &KvMemory) -> Result<(), CommandError> {
    // GPU memory needs no writes, because it is allocated completely at the start.
    if memory.is_on_cards() { Ok(()) } else { write_all(memory, |_, _, bytes| bytes.fill(0)) }
}

/// Mixes the bits of a number, so that neighbouring numbers get unrelated results.
fn mixed(nth: u64) -> u64 {
    let spread = nth.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    spread ^ spread >> 29
}

fn write_all(memory: &KvMemory, write: impl Fn(u16, u32, &mut [u8]) + Sync) -> Result<(), CommandError> {
    let (n_layers, n_blocks) = (memory.layout().group(GROUP).layers.len() as u16, memory.n_blocks());
    let of_layer = |layer| (0..n_blocks).step_by(BLOCKS_AT_ONCE as usize).map(move |first| (layer, first));
    let pieces: Vec<(u16, u32)> = (0..n_layers).flat_map(of_layer).collect();
    by_all_threads(&pieces, |(layer, first)| {
        let blocks = *first..n_blocks.min(first + BLOCKS_AT_ONCE);
        let mut pages = memory.write(GROUP, *layer, blocks).map_err(failed)?;
        write(*layer, *first, &mut pages);
        Ok(())
    })
}

/// Returns whether all of these runs have the same bytes on both sides.
pub(super) fn are_equal(near: &KvMemory, far: &KvMemory, runs: &[Run]) -> Result<bool, CommandError> {
    let pieces: Vec<Run> = runs.iter().flat_map(cut).collect();
    let differ = AtomicBool::new(false);
    by_all_threads(&windows(&pieces), |window| {
        let (of_near, of_far) = (covered(window, |run| &run.near), covered(window, |run| &run.far));
        let ours = near.read(GROUP, window[0].layer, of_near.clone()).map_err(failed)?;
        let theirs = far.read(GROUP, window[0].layer, of_far.clone()).map_err(failed)?;
        let page_bytes = ours.len() / of_near.len();
        let pages = |all: &Range<u32>, run: &Range<u32>| {
            (run.start - all.start) as usize * page_bytes..(run.end - all.start) as usize * page_bytes
        };
        let is_same = |run: &Run| ours[pages(&of_near, &run.near)] == theirs[pages(&of_far, &run.far)];
        if !window.iter().all(is_same) {
            differ.store(true, Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(!differ.into_inner())
}

/// Cuts a run into pieces of at most [`BLOCKS_AT_ONCE`] blocks.
fn cut(run: &Run) -> impl Iterator<Item = Run> + use<> {
    let Run { layer, near, far } = run.clone();
    (0..near.len() as u32).step_by(BLOCKS_AT_ONCE as usize).map(move |done| {
        let of =
            |blocks: &Range<u32>| blocks.start + done..blocks.end.min(blocks.start + done + BLOCKS_AT_ONCE);
        Run { layer, near: of(&near), far: of(&far) }
    })
}

/// Groups pieces that are close together on both sides. Each group is read at once, including the blocks
/// between the pieces.
fn windows(mut pieces: &[Run]) -> Vec<&[Run]> {
    let mut windows = Vec::new();
    while !pieces.is_empty() {
        let fits = |n: &usize| {
            let some = &pieces[..*n];
            some[n - 1].layer == some[0].layer
                && covered(some, |run| &run.near).len() <= BLOCKS_AT_ONCE as usize
                && covered(some, |run| &run.far).len() <= BLOCKS_AT_ONCE as usize
        };
        let n = (2..=pieces.len()).take_while(fits).last().unwrap_or(1);
        let (window, rest) = pieces.split_at(n);
        windows.push(window);
        pieces = rest;
    }
    windows
}

fn covered(runs: &[Run], of: impl Fn(&Run) -> &Range<u32>) -> Range<u32> {
    let first = runs.iter().map(|run| of(run).start).min().unwrap_or(0);
    first..runs.iter().map(|run| of(run).end).max().unwrap_or(0)
}

/// Calls `act` for each of `all` on all threads, and returns the first error.
fn by_all_threads<T: Sync>(
    all: &[T],
    act: impl Fn(&T) -> Result<(), CommandError> + Sync,
) -> Result<(), CommandError> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            act(one)?;
        }
        Ok(())
    };
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("a comparison does not panic"));
        joined.fold(Ok(()), Result::and)
    })
}

#[cfg(test)]
mod tests {
    use types::{KvDtype, KvLayout};

    use super::*;

    fn memory(n_blocks: u32) -> KvMemory {
        KvMemory::host(KvLayout::uniform(16, KvDtype::Bf16, 2, 1, 8), n_blocks).expect("a few pages")
    }

    /// Returns runs over every second block of one side, and over blocks of the other side in reverse order:
    /// no two are neighbours.
    fn scattered(n: u32) -> Vec<Run> {
        let run = |layer, nth: u32| Run { layer, near: 2 * nth..2 * nth + 1, far: n - 1 - nth..n - nth };
        (0..2).flat_map(|layer| (0..n).map(move |nth| run(layer, nth))).collect()
    }

    #[test]
    fn any_byte_that_differs_is_seen() {
        let (n, near, far) = (700, memory(1400), memory(700));
        fill(&near).expect("idle");
        touch(&far).expect("idle");
        let runs = scattered(n);
        assert!(!are_equal(&near, &far, &runs).expect("idle"));
        for run in &runs {
            let from = near.read(GROUP, run.layer, run.near.clone()).expect("idle");
            far.write(GROUP, run.layer, run.far.clone()).expect("idle").copy_from_slice(&from);
        }
        assert!(are_equal(&near, &far, &runs).expect("idle"));
        for (layer, block, byte) in [(0, 0, 0), (1, 699, 511), (1, 350, 77)] {
            let flip = || far.write(GROUP, layer, block..block + 1).expect("idle")[byte] ^= 1;
            flip();
            assert!(!are_equal(&near, &far, &runs).expect("idle"), "layer {layer}, block {block}");
            flip();
        }
        assert!(are_equal(&near, &far, &runs).expect("idle"));
    }

    #[test]
    fn pages_differ_from_each_other() {
        let memory = memory(600);
        fill(&memory).expect("idle");
        let mut seen = std::collections::HashSet::new();
        for (layer, block) in (0..2).flat_map(|layer| (0..600).map(move |block| (layer, block))) {
            let page = memory.read(GROUP, layer, block..block + 1).expect("idle");
            assert!(seen.insert(page.to_vec()), "layer {layer}, block {block}");
        }
    }

    #[test]
    fn what_is_looked_at_at_once_is_bounded() {
        let whole = Run { layer: 0, near: 0..1000, far: 5..1005 };
        let pieces: Vec<Run> = cut(&whole).collect();
        let sizes: Vec<usize> = pieces.iter().map(|piece| piece.near.len()).collect();
        assert_eq!(sizes, [256, 256, 256, 232]);
        assert_eq!(windows(&pieces).len(), 4);
        // The limit is 128 because 128 of every second block lie within 255 blocks. The other side alone
        // allows 256.
        let sizes: Vec<usize> = windows(&scattered(300)).iter().map(|window| window.len()).collect();
        assert_eq!(sizes, [128, 128, 44, 128, 128, 44]);
    }
}
