//! A model's folder, in the layout of the Hugging Face hub.

use std::path::{Path, PathBuf};

use tracing::info;

use super::checkpoint::Checkpoint;
use super::tensors::{EMBEDDING, OUTPUT};
use crate::error::LoadError;
use crate::model::ModelConfig;
use crate::model::config::ConfigProblem;

/// A folder with a `config.json` and further files.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    path: PathBuf,
    pub config: ModelConfig,
}

impl ModelFolder {
    /// Reads the configs of a folder. [`Checkpoint`] opens the weights.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let file = path.join("config.json");
        let config = std::fs::read(&file).map_err(|source| LoadError::Read { path: file.clone(), source })?;
        let generation = read_if_there(&path.join("generation_config.json"))?;
        let mut config = read_config(&file, &config, generation.as_deref())?;
        if config.tied && has_own_output(path) {
            info!(
                folder = %path.display(),
                "tie_word_embeddings is ignored: lm_head.weight and model.embed_tokens.weight differ"
            );
            config.tied = false;
        }
        Ok(Self { path: path.to_owned(), config })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder's name, which is the model's name.
    pub fn name(&self) -> String {
        let whole = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
    }

    /// Reads the folder's tokenizer; `None` if it has none.
    pub fn tokenizer(&self) -> Result<Option<Vec<u8>>, LoadError> {
        read_if_there(&self.path.join("tokenizer.json"))
    }
}

/// Checks that a `config.json` describes a supported model. `path` is for errors.
///
/// Called before the weights are downloaded.
pub fn check_config(path: &Path, config: &[u8]) -> Result<(), LoadError> {
    read_config(path, config, None).map(drop)
}

fn read_config(path: &Path, config: &[u8], generation: Option<&[u8]>) -> Result<ModelConfig, LoadError> {
    ModelConfig::parse(config, generation).map_err(|problem| {
        let path = path.to_owned();
        match problem {
            ConfigProblem::Architecture { name, known } => LoadError::Architecture { path, name, known },
            problem => LoadError::Config { path, source: Box::new(problem) },
        }
    })
}

/// Returns whether the weights have an output layer that is not the embedding. `transformers` then uses it, whatever the
/// config says: merged adapters leave such checkpoints.
fn has_own_output(folder: &Path) -> bool {
    // A folder for random weights may have no checkpoint, and the loading of weights reports a bad one.
    Checkpoint::open(folder).is_ok_and(|checkpoint| checkpoint.differ(EMBEDDING, OUTPUT))
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read { path: path.to_owned(), source }),
    }
}
