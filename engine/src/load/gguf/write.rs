//! Writes a hub's folder as a GGUF file, with candle's writer, for tests. It names and orders tensors as llama.cpp's
//! conversion does.

use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use serde_json::Value as Json;

use super::config::CONTROL;
use super::tensors::{IN_LAYERS, OF_EXPERTS, OUTSIDE, ROPE_FREQUENCIES, ROUTER};
use crate::load::tensors::TensorSpec;
use crate::load::{Checkpoint, ModelFolder, TensorSource as _, tensors};
use crate::model::rope::{Rope, Scaling};
use crate::model::{Mixture, ModelConfig};

/// The types that tests name.
pub const TYPES: [(&str, GgmlDType); 7] = [
    ("F32", GgmlDType::F32),
    ("F16", GgmlDType::F16),
    ("BF16", GgmlDType::BF16),
    ("Q8_0", GgmlDType::Q8_0),
    ("Q4_K", GgmlDType::Q4K),
    ("Q5_K", GgmlDType::Q5K),
    ("Q6_K", GgmlDType::Q6K),
];

/// Writes the model in `folder` to the file `to`, with a tokenizer that divides texts as GPT-2 does. Matrices are stored
/// as `kind`, if their rows are whole blocks of it, and everything else in f32.
///
/// # Panics
/// If anything fails, because only tests call it.
pub fn write(folder: &Path, to: &Path, kind: &str) {
    write_divided(folder, to, kind, "gpt-2");
}

/// Does what [`write()`] does, with this value of `tokenizer.ggml.pre`.
pub fn write_divided(folder: &Path, to: &Path, kind: &str, pre: &str) {
    let (_, kind) = TYPES.into_iter().find(|(name, _)| *name == kind).expect("a known type");
    let config = ModelFolder::open(folder).expect("it opens").config;
    let checkpoint = Checkpoint::open(folder).expect("it opens");
    let mut stored: Vec<(String, QTensor)> = Vec::new();
    for spec in tensors::tensors(&config).iter().filter(|spec| expert_of(&spec.name).is_none()) {
        let name = name_of(&spec.name, &config);
        let is_pairs = config.architecture.starts_with("Llama") || config.architecture.starts_with("Mixtral");
        let is_turned = is_pairs && ["attn_q.", "attn_k."].iter().any(|part| name.contains(part));
        let numbers = numbers(&checkpoint, spec, is_turned.then_some(config.head_dim));
        let is_narrow = spec.rows.is_some() && !name.contains(ROUTER);
        stored.push((name, quantized(&spec.shape(), numbers, if is_narrow { kind } else { GgmlDType::F32 })));
    }
    if let Some(mixture) = &config.mixture {
        stored.extend(experts(&checkpoint, &config, mixture, kind));
    }
    if config.rope.scaling != Scaling::None {
        let scaled = config.rope.frequencies(config.head_dim);
        let plain = Rope { scaling: Scaling::None, ..config.rope }.frequencies(config.head_dim);
        let divisors: Vec<f32> = plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect();
        let tensor = quantized(&[divisors.len()], divisors, GgmlDType::F32);
        stored.push((ROPE_FREQUENCIES.to_owned(), tensor));
    }
    let mut keys = keys(&config);
    keys.extend(tokenizer(folder, pre));
    let keys: Vec<(&str, &Value)> = keys.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let stored: Vec<(&str, &QTensor)> = stored.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(to).expect("a file"), &keys, &stored).expect("written");
}

