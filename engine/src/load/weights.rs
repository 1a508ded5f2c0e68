//! The decoder's view of a checkpoint: tensors by name, under a prefix.

use std::cell::RefCell;
use std::fmt::Debug;

use kernels::cpu::{Format, Matrix, Processor};

use super::rows::SourceRows;
use crate::error::LoadError;
use crate::model::ActivationFormat;

/// A source of tensors by name.
pub trait TensorSource: Debug {
    /// Reads a matrix in the number type of its source.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError>;

    /// Returns the rows of a matrix, for a reader that needs each row once. Those of a file are not copied.
    fn rows(&self, name: &str, rows: usize, cols: usize) -> Result<SourceRows, LoadError> {
        self.matrix(name, rows, cols).map(SourceRows::Stored)
    }

    /// Reads a vector in f32: norms and biases, which are small.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError>;

    /// Returns the format of a matrix that the source has in FP8; `None` for all others.
    fn fp8_format(&self, name: &str) -> Option<Format>;
}

/// The quantization of matrices during loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Quantize {
    /// No quantization: matrices stay in the file's mapped pages.
    #[default]
    No,
    /// 8 bits for each weight: half the memory traffic of bf16, with a loss of accuracy.
    Q8,
    /// The layers' matrices in FP8, with a scale for each row. The embedding and the output layer are not
    /// quantized.
    Fp8,
}

impl Quantize {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Q8 => "q8",
            Self::Fp8 => "fp8",
        }
    }
}

/// The setting for the input of products with FP8 matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Activations {
    /// In FP8 if the checkpoint was made for that.
    #[default]
    Auto,
    Full,
    Fp8,
}

/// Whether any matrix of a model is in FP8.
#[derive(Clone, Copy, Debug)]
pub struct HasFp8(pub bool);

/// Whether any matrix of a model has a scale for each block.
#[derive(Clone, Copy, Debug)]
pub struct HasBlocks(pub bool);

impl HasBlocks {
    /// Adds block scales to a description of the weights, for the fingerprint. Other scales add nothing, as in the
    /// fingerprints of older versions.
    pub fn added_to(self, weights: String) -> String {
        if self.0 { format!("{weights}, scales by 128x128") } else { weights }
    }
}

impl Activations {
    /// Returns the format of activations of a model. Fails if FP8 is wanted and no matrix is in FP8.
    pub fn resolve(
        self,
        of_checkpoint: ActivationFormat,
        has_fp8: HasFp8,
    ) -> Result<ActivationFormat, LoadError> {
        match (self, has_fp8) {
            (Self::Auto, HasFp8(true)) => Ok(of_checkpoint),
            (Self::Auto, HasFp8(false)) | (Self::Full, _) => Ok(ActivationFormat::Full),
            (Self::Fp8, HasFp8(true)) => Ok(ActivationFormat::Fp8),
            (Self::Fp8, HasFp8(false)) => Err(LoadError::Activations),
        }
    }
}

/// The tensors whose names start with a prefix.
#[derive(Clone, Debug)]
pub struct Weights<'a> {
    source: &'a dyn TensorSource,
    processor: &'a Processor,
    quantize: Quantize,
    prefix: String,
    seen: &'a LoadedFormats,
}

/// The format and bytes of each loaded matrix.
#[derive(Clone, Debug, Default)]
pub struct LoadedFormats(RefCell<Vec<(Format, usize)>>);

impl<'a> Weights<'a> {
    pub fn new(
        source: &'a dyn TensorSource,
        processor: &'a Processor,
        quantize: Quantize,
        seen: &'a LoadedFormats,
    ) -> Self {
        Self { source, processor, quantize, prefix: String::new(), seen }
    }

    /// Returns the tensors under `name`, as in `model.layers.0`.
    pub fn under(&self, name: &str) -> Self {
        Self { prefix: self.name(name), ..self.clone() }
    }

    /// Loads a layer's matrix, in the wanted quantization.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        self.quantized(self.quantize, name, rows, cols)
    }

    /// Loads a matrix in f32, never quantized: a router's, because a rounded score may choose another expert.
    pub fn in_f32(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        let matrix = self.source.matrix(&self.name(name), rows, cols)?;
        let wide = matrix.in_f32(1.0).map_err(LoadError::Memory)?;
        self.seen.0.borrow_mut().push((Format::F32, wide.bytes().len()));
        Ok(wide)
    }

    /// Loads the embedding or the output layer, with one row for each token.
    pub fn vocabulary(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        let quantize = match self.quantize {
            Quantize::No | Quantize::Fp8 => Quantize::No,
            Quantize::Q8 => Quantize::Q8,
        };
        self.quantized(quantize, name, rows, cols)
    }

    fn quantized(
        &self,
        quantize: Quantize,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, LoadError> {
        let matrix = self.source.matrix(&self.name(name), rows, cols)?;
        let matrix = match quantize {
            Quantize::No => matrix,
            Quantize::Fp8 if matrix.format().is_fp8() => matrix,
            Quantize::Fp8 => self.processor.quantize_fp8(&matrix).map_err(LoadError::Memory)?,
            Quantize::Q8 => self.processor.quantize(&matrix).map_err(LoadError::Memory)?,
        };
        self.seen.0.borrow_mut().push((matrix.format(), matrix.bytes().len() + size_of_val(matrix.scales())));
        Ok(matrix)
    }

    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        self.source.vector(&self.name(name), len)
    }

    fn name(&self, end: &str) -> String {
        if self.prefix.is_empty() { end.to_owned() } else { format!("{}.{end}", self.prefix) }
    }
}

impl LoadedFormats {
    /// Returns the bytes of each format of the matrices.
    pub fn bytes_by_format(&self) -> Vec<(Format, usize)> {
        let mut sums: Vec<(Format, usize)> = Vec::new();
        for (format, bytes) in self.0.borrow().iter() {
            match sums.iter_mut().find(|(known, _)| known == format) {
                Some((_, sum)) => *sum += bytes,
                None => sums.push((*format, *bytes)),
            }
        }
        sums
    }

    /// Adds the matrices that another process has loaded.
    pub fn add(&self, others: &[(Format, usize)]) {
        self.0.borrow_mut().extend_from_slice(others);
    }

    /// Returns the bytes of all loaded matrices.
    pub fn bytes(&self) -> usize {
        self.0.borrow().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns whether any matrix is in FP8.
    pub fn has_fp8(&self) -> HasFp8 {
        HasFp8(self.0.borrow().iter().any(|one| one.0.is_fp8()))
    }

    /// Returns whether any matrix has block scales.
    pub fn has_blocks(&self) -> HasBlocks {
        HasBlocks(self.0.borrow().iter().any(|one| one.0 == Format::Fp8Blocks))
    }

    /// Returns the number format of most of the loaded bytes.
    pub fn main_format(&self) -> Option<Format> {
        let seen = self.0.borrow();
        let bytes_of =
            |format: Format| seen.iter().filter(|one| one.0 == format).map(|one| one.1).sum::<usize>();
        seen.iter().map(|one| one.0).max_by_key(|format| bytes_of(*format))
    }
}
