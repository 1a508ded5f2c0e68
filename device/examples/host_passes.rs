//! Measures each pass over host memory in a shared-memory transfer: two threads, 1 GiB in pages of 64 KiB,
//! medians of seven. Prints one line for each pass, with its rate and its ratio to a plain copy.

use std::error::Error;
use std::hint::black_box;
use std::ops::Range;

use device::xxh3::{self, Parts, Stores};
use device::{HostMemory, PeerMemory, RegionShape};

const BYTES: usize = 1 << 30;
const PAGE_BYTES: usize = 64 << 10;
/// The size of K or V of one head.
const PART_BYTES: usize = 4 << 10;
const N_LAYERS: u32 = 32;
const N_PAGES: u32 = (BYTES / PAGE_BYTES) as u32 / N_LAYERS;
const N_TIMES: usize = 7;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;
/// A layer and a range of neighbouring pages in it.
type Piece = (u32, Range<u32>);

fn main() -> Outcome<()> {
    let ends = Ends::new()?;
    let plain = median(N_PAGES, |some| ends.copy_plainly(some))?;
    let say = |name: &str, took: f64| {
        eprintln!("{name:50} {:6.2} GB/s  {:.2}", BYTES as f64 / took / 1e9, plain / took);
    };
    say("plain copy", plain);
    say("digest", median(8, |some| ends.digest(some))?);
    for stores in [Stores::Cached, Stores::Streamed] {
        say(&format!("copy and digest, {stores:?}"), median(8, |some| ends.copy_hashed(some, stores))?);
    }
    for n_pages in [4, 8, 16, 32, 64, N_PAGES] {
        let both = |some: Piece| {
            ends.digest(some.clone())?;
            ends.copy_hashed(some, Stores::Streamed)
        };
        let ahead = n_pages as usize * (PAGE_BYTES >> 10);
        say(&format!("digest {ahead} KiB, then copy and digest them"), median(n_pages, both)?);
    }
    Ok(())
}

/// Returns the median time in seconds of a pass over all pages, in pieces of `n_pages`.
fn median(n_pages: u32, pass: impl Fn(Piece) -> Outcome<()> + Sync) -> Outcome<f64> {
    let mut times = Vec::new();
    for _ in 0..N_TIMES {
        times.push(once(n_pages, &pass)?);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[N_TIMES / 2])
}

#[allow(clippy::disallowed_methods, reason = "there is no runtime here whose time could be paused")]
fn once(n_pages: u32, pass: &(impl Fn(Piece) -> Outcome<()> + Sync)) -> Outcome<f64> {
    let of_layer =
        |layer| (0..N_PAGES).step_by(n_pages as usize).map(move |first| (layer, first..first + n_pages));
    let every_second = |nth| (0..N_LAYERS).flat_map(of_layer).skip(nth).step_by(2).try_for_each(pass);
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| every_second(1));
        every_second(0).and(other.join().expect("a pass does not panic"))
    })?;
    Ok(start.elapsed().as_secs_f64())
}

/// The memory of two nodes. The second node has mapped the first one's memory.
struct Ends {
    near: HostMemory,
    far: HostMemory,
    seen: PeerMemory,
}

impl Ends {
    fn new() -> Outcome<Self> {
        let shapes = [RegionShape { page_bytes: PAGE_BYTES, n_pages: N_PAGES }; N_LAYERS as usize];
        let (near, far) = (HostMemory::shared(&shapes)?, HostMemory::shared(&shapes)?);
        let file = near.file().ok_or("this system has no shared memory")?.try_clone_to_owned()?;
        let seen = PeerMemory::map(file)?;
        let ends = Self { near, far, seen };
        for layer in 0..N_LAYERS {
            let mut pages = ends.near.write(layer, 0..N_PAGES)?;
            for (word, nth) in pages.chunks_exact_mut(8).zip(u64::from(layer) << 32..) {
                word.copy_from_slice(&nth.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
            }
        }
        // A first copy allocates and maps all pages before the measurement starts.
        median(N_PAGES, |some| ends.copy_hashed(some, Stores::Cached))?;
        Ok(ends)
    }

    fn copy_plainly(&self, (layer, pages): Piece) -> Outcome<()> {
        let from = self.near.read(layer, pages.clone())?;
        self.far.write(layer, pages)?.copy_from_slice(&from);
        Ok(())
    }

    fn digest(&self, (layer, pages): Piece) -> Outcome<()> {
        let pages = self.near.read(layer, pages)?;
        for part in pages.chunks(PART_BYTES) {
            black_box(xxh3::hash(part));
        }
        Ok(())
    }

    fn copy_hashed(&self, (layer, pages): Piece, stores: Stores) -> Outcome<()> {
        let offset = self.near.file_offset(layer, pages.start) as u64;
        let mut into = self.far.write(layer, pages)?;
        let parts = Parts { bytes: PART_BYTES, hashed: PART_BYTES };
        let each = |hash| {
            black_box(hash);
        };
        Ok(self.seen.copy_hashed(offset, &mut into, parts, stores, each)?)
    }
}
