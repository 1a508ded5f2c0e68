//! Checks moves of pages between two GPUs: bytes and digests must equal the CPU's.

use baton_kernels::cuda::ComputeCard;
use device::RegionShape;
use device::cuda::{PageCopier, PageCopierSize, PageDigests, PageRuns, RemotePages, SomePages};
use twox_hash::XxHash3_64;

use crate::{Outcome, Two};

/// Parts, heads and bytes of a run: lengths with different digest code, and those of real models.
const SHAPES: &[(usize, usize, usize)] = &[
    (2, 2, 64),
    (2, 2, 192),
    (1, 3, 240),
    (2, 2, 256),
    (2, 1, 1024),
    (1, 1, 1040),
    (2, 8, 2048),
    (2, 8, 4096),
    (1, 1, 18432),
    (2, 3, 8192),
];
const N_PAGES: u32 = 64;

/// The number of shapes that are checked in slow instrumented runs.
const N_SMALL: usize = 5;

pub(crate) fn all(cards: &[ComputeCard; 2], is_small: bool) -> Outcome<usize> {
    let mut n_checks = memory(cards)? + rectangles(cards)?;
    let shapes = if is_small { &SHAPES[..N_SMALL] } else { SHAPES };
    for (n_parts, n_heads, run_bytes) in shapes {
        n_checks += pages(cards, PageRuns::whole(*n_parts, *n_heads, *run_bytes))?;
        n_checks += some_heads(cards, (*n_parts, *n_heads, *run_bytes))?;
    }
    Ok(n_checks)
}

