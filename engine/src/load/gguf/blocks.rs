//! The types of a GGUF file's tensors, and their numbers as they are handed on: as they are, or dequantized to bf16.

use std::num::NonZero;

use kernels::cpu::number::{f32_to_bf16, u16s_mut};
use kernels::cpu::{Format, SharedBytes};

/// The types that are read.
const READ: &str = "F32, F16, BF16, Q8_0, Q4_K, Q5_K and Q6_K";
/// The names of llama.cpp's other types, by number.
const OTHERS: &[(u32, &str)] = &[
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];
const WITHOUT_FEATURE: &str =
    "quantized tensors need an executable that is built with the cargo feature `gguf`, as that in the image";
/// About how many numbers are dequantized at once: candle copies the blocks and makes f32 of them.
const PIECE_NUMBERS: usize = 1 << 18;
/// The most threads for one tensor. More would wait for memory.
const THREADS_MAX: usize = 16;

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::load) enum StoredAs {
    Plain(Format),
    Blocks(Blocks),
}

/// A type of blocks, whose numbers share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::load) enum Blocks {
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// Why a tensor's numbers could not be read.
#[derive(Debug)]
pub(in crate::load) enum BlocksError {
    Memory(std::io::Error),
    Dequantize(String),
}

impl Blocks {
    /// Returns the numbers of a block, and its bytes.
    pub(super) fn size(self) -> (usize, usize) {
        match self {
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
        }
    }

    /// Dequantizes whole blocks.
    #[cfg(feature = "gguf")]
    fn numbers(self, bytes: &[u8], n_numbers: usize) -> Result<Vec<f32>, String> {
        use candle_core::CpuStorage;
        use candle_core::quantized::GgmlDType;
        let kind = match self {
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q5K => GgmlDType::Q5K,
            Self::Q6K => GgmlDType::Q6K,
        };
        match kind.from_data(bytes.into()).dequantize(n_numbers) {
            Ok(CpuStorage::F32(numbers)) => Ok(numbers),
            Ok(_) => Err("candle made no f32".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[cfg(not(feature = "gguf"))]
    fn numbers(self, _bytes: &[u8], _n_numbers: usize) -> Result<Vec<f32>, String> {
        Err(WITHOUT_FEATURE.to_owned())
    }
}

impl StoredAs {
    pub(super) fn of(kind: u32) -> Result<Self, String> {
        Ok(match kind {
            0 => Self::Plain(Format::F32),
            1 => Self::Plain(Format::F16),
            30 => Self::Plain(Format::Bf16),
            8 => Self::in_blocks("Q8_0", Blocks::Q8_0)?,
            12 => Self::in_blocks("Q4_K", Blocks::Q4K)?,
            13 => Self::in_blocks("Q5_K", Blocks::Q5K)?,
            14 => Self::in_blocks("Q6_K", Blocks::Q6K)?,
            _ => {
                let name = OTHERS.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name);
                let name = name.map_or_else(|| format!("type {kind}"), str::to_owned);
                return Err(format!("is of {name}, which is not implemented: {READ} are"));
            }
        })
    }

    fn in_blocks(name: &str, blocks: Blocks) -> Result<Self, String> {
        match cfg!(feature = "gguf") {
            true => Ok(Self::Blocks(blocks)),
            false => Err(format!("is of {name}: {WITHOUT_FEATURE}")),
        }
    }

    /// Returns the type of the numbers that are handed on.
    pub(in crate::load) fn format(self) -> Format {
        match self {
            Self::Plain(format) => format,
            Self::Blocks(_) => Format::Bf16,
        }
    }

    /// Returns the bytes of a tensor.
    pub(super) fn bytes(self, shape: &[usize]) -> Result<usize, String> {
        let cols = *shape.last().expect("a tensor has a dimension");
        let rows = shape[..shape.len() - 1].iter().try_fold(1_usize, |rows, count| rows.checked_mul(*count));
        rows.and_then(|rows| rows.checked_mul(self.row_bytes(cols)?))
            .ok_or_else(|| format!("has shape {shape:?}, and its type cannot have that many columns"))
    }

    /// Returns the bytes of a row; `None` if it is not a whole number of blocks.
    pub(super) fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Self::Plain(format) => format.bytes(1, cols),
            Self::Blocks(blocks) => {
                let (numbers, bytes) = blocks.size();
                cols.is_multiple_of(numbers).then_some(cols / numbers)?.checked_mul(bytes)
            }
        }
    }

