//! Random weights, so that the config alone is enough for speed measurements.

use kernels::cpu::number::{f32_to_bf16, u16s_mut};
use kernels::cpu::{Format, Matrix, Processor, SharedBytes};

use super::weights::TensorSource;
use crate::error::LoadError;

/// The number of numbers in one part of the work.
const PART_NUMBERS: usize = 1 << 18;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Random bf16 weights, equal for the same seed and name on every machine.
///
/// Their range keeps the size of activations constant through the layers. Norms are ones.
#[derive(Debug)]
pub struct Dummy<'a> {
    pub seed: u64,
    pub processor: &'a Processor,
}

impl TensorSource for Dummy<'_> {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        let (key, scale) = (key(self.seed, name), scale(cols));
        let bytes = SharedBytes::filled(rows * cols * 2, |bytes| {
            let numbers = u16s_mut(bytes).expect("the memory is aligned");
            self.processor.pool().run_on(numbers, PART_NUMBERS, |nth, numbers| {
                fill(numbers, key.wrapping_add((nth * PART_NUMBERS) as u64), scale);
            });
        });
        let bytes = bytes.map_err(LoadError::Memory)?;
        Ok(Matrix::new(bytes, rows, cols, Format::Bf16).expect("the bytes have the size of the matrix"))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        Ok(vector(name, len))
    }

    fn fp8_format(&self, _name: &str) -> Option<Format> {
        None
    }
}

/// Returns a vector of random weights: norms are ones, and biases are zeroes.
pub fn vector(name: &str, len: usize) -> Vec<f32> {
    vec![if name.ends_with("bias") { 0.0 } else { 1.0 }; len]
}

/// Returns the random key of one matrix.
pub fn key(seed: u64, name: &str) -> u64 {
    mix(seed ^ name.bytes().fold(0, |key, byte| mix(key ^ u64::from(byte))))
}

/// Returns the factor for 16 random bits as an integer.
///
/// A uniform distribution between plus and minus the root of 3 / cols has the variance 1 / cols.
pub fn scale(cols: usize) -> f32 {
    (3.0 / cols as f32).sqrt() / 32768.0
}

/// Fills `numbers`, four numbers from each draw.
fn fill(numbers: &mut [u16], key: u64, scale: f32) {
    for (nth, four) in numbers.chunks_mut(4).enumerate() {
        let mut draw = mix(key.wrapping_add(4 * nth as u64));
        for number in four {
            *number = f32_to_bf16(f32::from(draw as i16) * scale);
            draw >>= 16;
        }
    }
}

/// Applies the finalizer of SplitMix64: every input bit changes about half of the output bits.
fn mix(key: u64) -> u64 {
    let mut x = key.wrapping_add(1).wrapping_mul(GOLDEN);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use kernels::cpu::Arithmetic;

    use super::*;

    fn made(seed: u64, name: &str, threads: usize) -> Vec<u8> {
        let processor =
            Processor::new(Arithmetic::F32, NonZero::new(threads).expect("some")).expect("threads");
        let dummy = Dummy { seed, processor: &processor };
        dummy.matrix(name, 700, 900).expect("memory").bytes().to_vec()
    }

    #[test]
    fn seed_and_name_make_the_weights() {
        let one = made(1, "a", 1);
        assert_eq!(one, made(1, "a", 3), "whatever the threads");
        assert_ne!(one, made(2, "a", 1));
        assert_ne!(one, made(1, "b", 1));
    }
}