/// Returns a byte that identifies its position.
fn byte(seed: u64, at: usize) -> u8 {
    ((at as u64 ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn ensure(holds: bool, what: &str) -> Outcome<usize> {
    if holds { Ok(1) } else { Err(what.into()) }
}

/// Checks that written pages are read back, that other pages do not change, and that borrows exclude each
/// other.
fn memory(cards: &[ComputeCard; 2]) -> Outcome<usize> {
    let shapes =
        [RegionShape { page_bytes: 4096, n_pages: 300 }, RegionShape { page_bytes: 100, n_pages: 7 }];
    let two = Two::new(cards, &shapes)?;
    let mut n_checks =
        ensure(two.far.read(0, 0..300)?.iter().all(|byte| *byte == 0), "fresh memory is zero")?;
    for memory in [&two.near, &two.far] {
        for (region, pages) in [(0, 3..7), (1, 2..5), (0, 299..300)] {
            memory.write(region, pages)?.iter_mut().enumerate().for_each(|(at, cell)| *cell = byte(7, at));
        }
        n_checks += ensure(memory.read(0, 2..3)?.iter().all(|byte| *byte == 0), "the page before")?;
        n_checks += ensure(memory.read(0, 7..8)?.iter().all(|byte| *byte == 0), "the page behind")?;
        let right = |bytes: &[u8]| bytes.iter().enumerate().all(|(at, cell)| *cell == byte(7, at));
        n_checks += ensure(right(&memory.read(0, 3..7)?), "four pages")?;
        n_checks += ensure(right(&memory.read(1, 2..5)?), "pages of odd size")?;
        n_checks += ensure(right(&memory.read(0, 299..300)?), "the last page")?;
        let reader = memory.read(0, 3..5)?;
        n_checks += ensure(memory.write(0, 4..5).is_err(), "a page that is read is not written")?;
        drop(reader);
        n_checks += ensure(memory.write(0, 4..5).is_ok(), "a page is given back")?;
    }
    Ok(n_checks)
}

fn fill(two: &Two, seed: u64) -> Outcome<()> {
    two.near.write(0, 0..N_PAGES)?.iter_mut().enumerate().for_each(|(at, cell)| *cell = byte(seed, at));
    two.far.write(0, 0..N_PAGES)?.fill(0xee);
    Ok(())
}

/// Returns the region and the number of each page; all are in region 0.
fn places(pages: &[u32]) -> Vec<(u32, u32)> {
    pages.iter().map(|page| (0, *page)).collect()
}

fn digest(page: &[u8], runs: PageRuns, head: usize, valid: usize) -> u64 {
    let mut parts = Vec::new();
    for part in 0..runs.n_parts {
        let start = (part * runs.n_heads + head) * runs.run_bytes;
        parts.extend(XxHash3_64::oneshot(&page[start..start + valid]).to_le_bytes());
    }
    XxHash3_64::oneshot(&parts)
}

/// Checks digests of every valid length, and pages pulled between any positions.
fn pages(cards: &[ComputeCard; 2], runs: PageRuns) -> Outcome<usize> {
    let two = Two::new(cards, &[RegionShape { page_bytes: runs.page_bytes(), n_pages: N_PAGES }])?;
    let (near, far) = (
        PageCopier::new(&two.near, PageCopierSize::default())?,
        PageCopier::new(&two.far, PageCopierSize::default())?,
    );
    let by_engines =
        PageCopier::new(&two.far, PageCopierSize { engine_bytes_min: 0, ..PageCopierSize::default() })?;
    let mut n_checks = 0;
    let all: Vec<u32> = (0..N_PAGES).collect();
    let lengths = (16..=runs.run_bytes).step_by(if runs.run_bytes > 1024 { 112 } else { 16 });
    for (nth, valid) in lengths.chain([runs.run_bytes]).enumerate() {
        fill(&two, nth as u64)?;
        let partial = nth * 5 % N_PAGES as usize;
        let from: Vec<u32> = all.iter().map(|page| page * 29 % N_PAGES).collect();
        let to: Vec<u32> = all.iter().map(|page| page * 43 % N_PAGES).collect();
        let half = N_PAGES as usize / 2;
        let some =
            |places| SomePages { places, n_of_layer: half, runs, partial: Some((partial % half, valid)) };
        let (from_places, to_places) = (places(&from), places(&to));
        let copy_job = near.digest(&two.near, some(&from_places))?;
        let there = near.take(copy_job)?;
        let offsets: Vec<u64> = from.iter().map(|page| two.near.offset(0, *page)).collect();
        let there_of = |offsets| RemotePages { memory: &two.near_from_far, offsets, runs };
        let copy_job = far.pull(there_of(&offsets), &two.far, some(&to_places))?;
        let here = far.take(copy_job)?;
        n_checks += ensure(arrived(&two, runs, &from, &to)?, "pages arrive as they are, by a kernel")?;
        two.far.write(0, 0..N_PAGES)?.fill(0xee);
        let copy_job = by_engines.fetch(there_of(&offsets), &two.far, some(&to_places), PageDigests::Make)?;
        let engines = by_engines.take(copy_job)?;
        let source = two.near.read(0, 0..N_PAGES)?;
        let target = two.far.read(0, 0..N_PAGES)?;
        let page = |bytes: &[u8], page: u32| {
            bytes[page as usize * runs.page_bytes()..][..runs.page_bytes()].to_vec()
        };
        let mut expected = Vec::new();
        for (nth, (from, to)) in from.iter().zip(&to).enumerate() {
            let bytes = page(&source, *from);
            n_checks += ensure(bytes == page(&target, *to), "a page arrives as it is")?;
            let valid = if nth % half == partial % half { valid } else { runs.run_bytes };
            expected.extend((0..runs.n_heads).map(|head| digest(&bytes, runs, head, valid)));
        }
        n_checks +=
            ensure(there == expected, &format!("{runs:?} of {valid} valid bytes: digests at the sender"))?;
        n_checks +=
            ensure(here == expected, &format!("{runs:?} of {valid} valid bytes: digests on the way"))?;
        n_checks +=
            ensure(engines == expected, &format!("{runs:?} of {valid} valid bytes: digests behind engines"))?;
    }
    Ok(n_checks)
}

/// Checks moves of some heads: the sender's last heads are the receiver's first ones, and the other way
/// round. Pages on both sides have other heads, which are not moved or written.
fn some_heads(
    cards: &[ComputeCard; 2],
    (n_parts, n_heads, run_bytes): (usize, usize, usize),
) -> Outcome<usize> {
    let mut n_checks = 0;
    for (first_there, first_here) in [(3, 0), (0, 1)] {
        let runs = |first_head, page_heads| PageRuns {
            first_head,
            page_heads,
            ..PageRuns::whole(n_parts, n_heads, run_bytes)
        };
        let (there, here) = (runs(first_there, n_heads + 3), runs(first_here, n_heads + 1));
        let shapes = |runs: PageRuns| [RegionShape { page_bytes: runs.page_bytes(), n_pages: N_PAGES }];
        let two = Two::between(cards, &shapes(there), &shapes(here))?;
        let (near, far) = (
            PageCopier::new(&two.near, PageCopierSize::default())?,
            PageCopier::new(&two.far, PageCopierSize::default())?,
        );
        fill(&two, 3)?;
        let pages: Vec<(u32, u32)> = places(&(0..N_PAGES).collect::<Vec<_>>());
        let some = |runs| SomePages { places: &pages, n_of_layer: pages.len(), runs, partial: None };
        let offsets: Vec<u64> = pages.iter().map(|(region, page)| two.near.offset(*region, *page)).collect();
        let said = near.take(near.digest(&two.near, some(there))?)?;
        let from = RemotePages { memory: &two.near_from_far, offsets: &offsets, runs: there };
        let seen = far.take(far.fetch(from, &two.far, some(here), PageDigests::Make)?)?;
        n_checks += ensure(said == seen, "digests of some heads of pages")?;
        let (source, target) = (two.near.read(0, 0..N_PAGES)?, two.far.read(0, 0..N_PAGES)?);
        for (source, target) in source.chunks(there.page_bytes()).zip(target.chunks(here.page_bytes())) {
            for (nth, run) in target.chunks(run_bytes).enumerate() {
                let (part, head) = (nth / here.page_heads, nth % here.page_heads);
                let is_meant = (first_here..first_here + n_heads).contains(&head);
                let from = part * there.page_heads + (head + first_there).saturating_sub(first_here);
                let right = if is_meant {
                    run == &source[from * run_bytes..][..run_bytes]
                } else {
                    run.iter().all(|byte| *byte == 0xee)
                };
                n_checks += ensure(right, "some heads arrive as they are, and nothing beside them")?;
            }
        }
    }
    Ok(n_checks)
}

/// Returns whether each page in `from` equals the page in `to` on the other GPU.
fn arrived(two: &Two, runs: PageRuns, from: &[u32], to: &[u32]) -> Outcome<bool> {
    let (source, target) = (two.near.read(0, 0..N_PAGES)?, two.far.read(0, 0..N_PAGES)?);
    let (source, target): (Vec<_>, Vec<_>) =
        (source.chunks(runs.page_bytes()).collect(), target.chunks(runs.page_bytes()).collect());
    Ok(from.iter().zip(to).all(|(from, to)| source[*from as usize] == target[*to as usize]))
}

/// Checks rectangles over layers. Some of their blocks are neighbours on both sides, and no other page is
/// written.
fn rectangles(cards: &[ComputeCard; 2]) -> Outcome<usize> {
    const N_LAYERS: u32 = 5;
    let runs = PageRuns::whole(2, 2, 1024);
    let shapes = [RegionShape { page_bytes: runs.page_bytes(), n_pages: N_PAGES }; N_LAYERS as usize];
    let two = Two::new(cards, &shapes)?;
    let size = PageCopierSize { engine_bytes_min: 0, ..PageCopierSize::default() };
    let (near, far) = (PageCopier::new(&two.near, size)?, PageCopier::new(&two.far, size)?);
    for layer in 0..N_LAYERS {
        let seed = u64::from(layer) + 77;
        two.near
            .write(layer, 0..N_PAGES)?
            .iter_mut()
            .enumerate()
            .for_each(|(at, cell)| *cell = byte(seed, at));
        two.far.write(layer, 0..N_PAGES)?.fill(0xee);
    }
    let blocks: [(u32, u32); 6] = [(3, 40), (4, 41), (5, 42), (9, 7), (20, 9), (21, 10)];
    let all = |of: fn(&(u32, u32)) -> u32| -> Vec<(u32, u32)> {
        (0..N_LAYERS).flat_map(|layer| blocks.iter().map(move |block| (layer, of(block)))).collect()
    };
    let (there, here) = (all(|block| block.0), all(|block| block.1));
    let some = |places| SomePages { places, n_of_layer: blocks.len(), runs, partial: None };
    let offsets: Vec<u64> = there.iter().map(|(layer, page)| two.near.offset(*layer, *page)).collect();
    let said = near.take(near.digest(&two.near, some(&there))?)?;
    let there = RemotePages { memory: &two.near_from_far, offsets: &offsets, runs };
    let seen = far.take(far.fetch(there, &two.far, some(&here), PageDigests::Make)?)?;
    let mut n_checks = ensure(said == seen, "digests of rectangles")?;
    for layer in 0..N_LAYERS {
        let (source, target) = (two.near.read(layer, 0..N_PAGES)?, two.far.read(layer, 0..N_PAGES)?);
        for (page, bytes) in target.chunks(runs.page_bytes()).enumerate() {
            let from = blocks.iter().find(|(_, to)| *to as usize == page).map(|(from, _)| *from as usize);
            let right = match from {
                Some(from) => bytes == &source[from * runs.page_bytes()..][..runs.page_bytes()],
                None => bytes.iter().all(|byte| *byte == 0xee),
            };
            n_checks += ensure(right, "rectangles arrive as they are, and nothing beside them")?;
        }
    }
    Ok(n_checks)
}
