//! Puts matrices into their places on the GPU: a rank's part, with padding, in bf16 or FP8.
//!
//! All threads work on the rows of all matrices of a call, so a layer's experts are loaded in few calls: one expert's
//! matrix is too small to be divided.

use device::cuda::{Bf16, ViewMut};
use kernels::cpu::Format;
use kernels::cuda::{DummyRows, Fp8Rows, Fp8RowsMut, Fp8Scales};

use super::{Loader, MatrixPart, MatrixShape, Origin, PaddedDimension, ShardRange, halves};
use crate::backend::cuda::fp8::{self, PackedRows};
use crate::backend::cuda::weights::Rows;
use crate::error::{LoadError, OpenError};
use crate::load::{SourceRows, TensorSource, dummy};

/// Where the rows and columns of a matrix are on the GPU: its row or column for each place, and `None` for zeroes.
struct Places {
    rows: Vec<Option<usize>>,
    columns: Vec<Option<usize>>,
}

impl Loader<'_> {
    /// Writes the rank's part of a matrix of `shape` to `to`, and zeroes in the rest of `to`.
    pub(super) fn put_matrix(
        &mut self,
        to: Rows<'_>,
        name: &str,
        shape: MatrixShape,
        part: MatrixPart,
    ) -> Result<(), OpenError> {
        self.put_matrices(to, &[name.to_owned()], shape, part)
    }

    /// Writes the rank's parts of matrices of the same shape to `to`, one after the other, each in an equal share of
    /// `to`.
    pub(super) fn put_matrices(
        &mut self,
        to: Rows<'_>,
        names: &[String],
        shape: MatrixShape,
        part: MatrixPart,
    ) -> Result<(), OpenError> {
        let padded = if self.heads.are_padded() { part.padded } else { PaddedDimension::Neither };
        let part = MatrixPart { padded, ..part };
        let mut to = match to {
            Rows::Bf16(to) => to,
            Rows::Fp8(to) => return self.put_fp8(to, names, shape, &part),
        };
        let of_each = to.len() / names.len().max(1);
        for (nth, name) in names.iter().enumerate() {
            let to = to.reborrow().slice(nth * of_each..(nth + 1) * of_each);
            self.put_bf16(to, name, shape, &part)?;
        }
        Ok(())
    }

    fn put_bf16(
        &mut self,
        to: ViewMut<'_, Bf16>,
        name: &str,
        shape: MatrixShape,
        part: &MatrixPart,
    ) -> Result<(), OpenError> {
        let MatrixShape { rows, cols } = shape;
        let width = match part.range {
            ShardRange::Rows(_) => cols,
            ShardRange::Columns(_) => to.len() / rows,
        };
        let source = match self.origin {
            Origin::Host(source) => source.rows(name, rows, cols)?,
            Origin::Card { seed } => {
                self.upload.count(to.len());
                let random = dummy::numbers(seed, name, cols);
                return Ok(self.card().dummy_rows(to, width, random, &part.range.rows_of(shape))?);
            }
        };
        if let Some(matrix) = source.stored_as(Format::Bf16)
            && part.padded == PaddedDimension::Neither
        {
            let put = match part.range.clone() {
                ShardRange::Rows(rows) => {
                    self.upload.put_bytes(to, &matrix.bytes()[2 * rows.start * cols..2 * rows.end * cols])
                }
                ShardRange::Columns(columns) => {
                    self.upload.put_columns(to, matrix.bytes(), cols, columns, width)
                }
            };
            return Ok(put?);
        }
        let Places { rows, columns } = self.places(part, shape, to.len() / width.max(1), width);
        let host = self.upload.host();
        Ok(self.upload.put_rows(to, width, |first, numbers| {
            let mut wide = vec![0.0; cols];
            for (row, numbers) in rows[first..].iter().zip(numbers.chunks_mut(width)) {
                let Some(row) = row else {
                    numbers.fill(Bf16::default());
                    continue;
                };
                source.read_row(*row, &mut wide, host);
                for (number, column) in numbers.iter_mut().zip(&columns) {
                    *number = column.map_or(Bf16::default(), |column| Bf16::from(wide[column]));
                }
            }
        })?)
    }

    /// Like [`put_matrices`](Self::put_matrices), in FP8. Other formats are quantized, in whole rows, so that the
    /// scales do not depend on the rank.
    fn put_fp8(
        &mut self,
        to: Fp8RowsMut<'_>,
        names: &[String],
        shape: MatrixShape,
        part: &MatrixPart,
    ) -> Result<(), OpenError> {
        let source = match self.origin {
            Origin::Host(source) => source,
            Origin::Card { seed } => return self.make_up_fp8(to, seed, names, shape, part),
        };
        let Fp8RowsMut { numbers, scales, scaling, k } = to;
        let host = self.upload.host();
        let read = |name: &String| self.read_fp8(source, name, shape, scaling);
        let sources = names.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let n_rows = numbers.len() / Fp8Rows::width(k).max(1) / names.len().max(1);
        let Places { rows, columns } = self.places(part, shape, n_rows, k);
        let packed = PackedRows::new(host, sources, scaling, rows, &columns);
        self.upload
            .put_rows(numbers.halves(), packed.width() / 2, |first, pairs| packed.fill(first, pairs))?;
        let in_halves: Vec<Bf16> = halves(&packed.scales()).collect();
        self.upload.put(scales.halves(), &in_halves)?;
        match packed.nth_with_nan() {
            Some(nth) => Err(LoadError::NoNumber { tensor: names[nth].clone() }.into()),
            None => Ok(()),
        }
    }

    /// Lets the GPU generate the rank's parts of matrices in FP8.
    fn make_up_fp8(
        &mut self,
        to: Fp8RowsMut<'_>,
        seed: u64,
        names: &[String],
        shape: MatrixShape,
        part: &MatrixPart,
    ) -> Result<(), OpenError> {
        let Fp8RowsMut { mut numbers, mut scales, scaling, k } = to;
        let [of_numbers, of_scales] = [numbers.len(), scales.len()].map(|len| len / names.len().max(1));
        let rows = part.range.rows_of(shape);
        for (nth, name) in names.iter().enumerate() {
            let to = Fp8RowsMut {
                numbers: numbers.reborrow().slice(nth * of_numbers..(nth + 1) * of_numbers),
                scales: scales.reborrow().slice(nth * of_scales..(nth + 1) * of_scales),
                scaling,
                k,
            };
            self.card().dummy_fp8(to, dummy::numbers(seed, name, shape.cols), &rows)?;
        }
        self.upload.count(numbers.len() / size_of::<Bf16>());
        Ok(())
    }

    /// Reads a matrix that becomes one in FP8. A stored matrix is quantized by blocks here. Rows
    /// and random matrices are quantized when they are packed.
    fn read_fp8(
        &self,
        source: &dyn TensorSource,
        name: &str,
        shape: MatrixShape,
        scaling: Fp8Scales,
    ) -> Result<SourceRows, LoadError> {
        let MatrixShape { rows, cols } = shape;
        match (scaling, source.rows(name, rows, cols)?) {
            (Fp8Scales::OfBlocks, SourceRows::Stored(matrix)) if matrix.format() != Format::Fp8Blocks => {
                let in_blocks = self.upload.host().quantize_fp8_blocks(&matrix);
                in_blocks.map(SourceRows::Stored).map_err(LoadError::Memory)
            }
            (_, rows) => Ok(rows),
        }
    }

    /// Returns the places of the rank's part of a matrix in `n_rows` rows of `n_columns` numbers.
    fn places(&self, part: &MatrixPart, shape: MatrixShape, n_rows: usize, n_columns: usize) -> Places {
        let DummyRows { rows, columns, .. } = part.range.rows_of(shape);
        let place = |of, nth| if part.padded == of { self.heads.place(nth) } else { nth };
        Places {
            rows: fp8::spread(rows, n_rows, |nth| place(PaddedDimension::Rows, nth)),
            columns: fp8::spread(columns, n_columns, |nth| place(PaddedDimension::Columns, nth)),
        }
    }
}

impl ShardRange {
    /// Returns the rows and columns of a matrix of `shape`.
    pub(super) fn rows_of(&self, shape: MatrixShape) -> DummyRows {
        let (rows, columns) = match self.clone() {
            Self::Rows(rows) => (rows, 0..shape.cols),
            Self::Columns(columns) => (0..shape.rows, columns),
        };
        DummyRows { cols: shape.cols, rows, columns }
    }
}
