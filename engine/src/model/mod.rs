//! Models: what each is made of, and how the processor computes it. One file per architecture, read top to bottom.
//!
//! Suggested reading order: what a model is said to be ([`config`], [`quantization`],
//! [`rope`]), what goes through it ([`tensor`],
//! [`ranks`], [`pass`]), what it is made of ([`nn`]), and then [`llama`]; the others say how they differ from it.

pub mod config;
pub mod quantization;
pub mod rope;
pub mod tensor;
pub mod ranks;
pub mod pass;
pub mod nn;

pub mod llama;
pub mod mistral;
pub mod qwen2;
pub mod qwen3;

use std::fmt::Debug;
use std::sync::Arc;

pub use config::ModelConfig;
pub use pass::{Pass, PassRow};
pub use tensor::{Scratch, Tensor};

use crate::error::LoadError;
use crate::load::Weights;

/// A decoder. It reads and writes the KV of each layer on the way, and holds nothing else of a sequence.
pub trait Model: Debug + Send + Sync {
    /// From the pass's tokens to the logits of the rows that are wanted: (wanted, vocab), or the pass's rank's share of
    /// their columns.
    fn forward(&self, pass: &mut Pass<'_>) -> Tensor;
}

/// A line of the table below.
#[derive(Debug)]
pub struct Architecture {
    /// As `architectures` in a `config.json` names it.
    pub name: &'static str,
    /// How many tokens each layer looks back, by layer; `None` looks at all.
    pub windows: fn(&ModelConfig) -> Vec<Option<u32>>,
    /// What it has beside the matrices that all have.
    pub parts: fn(&ModelConfig) -> Parts,
    pub load: Load,
}

/// What some of these decoders have and others do not: all that a backend must know that computes them by one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Of the projections to q, k and v.
    pub qkv_bias: bool,
    /// Of the projection out of attention.
    pub o_bias: bool,
    /// Of the feed-forward layers.
    pub mlp_bias: bool,
    /// Each head of q and k is normed by itself.
    pub head_norms: bool,
}

impl Parts {
    /// None of them.
    pub const PLAIN: Self = Self { qkv_bias: false, o_bias: false, mlp_bias: false, head_norms: false };
}

/// Takes a model's weights by their names.
pub type Load = fn(&ModelConfig, &Weights<'_>) -> Result<Arc<dyn Model>, LoadError>;

/// The architectures that there are. A new one is one file and one line.
pub const ARCHITECTURES: &[Architecture] =
    &[llama::ARCHITECTURE, mistral::ARCHITECTURE, qwen2::ARCHITECTURE, qwen3::ARCHITECTURE];

/// The architecture of that name, or the names of those there are.
pub fn architecture(name: &str) -> Result<&'static Architecture, String> {
    let found = ARCHITECTURES.iter().find(|architecture| architecture.name == name);
    found.ok_or_else(|| ARCHITECTURES.iter().map(|known| known.name).collect::<Vec<_>>().join(", "))
}
