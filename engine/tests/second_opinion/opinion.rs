//! The results of candle.

use std::collections::HashMap;

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, mistral, mixtral, qwen2, qwen3, qwen3_moe};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::case::{Architecture, Case};
use crate::weights::{has_experts, n_experts, number};

type Tensors = HashMap<String, Tensor>;

/// Returns the logits after the prompt.
pub(crate) fn logits(case: &Case, tensors: &Tensors) -> Result<Vec<f64>> {
    let logits = last_logits(case.architecture, &case.config, tensors, &case.prompt)?;
    Ok(logits.into_iter().map(f64::from).collect())
}

/// Returns the smallest difference between the router's logits of the last expert taken and of the first one left, over
/// all tokens and layers.
pub(crate) fn routing_margin(case: &Case, tensors: &Tensors) -> Result<f32> {
    let Some(n_experts) = n_experts(&case.config) else { return Ok(f32::INFINITY) };
    let per_token = number(&case.config, "num_experts_per_tok");
    let mut least = f32::INFINITY;
    let sparse = (0..number(&case.config, "num_hidden_layers")).filter(|at| has_experts(&case.config, *at));
    for layer in sparse.filter(|_| per_token < n_experts) {
        let (config, tensors) = ending_in_router(&case.config, tensors, layer)?;
        for n_tokens in 1..=case.prompt.len() {
            let mut scores = last_logits(case.architecture, &config, &tensors, &case.prompt[..n_tokens])?;
            scores.truncate(n_experts);
            scores.sort_by(|one, other| other.total_cmp(one));
            least = least.min(scores[per_token - 1] - scores[per_token]);
        }
    }
    Ok(least)
}

/// Makes a model whose first logits are those of a layer's router, because candle's models do not show them: the layers
/// up to that one, whose experts add nothing, then the router's norm and the router.
fn ending_in_router(config: &Value, tensors: &Tensors, layer: usize) -> Result<(Value, Tensors)> {
    let (mut config, mut tensors) = (config.clone(), tensors.clone());
    config["num_hidden_layers"] = json!(layer + 1);
    config["tie_word_embeddings"] = json!(false);
    let prefix = format!("model.layers.{layer}.");
    for (name, tensor) in &mut tensors {
        let adds = name.contains(".experts.") && (name.contains(".w2.") || name.contains(".down_proj."));
        if name.starts_with(&prefix) && adds {
            *tensor = tensor.zeros_like()?;
        }
    }
    let router = tensors.iter().find(|(name, _)| name.starts_with(&prefix) && name.ends_with(".gate.weight"));
    let router = router.expect("the layer has experts").1;
    let n_rest = number(&config, "vocab_size") - router.dim(0)?;
    let output = router.pad_with_zeros(0, 0, n_rest)?;
    let norm = tensors[&format!("{prefix}post_attention_layernorm.weight")].clone();
    tensors.insert("lm_head.weight".to_owned(), output);
    tensors.insert("model.norm.weight".to_owned(), norm);
    Ok((config, tensors))
}

fn last_logits(
    architecture: Architecture,
    config: &Value,
    tensors: &Tensors,
    prompt: &[u32],
) -> Result<Vec<f32>> {
    let weights = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
    let prompt = Tensor::new(prompt, &Device::Cpu)?.unsqueeze(0)?;
    let logits = match architecture {
        Architecture::Llama => {
            let config = read::<llama::LlamaConfig>(config)?.into_config(false);
            let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
            llama::Llama::load(weights, &config)?.forward(&prompt, 0, &mut cache)?
        }
        Architecture::Mistral => mistral::Model::new(&read(config)?, weights)?.forward(&prompt, 0)?,
        Architecture::Mixtral => mixtral::Model::new(&read(config)?, weights)?.forward(&prompt, 0)?,
        Architecture::Qwen2 => qwen2::ModelForCausalLM::new(&read(config)?, weights)?.forward(&prompt, 0)?,
        Architecture::Qwen3 => qwen3::ModelForCausalLM::new(&read(config)?, weights)?.forward(&prompt, 0)?,
        Architecture::Qwen3Moe => {
            qwen3_moe::ModelForCausalLM::new(&read(config)?, weights)?.forward(&prompt, 0)?
        }
    };
    logits.flatten_all()?.to_vec1()
}

/// Reads a config as candle has it.
fn read<T: DeserializeOwned>(config: &Value) -> Result<T> {
    let mut config = config.clone();
    // Mixtral's config requires it.
    config["use_flash_attn"] = json!(false);
    // candle's window counts the tokens before the current one, that of `transformers` counts the current one too.
    // Mixtral's has no form for no window.
    let is_mixtral = config.get("num_local_experts").is_some();
    match config.get("sliding_window").and_then(Value::as_u64) {
        Some(window) => config["sliding_window"] = json!(window - 1),
        None if is_mixtral => config["sliding_window"] = config["max_position_embeddings"].clone(),
        None => {}
    }
    serde_json::from_value(config).map_err(Error::wrap)
}
