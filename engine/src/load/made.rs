//! Writes whole checkpoints: with random weights, to measure loading, or with another checkpoint's weights in
//! another format.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::num::NonZero;
use std::path::Path;

use kernels::cpu::number::f32_to_bf16;
use kernels::cpu::{Arithmetic, FP8_BLOCK, Format, Matrix, Processor};
use serde_json::{Map, Value, json};

use super::checkpoint::Checkpoint;
use super::dummy::Dummy;
use super::folder::ModelFolder;
use super::tensors::{TensorSpec, tensors};
use super::weights::TensorSource;
use crate::error::LoadError;

/// The largest size of one file in bytes, as in published checkpoints.
const FILE_BYTES_MAX: usize = 5 << 30;

/// The format of the written weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Bf16,
    F32,
    /// The layers' matrices in FP8 with a bf16 scale for each row, as `compressed-tensors` writes them.
    CompressedTensors,
    /// The layers' matrices in FP8 with f32 scales, as `fbgemm_fp8` writes them.
    Fbgemm,
    /// The layers' matrices in FP8 with an f32 scale for each block, as DeepSeek and Qwen publish them.
    Blocks,
}

/// Writes a folder with another folder's config and random weights, using all cores. Returns the bytes of the
/// weights.
pub fn write(from: &Path, to: &Path, seed: u64, form: Form) -> Result<usize, LoadError> {
    let processor = all_cores()?;
    write_all(from, to, &Dummy { seed, processor: &processor }, form, &processor)
}

/// Writes a model's weights again, in another format.
pub fn rewrite(from: &Path, to: &Path, form: Form) -> Result<usize, LoadError> {
    write_all(from, to, &Checkpoint::open(from)?, form, &all_cores()?)
}

fn all_cores() -> Result<Processor, LoadError> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    Processor::new(Arithmetic::F32, cores).map_err(LoadError::Threads)
}

fn write_all(
    from: &Path,
    to: &Path,
    source: &dyn TensorSource,
    form: Form,
    processor: &Processor,
) -> Result<usize, LoadError> {
    let folder = ModelFolder::open(from)?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| LoadError::Write { path, source }
    };
    std::fs::create_dir_all(to).map_err(failed(to))?;
    let path = to.join("config.json");
    std::fs::write(&path, form.config(from)?).map_err(failed(&path))?;
    let files = divided(tensors(&folder.config), form);
    let (mut index, mut bytes) = (Map::new(), 0);
    for (nth, tensors) in files.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", nth + 1, files.len());
        let path = to.join(&name);
        let entries: Vec<TensorEntry> = tensors.iter().flat_map(|tensor| form.entries(tensor)).collect();
        write_file(&path, &entries, tensors, |tensor| form.contents(tensor, source, processor)).map_err(
            |problem| match problem {
                WriteError::Io(source) => LoadError::Write { path: path.clone(), source },
                WriteError::Source(error) => error,
            },
        )?;
        bytes += entries.iter().map(|entry| entry.bytes).sum::<usize>();
        index.extend(entries.into_iter().map(|entry| (entry.name, Value::from(name.clone()))));
    }
    let path = to.join("model.safetensors.index.json");
    std::fs::write(&path, json!({ "weight_map": index }).to_string()).map_err(failed(&path))?;
    Ok(bytes)
}

fn divided(tensors: Vec<TensorSpec>, form: Form) -> Vec<Vec<TensorSpec>> {
    let mut files: Vec<Vec<TensorSpec>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        let more: usize = form.entries(&tensor).iter().map(|entry| entry.bytes).sum();
        if bytes > 0 && bytes + more > FILE_BYTES_MAX {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += more;
        files.last_mut().expect("the list begins with one file").push(tensor);
    }
    files
}

/// A tensor's entry in a file's header.
struct TensorEntry {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
}

impl TensorEntry {
    fn new(name: String, dtype: &'static str, shape: Vec<usize>) -> Self {
        let number_bytes = match dtype {
            "F8_E4M3" => 1,
            "BF16" => 2,
            _ => 4,
        };
        let bytes = number_bytes * shape.iter().product::<usize>();
        Self { name, dtype, shape, bytes }
    }
}

impl Form {
    fn is_fp8(self) -> bool {
        matches!(self, Self::CompressedTensors | Self::Fbgemm | Self::Blocks)
    }

    /// Returns a tensor's entries in the file: the tensor and its scales.
    fn entries(self, tensor: &TensorSpec) -> Vec<TensorEntry> {
        let TensorSpec { name, .. } = tensor;
        if let (true, true, Some(rows)) = (self.is_fp8(), tensor.is_linear(), tensor.rows) {
            let blocks = [rows, tensor.cols].map(|size| size.div_ceil(FP8_BLOCK)).to_vec();
            let scales = match self {
                Self::Blocks => TensorEntry::new(format!("{name}_scale_inv"), "F32", blocks),
                Self::Fbgemm => TensorEntry::new(format!("{name}_scale"), "F32", vec![rows, 1]),
                _ => TensorEntry::new(format!("{name}_scale"), "BF16", vec![rows, 1]),
            };
            return vec![TensorEntry::new(name.clone(), "F8_E4M3", tensor.shape()), scales];
        }
        let dtype = if self == Self::F32 { "F32" } else { "BF16" };
        vec![TensorEntry::new(name.clone(), dtype, tensor.shape())]
    }

