//! All weights of a folder: one safetensors file, several files with an index, or one GGUF file.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use kernels::cpu::{FP8_BLOCK, Format, Matrix, WrongSize};
use serde::Deserialize;

use super::gguf;
use super::safetensors::{TensorBytes, TensorFile};
use super::stacked::StackedPlace;
use super::weights::TensorSource;
use crate::error::LoadError;

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a folder. The files stay mapped while one of their matrices is in use.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Vec<TensorFile>,
    /// The file of each tensor, from the index. Empty without an index.
    index: HashMap<String, usize>,
}

#[derive(Debug, Deserialize)]
struct RawIndex {
    weight_map: HashMap<String, String>,
}

/// Returns whether `folder` has weights as safetensors.
pub(super) fn has_safetensors(folder: &Path) -> bool {
    [WHOLE, INDEX].iter().any(|name| folder.join(name).exists())
}

impl Checkpoint {
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        // One file comes before an index, which may be of an older checkpoint. `transformers` does the same.
        let is_indexed = folder.join(INDEX).exists() && !folder.join(WHOLE).exists();
        if is_indexed { Self::indexed(folder) } else { Self::whole(folder) }
    }

    fn whole(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join(WHOLE);
        let file = match gguf::find(folder)? {
            Some(gguf) => TensorFile::open_gguf(&gguf)?,
            None if path.exists() => TensorFile::open(&path)?,
            None => return Err(LoadError::NoWeights { folder: folder.to_owned() }),
        };
        Ok(Self { folder: folder.to_owned(), files: vec![file], index: HashMap::new() })
    }

    fn indexed(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join(INDEX);
        let bytes = std::fs::read(&path).map_err(|source| LoadError::Read { path: path.clone(), source })?;
        let raw: RawIndex = serde_json::from_slice(&bytes)
            .map_err(|error| LoadError::Header { path, reason: error.to_string() })?;
        let names: BTreeSet<&String> = raw.weight_map.values().collect();
        let files = names.iter().map(|name| TensorFile::open(&folder.join(name)));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let nth: HashMap<&String, usize> = names.into_iter().zip(0..).collect();
        let index = raw.weight_map.iter().map(|(tensor, file)| (tensor.clone(), nth[file])).collect();
        Ok(Self { folder: folder.to_owned(), files, index })
    }

    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// Returns the file that should contain a tensor; `None` if the index does not name the tensor.
    fn file(&self, tensor: &str) -> Option<&TensorFile> {
        match self.index.is_empty() {
            true => self.files.first(),
            false => self.index.get(tensor).map(|nth| &self.files[*nth]),
        }
    }

    /// Returns a tensor's shape; `None` if there is no such tensor.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.file(name)?.shape(name).map(<[usize]>::to_vec)
    }

    /// Reads all numbers of a tensor of any shape. Also returns its file.
    pub(super) fn numbers(&self, name: &str) -> Result<(Vec<f32>, &Path), LoadError> {
        let (tensor, file) = self.tensor(name)?;
        let len = tensor.shape.iter().product();
        let numbers = numbers(name, file, TensorBytes { shape: vec![len], ..tensor }, len)?;
        Ok((numbers, file.path()))
    }

    /// Reads the matrix of one expert out of a tensor with those of all experts.
    fn stacked(&self, place: &StackedPlace, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        let name = &place.tensor;
        let (tensor, file) = self.tensor(name)?;
        let of_expert = place.rows_of_expert(rows);
        let n_experts = tensor.shape.first().copied().unwrap_or(0).max(place.expert + 1);
        check_shape(name, file, &tensor, &[n_experts, of_expert, cols])?;
        let size_of = |rows: usize| tensor.format.bytes(rows, cols);
        let whole = size_of(n_experts * of_expert).filter(|bytes| *bytes == tensor.bytes.len());
        let (Some(_), Some(first), Some(len), false) =
            (whole, size_of(place.first_row(rows)), size_of(rows), tensor.format == Format::Fp8)
        else {
            let reason = format!(
                "{name} of {} bytes in {:?} cannot be divided into experts",
                tensor.bytes.len(),
                tensor.format
            );
            return Err(LoadError::Header { path: file.path().to_owned(), reason });
        };
        let bytes = tensor.bytes.slice(first..first + len);
        let matrix = Matrix::new(bytes, rows, cols, tensor.format)
            .map_err(|wrong| size_is_wrong(name, file, &wrong))?;
        matrix.aligned().map_err(LoadError::Memory)
    }

    /// Returns whether both tensors are there and have other numbers.
    pub(super) fn differ(&self, one: &str, other: &str) -> bool {
        if self.shape(one).is_none() || self.shape(other).is_none() {
            return false;
        }
        let (Ok((one, _)), Ok((other, _))) = (self.tensor(one), self.tensor(other)) else { return true };
        one.shape != other.shape || one.format != other.format || *one.bytes != *other.bytes
    }

    fn tensor(&self, name: &str) -> Result<(TensorBytes, &TensorFile), LoadError> {
        let missing =
            |path: &Path| LoadError::MissingTensor { tensor: name.to_owned(), path: path.to_owned() };
        let file = self.file(name).ok_or_else(|| missing(&self.folder.join(INDEX)))?;
        let tensor = file.tensor(name).ok_or_else(|| missing(file.path()))??;
        Ok((tensor, file))
    }
}

