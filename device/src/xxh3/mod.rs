//! Hot path.
//! XXH3-64 of bytes in place, or while they are copied: one pass over memory instead of two.
//!
//! On processors with AVX2, this module has its own implementation of the long form, because other
//! implementations do not copy while they hash, and do not prefetch. Everything else is computed by the
//! `twox-hash` crate.

use twox_hash::XxHash3_64;

#[cfg(target_arch = "x86_64")]
mod avx2;

/// The kind of stores for copied bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Ordinary stores through the caches, for a few bytes that are read again soon.
    Cached,
    /// Streamed stores to memory: the target is not fetched into the caches, and no other data is evicted.
    Streamed,
}

/// Returns the hash of `bytes`.
pub fn hash(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if let Some(hash) = avx2::hash(bytes) {
        return hash;
    }
    XxHash3_64::oneshot(bytes)
}

/// The division of memory into consecutive parts. Each part is hashed separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    pub bytes: usize,
    /// The number of bytes at the start of a part that are hashed.
    pub hashed: usize,
}

/// Copies the bytes at `from` into `into`. Calls `each` with the hash of each part of the copy.
///
/// # Safety
/// `into.len()` bytes can be read at `from` and do not overlap `into`. Another process may write them
/// meanwhile; then `into` holds a mixture.
pub(crate) unsafe fn copy_parts(
    from: *const u8,
    into: &mut [u8],
    parts: Parts,
    stores: Stores,
    mut each: impl FnMut(u64),
) {
    for (nth, part) in into.chunks_mut(parts.bytes.max(1)).enumerate() {
        let from = from.wrapping_add(nth * parts.bytes);
        let (hashed, beyond) = part.split_at_mut(parts.hashed.min(part.len()));
        // JUSTIFICATION: the source has no slice.
        // SAFETY: the caller guarantees the ranges. Streamed stores are made visible below, before the copy
        // is read.
        each(unsafe { copy(from, hashed, stores) });
        let from = from.wrapping_add(hashed.len());
        // SAFETY: the caller guarantees that the ranges are valid and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, beyond.as_mut_ptr(), beyond.len()) };
    }
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streamed {
        avx2::settle();
    }
}

/// Copies the bytes at `from` into `into` and returns the hash of the copy.
///
/// # Safety
/// The requirements of [`copy_parts`]. Streamed stores must be made visible by `settle` before the copy is
/// read.
unsafe fn copy(from: *const u8, into: &mut [u8], stores: Stores) -> u64 {
    #[cfg(target_arch = "x86_64")]
    // JUSTIFICATION: the source has no slice.
    // SAFETY: guaranteed by the caller.
    if let Some(hash) = unsafe { avx2::copy(from, into, stores) } {
        return hash;
    }
    let _ = stores;
    // JUSTIFICATION: the source has no slice.
    // SAFETY: the caller guarantees that the source can be read and does not overlap the target.
    unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    XxHash3_64::oneshot(into)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: usize) -> Vec<u8> {
        let mut state = n as u64 | 1;
        let step = |_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 56) as u8
        };
        (0..n).map(step).collect()
    }

    /// Returns lengths around every limit at which the hash uses another form.
    fn lengths() -> impl Iterator<Item = usize> {
        let edges = [0, 16, 128, 240, 256, 1024, 1088, 2048, 4096, 8192, 65_536];
        edges.into_iter().flat_map(|edge: usize| edge.saturating_sub(3)..edge + 67)
    }

    #[test]
    fn it_is_the_hash_that_everybody_computes() {
        for n in lengths() {
            let bytes = bytes(n);
            assert_eq!(hash(&bytes), XxHash3_64::oneshot(&bytes), "{n} bytes");
        }
    }

    #[test]
    fn a_copy_is_whole_and_its_hash_is_its_own() {
        for n in lengths() {
            let from = bytes(n + 1);
            for (stores, at) in [(Stores::Cached, 0), (Stores::Streamed, 0), (Stores::Streamed, 1)] {
                let mut into = vec![0xee; n + 66];
                // The first target is aligned to vectors, and the second one is not.
                let at = into.as_ptr().align_offset(64) + at;
                let (parts, mut hashes) = (Parts { bytes: n, hashed: n }, Vec::new());
                let each = |hash| hashes.push(hash);
                // JUSTIFICATION: the source is a pointer.
                // SAFETY: there are `n` bytes after the first one, in another vector than `into`.
                unsafe { copy_parts(from[1..].as_ptr(), &mut into[at..at + n], parts, stores, each) };
                assert_eq!(into[at..at + n], from[1..], "{n} bytes, {stores:?}");
                let expected = if n == 0 { Vec::new() } else { vec![XxHash3_64::oneshot(&from[1..])] };
                assert_eq!(hashes, expected, "{n} bytes, {stores:?}");
                assert!(into[..at].iter().chain(&into[at + n..]).all(|byte| *byte == 0xee), "{n} bytes");
            }
        }
    }

    #[test]
    fn each_part_is_hashed_by_itself_and_copied_whole() {
        for (n_parts, parts) in [
            (3, Parts { bytes: 4096, hashed: 4096 }),
            (4, Parts { bytes: 512, hashed: 320 }),
            (5, Parts { bytes: 64, hashed: 32 }),
        ] {
            let from = bytes(n_parts * parts.bytes);
            for stores in [Stores::Cached, Stores::Streamed] {
                let (mut into, mut hashes) = (vec![0; from.len()], Vec::new());
                // JUSTIFICATION: the source is a pointer.
                // SAFETY: both vectors have the same length.
                unsafe { copy_parts(from.as_ptr(), &mut into, parts, stores, |hash| hashes.push(hash)) };
                assert_eq!(into, from);
                let expected =
                    from.chunks(parts.bytes).map(|part| XxHash3_64::oneshot(&part[..parts.hashed]));
                assert_eq!(hashes, expected.collect::<Vec<_>>(), "{parts:?}, {stores:?}");
            }
        }
    }
}
