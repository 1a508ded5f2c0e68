//! Models in llama.cpp's format: one file with the description, the tokenizer and the tensors.
//!
//! A GGUF file becomes a model's folder with a link to it: [`files`] makes the JSON files that the folder of the same
//! model on the Hugging Face hub has, and [`Checkpoint`](super::Checkpoint) reads the tensors, under the names that
//! they have there.
//!
//! Suggested reading order: the file's beginning (`header`), the model that it describes (`model`), `config.json`
//! (`config`), `tokenizer.json` (`tokenizer`), the tensors' places (`tensors`) and numbers (`blocks`).

mod header;
mod model;
mod config;
mod tokenizer;
mod tensors;
mod blocks;
#[cfg(all(feature = "gguf", any(test, feature = "test-support")))]
pub mod write;
#[cfg(all(feature = "gguf", test))]
mod tests;

use std::path::{Path, PathBuf};

use kernels::cpu::SharedBytes;

use super::folder::check_config;
use crate::error::LoadError;
use header::Header;
use model::Model;

pub(super) use blocks::BlocksError;
pub(super) use tensors::Tensor;

/// The name of the link to the GGUF file in a folder that was made of it.
pub const LINK: &str = "model.gguf";

/// Returns the GGUF file at `path`: the file itself, or the only one in a folder without safetensors. `None` if there
/// is none.
pub fn find(path: &Path) -> Result<Option<PathBuf>, LoadError> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|ending| ending == "gguf");
    if path.is_file() {
        return Ok(is_gguf(path).then(|| path.to_owned()));
    }
    if super::checkpoint::has_safetensors(path) {
        return Ok(None);
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_gguf(path)).collect();
    found.sort_unstable();
    match found.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        [first, second, ..] => Err(LoadError::SeveralGguf {
            folder: path.to_owned(),
            names: [first, second].map(|path| path.file_name().unwrap_or_default().to_owned()),
        }),
    }
}

/// Makes the small files of the model's folder, by name: configs, tokenizer and chat template.
pub fn files(gguf: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, LoadError> {
    let (files, _) = read(gguf, files_of)?;
    check_config(gguf, &files[0].1)?;
    Ok(files)
}

/// Makes the files, with `config.json` at the beginning.
fn files_of(header: &Header<'_>) -> Result<Vec<(&'static str, Vec<u8>)>, String> {
    let model = Model::of(header)?;
    let config = config::config(header, &model)?;
    let mut files = vec![("config.json", config), ("generation_config.json", config::generation(header)?)];
    if let Some((tokenizer, config)) = tokenizer::tokenizer(header, &model)? {
        files.extend([("tokenizer.json", tokenizer), ("tokenizer_config.json", config)]);
    }
    Ok(files.into_iter().map(|(name, json)| (name, json.to_string().into_bytes())).collect())
}

/// A file's tensors by the names in a hub's folder, its header, and the data from which the tensors' places count.
type Parts = (Vec<(String, Tensor)>, SharedBytes, SharedBytes);

/// Divides a file into its tensors.
pub(super) fn tensors(gguf: &Path) -> Result<Parts, LoadError> {
    let ((tensors, data_start), bytes) =
        read(gguf, |header| Ok((tensors::tensors(header, &Model::of(header)?)?, header.data_start)))?;
    Ok((tensors, bytes.slice(0..data_start), bytes.slice(data_start..bytes.len())))
}

fn read<T>(
    path: &Path,
    read: impl FnOnce(&Header<'_>) -> Result<T, String>,
) -> Result<(T, SharedBytes), LoadError> {
    let bytes = SharedBytes::map(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    let found = Header::parse(&bytes).and_then(|header| read(&header));
    let found = found.map_err(|reason| LoadError::Header { path: path.to_owned(), reason })?;
    Ok((found, bytes))
}
