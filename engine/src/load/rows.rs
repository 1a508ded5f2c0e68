//! The rows of a matrix, read one by one: out of memory, or generated at each read.

use kernels::cpu::number::bf16_to_f32;
use kernels::cpu::random::RandomNumbers;
use kernels::cpu::{Format, Matrix, Processor};

/// The number of random numbers that are generated at a time.
const GENERATED_AT_ONCE: usize = 1024;

/// A matrix whose rows may be read by several threads. Random rows take no memory.
#[derive(Clone, Debug)]
pub enum SourceRows {
    Stored(Matrix),
    Random { numbers: RandomNumbers, cols: usize },
}

impl SourceRows {
    pub fn format(&self) -> Format {
        match self {
            Self::Stored(matrix) => matrix.format(),
            Self::Random { .. } => Format::Bf16,
        }
    }

    pub fn cols(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.cols(),
            Self::Random { cols, .. } => *cols,
        }
    }

    /// Returns the matrix if it is in memory in this format.
    pub fn stored_as(&self, format: Format) -> Option<&Matrix> {
        match self {
            Self::Stored(matrix) if matrix.format() == format => Some(matrix),
            _ => None,
        }
    }

    /// Widens one row into `to`, on the calling thread.
    ///
    /// # Panics
    /// If the row does not exist, or `to` has another length.
    pub fn read_row(&self, row: usize, to: &mut [f32], processor: &Processor) {
        let (numbers, cols) = match self {
            Self::Stored(matrix) => return matrix.read_row(row, to),
            Self::Random { numbers, cols } => (*numbers, *cols),
        };
        assert_eq!(to.len(), cols);
        let mut narrow = [0; GENERATED_AT_ONCE];
        for (nth, to) in to.chunks_mut(GENERATED_AT_ONCE).enumerate() {
            let narrow = &mut narrow[..to.len()];
            processor.fill_random(numbers, row * cols + nth * GENERATED_AT_ONCE, narrow);
            for (to, narrow) in to.iter_mut().zip(narrow) {
                *to = bf16_to_f32(*narrow);
            }
        }
    }
}
