//! Models: their parts, and their computation on a CPU.
//!
//! Suggested reading order: a model's description ([`config`], [`architecture`], [`mixture`], [`latent`], `keys`,
//! [`quantization`], [`rope`]), a step through it ([`tensor`], [`ranks`], [`pass`]), and its parts, from the whole to the
//! details ([`decoder`], `attention`, `latent_attention`, `mlp`, `experts`, [`nn`]).

pub mod config;
pub mod architecture;
pub mod mixture;
pub mod latent;
mod keys;
pub mod quantization;
pub mod rope;
pub mod tensor;
pub mod ranks;
pub mod pass;
pub mod decoder;
mod attention;
mod latent_attention;
mod mlp;
mod experts;
pub mod nn;

pub use architecture::OptionalTensors;
pub use config::ModelConfig;
pub use decoder::Decoder;
pub use latent::{LatentShape, NORM_EPSILON as LATENT_EPSILON, RotatedPairs};
pub use mixture::{GroupLimit, Mixture};
pub use pass::{Pass, PassRow};
pub use quantization::ActivationFormat;
pub use tensor::{Scratch, Tensor};
