//! Hot path.
//! Sixteen lanes in one register: AVX-512, and its bf16 dot product if the processor has it.

use std::arch::x86_64::*;

use super::{Accumulate, Isa, Kernel, Kind, LANES, Simd, Tiles, avx2};

/// Proof that the processor has the F, BW, DQ and VL parts of AVX-512, like every server since 2017.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Avx512(());

/// Proof that the processor has AVX512-BF16 as well.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Avx512Bf16(Avx512);

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` is the proof that the processor has these features.
        unsafe { compiled(self, kernel) }
    }
}

impl Accumulate for Avx512 {
    type Floats = __m512;
    const TILES: Tiles = Tiles::Large;

    #[inline(always)]
    fn zero(self) -> Self::Floats {
        self.splat(0.0)
    }

    #[inline(always)]
    fn load_sums(self, from: &[f32; LANES]) -> Self::Floats {
        self.load(from)
    }

    #[inline(always)]
    fn store_sums(self, sums: Self::Floats, to: &mut [f32; LANES]) {
        self.store(sums, to);
    }

    #[inline(always)]
    fn accumulate(self, a: Self::Floats, b: Self::Floats, sums: Self::Floats) -> Self::Floats {
        self.mul_add(a, b, sums)
    }

    #[inline(always)]
    fn prefetch<T>(self, from: *const T) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}

// SAFETY (for every block below): `self` proves that the processor has AVX-512. Each load or store covers one
// whole array of sixteen and needs no alignment.
impl Simd for Avx512 {
    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe {
            let narrow = _mm256_loadu_si256(from.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn store(self, value: __m512, to: &mut [f32; LANES]) {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(a) }
    }

    #[inline(always)]
    fn exp2_whole(self, a: __m512) -> __m512 {
        // SAFETY: as stated at this `impl`.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvttps_epi32(a), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        // SAFETY: as stated at this `impl`.
        unsafe { avx2::sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))) }
    }

    #[inline(always)]
    fn greatest(self, a: __m512) -> f32 {
        // SAFETY: as stated at this `impl`.
        unsafe {
            avx2::greatest_of_8(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a)))
        }
    }

    #[inline(always)]
    fn sums(self, vectors: &[[f32; LANES]; LANES]) -> __m512 {
        let mut a = [self.splat(0.0); LANES];
        for i in 0..LANES {
            a[i] = self.load(&vectors[i]);
        }
        // SAFETY: as stated at this `impl`.
        unsafe { sums_of_16(a) }
    }
}

/// Adds up sixteen vectors: lane i of the result is the sum of `a[i]`.
///
/// Each level adds the two halves of two vectors and keeps both results in one. Let a, b, c and d be the
/// vectors. Their quarters of 4 lanes are `[a | a | b | b]` after the first level and `[a | b | c | d]` after
/// the second.
///
/// # Safety
/// The processor must have AVX-512.
#[inline(always)]
unsafe fn sums_of_16(a: [__m512; LANES]) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe {
        let q0 = quarters(a[0], a[4], a[8], a[12]);
        let q1 = quarters(a[1], a[5], a[9], a[13]);
        let q2 = quarters(a[2], a[6], a[10], a[14]);
        let q3 = quarters(a[3], a[7], a[11], a[15]);
        let (q01, q23) = (lanes_by_2(q0, q1), lanes_by_2(q2, q3));
        // Each quarter has one lane of each of four vectors, so quarter j of the result has vectors 4j to 4j
        // + 3.
        _mm512_add_ps(_mm512_shuffle_ps::<0x88>(q01, q23), _mm512_shuffle_ps::<0xDD>(q01, q23))
    }
}

/// Returns `[a | b | c | d]`, four lanes each: the sums of lanes i, i + 8, i + 4 and i + 12 of each vector.
///
/// # Safety
/// The processor must have AVX-512.
#[inline(always)]
unsafe fn quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe {
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xEE>(c, d));
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd))
    }
}

/// Returns, in each quarter, two lanes of `a`, then two of `b`: the sums of lanes i and i + 2.
///
/// # Safety
/// The processor must have AVX-512.
#[inline(always)]
unsafe fn lanes_by_2(a: __m512, b: __m512) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b)) }
}

// === impl Avx512Bf16 ===

impl Avx512Bf16 {
    pub(super) fn detect(simd: Avx512) -> Option<Self> {
        is_x86_feature_detected!("avx512bf16").then_some(Self(simd))
    }

    /// Returns the same processor without its bf16 instructions.
    pub(in crate::cpu) fn simd(self) -> Avx512 {
        self.0
    }

    /// Like [`Avx512::run`], with the bf16 instructions too.
    #[inline]
    pub(in crate::cpu) fn run<K: Bf16Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
        fn compiled<K: Bf16Kernel>(simd: Avx512Bf16, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` is the proof that the processor has these features.
        unsafe { compiled(self, kernel) }
    }

    /// Returns the instruction set that bf16 products extend.
    pub(in crate::cpu) fn isa(self) -> Isa {
        Isa(Kind::Avx512(self.0))
    }

    /// Loads thirty-two bf16 numbers for bf16 products.
    #[inline(always)]
    pub(in crate::cpu) fn load_pairs(self, from: &[u16; 2 * LANES]) -> __m512 {
        // SAFETY: `self` is the proof that the processor has AVX-512; the load covers the array.
        unsafe { _mm512_castsi512_ps(_mm512_loadu_si512(from.as_ptr().cast())) }
    }
}

