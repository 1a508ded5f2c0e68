//! `config.json` and `generation_config.json`, made of a GGUF file's keys.

use serde_json::{Map, Value, json};

use super::header::Header;
use super::model::Model;
use super::tensors::ROPE_FREQUENCIES;
use crate::model::rope::{Rope, Scaling};

/// The keys of an architecture that are read. Any other may change results, and is rejected.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
];
/// Keys without effect on results: which program wrote the file, and how the model was trained.
const WITHOUT_EFFECT: &[&str] = &["rope.scaling.finetuned", "tensor_data_layout"];

/// Texts of tokens that end an answer, whatever the file's keys name, as in llama.cpp.
const ENDS: &[&str] = &["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"];
/// The type of a token that is no text.
pub(super) const CONTROL: u64 = 3;

/// The sampling that the model's authors recommend: the keys of both formats.
const SAMPLING: &[(&str, &str)] = &[
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.top_k", "top_k"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
];

pub(super) fn config(header: &Header<'_>, model: &Model) -> Result<Value, String> {
    check_keys(header, model)?;
    let Model { n_layers, hidden, n_heads, n_kv_heads, head_dim, vocab, .. } = *model;
    let has = |name: &str| header.tensors.iter().any(|tensor| tensor.name == name);
    let key = |key: &str| model.key(key);
    for same in ["attention.value_length", "rope.dimension_count"] {
        let found = header.count_or(&key(same), head_dim)?;
        if found != head_dim {
            return Err(format!(
                "key {} is {found}, and a head has {head_dim}: this is not implemented",
                key(same)
            ));
        }
    }
    let epsilon = header.real(&key("attention.layer_norm_rms_epsilon"))?;
    let mut config = json!({
        "architectures": [model.architecture.class],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": header.needed_count(&key("feed_forward_length"))?,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": header.needed_count(&key("context_length"))?,
        "rms_norm_eps": epsilon.ok_or_else(|| format!("there is no key {}", key("attention.layer_norm_rms_epsilon")))?,
        "tie_word_embeddings": !has("output.weight"),
        "eos_token_id": ends(header)?,
    });
    let keys = config.as_object_mut().expect("it is an object");
    rope(header, model, keys)?;
    if model.architecture.class == "LlamaForCausalLM" {
        keys.insert("mlp_bias".to_owned(), has("blk.0.ffn_up.bias").into());
    }
    if ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"].contains(&model.architecture.class) {
        keys.insert("attention_bias".to_owned(), has("blk.0.attn_q.bias").into());
    }
    if model.n_experts > 0 {
        keys.insert("num_experts_per_tok".to_owned(), header.needed_count(&key("expert_used_count"))?.into());
    }
    match model.architecture.class {
        "MixtralForCausalLM" => keys.extend([
            ("num_local_experts".to_owned(), model.n_experts.into()),
            ("sliding_window".to_owned(), Value::Null),
        ]),
        "Qwen3MoeForCausalLM" => keys.extend([
            ("num_experts".to_owned(), model.n_experts.into()),
            (
                "moe_intermediate_size".to_owned(),
                header.needed_count(&key("expert_feed_forward_length"))?.into(),
            ),
            // A file has no key for this, and llama.cpp always does it.
            ("norm_topk_prob".to_owned(), true.into()),
        ]),
        _ => {}
    }
    Ok(config)
}

fn check_keys(header: &Header<'_>, model: &Model) -> Result<(), String> {
    let prefix = model.key("");
    let mut of_model = header.keys().filter_map(|key| key.strip_prefix(prefix.as_str()));
    match of_model.find(|key| !READ.contains(key) && !WITHOUT_EFFECT.contains(key)) {
        Some(key) => Err(format!("key {prefix}{key} is not known, and may change results")),
        None => Ok(()),
    }
}

