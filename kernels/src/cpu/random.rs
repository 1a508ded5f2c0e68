//! Random bf16 numbers, each defined by its index: any part of them can be made alone, on any processor.

use super::number::f32_to_bf16;
use super::processor::Processor;
use super::simd::{Kernel, Simd};

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// The number of numbers that come from one draw of 64 bits.
const OF_DRAW: usize = 4;
/// The number of draws that one loop computes: they fit into the first-level cache.
const DRAWS: usize = 64;

/// A sequence of random numbers: 16 random bits as an integer, times `scale`.
#[derive(Clone, Copy, Debug)]
pub struct RandomNumbers {
    pub key: u64,
    pub scale: f32,
}

/// Applies the finalizer of SplitMix64: every input bit changes about half of the output bits.
#[inline(always)]
pub fn mix(key: u64) -> u64 {
    let mut x = key.wrapping_add(1).wrapping_mul(GOLDEN);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Processor {
    /// Writes the numbers from index `first` on, as bf16, on the calling thread.
    pub fn fill_random(&self, numbers: RandomNumbers, first: usize, to: &mut [u16]) {
        let RandomNumbers { key, scale } = numbers;
        let missing = first.next_multiple_of(OF_DRAW) - first;
        let (head, to) = to.split_at_mut(missing.min(to.len()));
        let start = (first - first % OF_DRAW) as u64;
        if missing > 0 {
            let mut four = [0; OF_DRAW];
            self.isa().run(FillRandom { key: key.wrapping_add(start), scale, to: &mut four });
            head.copy_from_slice(&four[OF_DRAW - missing..][..head.len()]);
        }
        let start = (first + missing) as u64;
        self.isa().run(FillRandom { key: key.wrapping_add(start), scale, to });
    }
}

struct FillRandom<'a> {
    key: u64,
    scale: f32,
    to: &'a mut [u16],
}

impl Kernel for FillRandom<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let Self { mut key, scale, to } = self;
        for block in to.chunks_mut(OF_DRAW * DRAWS) {
            let mut draws = [0; DRAWS];
            for (nth, draw) in draws.iter_mut().enumerate() {
                *draw = mix(key.wrapping_add((OF_DRAW * nth) as u64));
            }
            let (fours, rest) = block.as_chunks_mut::<OF_DRAW>();
            let bits = |draw: u64| [0, 16, 32, 48].map(|shift| (draw >> shift) as u16);
            rest.copy_from_slice(&bits(draws[fours.len() % DRAWS])[..rest.len()]);
            for (four, draw) in fours.iter_mut().zip(draws) {
                *four = bits(draw);
            }
            for number in block {
                *number = f32_to_bf16(f32::from(number.cast_signed()) * scale);
            }
            key = key.wrapping_add((OF_DRAW * DRAWS) as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;
    use crate::cpu::{Arithmetic, Isa};

    /// The definition: four numbers from each draw, the lowest bits first.
    fn number(numbers: RandomNumbers, nth: usize) -> u16 {
        let draw = mix(numbers.key.wrapping_add((nth / 4 * 4) as u64)) >> (nth % 4 * 16);
        f32_to_bf16(f32::from(draw as i16) * numbers.scale)
    }

    #[test]
    fn a_part_is_the_same_as_in_the_whole_with_every_instruction_set() {
        for (key, scale) in [(0, 1.0), (u64::MAX - 90, 1.3e-6), (0x1234_5678_9abc_def0, 3e-39)] {
            let numbers = RandomNumbers { key, scale };
            let expected: Vec<u16> = (0..3000).map(|nth| number(numbers, nth)).collect();
            for isa in Isa::all() {
                let cpu = Processor::with_isa(isa, Arithmetic::F32, NonZero::<usize>::MIN).unwrap();
                for (first, len) in
                    [(0, 3000), (0, 1), (1, 1), (1, 2), (2, 0), (3, 1030), (255, 513), (256, 7)]
                {
                    let mut to = vec![9; len];
                    cpu.fill_random(numbers, first, &mut to);
                    assert_eq!(to, expected[first..first + len], "{isa:?} {first} {len}");
                }
            }
        }
    }
}