    /// Returns the bytes of these entries, one after the other.
    fn contents(
        self,
        tensor: &TensorSpec,
        source: &dyn TensorSource,
        processor: &Processor,
    ) -> Result<Vec<u8>, LoadError> {
        let Some(rows) = tensor.rows else {
            return Ok(self.plain(&source.vector(&tensor.name, tensor.cols)?));
        };
        let matrix = source.matrix(&tensor.name, rows, tensor.cols)?;
        if self.is_fp8() && tensor.is_linear() {
            let narrow = match (self, matrix.format()) {
                (Self::Blocks, Format::Fp8Blocks) => matrix,
                (Self::Blocks, _) => processor.quantize_fp8_blocks(&matrix).map_err(LoadError::Memory)?,
                (_, Format::Fp8) => matrix,
                _ => processor.quantize_fp8(&matrix).map_err(LoadError::Memory)?,
            };
            let scales = match self {
                Self::CompressedTensors => bytes_bf16(narrow.scales()),
                _ => bytes_f32(narrow.scales()),
            };
            return Ok([narrow.bytes(), &scales].concat());
        }
        if self != Self::F32 && matrix.format() == Format::Bf16 {
            return Ok(matrix.bytes().to_vec());
        }
        Ok(self.plain(&numbers(&matrix)))
    }

    fn plain(self, numbers: &[f32]) -> Vec<u8> {
        if self == Self::F32 { bytes_f32(numbers) } else { bytes_bf16(numbers) }
    }

    /// Returns the config of the folder `from`, changed for this format.
    fn config(self, from: &Path) -> Result<String, LoadError> {
        let path = from.join("config.json");
        let bytes = std::fs::read(&path).map_err(|source| LoadError::Read { path: path.clone(), source })?;
        let mut config: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| LoadError::Config { path, source: Box::new(error.into()) })?;
        config.remove("quantization_config");
        let quantized = match self {
            Self::Bf16 | Self::F32 => return Ok(Value::Object(config).to_string()),
            Self::CompressedTensors => json!({
                "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true},
                }},
            }),
            Self::Fbgemm => json!({
                "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"],
            }),
            Self::Blocks => json!({
                "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            }),
        };
        config.insert("quantization_config".to_owned(), quantized);
        Ok(Value::Object(config).to_string())
    }
}

fn numbers(matrix: &Matrix) -> Vec<f32> {
    let mut numbers = vec![0.0; matrix.rows() * matrix.cols()];
    for (nth, row) in numbers.chunks_mut(matrix.cols()).enumerate() {
        matrix.read_row(nth, row);
    }
    numbers
}

fn bytes_f32(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn bytes_bf16(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| f32_to_bf16(*number).to_le_bytes()).collect()
}

#[derive(Debug)]
enum WriteError {
    Io(std::io::Error),
    Source(LoadError),
}

impl From<std::io::Error> for WriteError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

fn write_file(
    path: &Path,
    entries: &[TensorEntry],
    tensors: &[TensorSpec],
    contents: impl Fn(&TensorSpec) -> Result<Vec<u8>, LoadError>,
) -> Result<(), WriteError> {
    let (mut header, mut end) = (Map::new(), 0);
    for entry in entries {
        let offsets = [end, end + entry.bytes];
        let found = json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets});
        header.insert(entry.name.clone(), found);
        end = offsets[1];
    }
    let mut header = Value::Object(header).to_string();
    // The header is padded, because tensors start at multiples of 8 bytes in files by the format's own
    // writers.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for tensor in tensors {
        file.write_all(&contents(tensor).map_err(WriteError::Source)?)?;
    }
    Ok(file.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Checkpoint;

    #[test]
    fn what_is_written_is_read_as_it_was_made() {
        let processor = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
        let source = Dummy { seed: 5, processor: &processor };
        let to = tempfile::tempdir().expect("a folder");
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/qwen3");
        let bytes = write(&from, to.path(), 5, Form::Bf16).expect("it is written");
        let read = Checkpoint::open(to.path()).expect("it opens");
        assert_eq!(read.files().iter().map(|file| file.data().len()).sum::<usize>(), bytes);
        let config = ModelFolder::open(to.path()).expect("it opens").config;
        let name = "model.layers.1.mlp.down_proj.weight";
        let made = source.matrix(name, config.hidden, config.intermediate).expect("made");
        let found = read.matrix(name, config.hidden, config.intermediate).expect("read");
        assert_eq!(made.bytes(), found.bytes());
        let norm = read.vector("model.layers.0.self_attn.q_norm.weight", config.head_dim).expect("read");
        assert_eq!(norm, vec![1.0; config.head_dim]);
    }
}
