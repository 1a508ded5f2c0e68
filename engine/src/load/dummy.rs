//! Random weights, so that the config alone is enough for speed measurements.

use kernels::cpu::number::u16s_mut;
use kernels::cpu::random::{RandomNumbers, mix};
use kernels::cpu::{Format, Matrix, Processor, SharedBytes};

use super::rows::SourceRows;
use super::weights::TensorSource;
use crate::error::LoadError;

/// The number of numbers in one part of the work.
const PART_NUMBERS: usize = 1 << 16;

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
        let random = numbers(self.seed, name, cols);
        let bytes = SharedBytes::filled(rows * cols * 2, |bytes| {
            let numbers = u16s_mut(bytes).expect("the memory is aligned");
            self.processor.pool().run_on(numbers, PART_NUMBERS, |nth, numbers| {
                self.processor.fill_random(random, nth * PART_NUMBERS, numbers);
            });
        });
        let bytes = bytes.map_err(LoadError::Memory)?;
        Ok(Matrix::new(bytes, rows, cols, Format::Bf16).expect("the bytes have the size of the matrix"))
    }

    fn rows(&self, name: &str, _rows: usize, cols: usize) -> Result<SourceRows, LoadError> {
        Ok(SourceRows::Random { numbers: numbers(self.seed, name, cols), cols })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        Ok(vector(name, len))
    }

    fn fp8_format(&self, _name: &str) -> Option<Format> {
        None
    }
}

/// Returns the random numbers of a matrix of `cols` columns.
pub fn numbers(seed: u64, name: &str, cols: usize) -> RandomNumbers {
    RandomNumbers { key: key(seed, name), scale: scale(cols) }
}

/// Returns a vector of random weights: norms are ones, and biases are zeroes.
pub fn vector(name: &str, len: usize) -> Vec<f32> {
    vec![if name.ends_with("bias") { 0.0 } else { 1.0 }; len]
}

/// Returns the random key of one matrix.
fn key(seed: u64, name: &str) -> u64 {
    mix(seed ^ name.bytes().fold(0, |key, byte| mix(key ^ u64::from(byte))))
}

/// Returns the factor for 16 random bits as an integer.
///
/// A uniform distribution between plus and minus the root of 3 / cols has the variance 1 / cols.
fn scale(cols: usize) -> f32 {
    (3.0 / cols as f32).sqrt() / 32768.0
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

    #[test]
    fn rows_are_those_of_the_matrix() {
        let processor = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
        let dummy = Dummy { seed: 3, processor: &processor };
        // The rows of 1,501 numbers begin within a draw.
        for (rows, cols) in [(5, 1501), (3, 64), (4, 2)] {
            let matrix = dummy.matrix("a", rows, cols).expect("memory");
            let source = dummy.rows("a", rows, cols).expect("random rows");
            assert_eq!(source.format(), matrix.format());
            let (mut expected, mut found) = (vec![0.0; cols], vec![9.0; cols]);
            for row in 0..rows {
                matrix.read_row(row, &mut expected);
                source.read_row(row, &mut found, &processor);
                assert_eq!(found, expected, "row {row} of {cols}");
            }
        }
    }

    /// The numbers of the first version, so that the weights of a seed stay the same.
    #[test]
    fn a_seed_has_the_weights_of_the_first_version() {
        let made = made(7, "model.layers.0.mlp.down_proj.weight", 2);
        let numbers = made.as_chunks::<2>().0[..8].iter().map(|bytes| u16::from_le_bytes(*bytes));
        assert_eq!(
            numbers.collect::<Vec<_>>(),
            [0x3C37, 0x3C88, 0xBD41, 0xBB56, 0xBD15, 0x3D45, 0x3C7E, 0xBD19]
        );
    }
}