/// The part of an FP8 matrix that has one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleUnit {
    Matrix,
    Row,
    Block,
}

/// The ends of the names of scales, after the name of their matrix. `_scale_inv` are factors too, despite the name.
const SCALE: &str = "_scale";
const BLOCK_SCALE: &str = "_scale_inv";

impl Checkpoint {
    /// Returns the name of an FP8 matrix's scales.
    fn scales_name(&self, matrix: &str) -> String {
        let of_blocks = format!("{matrix}{BLOCK_SCALE}");
        if self.shape(&of_blocks).is_some() { of_blocks } else { format!("{matrix}{SCALE}") }
    }

    /// Returns the FP8 matrix whose scales have this name; `None` if there is none.
    pub(super) fn scaled_by<'a>(&self, name: &'a str) -> Option<&'a str> {
        let matrix = name.strip_suffix(BLOCK_SCALE).or_else(|| name.strip_suffix(SCALE))?;
        (self.fp8_format(matrix).is_some() && self.scales_name(matrix) == name).then_some(matrix)
    }

    /// Reads an FP8 matrix with its scales: one for each row, for all rows, or for each block.
    fn fp8(
        &self,
        name: &str,
        file: &TensorFile,
        numbers: TensorBytes,
        [rows, cols]: [usize; 2],
    ) -> Result<Matrix, LoadError> {
        check_shape(name, file, &numbers, &[rows, cols])?;
        let scale = self.scales_name(name);
        let wrong = |wrong: String| LoadError::Scales {
            tensor: name.to_owned(),
            path: file.path().to_owned(),
            wrong,
        };
        let shape = match self.tensor(&scale) {
            Err(LoadError::MissingTensor { tensor, path }) => {
                let path = path.display();
                return Err(wrong(format!(
                    "are missing: no tensor {tensor} or {name}{BLOCK_SCALE} in {path}"
                )));
            }
            found => found?.0.shape,
        };
        let unit = scale_unit(&scale, &shape, [rows, cols]).ok_or_else(|| {
            let others = if scale.ends_with(BLOCK_SCALE) { "" } else { &format!("[{rows}, 1], [{rows}], [1] or ") };
            let blocks = [rows, cols].map(|size| size.div_ceil(FP8_BLOCK));
            wrong(format!(
                "{scale} have shape {shape:?}, not {others}{blocks:?} for blocks of {FP8_BLOCK} by {FP8_BLOCK}"
            ))
        })?;
        let (scales, _) = self.numbers(&scale)?;
        if let Some(number) = scales.iter().find(|number| !number.is_finite()) {
            return Err(wrong(format!("{scale} of shape {shape:?} have {number} among them")));
        }
        let matrix = match unit {
            ScaleUnit::Matrix => Matrix::scaled(numbers.bytes, cols, vec![scales[0]; rows].into()),
            ScaleUnit::Row => Matrix::scaled(numbers.bytes, cols, scales.into()),
            ScaleUnit::Block => Matrix::scaled_by_blocks(numbers.bytes, rows, cols, scales.into()),
        };
        matrix.map_err(|wrong| size_is_wrong(name, file, &wrong))
    }
}

