//! Hot path.
//! Sixteen lanes without a particular instruction set: the reference that the others must equal bit for bit.

use super::{Accumulate, LANES, Simd, Tiles};
use crate::cpu::number::{bf16_to_f32, f16_to_f32};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Accumulate for Portable {
    type Floats = [f32; LANES];
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
}

impl Simd for Portable {
    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Floats {
        *from
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> Self::Floats {
        each(|i| bf16_to_f32(from[i]))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Self::Floats {
        each(|i| f16_to_f32(from[i]))
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::Floats {
        each(|i| f32::from(from[i]))
    }

    #[inline(always)]
    fn store(self, value: Self::Floats, to: &mut [f32; LANES]) {
        *to = value;
    }

    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        each(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn round(self, a: Self::Floats) -> Self::Floats {
        each(|i| a[i].round_ties_even())
    }

    #[inline(always)]
    fn exp2_whole(self, a: Self::Floats) -> Self::Floats {
        each(|i| f32::from_bits(((a[i] as i32 + 127) << 23) as u32))
    }

    #[inline(always)]
    fn sum(self, a: Self::Floats) -> f32 {
        let mut lanes = a;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    #[inline(always)]
    fn greatest(self, a: Self::Floats) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}
