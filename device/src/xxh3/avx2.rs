//! Hot path.
//! The long form of XXH3-64 in registers of 256 bits, with or without a copy.
//!
//! | bytes | operation |
//! |---|---|
//! | 64, a stripe | are added to eight sums of 64 bits, with 64 bytes of the secret, which start 8 bytes later for each stripe |
//! | 1024, a block | the sums are scrambled after the 16 stripes that the secret has room for |
//! | the last 64 | are a stripe of their own, also if they overlap the one before |

use std::arch::x86_64::{
    __m256i, _MM_HINT_T1, _mm_prefetch, _mm_sfence, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32,
    _mm256_set1_epi32, _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256,
    _mm256_stream_si256, _mm256_xor_si256,
};

use super::Stores;

/// The maximum length of the hash's short forms.
const SHORT_MAX: usize = 240;
const STRIPE: usize = 64;
const STRIPES_OF_A_BLOCK: usize = (SECRET.len() - STRIPE) / 8;
/// The prefetch distance: longer than the memory latency, and mostly within the bytes that are read anyway.
const AHEAD: usize = 4096;

const PRIME32: [u64; 3] = [0x9e37_79b1, 0x85eb_ca77, 0xc2b2_ae3d];
const PRIME64: [u64; 5] = [
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
    0x27d4_eb2f_1656_67c5,
];
const FIRST_SUMS: [u64; 8] =
    [PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]];

/// The default secret of XXH3.
#[rustfmt::skip]
const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// The keys of the final mix: the secret from its 12th byte on.
const LAST_KEYS: [u64; 8] = {
    let (mut keys, mut nth) = ([0; 8], 0);
    while nth < 64 {
        keys[nth / 8] |= (SECRET[11 + nth] as u64) << (nth % 8 * 8);
        nth += 1;
    }
    keys
};

/// The use of the hashed bytes: no copy, a copy through the caches, or a copy that bypasses them.
const STAY: u8 = 0;
const CACHED: u8 = 1;
const STREAMED: u8 = 2;

/// Hashes `bytes`. Returns `None` if this module does not support the length or the processor.
pub(super) fn hash(bytes: &[u8]) -> Option<u64> {
    if bytes.len() <= SHORT_MAX || !is_x86_feature_detected!("avx2") {
        return None;
    }
    // JUSTIFICATION: one loop for hashing and for copying.
    // SAFETY: the processor has AVX2, there are more than 240 bytes, and nothing is stored.
    Some(unsafe { long::<STAY>(bytes.as_ptr(), std::ptr::null_mut(), bytes.len()) })
}

/// Copies and hashes. Returns `None` and copies nothing if this module does not support the length or the
/// processor.
///
/// # Safety
/// The requirements of [`copy`](super::copy).
pub(super) unsafe fn copy(from: *const u8, into: &mut [u8], stores: Stores) -> Option<u64> {
    if into.len() <= SHORT_MAX || !is_x86_feature_detected!("avx2") {
        return None;
    }
    let (to, n) = (into.as_mut_ptr(), into.len());
    let is_aligned = to.align_offset(size_of::<__m256i>()) == 0;
    // JUSTIFICATION: the source has no slice.
    // SAFETY: the processor has AVX2. More than 240 bytes can be read, as the caller guarantees, and the same
    // number can be written; the ranges do not overlap. Streamed stores are used only if the target is
    // aligned to vectors.
    Some(unsafe {
        match stores {
            Stores::Streamed if is_aligned => long::<STREAMED>(from, to, n),
            _ => long::<CACHED>(from, to, n),
        }
    })
}

/// Makes streamed stores visible before later stores.
pub(super) fn settle() {
    // JUSTIFICATION: a CPU instruction.
    // SAFETY: every x86_64 processor has it.
    unsafe { _mm_sfence() };
}