    /// Reads the numbers of a matrix with rows of `cols` numbers. `row_at` returns the place in the file of each row.
    pub(super) fn read(
        self,
        bytes: &SharedBytes,
        cols: usize,
        row_at: Option<&(dyn Fn(usize) -> usize + Sync)>,
    ) -> Result<SharedBytes, BlocksError> {
        let row_bytes = self.row_bytes(cols).expect("the header was checked");
        match (self, row_at) {
            (Self::Plain(_), None) => Ok(bytes.clone()),
            (Self::Plain(_), Some(row_at)) => {
                let copied = SharedBytes::filled(bytes.len(), |to| {
                    for (row, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                        to.copy_from_slice(&bytes[row_at(row) * row_bytes..][..row_bytes]);
                    }
                });
                copied.map_err(BlocksError::Memory)
            }
            (Self::Blocks(blocks), row_at) => {
                let rows = Rows { bytes, cols, row_bytes, row_at: row_at.unwrap_or(&|row| row) };
                dequantized(blocks, rows)
            }
        }
    }
}

/// The rows of a matrix in blocks.
#[derive(Clone, Copy)]
struct Rows<'a> {
    bytes: &'a [u8],
    cols: usize,
    row_bytes: usize,
    /// Returns the place in the file of each row.
    row_at: &'a (dyn Fn(usize) -> usize + Sync),
}

fn dequantized(blocks: Blocks, rows: Rows<'_>) -> Result<SharedBytes, BlocksError> {
    let n_rows = rows.bytes.len() / rows.row_bytes;
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX);
    let rows_per_thread = n_rows.div_ceil(threads).max(PIECE_NUMBERS / rows.cols).max(1);
    let mut wrong = Ok(());
    let filled = SharedBytes::filled(n_rows * rows.cols * 2, |to| {
        let to = u16s_mut(to).expect("the memory is aligned");
        let parts = to.chunks_mut(rows_per_thread * rows.cols).enumerate();
        wrong = std::thread::scope(|scope| {
            let part = |(nth, to)| scope.spawn(move || rows.dequantize(blocks, nth * rows_per_thread, to));
            let running: Vec<_> = parts.map(part).collect();
            running.into_iter().try_for_each(|part| part.join().expect("it does not panic"))
        });
    });
    let filled = filled.map_err(BlocksError::Memory)?;
    wrong.map_err(BlocksError::Dequantize)?;
    Ok(filled)
}

impl Rows<'_> {
    /// Dequantizes the rows from `first` on into `to`, piece by piece.
    fn dequantize(self, blocks: Blocks, first: usize, to: &mut [u16]) -> Result<(), String> {
        let Self { bytes, cols, row_bytes, row_at } = self;
        let rows_per_piece = (PIECE_NUMBERS / cols).max(1);
        let mut piece = Vec::new();
        for (nth, to) in to.chunks_mut(rows_per_piece * cols).enumerate() {
            let first = first + nth * rows_per_piece;
            let rows = first..first + to.len() / cols;
            piece.clear();
            rows.for_each(|row| piece.extend_from_slice(&bytes[row_at(row) * row_bytes..][..row_bytes]));
            let numbers = blocks.numbers(&piece, to.len())?;
            for (to, number) in to.iter_mut().zip(numbers) {
                *to = f32_to_bf16(number);
            }
        }
        Ok(())
    }
}
