//! Compares random models with candle, which has these architectures by other authors. `golden.rs` compares fixed models
//! with `transformers`.
//!
//! Each test makes some random configs, which are the same in every run. `TEST_RANDOM_CONFIGS` makes more of them.
//! Configs leave out what candle computes unlike `transformers`, because `transformers` is right: see `case.rs`.

mod case;
mod opinion;
mod weights;

use std::collections::HashMap;

use baton_engine::conformance::alone::step;
use baton_engine::{CpuBackend, CpuSettings};
use candle_core::Tensor;
use types::{KvDtype, TokenId};

use crate::case::{Architecture, Case};

/// The largest difference between two logits, as a share of the largest logit.
const TOLERANCE: f64 = 1e-4;
/// Routers choose experts by the order of logits. If two logits differ by less than this, rounding may decide, and the
/// case is left out. Routers' logits are of order 1, and both sides compute in f32.
const ROUTING_MARGIN: f32 = 3e-5;

fn n_configs() -> u64 {
    match std::env::var("TEST_RANDOM_CONFIGS") {
        Ok(number) => number.parse().expect("TEST_RANDOM_CONFIGS is a number"),
        Err(_) => 20,
    }
}

fn check(architecture: Architecture) {
    let (n_configs, mut n_near_ties) = (n_configs(), 0);
    for seed in 0..n_configs {
        let case = Case::random(architecture, seed);
        let tensors = weights::random(&case.config, seed);
        if opinion::routing_margin(&case, &tensors).expect("candle computes") < ROUTING_MARGIN {
            n_near_ties += 1;
        } else {
            compare(&case, &tensors);
        }
    }
    eprintln!("{architecture:?}: {n_near_ties} of {n_configs} configs have near ties of routing");
    assert!(n_near_ties * 20 <= n_configs, "{n_near_ties} of {n_configs} configs have near ties of routing");
}

fn compare(case: &Case, tensors: &HashMap<String, Tensor>) {
    let logits = opinion::logits(case, tensors).expect("candle computes");
    let largest = logits.iter().fold(0.0, |largest: f64, logit| largest.max(logit.abs()));
    assert!((0.5..50.0).contains(&largest), "{}: the largest logit is {largest}", case.config);
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let found = log_probabilities(case, tensors);
    assert_eq!(found.len(), logits.len(), "{}", case.config);
    for (TokenId(token), found) in found {
        let (found, expected) = (f64::from(found), logits[token as usize] - sum.ln());
        assert!(
            (found - expected).abs() <= TOLERANCE * largest,
            "token {token}: {found}, candle has {expected}, the largest logit is {largest}; the prompt has {} \
             tokens, the first step computes {}; {}",
            case.prompt.len(),
            case.first_step,
            case.config
        );
    }
}

/// Writes the model as a hub has it, and returns the log-probabilities of all tokens after the prompt.
fn log_probabilities(case: &Case, tensors: &HashMap<String, Tensor>) -> Vec<(TokenId, f32)> {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), case.config.to_string()).expect("written");
    candle_core::safetensors::save(tensors, folder.path().join("model.safetensors")).expect("written");
    let settings = CpuSettings { kv_dtype: KvDtype::F32, ..CpuSettings::default() };
    let mut backend = CpuBackend::open(folder.path(), 4 << 20, &settings)
        .unwrap_or_else(|error| panic!("{error:?}: {}", case.config));
    let prompt: Vec<TokenId> = case.prompt.iter().copied().map(TokenId).collect();
    let (first, rest) = prompt.split_at(case.first_step);
    let (_, mut top) = step(&mut backend, first, 0, u8::MAX);
    if !rest.is_empty() {
        (_, top) = step(&mut backend, rest, first.len(), u8::MAX);
    }
    top
}

#[test]
fn llama_is_as_in_candle() {
    check(Architecture::Llama);
}

#[test]
fn mistral_is_as_in_candle() {
    check(Architecture::Mistral);
}

#[test]
fn mixtral_is_as_in_candle() {
    check(Architecture::Mixtral);
}

#[test]
fn qwen2_is_as_in_candle() {
    check(Architecture::Qwen2);
}

#[test]
fn qwen3_is_as_in_candle() {
    check(Architecture::Qwen3);
}

#[test]
fn qwen3_moe_is_as_in_candle() {
    check(Architecture::Qwen3Moe);
}
