//! Hot path.
//! Sixteen lanes of f32: the vector type of every kernel, on every processor.
//!
//! A kernel is written once, over [`Simd`], and compiled for each instruction set. Each lane operation is a
//! single IEEE 754 operation, fused only if its name says so, and [`Simd::sum`] adds the lanes in one fixed
//! tree. So all processors give the same bits, and a sequence may move from a node with AVX-512 to one
//! without.

use std::fmt;

use super::number::f8_to_f16_256th;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512Bf16, Bf16Kernel};

/// The number of lanes of a vector.
pub(super) const LANES: usize = 16;

/// Sums products in sixteen lanes, as a dot product needs.
pub(super) trait Accumulate: Copy + Send + Sync {
    /// A vector of sixteen running sums, or of sixteen factors.
    type Floats: Copy;
    /// The size of tiles that suits the registers.
    const TILES: Tiles;

    fn zero(self) -> Self::Floats;
    fn load_sums(self, from: &[f32; LANES]) -> Self::Floats;
    fn store_sums(self, sums: Self::Floats, to: &mut [f32; LANES]);
    /// Computes `a * b + sums`.
    fn accumulate(self, a: Self::Floats, b: Self::Floats, sums: Self::Floats) -> Self::Floats;

    /// Prefetches the memory at `from`. Never faults, and changes nothing.
    #[inline(always)]
    fn prefetch<T>(self, from: *const T) {
        let _ = from;
    }
}

/// The sizes of tiles, rows by columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tiles {
    /// Sixteen registers of eight lanes: 2 by 3.
    Small,
    /// Thirty-two registers of sixteen: 4 by 6.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "used by AVX-512"))]
    Large,
}

/// An instruction set that this processor has. A value of the type proves it.
pub(super) trait Simd: Accumulate {
    fn splat(self, value: f32) -> Self::Floats;
    fn load(self, from: &[f32; LANES]) -> Self::Floats;
    /// Widens sixteen bf16 numbers.
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Floats;
    /// Widens sixteen f16 numbers.
    fn load_f16(self, from: &[u16; LANES]) -> Self::Floats;
    /// Widens sixteen 8-bit integers.
    fn load_i8(self, from: &[i8; LANES]) -> Self::Floats;
    /// Widens sixteen 8-bit floating-point numbers.
    #[inline(always)]
    fn load_f8(self, from: &[u8; LANES]) -> Self::Floats {
        let mut halves = [0; LANES];
        for (half, narrow) in halves.iter_mut().zip(from) {
            *half = f8_to_f16_256th(*narrow);
        }
        self.mul(self.load_f16(&halves), self.splat(256.0))
    }
    fn store(self, value: Self::Floats, to: &mut [f32; LANES]);

    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Computes `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::Floats) -> Self::Floats;
    /// Computes 2 to the power of `a`, which is an integer between -126 and 127.
    fn exp2_whole(self, a: Self::Floats) -> Self::Floats;
    /// Adds all lanes as a tree: lane i to lane i + 8, then to i + 4, i + 2, i + 1.
    fn sum(self, a: Self::Floats) -> f32;

    /// Adds the lanes of each vector, by the same tree as [`Simd::sum`]. Lane i of the result belongs to
    /// vector i.
    #[inline(always)]
    fn sums(self, vectors: &[[f32; LANES]; LANES]) -> Self::Floats {
        let mut sums = [0.0; LANES];
        for (sum, vector) in sums.iter_mut().zip(vectors) {
            *sum = self.sum(self.load(vector));
        }
        self.load(&sums)
    }
    /// Returns the greatest lane.
    fn greatest(self, a: Self::Floats) -> f32;
}

/// Work that is written once and compiled for every instruction set.
///
/// `run` and everything that it calls with `simd` must be `#[inline(always)]`. Otherwise it is not compiled
/// for the instruction set of `simd`.
pub(super) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The instruction set that the kernels use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

// === impl Isa ===

impl Isa {
    /// Returns the best instruction set of this processor.
    pub fn best() -> Self {
        Self::all().last().copied().unwrap_or(Self(Kind::Portable(portable::Portable)))
    }

    /// Returns all instruction sets of this processor, the best one last. They give the same results and
    /// differ in speed.
    pub fn all() -> Vec<Self> {
        #[cfg_attr(
            not(target_arch = "x86_64"),
            expect(unused_mut, reason = "other processors have no more kinds")
        )]
        let mut found = vec![Kind::Portable(portable::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(avx2::Avx2::detect().map(Kind::Avx2));
            found.extend(avx512::Avx512::detect().map(Kind::Avx512));
        }
        found.into_iter().map(Self).collect()
    }

    pub fn as_str(self) -> &'static str {
        match self.0 {
            Kind::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
        }
    }

    /// Runs a kernel, compiled for this instruction set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Kind::Portable(simd) => kernel.run(simd),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => simd.run(kernel),
        }
    }

    /// Returns the bf16 dot product instruction, if this instruction set and the processor have it.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn bf16(self) -> Option<Avx512Bf16> {
        match self.0 {
            Kind::Avx512(simd) => Avx512Bf16::detect(simd),
            _ => None,
        }
    }

    /// Returns whether there is an instruction for bf16 products.
    pub fn has_bf16_products(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.bf16().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
