//! Hot path.
//! Sixteen lanes as two halves of eight: AVX2 with FMA and F16C, which every x86 server since 2013 has.

use std::arch::x86_64::*;

use super::{Accumulate, Kernel, LANES, Simd, Tiles};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Avx2(());

/// A vector as two registers: lanes 0 to 7, and 8 to 15.
type Halves = [__m256; 2];

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` is the proof that the processor has these features.
        unsafe { compiled(self, kernel) }
    }
}

#[inline(always)]
fn half<T>(from: &[T; LANES], nth: usize) -> *const T {
    from[nth * 8..].as_ptr()
}

/// Evaluates one expression for each half. This is a macro, because a closure is not always inlined, and
/// alone it would be compiled without the instruction set.
macro_rules! halves {
    ($h:ident => $value:expr) => {
        // SAFETY: `self` proves that the processor has AVX2, FMA and F16C. Each load covers one half of an
        // array of sixteen and needs no alignment.
        unsafe {
            [
                {
                    const $h: usize = 0;
                    $value
                },
                {
                    const $h: usize = 1;
                    $value
                },
            ]
        }
    };
}

impl Accumulate for Avx2 {
    type Floats = Halves;
    const TILES: Tiles = Tiles::Small;

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

impl Simd for Avx2 {
    #[inline(always)]
    fn splat(self, value: f32) -> Halves {
        // SAFETY: `self` is the proof that the processor has AVX2.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Halves {
        halves!(H => _mm256_loadu_ps(half(from, H)))
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> Halves {
        halves!(H => {
            let narrow = _mm_loadu_si128(half(from, H).cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Halves {
        halves!(H => _mm256_cvtph_ps(_mm_loadu_si128(half(from, H).cast())))
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Halves {
        halves!(H => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(half(from, H).cast()))))
    }

    #[inline(always)]
    fn store(self, value: Halves, to: &mut [f32; LANES]) {
        for (h, value) in value.into_iter().enumerate() {
            // SAFETY: `self` is the proof that the processor has AVX2; each store covers one half of the array.
            unsafe { _mm256_storeu_ps(to[h * 8..].as_mut_ptr(), value) }
        }
    }

    #[inline(always)]
    fn add(self, a: Halves, b: Halves) -> Halves {
        halves!(H => _mm256_add_ps(a[H], b[H]))
    }

    #[inline(always)]
    fn sub(self, a: Halves, b: Halves) -> Halves {
        halves!(H => _mm256_sub_ps(a[H], b[H]))
    }

    #[inline(always)]
    fn mul(self, a: Halves, b: Halves) -> Halves {
        halves!(H => _mm256_mul_ps(a[H], b[H]))
    }

    #[inline(always)]
    fn div(self, a: Halves, b: Halves) -> Halves {
        halves!(H => _mm256_div_ps(a[H], b[H]))
    }

    #[inline(always)]
    fn min(self, a: Halves, b: Halves) -> Halves {
        halves!(H => _mm256_min_ps(a[H], b[H]))
    }

    #[inline(always)]
    fn max(self, a: Halves, b: Halves) -> Halves {
        halves!(H => _mm256_max_ps(a[H], b[H]))
    }

    #[inline(always)]
    fn mul_add(self, a: Halves, b: Halves, c: Halves) -> Halves {
        halves!(H => _mm256_fmadd_ps(a[H], b[H], c[H]))
    }

    #[inline(always)]
    fn round(self, a: Halves) -> Halves {
        halves!(H => _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[H]))
    }

    #[inline(always)]
    fn exp2_whole(self, a: Halves) -> Halves {
        halves!(H => {
            let biased = _mm256_add_epi32(_mm256_cvttps_epi32(a[H]), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn sum(self, a: Halves) -> f32 {
        // SAFETY: `self` is the proof that the processor has AVX2.
        unsafe { sum_of_8(_mm256_add_ps(a[0], a[1])) }
    }

    #[inline(always)]
    fn greatest(self, a: Halves) -> f32 {
        // SAFETY: `self` is the proof that the processor has AVX2.
        unsafe { greatest_of_8(_mm256_max_ps(a[0], a[1])) }
    }
}

/// Returns the greatest of eight lanes.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
pub(super) unsafe fn greatest_of_8(a: __m256) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        let of_4 = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let of_2 = _mm_max_ps(of_4, _mm_movehl_ps(of_4, of_4));
        _mm_cvtss_f32(_mm_max_ss(of_2, _mm_shuffle_ps::<1>(of_2, of_2)))
    }
}

/// Adds eight lanes, as the lower three levels of the tree: lane i is added to i + 4, i + 2, i + 1.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
pub(super) unsafe fn sum_of_8(a: __m256) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        let of_4 = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let of_2 = _mm_add_ps(of_4, _mm_movehl_ps(of_4, of_4));
        _mm_cvtss_f32(_mm_add_ss(of_2, _mm_shuffle_ps::<1>(of_2, of_2)))
    }
}