impl Avx512Bf16 {
    #[inline(always)]
    pub(in crate::cpu) fn store_pairs(self, pairs: __m512, to: &mut [u16; 2 * LANES]) {
        // SAFETY: `self` is the proof that the processor has AVX-512; the store covers the array.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_castps_si512(pairs)) }
    }

    /// Scales thirty-two integers and rounds them to bf16.
    #[inline(always)]
    pub(in crate::cpu) fn scaled_pairs(self, values: &[i8; 2 * LANES], scale: f32) -> __m512 {
        let (low, high) = values.split_at(LANES);
        let scale = self.0.splat(scale);
        let low = self.0.mul(self.0.load_i8(low.first_chunk().expect("each half has LANES values")), scale);
        let high = self.0.mul(self.0.load_i8(high.first_chunk().expect("each half has LANES values")), scale);
        // SAFETY: `self` proves that the processor has AVX512-BF16. Both types have 64 bytes, and all bit
        // patterns are valid.
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
    }
}

impl Accumulate for Avx512Bf16 {
    type Floats = __m512;
    const TILES: Tiles = Tiles::Large;

    #[inline(always)]
    fn zero(self) -> __m512 {
        self.0.zero()
    }

    #[inline(always)]
    fn load_sums(self, from: &[f32; LANES]) -> __m512 {
        self.0.load(from)
    }

    #[inline(always)]
    fn store_sums(self, sums: __m512, to: &mut [f32; LANES]) {
        self.0.store(sums, to);
    }

    /// Adds to lane i the products of the bf16 numbers 2i and 2i + 1 of [`Avx512Bf16::load_pairs`].
    #[inline(always)]
    fn accumulate(self, a: __m512, b: __m512, sums: __m512) -> __m512 {
        // SAFETY: `self` proves that the processor has AVX512-BF16. Both types have 64 bytes, and all bit
        // patterns are valid.
        unsafe {
            let (a, b) =
                (std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b));
            _mm512_dpbf16_ps(sums, a, b)
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, from: *const T) {
        self.0.prefetch(from);
    }
}

/// Work that needs the bf16 dot product. The rules of [`Kernel`] apply.
pub(in crate::cpu) trait Bf16Kernel {
    type Output;
    fn run(self, simd: Avx512Bf16) -> Self::Output;
}