/// Returns the part of the matrix that has one scale, by the name and shape of the scales; `None` if they do
/// not fit the matrix.
fn scale_unit(name: &str, shape: &[usize], [rows, cols]: [usize; 2]) -> Option<ScaleUnit> {
    let are_of_blocks = shape == [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
    match *shape {
        _ if name.ends_with(BLOCK_SCALE) => are_of_blocks.then_some(ScaleUnit::Block),
        [] | [1] | [1, 1] => Some(ScaleUnit::Matrix),
        [n] | [n, 1] if n == rows => Some(ScaleUnit::Row),
        _ => are_of_blocks.then_some(ScaleUnit::Block),
    }
}

impl TensorSource for Checkpoint {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        if let Some(place) = StackedPlace::of(name)
            && self.shape(name).is_none()
            && self.shape(&place.tensor).is_some()
        {
            return self.stacked(&place, rows, cols);
        }
        let (tensor, file) = self.tensor(name)?;
        if tensor.format != Format::Fp8 {
            return matrix(name, file, tensor, &[rows, cols]);
        }
        self.fp8(name, file, tensor, [rows, cols])
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let (tensor, file) = self.tensor(name)?;
        numbers(name, file, tensor, len)
    }

    fn fp8_format(&self, name: &str) -> Option<Format> {
        let format = self.file(name)?.format(name).filter(|format| *format == Format::Fp8)?;
        let scale = self.scales_name(name);
        let unit = match (self.shape(name).as_deref(), self.shape(&scale)) {
            (Some([rows, cols]), Some(shape)) => scale_unit(&scale, &shape, [*rows, *cols]),
            _ => None,
        };
        Some(if unit == Some(ScaleUnit::Block) { Format::Fp8Blocks } else { format })
    }
}

fn numbers(name: &str, file: &TensorFile, tensor: TensorBytes, len: usize) -> Result<Vec<f32>, LoadError> {
    if tensor.format == Format::Fp8 {
        let (tensor, path) = (name.to_owned(), file.path().to_owned());
        return Err(LoadError::VectorInFp8 { tensor, path });
    }
    let row = matrix(name, file, tensor, &[len])?;
    let mut numbers = vec![0.0; len];
    row.read_row(0, &mut numbers);
    Ok(numbers)
}

/// Makes a matrix of a tensor's bytes. A vector becomes a matrix with one row.
fn matrix(name: &str, file: &TensorFile, tensor: TensorBytes, shape: &[usize]) -> Result<Matrix, LoadError> {
    check_shape(name, file, &tensor, shape)?;
    let (rows, cols) = if let [rows, cols] = *shape { (rows, cols) } else { (1, shape.iter().product()) };
    let matrix = Matrix::new(tensor.bytes, rows, cols, tensor.format)
        .map_err(|wrong| size_is_wrong(name, file, &wrong))?;
    matrix.aligned().map_err(LoadError::Memory)
}

fn check_shape(
    name: &str,
    file: &TensorFile,
    tensor: &TensorBytes,
    shape: &[usize],
) -> Result<(), LoadError> {
    if tensor.shape == shape {
        return Ok(());
    }
    Err(LoadError::Shape {
        tensor: name.to_owned(),
        path: file.path().to_owned(),
        expected: shape.to_vec(),
        found: tensor.shape.clone(),
    })
}

fn size_is_wrong(name: &str, file: &TensorFile, wrong: &WrongSize) -> LoadError {
    LoadError::Header { path: file.path().to_owned(), reason: format!("{name}: {wrong}") }
}
