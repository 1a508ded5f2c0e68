//! The CPU with its instruction set and its threads.

use std::io;
use std::num::NonZero;

use super::number::f32_to_bf16;
use super::pool::Pool;
use super::simd::{Isa, Kernel, Simd};

/// The CPU. Every CPU kernel is a method of this type.
#[derive(Debug)]
pub struct Processor {
    isa: Isa,
    arithmetic: Arithmetic,
    pool: Pool,
}

/// The arithmetic of matrix products with bf16 weights. All other arithmetic is f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// Weights are widened exactly and multiplied by f32 activations.
    #[default]
    F32,
    /// Activations are rounded to bf16 and multiplied by the CPU's bf16 instruction, twice as fast as f32.
    /// Without such an instruction, this is the same as `F32`.
    Bf16,
}

impl Processor {
    /// Makes a processor with the best instruction set of this CPU. `threads` includes the calling thread.
    pub fn new(arithmetic: Arithmetic, threads: NonZero<usize>) -> io::Result<Self> {
        Self::with_isa(Isa::best(), arithmetic, threads)
    }

    pub fn with_isa(isa: Isa, arithmetic: Arithmetic, threads: NonZero<usize>) -> io::Result<Self> {
        let arithmetic = if isa.has_bf16_products() { arithmetic } else { Arithmetic::F32 };
        Ok(Self { isa, arithmetic, pool: Pool::new(threads)? })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns the arithmetic in use: `F32` if the CPU has no bf16 instruction.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn multiplies_bf16(&self) -> bool {
        self.arithmetic == Arithmetic::Bf16
    }

    /// Rounds each number to bf16.
    pub(super) fn narrow(&self, wide: &[f32], narrow: &mut [u16]) {
        assert_eq!(wide.len(), narrow.len());
        self.isa.run(NarrowKernel { wide, narrow });
    }
}

struct NarrowKernel<'a> {
    wide: &'a [f32],
    narrow: &'a mut [u16],
}

impl Kernel for NarrowKernel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        for (narrow, wide) in self.narrow.iter_mut().zip(self.wide) {
            *narrow = f32_to_bf16(*wide);
        }
    }
}
