//! Weights: from a published folder, or random.
//!
//! Suggested reading order: a model's [`folder`], one file's tensors ([`safetensors`]), all files' ([`checkpoint`]),
//! none at all ([`dummy`]), the tensors that a model reads ([`tensors`]), folders that are written here ([`made`]), what architectures see of it ([`weights`]), how far it
//! has come (`meter`), and what two nodes compare ([`fingerprint`]).

pub mod folder;
pub mod safetensors;
pub mod checkpoint;
pub mod dummy;
pub mod tensors;
pub mod made;
pub mod weights;
pub(crate) mod meter;
pub mod fingerprint;
#[cfg(test)]
mod tests;

pub use checkpoint::{Checkpoint, has_gguf};
pub use dummy::Dummy;
pub use folder::{ModelFolder, check_config};
pub use weights::{Quantize, TensorSource, Weights};
