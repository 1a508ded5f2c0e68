//! All weights of a folder: one safetensors file, or several with an index.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use kernels::cpu::Matrix;
use serde::Deserialize;

use super::safetensors::{TensorBytes, TensorFile};
use super::weights::TensorSource;
use crate::error::LoadError;

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a folder. The files stay mapped for as long as a matrix of theirs is in use.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Vec<TensorFile>,
    /// Which file has which tensor, as an index says; empty without one.
    index: HashMap<String, usize>,
}

#[derive(Debug, Deserialize)]
struct RawIndex {
    weight_map: HashMap<String, String>,
}

impl Checkpoint {
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        if folder.join(INDEX).exists() { Self::indexed(folder) } else { Self::whole(folder) }
    }

    fn whole(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join(WHOLE);
        if !path.exists() {
            return Err(LoadError::NoWeights { folder: folder.to_owned() });
        }
        Ok(Self { folder: folder.to_owned(), files: vec![TensorFile::open(&path)?], index: HashMap::new() })
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

    /// The file that has a tensor, or should have it.
    fn file(&self, tensor: &str) -> Option<&TensorFile> {
        match self.index.is_empty() {
            true => self.files.first(),
            false => self.index.get(tensor).map(|nth| &self.files[*nth]),
        }
    }

    fn tensor(&self, name: &str) -> Result<(TensorBytes, &TensorFile), LoadError> {
        let missing =
            |path: &Path| LoadError::MissingTensor { tensor: name.to_owned(), path: path.to_owned() };
        let file = self.file(name).ok_or_else(|| missing(&self.folder.join(INDEX)))?;
        let tensor = file.tensor(name).ok_or_else(|| missing(file.path()))??;
        Ok((tensor, file))
    }
}

impl TensorSource for Checkpoint {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        let (tensor, file) = self.tensor(name)?;
        matrix(name, file, tensor, &[rows, cols])
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let (tensor, file) = self.tensor(name)?;
        let row = matrix(name, file, tensor, &[len])?;
        let mut numbers = vec![0.0; len];
        row.read_row(0, &mut numbers);
        Ok(numbers)
    }
}

/// A vector is a matrix of one row.
fn matrix(name: &str, file: &TensorFile, tensor: TensorBytes, shape: &[usize]) -> Result<Matrix, LoadError> {
    let (name, path) = (name.to_owned(), file.path().to_owned());
    if tensor.shape != shape {
        return Err(LoadError::Shape { tensor: name, path, expected: shape.to_vec(), found: tensor.shape });
    }
    let (rows, cols) = if let [rows, cols] = *shape { (rows, cols) } else { (1, shape.iter().product()) };
    let matrix = Matrix::new(tensor.bytes, rows, cols, tensor.format)
        .map_err(|wrong| LoadError::Header { path: path.clone(), reason: format!("{name}: {wrong}") })?;
    matrix.aligned().map_err(LoadError::Memory)
}