fn keys(config: &ModelConfig) -> Vec<(String, Value)> {
    let name = match config.architecture {
        "LlamaForCausalLM" | "MixtralForCausalLM" => "llama",
        "Qwen2ForCausalLM" => "qwen2",
        "Qwen3ForCausalLM" => "qwen3",
        "Qwen3MoeForCausalLM" => "qwen3moe",
        other => panic!("{other} has no name in GGUF"),
    };
    let count = |count: usize| Value::U32(count as u32);
    let mut keys = vec![
        ("block_count", count(config.n_layers)),
        ("context_length", count(config.context_tokens)),
        ("embedding_length", count(config.hidden)),
        ("feed_forward_length", count(config.intermediate)),
        ("attention.head_count", count(config.n_heads)),
        ("attention.head_count_kv", count(config.n_kv_heads)),
        ("attention.key_length", count(config.head_dim)),
        ("attention.value_length", count(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Value::F32(config.norm_epsilon)),
        ("rope.dimension_count", count(config.head_dim)),
        ("rope.freq_base", Value::F32(config.rope.theta)),
    ];
    if let Some(mixture) = &config.mixture {
        keys.extend([
            ("expert_count", count(mixture.n_experts)),
            ("expert_used_count", count(mixture.per_token)),
            ("expert_feed_forward_length", count(mixture.intermediate)),
        ]);
    }
    let keys = keys.into_iter().map(|(key, value)| (format!("{name}.{key}"), value));
    let architecture = ("general.architecture".to_owned(), Value::String(name.to_owned()));
    let ends =
        config.eos_tokens.first().map(|end| ("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(end.0)));
    std::iter::once(architecture).chain(keys).chain(ends).collect()
}

/// Returns the keys of a byte-level tokenizer.
fn tokenizer(folder: &Path, pre: &str) -> Vec<(String, Value)> {
    let read = |name: &str| -> Option<Json> {
        Some(serde_json::from_slice(&std::fs::read(folder.join(name)).ok()?).expect("JSON"))
    };
    let (Some(tokenizer), Some(config)) = (read("tokenizer.json"), read("tokenizer_config.json")) else {
        return Vec::new();
    };
    let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary");
    let added = tokenizer["added_tokens"].as_array().expect("a list");
    let mut texts = vec![String::new(); vocab.len()];
    let mut types = vec![Value::I32(1); vocab.len()];
    vocab.iter().for_each(|(text, id)| texts[id.as_u64().expect("a number") as usize].clone_from(text));
    for token in added {
        types[token["id"].as_u64().expect("a number") as usize] = Value::I32(CONTROL as i32);
    }
    let id = |name: &str| {
        let text = config[name].as_str().expect("a token");
        Value::U32(texts.iter().position(|known| known == text).expect("it is known") as u32)
    };
    let text = |text: &str| Value::String(text.to_owned());
    let merge = |merge: &Json| match merge {
        Json::String(merge) => text(merge),
        pair => text(&format!("{} {}", pair[0].as_str().expect("a text"), pair[1].as_str().expect("a text"))),
    };
    let merges = tokenizer["model"]["merges"].as_array().expect("a list").iter().map(merge).collect();
    [
        ("ggml.model", text("gpt2")),
        ("ggml.pre", text(pre)),
        ("ggml.bos_token_id", id("bos_token")),
        ("ggml.padding_token_id", id("pad_token")),
        ("ggml.add_bos_token", Value::Bool(config["add_bos_token"] == true)),
        ("ggml.tokens", Value::Array(texts.iter().map(|known| text(known)).collect())),
        ("ggml.token_type", Value::Array(types)),
        ("ggml.merges", Value::Array(merges)),
        ("chat_template", text(config["chat_template"].as_str().expect("a template"))),
    ]
    .map(|(key, value)| (format!("tokenizer.{key}"), value))
    .into()
}

/// Returns llama.cpp's name of a tensor.
fn name_of(name: &str, config: &ModelConfig) -> String {
    if let Some((outside, _)) = OUTSIDE.iter().find(|(_, known)| *known == name) {
        return (*outside).to_owned();
    }
    let (layer, rest) =
        name.strip_prefix("model.layers.").and_then(|name| name.split_once('.')).expect("a layer's");
    let (part, end) = rest.rsplit_once('.').expect("it ends with .weight or .bias");
    let router = config.mixture.as_ref().map(|mixture| format!("{}.gate", mixture.style.part));
    let known = IN_LAYERS.iter().find(|(_, known)| *known == part).map(|(known, _)| *known);
    let part = known.unwrap_or_else(|| {
        assert_eq!(Some(part), router.as_deref());
        ROUTER
    });
    format!("blk.{layer}.{part}.{end}")
}

fn expert_of(name: &str) -> Option<&str> {
    name.split_once(".experts.").map(|(_, expert)| expert)
}

fn experts(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    mixture: &Mixture,
    kind: GgmlDType,
) -> Vec<(String, QTensor)> {
    let (hidden, inner) = (config.hidden, mixture.intermediate);
    let shapes = [(inner, hidden), (inner, hidden), (hidden, inner)];
    let mut all = Vec::new();
    for layer in 0..config.n_layers {
        for (nth, (rows, cols)) in shapes.into_iter().enumerate() {
            let spec = |expert: usize| {
                let name = mixture.expert(expert, mixture.style.matrices[nth]);
                TensorSpec { name: format!("model.layers.{layer}.{name}.weight"), rows: Some(rows), cols }
            };
            let of_all = (0..mixture.n_experts).flat_map(|expert| numbers(checkpoint, &spec(expert), None));
            let tensor = quantized(&[mixture.n_experts, rows, cols], of_all.collect(), kind);
            all.push((format!("blk.{layer}.{}.weight", OF_EXPERTS[nth]), tensor));
        }
    }
    all
}

/// Reads a tensor. With `pairs`, the rows of each head of so many rows are ordered so that the rows that are turned
/// together are neighbours.
fn numbers(checkpoint: &Checkpoint, spec: &TensorSpec, pairs: Option<usize>) -> Vec<f32> {
    let (rows, width) = spec.rows.map_or((spec.cols, 1), |rows| (rows, spec.cols));
    let numbers = match spec.rows {
        Some(rows) => {
            let matrix = checkpoint.matrix(&spec.name, rows, spec.cols).expect("it is there");
            let mut numbers = vec![0.0; rows * spec.cols];
            numbers.chunks_mut(spec.cols).enumerate().for_each(|(nth, row)| matrix.read_row(nth, row));
            numbers
        }
        None => checkpoint.vector(&spec.name, spec.cols).expect("it is there"),
    };
    let Some(head) = pairs else { return numbers };
    let from = |row: usize| row / head * head + row % 2 * (head / 2) + row % head / 2;
    (0..rows).flat_map(|row| numbers[from(row) * width..][..width].to_vec()).collect()
}

fn quantized(shape: &[usize], numbers: Vec<f32>, kind: GgmlDType) -> QTensor {
    let is_whole = shape.last().expect("a dimension").is_multiple_of(kind.block_size());
    let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).expect("the shape fits");
    QTensor::quantize(&tensor, if is_whole { kind } else { GgmlDType::F32 }).expect("quantized")
}