/// Hashes `n` bytes and stores each byte as it was hashed. Bytes are loaded once, except some of the last 64:
/// if `n` is not a multiple of 64, some are loaded, hashed and stored twice.
///
/// # Safety
/// The processor has AVX2. `n` is more than 240, and `n` bytes can be read at `from`. Unless `STORES` is
/// [`STAY`], `n` bytes can be written at `to`, and the ranges do not overlap. With [`STREAMED`], `to` is
/// aligned to vectors.
#[target_feature(enable = "avx2")]
unsafe fn long<const STORES: u8>(from: *const u8, to: *mut u8, n: usize) -> u64 {
    let n_stripes = (n - 1) / STRIPE;
    // JUSTIFICATION: vectors of bytes that have no slice.
    // SAFETY: `stripe` stays within the `n` bytes: all of `n_stripes` end before the last byte, and the last
    // stripe ends with it. The secret is read up to 64 bytes after `nth * 8`, which is at most 184.
    unsafe {
        let mut sums = [load(FIRST_SUMS.as_ptr().cast()), load(FIRST_SUMS.as_ptr().add(4).cast())];
        let mut done = 0;
        while done < n_stripes {
            let of_block = STRIPES_OF_A_BLOCK.min(n_stripes - done);
            for nth in 0..of_block {
                let at = (done + nth) * STRIPE;
                _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at + AHEAD).cast());
                stripe::<STORES>(from.add(at), to.wrapping_add(at), SECRET.as_ptr().add(nth * 8), &mut sums);
            }
            done += of_block;
            if of_block == STRIPES_OF_A_BLOCK {
                scramble(&mut sums);
            }
        }
        let (at, secret) = (n - STRIPE, SECRET.as_ptr().add(SECRET.len() - STRIPE - 7));
        match STORES {
            STAY => stripe::<STAY>(from.add(at), to, secret, &mut sums),
            // The last stripe is streamed too: a single line through the caches would have to be fetched, and
            // all later stores would wait for it.
            STREAMED if at.is_multiple_of(STRIPE) => {
                stripe::<STREAMED>(from.add(at), to.add(at), secret, &mut sums);
            }
            // In all other cases the last stripe is not aligned to vectors, or all stores go through the
            // caches.
            _ => stripe::<CACHED>(from.add(at), to.add(at), secret, &mut sums),
        }
        merged(&sums, n)
    }
}

/// Hashes one stripe into `sums`, and stores it.
///
/// # Safety
/// The requirements of [`long`], with 64 bytes for each pointer.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn stripe<const STORES: u8>(from: *const u8, to: *mut u8, secret: *const u8, sums: &mut [__m256i; 2]) {
    for (half, sum) in sums.iter_mut().enumerate() {
        let at = half * size_of::<__m256i>();
        // JUSTIFICATION: vectors of bytes that have no slice.
        // SAFETY: guaranteed by the caller.
        let (value, key) = unsafe { (load(from.add(at)), load(secret.add(at))) };
        // SAFETY: guaranteed by the caller.
        unsafe {
            match STORES {
                CACHED => _mm256_storeu_si256(to.add(at).cast(), value),
                STREAMED => _mm256_stream_si256(to.add(at).cast(), value),
                _ => {}
            }
        }
        let keyed = _mm256_xor_si256(value, key);
        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
        // Each value is added to its neighbour's sum, as XXH3 specifies.
        let neighbour = _mm256_shuffle_epi32::<0b01_00_11_10>(value);
        *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, neighbour));
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn scramble(sums: &mut [__m256i; 2]) {
    let prime = _mm256_set1_epi32(PRIME32[0] as i32);
    for (half, sum) in sums.iter_mut().enumerate() {
        // JUSTIFICATION: a vector from an array.
        // SAFETY: the secret's last 64 bytes are two vectors.
        let key = unsafe { load(SECRET.as_ptr().add(SECRET.len() - STRIPE + half * size_of::<__m256i>())) };
        let mixed = _mm256_xor_si256(_mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum)), key);
        // Multiplies a 64-bit number by a 32-bit number, in two halves.
        let (low, high) =
            (_mm256_mul_epu32(mixed, prime), _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime));
        *sum = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn merged(sums: &[__m256i; 2], n: usize) -> u64 {
    let mut values = [0u64; 8];
    for (half, sum) in sums.iter().enumerate() {
        // JUSTIFICATION: stores vectors into an array.
        // SAFETY: a vector is four numbers of 64 bits, and the array has two times four.
        unsafe { _mm256_storeu_si256(values.as_mut_ptr().add(half * 4).cast(), *sum) };
    }
    let mut hash = (n as u64).wrapping_mul(PRIME64[0]);
    for pair in 0..4 {
        let (a, b) = (values[2 * pair] ^ LAST_KEYS[2 * pair], values[2 * pair + 1] ^ LAST_KEYS[2 * pair + 1]);
        let product = u128::from(a) * u128::from(b);
        hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    hash = (hash ^ (hash >> 37)).wrapping_mul(0x1656_6791_9e37_79f9);
    hash ^ (hash >> 32)
}

/// Loads 32 bytes.
///
/// # Safety
/// 32 bytes can be read at `from`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(from: *const u8) -> __m256i {
    // JUSTIFICATION: a vector of bytes that have no slice.
    // SAFETY: guaranteed by the caller.
    unsafe { _mm256_loadu_si256(from.cast()) }
}