/// Adds the rotary settings.
fn rope(header: &Header<'_>, model: &Model, keys: &mut Map<String, Value>) -> Result<(), String> {
    let theta = header.real(&model.key("rope.freq_base"))?.unwrap_or(10_000.0);
    keys.insert("rope_theta".to_owned(), theta.into());
    let factor = header.real(&model.key("rope.scaling.factor"))?.filter(|factor| *factor != 0.0);
    // llama.cpp scales linearly if there is a factor without a type.
    let kind = header.text(&model.key("rope.scaling.type"))?.unwrap_or("linear");
    let scaling = match (header.tensors.iter().any(|tensor| tensor.name == ROPE_FREQUENCIES), kind, factor) {
        (false, "none", _) | (false, "linear", None) => return Ok(()),
        (false, "yarn", factor) => {
            let trained_tokens = header
                .count(&model.key("rope.scaling.original_context_length"))?
                .filter(|tokens| *tokens > 0);
            json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained_tokens})
        }
        (false, kind, factor) => json!({"rope_type": kind, "factor": factor}),
        (true, "none", _) | (true, "linear", None) => llama3(header, model, theta as f32)?,
        (true, ..) => {
            return Err(format!("{ROPE_FREQUENCIES} and rope scaling {kind} together are not implemented"));
        }
    };
    keys.insert("rope_scaling".to_owned(), scaling);
    Ok(())
}

/// Returns the settings of the type `llama3` that have these divisors of frequencies.
///
/// A file has the divisors only. All published models have the factors 1 and 4. With these, one divisor between the
/// smallest and the largest determines the number of trained tokens.
fn llama3(header: &Header<'_>, model: &Model, theta: f32) -> Result<Value, String> {
    let unknown = || format!("the divisors in {ROPE_FREQUENCIES} are not those of rope type llama3");
    let divisors = header.f32s(ROPE_FREQUENCIES).ok_or_else(unknown)?;
    if divisors.len() as u64 * 2 != model.head_dim {
        return Err(unknown());
    }
    let plain = Rope { theta, scaling: Scaling::None }.frequencies(model.head_dim as usize);
    let factor = divisors.iter().copied().fold(1.0, f32::max);
    let between = plain.iter().zip(&divisors).find(|(_, divisor)| (1.01..0.99 * factor).contains(*divisor));
    let (frequency, divisor) = between.ok_or_else(unknown)?;
    let smooth = (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor);
    let trained_tokens = ((3.0 * smooth + 1.0) * std::f32::consts::TAU / frequency).round();
    let scaling = Scaling::Llama3 { factor, low_frequency: 1.0, high_frequency: 4.0, trained_tokens };
    let scaled = Rope { theta, scaling }.frequencies(model.head_dim as usize);
    let is_same = |((plain, divisor), scaled): ((&f32, &f32), &f32)| {
        (plain / divisor - scaled).abs() <= 1e-4 * scaled.abs()
    };
    if !plain.iter().zip(&divisors).zip(&scaled).all(is_same) {
        return Err(unknown());
    }
    Ok(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": trained_tokens,
    }))
}

pub(super) fn generation(header: &Header<'_>) -> Result<Value, String> {
    let mut generation = Map::from_iter([("eos_token_id".to_owned(), json!(ends(header)?))]);
    for (key, name) in SAMPLING {
        // `top_k` is a whole number in both formats.
        let value = match header.count(key) {
            Ok(count) => count.map(Value::from),
            Err(_) => header.real(key)?.map(Value::from),
        };
        generation.extend(value.map(|value| ((*name).to_owned(), value)));
    }
    Ok(Value::Object(generation))
}

/// Returns the tokens that end an answer.
fn ends(header: &Header<'_>) -> Result<Vec<u64>, String> {
    let mut ends = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(header.count(&format!("tokenizer.ggml.{key}"))?);
    }
    let texts = header.list("tokenizer.ggml.tokens", super::header::Value::text)?.unwrap_or_default();
    let types = header.list("tokenizer.ggml.token_type", super::header::Value::count)?.unwrap_or_default();
    let is_end = |(text, kind): &(&&str, &u64)| **kind == CONTROL && ENDS.contains(text);
    ends.extend((0..).zip(texts.iter().zip(&types)).filter(|(_, token)| is_end(token)).map(|(id, _)| id));
    let mut seen = std::collections::BTreeSet::new();
    ends.retain(|id| seen.insert(*id));
    Ok(ends)
}
