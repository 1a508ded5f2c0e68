//! Weights from a published folder or GGUF file, or random.
//!
//! Suggested reading order: a model's [`folder`], one file's tensors ([`safetensors`], [`gguf`]), all files'
//! ([`checkpoint`], `stacked`), scales of KV ([`KvScaled`]), rows ([`SourceRows`]), random tensors ([`dummy`]), the tensors that a model reads ([`tensors`]), written
//! folders ([`made`]), the architectures' view ([`weights`]), progress (`meter`), and the comparison between
//! nodes ([`fingerprint`]).

pub mod folder;
pub mod safetensors;
pub mod gguf;
mod stacked;
pub mod checkpoint;
mod kv_scales;
mod rows;
pub mod dummy;
pub mod tensors;
pub mod made;
pub mod weights;
pub(crate) mod meter;
pub mod fingerprint;
#[cfg(test)]
mod tests;

pub use checkpoint::Checkpoint;
pub use dummy::Dummy;
pub use folder::{ModelFolder, check_config};
pub use kv_scales::KvScaled;
pub use rows::SourceRows;
pub use weights::{Activations, Quantize, TensorSource, Weights};
