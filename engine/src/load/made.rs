//! A whole checkpoint that is made up: for measuring how fast weights are loaded, where none can be fetched.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::num::NonZero;
use std::path::Path;

use kernels::cpu::{Arithmetic, Processor};
use serde_json::{Map, Value, json};

use super::dummy::Dummy;
use super::folder::ModelFolder;
use super::weights::TensorSource;
use crate::error::LoadError;
use crate::model::{self, ModelConfig, Parts};

/// One file holds no more than so much, as published checkpoints do.
const FILE_BYTES_MAX: usize = 5 << 30;

/// A tensor that a model has: a vector has one row, and says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub rows: Option<usize>,
    pub cols: usize,
}

impl Named {
    fn shape(&self) -> Vec<usize> {
        self.rows.into_iter().chain([self.cols]).collect()
    }

    fn bytes(&self) -> usize {
        2 * self.rows.unwrap_or(1) * self.cols
    }
}

/// Every tensor of such a model, by the names that all of these architectures use.
pub fn tensors(config: &ModelConfig, parts: Parts) -> Vec<Named> {
    let matrix = |name: String, rows, cols| Named { name, rows: Some(rows), cols };
    let vector = |name: String, cols| Named { name, rows: None, cols };
    let ModelConfig { hidden, intermediate, vocab, head_dim, .. } = *config;
    let (q, kv) = (config.n_heads * head_dim, config.n_kv_heads * head_dim);
    let mut all = vec![matrix("model.embed_tokens.weight".to_owned(), vocab, hidden)];
    for nth in 0..config.n_layers {
        let of = |part: &str| format!("model.layers.{nth}.{part}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            all.push(vector(of(&format!("{norm}.weight")), hidden));
        }
        for (name, rows, cols, has_bias) in [
            ("self_attn.q_proj", q, hidden, parts.qkv_bias),
            ("self_attn.k_proj", kv, hidden, parts.qkv_bias),
            ("self_attn.v_proj", kv, hidden, parts.qkv_bias),
            ("self_attn.o_proj", hidden, q, parts.o_bias),
            ("mlp.gate_proj", intermediate, hidden, parts.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, parts.mlp_bias),
            ("mlp.down_proj", hidden, intermediate, parts.mlp_bias),
        ] {
            all.push(matrix(of(&format!("{name}.weight")), rows, cols));
            if has_bias {
                all.push(vector(of(&format!("{name}.bias")), rows));
            }
        }
        if parts.head_norms {
            all.push(vector(of("self_attn.q_norm.weight"), head_dim));
            all.push(vector(of("self_attn.k_norm.weight"), head_dim));
        }
    }
    all.push(vector("model.norm.weight".to_owned(), hidden));
    if !config.tied {
        all.push(matrix("lm_head.weight".to_owned(), vocab, hidden));
    }
    all
}

/// Writes a folder with the config of another and made-up weights in bf16, with all cores at work. Answers how many bytes
/// they are.
pub fn write(from: &Path, to: &Path, seed: u64) -> Result<usize, LoadError> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let processor = Processor::new(Arithmetic::F32, cores).map_err(LoadError::Threads)?;
    let source = Dummy { seed, processor: &processor };
    let folder = ModelFolder::open(from)?;
    let architecture = model::architecture(&folder.config.architecture).map_err(|known| {
        let (path, name) = (from.join("config.json"), folder.config.architecture.clone());
        LoadError::Architecture { path, name, known }
    })?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| LoadError::Write { path, source }
    };
    std::fs::create_dir_all(to).map_err(failed(to))?;
    let config = to.join("config.json");
    std::fs::copy(from.join("config.json"), &config).map_err(failed(&config))?;
    let files = divided(tensors(&folder.config, (architecture.parts)(&folder.config)));
    let mut index = Map::new();
    for (nth, tensors) in files.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", nth + 1, files.len());
        let path = to.join(&name);
        write_file(&path, tensors, &source).map_err(|problem| match problem {
            WriteError::Io(source) => LoadError::Write { path: path.clone(), source },
            WriteError::Source(error) => error,
        })?;
        index.extend(tensors.iter().map(|tensor| (tensor.name.clone(), Value::from(name.clone()))));
    }
    let path = to.join("model.safetensors.index.json");
    std::fs::write(&path, json!({ "weight_map": index }).to_string()).map_err(failed(&path))?;
    Ok(files.iter().flatten().map(Named::bytes).sum())
}

fn divided(tensors: Vec<Named>) -> Vec<Vec<Named>> {
    let mut files: Vec<Vec<Named>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        if bytes > 0 && bytes + tensor.bytes() > FILE_BYTES_MAX {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += tensor.bytes();
        files.last_mut().expect("one is there from the start").push(tensor);
    }
    files
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

fn write_file(path: &Path, tensors: &[Named], source: &Dummy<'_>) -> Result<(), WriteError> {
    let (mut header, mut end) = (Map::new(), 0);
    for tensor in tensors {
        let offsets = [end, end + tensor.bytes()];
        let entry = json!({"dtype": "BF16", "shape": tensor.shape(), "data_offsets": offsets});
        header.insert(tensor.name.clone(), entry);
        end = offsets[1];
    }
    let mut header = Value::Object(header).to_string();
    // Tensors begin on an edge of 8 bytes, as the format's own writers have it.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for tensor in tensors {
        match tensor.rows {
            Some(rows) => {
                let matrix = source.matrix(&tensor.name, rows, tensor.cols).map_err(WriteError::Source)?;
                file.write_all(matrix.bytes())?;
            }
            None => {
                let numbers = source.vector(&tensor.name, tensor.cols).map_err(WriteError::Source)?;
                for number in numbers {
                    file.write_all(&kernels::cpu::number::f32_to_bf16(number).to_le_bytes())?;
                }
            }
        }
    }
    Ok(file.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Checkpoint;
    use std::collections::BTreeSet;

    fn models() -> impl Iterator<Item = std::path::PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
        ["llama", "llama3", "mistral", "qwen2", "qwen3"].into_iter().map(move |name| folder.join(name))
    }

    #[test]
    fn a_model_has_the_tensors_that_its_checkpoint_has() {
        for path in models() {
            let config = ModelFolder::open(&path).expect("it opens").config;
            let parts = (model::architecture(&config.architecture).expect("known").parts)(&config);
            let checkpoint = Checkpoint::open(&path).expect("it opens");
            let names: BTreeSet<&str> = checkpoint.files().iter().flat_map(|file| file.names()).collect();
            let tensors = tensors(&config, parts);
            assert_eq!(tensors.iter().map(|one| one.name.as_str()).collect::<BTreeSet<_>>(), names);
            for one in &tensors {
                let file = checkpoint.files().iter().find(|file| file.tensor(&one.name).is_some());
                let found =
                    file.and_then(|file| file.tensor(&one.name)).expect("it is there").expect("whole");
                assert_eq!(found.shape, one.shape(), "{}", one.name);
            }
        }
    }

    #[test]
    fn what_is_written_is_read_as_it_was_made() {
        let processor = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
        let source = Dummy { seed: 5, processor: &processor };
        let to = tempfile::tempdir().expect("a folder");
        let from = models().nth(4).expect("qwen3");
        let bytes = write(&from, to.path(), 5).expect("it is written");
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
