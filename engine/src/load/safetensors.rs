//! One file with tensors. Safetensors: a JSON header with the position of each tensor's bytes, then the bytes. The other
//! format is [GGUF](super::gguf).
//!
//! ```text
//! 8 bytes    length of the header, little-endian
//! header     {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {…}}
//! data       offsets count from here
//! ```

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use kernels::cpu::{Format, SharedBytes};
use serde::Deserialize;

use super::gguf;
use crate::error::LoadError;

/// The longest accepted header. The largest models need a few megabytes.
const HEADER_BYTES_MAX: usize = 100 << 20;
const LENGTH_BYTES: usize = 8;

/// A mapped file with its tensors by name.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    header: SharedBytes,
    data: SharedBytes,
    entries: HashMap<String, Entry>,
}

/// Where and how a tensor is stored.
#[derive(Clone, Debug)]
enum Entry {
    Safetensors(TensorEntry),
    Gguf(gguf::Tensor),
}

/// A tensor's entry in the header of the file.
#[derive(Clone, Debug, Deserialize)]
struct TensorEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// One tensor's bytes.
#[derive(Clone, Debug)]
pub struct TensorBytes {
    pub bytes: SharedBytes,
    pub shape: Vec<usize>,
    pub format: Format,
}

impl TensorFile {
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let bytes =
            SharedBytes::map(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        let bad = |reason: String| LoadError::Header { path: path.to_owned(), reason };
        let header_end = header_end(&bytes).map_err(bad)?;
        let header = bytes.slice(LENGTH_BYTES..header_end);
        let entries = parse(&header).map_err(|error| bad(error.to_string()))?;
        let entries = entries.into_iter().map(|(name, entry)| (name, Entry::Safetensors(entry))).collect();
        Ok(Self { path: path.to_owned(), header, data: bytes.slice(header_end..bytes.len()), entries })
    }

    /// Opens a file in llama.cpp's format. Its tensors have the names of safetensors.
    pub fn open_gguf(path: &Path) -> Result<Self, LoadError> {
        let (tensors, header, data) = gguf::tensors(path)?;
        let entries = tensors.into_iter().map(|(name, tensor)| (name, Entry::Gguf(tensor))).collect();
        Ok(Self { path: path.to_owned(), header, data, entries })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the header's bytes: names, types, shapes and positions of all tensors.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Returns all names, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the shape of the tensor with that name; `None` if there is none.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| match entry {
            Entry::Safetensors(entry) => entry.shape.as_slice(),
            Entry::Gguf(tensor) => tensor.shape.as_slice(),
        })
    }

    /// Returns the number format of the tensor with that name; `None` if there is none, or none of a known format.
    pub fn format(&self, name: &str) -> Option<Format> {
        self.entries.get(name).and_then(|entry| match entry {
            Entry::Safetensors(entry) => format(&entry.dtype),
            Entry::Gguf(tensor) => Some(tensor.stored_as.format()),
        })
    }

    /// Returns the tensor with that name; `None` if there is none. A quantized tensor of a GGUF file is dequantized.
    pub fn tensor(&self, name: &str) -> Option<Result<TensorBytes, LoadError>> {
        self.entries.get(name).map(|entry| match entry {
            Entry::Safetensors(entry) => self.cut_out(name, entry),
            Entry::Gguf(tensor) => self.dequantized(name, tensor),
        })
    }

    fn dequantized(&self, name: &str, tensor: &gguf::Tensor) -> Result<TensorBytes, LoadError> {
        let bytes = tensor.read(&self.data).map_err(|wrong| match wrong {
            gguf::BlocksError::Memory(source) => LoadError::Memory(source),
            gguf::BlocksError::Dequantize(error) => {
                LoadError::Header { path: self.path.clone(), reason: format!("dequantize {name}: {error}") }
            }
        })?;
        Ok(TensorBytes { bytes, shape: tensor.shape.clone(), format: tensor.stored_as.format() })
    }

    fn cut_out(&self, name: &str, entry: &TensorEntry) -> Result<TensorBytes, LoadError> {
        let (tensor, path) = (name.to_owned(), self.path.clone());
        let Some(format) = format(&entry.dtype) else {
            return Err(LoadError::Dtype { tensor, path, found: entry.dtype.clone() });
        };
        let (start, end) = entry.data_offsets;
        if start > end || end > self.data.len() {
            return Err(LoadError::ShortFile { tensor, path, needed: end, found: self.data.len() });
        }
        Ok(TensorBytes { bytes: self.data.slice(start..end), shape: entry.shape.clone(), format })
    }
}

fn header_end(bytes: &[u8]) -> Result<usize, String> {
    let (length, rest) =
        bytes.split_first_chunk().ok_or_else(|| format!("{} bytes are no file", bytes.len()))?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if length > HEADER_BYTES_MAX || length > rest.len() {
        if bytes.starts_with(b"version https://git-lfs") {
            return Err("it is a pointer of Git LFS: `git lfs pull` downloads the file".to_owned());
        }
        return Err(format!("a header of {length} bytes in a file of {}", bytes.len()));
    }
    Ok(LENGTH_BYTES + length)
}

fn parse(header: &[u8]) -> Result<HashMap<String, TensorEntry>, serde_json::Error> {
    let mut raw: HashMap<String, serde_json::Value> = serde_json::from_slice(header)?;
    raw.remove("__metadata__");
    raw.into_iter().map(|(name, entry)| Ok((name, serde_json::from_value(entry)?))).collect()
}

fn format(dtype: &str) -> Option<Format> {
    match dtype {
        "F32" => Some(Format::F32),
        "BF16" => Some(Format::Bf16),
        "F16" => Some(Format::F16),
        "F8_E4M3" => Some(Format::Fp8),
        _ => None,
    }
}
