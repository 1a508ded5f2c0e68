use std::collections::HashMap;
use std::num::NonZero;

use kernels::cpu::Arithmetic;
use serde_json::Value as Json;
use tempfile::TempDir;
use types::layout::Attention;
use types::{BlockIdx, KvDtype, StageSplit, TokenId};

use super::*;
use crate::conformance;
use crate::conformance::alone::step;
use crate::load::{Activations, Quantize};
use crate::step::{Row, RowInput, SlotId};

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn check(name: &str, settings: &CpuSettings) {
    let open = || -> Box<dyn Backend> {
        Box::new(CpuBackend::open(&folder(name), 8 << 20, settings).expect("it opens"))
    };
    conformance::suite(&open);
    conformance::grammar::suite(&open);
}

fn settings(threads: usize) -> CpuSettings {
    CpuSettings { threads: NonZero::new(threads), ..CpuSettings::default() }
}

#[test]
fn every_architecture_keeps_the_contract() {
    for name in ["llama", "llama3", "mistral", "qwen2", "qwen3", "deepseek-v2", "deepseek-v3"] {
        check(&format!("tests/models/{name}"), &settings(1));
    }
}

#[test]
fn the_demo_model_keeps_the_contract_on_two_threads() {
    check("../models/demo", &settings(2));
}

#[test]
fn every_setting_keeps_the_contract() {
    for (kv_dtype, arithmetic, quantize, block_tokens) in [
        (KvDtype::F32, Arithmetic::F32, Quantize::No, 16),
        (KvDtype::Bf16, Arithmetic::Bf16, Quantize::No, 16),
        (KvDtype::Bf16, Arithmetic::F32, Quantize::Q8, 16),
        (KvDtype::Bf16, Arithmetic::F32, Quantize::Fp8, 16),
        (KvDtype::Bf16, Arithmetic::Bf16, Quantize::Fp8, 16),
        (KvDtype::Fp8E4m3, Arithmetic::F32, Quantize::No, 16),
        (KvDtype::Bf16, Arithmetic::F32, Quantize::No, 8),
        (KvDtype::Bf16, Arithmetic::F32, Quantize::No, 32),
    ] {
        let settings = CpuSettings { kv_dtype, arithmetic, quantize, block_tokens, ..settings(2) };
        check("tests/models/qwen3", &settings);
        check("tests/models/mistral", &settings);
        check("tests/models/deepseek-v3", &settings);
    }
    let fp8 = CpuSettings { quantize: Quantize::Fp8, activations: Activations::Fp8, ..settings(2) };
    check("tests/models/qwen3", &fp8);
    check("tests/models/qwen3-moe", &fp8);
}

#[test]
fn ranks_keep_the_contract() {
    for (name, ranks) in [
        ("llama", 4),
        ("llama3", 2),
        ("mistral", 2),
        ("qwen2", 4),
        ("qwen3", 2),
        ("deepseek-v2", 2),
        ("deepseek-v3", 4),
    ] {
        let ranks = NonZero::new(ranks).expect("some");
        for (kv_dtype, quantize) in
            [(KvDtype::Bf16, Quantize::No), (KvDtype::F32, Quantize::Q8), (KvDtype::Fp8E4m3, Quantize::Fp8)]
        {
            check(&format!("tests/models/{name}"), &CpuSettings { ranks, kv_dtype, quantize, ..settings(1) });
        }
    }
}

fn staged(n_stages: u16, layers: &[u16]) -> CpuSettings {
    let n_stages = NonZero::new(n_stages).expect("some");
    CpuSettings { stages: StageSplit { n_stages, layers: layers.to_vec() }, ..settings(1) }
}

#[test]
fn stages_keep_the_contract() {
    for (name, n_stages, layers) in [
        ("llama", 2, &[][..]),
        ("mistral", 2, &[]),
        ("qwen2-window", 3, &[]),
        ("qwen2-window", 2, &[1, 2]),
        ("qwen3-moe", 3, &[1, 2, 1]),
        ("deepseek-v3", 3, &[]),
    ] {
        for ranks in [1, 2] {
            let ranks = NonZero::new(ranks).expect("some");
            check(&format!("tests/models/{name}"), &CpuSettings { ranks, ..staged(n_stages, layers) });
        }
    }
}

#[test]
fn layers_that_stages_cannot_share_are_refused() {
    let refusal = |n_stages: u16, layers: &[u16]| {
        let settings = staged(n_stages, layers);
        let error = CpuBackend::open(&folder("tests/models/qwen3"), 1 << 20, &settings);
        types::in_full(&error.expect_err("it cannot be"))
    };
    assert_eq!(refusal(3, &[]), "pipeline stages: 3 stages for 2 layers: every stage needs a layer");
    assert_eq!(refusal(2, &[2, 1]), "pipeline stages: stage_layers adds up to 3 layers, and the model has 2");
}

/// The first layer has a layer group of its own, so a row without blocks in one of the groups makes a certain stage panic.
#[test]
fn a_stage_that_panics_is_a_lost_device() {
    for (ranks, group, n_layers_written) in [(1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 1)] {
        let settings = CpuSettings { ranks: NonZero::new(ranks).expect("some"), ..staged(2, &[1, 2]) };
        let mut backend =
            CpuBackend::open(&folder("tests/models/qwen2-window"), 1 << 20, &settings).expect("it opens");
        let blocks = [BlockIdx(0), BlockIdx(1)];
        let mut launch = |slot, tables: [&[BlockIdx]; 2]| {
            let input = RowInput::Tokens(&[TokenId(7), TokenId(8)]);
            let row = Row {
                slot: SlotId(slot),
                input,
                start: 0,
                tables: &tables,
                prompt_logprobs: None,
                sample: None,
            };
            backend.launch(StepBatch { rows: &[row] })
        };
        let mut tables = [&blocks[..1], &blocks[1..]];
        let good = launch(1, tables).expect("launched");
        tables[group] = &[];
        let bad = launch(2, tables).expect("launched");
        let fence = bad.fence().clone();
        let after = launch(3, [&blocks[..1], &blocks[1..]]);
        assert!(backend.collect(good).expect("it was before").rows[0].is_ok());
        let lost = |error| matches!(error, BackendError::DeviceLost(_));
        assert!(lost(backend.collect(bad).expect_err("a thread panicked")));
        let mut is_lost = |launched: Result<PendingStep, BackendError>| match launched {
            Ok(launched) => lost(backend.collect(launched).expect_err("a thread panicked")),
            Err(error) => lost(error),
        };
        assert!(is_lost(after), "a step that was launched before");
        for n in 0..=3 {
            assert_eq!(fence.is_open(n), n <= n_layers_written, "{n} layers, {ranks} ranks, group {group}");
        }
        let last = backend.launch(StepBatch { rows: &[] });
        assert!(last.map_or_else(lost, |last| lost(backend.collect(last).expect_err("no thread answers"))));
    }
}

#[test]
fn what_ranks_cannot_share_is_refused() {
    let refusal = |name: &str, ranks: u16| {
        let settings = CpuSettings { ranks: NonZero::new(ranks).expect("some"), ..settings(1) };
        CpuBackend::open(&folder(name), 1 << 20, &settings).expect_err("it cannot be").to_string()
    };
    assert_eq!(refusal("tests/models/qwen3", 3), "tensor parallel: 4 heads do not spread over 3 ranks");
    assert_eq!(refusal("tests/models/qwen3", 8), "tensor parallel: 4 heads do not spread over 8 ranks");
}

#[test]
fn how_many_ranks_there_are_is_not_in_the_fingerprint() {
    let model = |ranks: u16| {
        let settings = CpuSettings { ranks: NonZero::new(ranks).expect("some"), ..settings(1) };
        let backend = CpuBackend::open(&folder("tests/models/llama"), 1 << 20, &settings).expect("it opens");
        backend.model().clone()
    };
    let (one, four) = (model(1), model(4));
    assert_eq!(one.fingerprint.agree(&four.fingerprint), Ok(()));
    assert_eq!((one.layout.shard.tp_size, four.layout.shard.tp_size), (1, 4));
}

#[test]
fn a_config_alone_is_a_model() {
    let dummy = CpuSettings { load_format: LoadFormat::Dummy { seed: 5 }, ..settings(2) };
    check("tests/models/qwen3", &dummy);
    let backend = CpuBackend::open(&folder("tests/models/qwen3"), 1 << 20, &dummy).expect("it opens");
    let weights = backend.model().fingerprint.parts().find(|part| part.0 == "weights").map(|part| part.1);
    assert_eq!(weights, Some("dummy, seed 5"));
}

#[test]
fn what_makes_kv_differ_is_in_the_fingerprint() {
    let fingerprint = |name: &str, settings: &CpuSettings| {
        let backend = CpuBackend::open(&folder(name), 1 << 20, settings).expect("it opens");
        backend.model().fingerprint.clone()
    };
    let plain = fingerprint("../models/demo", &settings(1));
    assert_eq!(plain.agree(&fingerprint("../models/demo", &settings(2))), Ok(()));
    let q8 = CpuSettings { quantize: Quantize::Q8, ..settings(1) };
    let error = plain.agree(&fingerprint("../models/demo", &q8)).expect_err("8 bits are not 16");
    assert_eq!(error.to_string(), "models differ: dtype: bf16 here, q8 there");
    let fp8 = CpuSettings { quantize: Quantize::Fp8, ..settings(1) };
    let error = plain.agree(&fingerprint("../models/demo", &fp8)).expect_err("these neither");
    assert_eq!(error.to_string(), "models differ: dtype: bf16 here, fp8 there");
    let fp8 = CpuSettings { kv_dtype: KvDtype::Fp8E4m3, ..settings(1) };
    let error = plain.agree(&fingerprint("../models/demo", &fp8)).expect_err("KV of 8 bits is not of 16");
    assert!(error.to_string().contains("bf16 here, fp8_e4m3 there"), "{error}");
    let error = plain.agree(&fingerprint("tests/models/llama", &settings(1))).expect_err("another model");
    assert!(error.to_string().contains("weights: "), "{error}");
}

/// The prompts of the bundled model with their continuations, as tokens.
fn texts() -> Vec<[Vec<TokenId>; 2]> {
    let golden = std::fs::read(folder("../models/demo/golden.json")).expect("a file");
    let golden: Json = serde_json::from_slice(&golden).expect("JSON");
    let ids = |ids: &Json| -> Vec<TokenId> {
        let ids = ids.as_array().expect("a list").iter();
        ids.map(|id| TokenId(id.as_u64().expect("a number") as u32)).collect()
    };
    let prompts = golden["prompts"].as_array().expect("a list").iter();
    prompts.map(|one| [ids(&one["prompt_ids"]), ids(&one["continuation_ids"])]).collect()
}

/// Returns the mean divergence (KL) of the model's next tokens from those of the reference, along its texts, over
/// the 255 likeliest tokens of each.
fn divergence(reference: &CpuSettings, settings: &CpuSettings) -> f64 {
    let open = |settings: &CpuSettings| {
        CpuBackend::open(&folder("../models/demo"), 32 << 20, settings).expect("it opens")
    };
    let (mut reference, mut subject) = (open(reference), open(settings));
    let (mut sum, mut n) = (0.0, 0);
    for [prompt, continuation] in texts() {
        let mut start = 0;
        for tokens in std::iter::once(prompt.as_slice()).chain(continuation.chunks(1)) {
            let (_, expected) = step(&mut reference, tokens, start, u8::MAX);
            let (_, found) = step(&mut subject, tokens, start, u8::MAX);
            let found: HashMap<TokenId, f32> = found.into_iter().collect();
            for (token, logprob) in expected {
                if let Some(other) = found.get(&token) {
                    sum += f64::from(logprob).exp() * f64::from(logprob - other);
                }
            }
            n += 1;
            start += tokens.len();
        }
    }
    sum / f64::from(n)
}

#[test]
fn rounded_activations_diverge_about_as_much_as_rounded_weights() {
    let plain = CpuSettings { kv_dtype: KvDtype::F32, ..settings(2) };
    let weights = CpuSettings { quantize: Quantize::Fp8, ..plain.clone() };
    let both = CpuSettings { activations: Activations::Fp8, ..weights.clone() };
    assert_eq!(divergence(&plain, &plain), 0.0);
    let (weights, both) = (divergence(&plain, &weights), divergence(&plain, &both));
    println!("mean divergence: {weights:.6} with weights in FP8, {both:.6} with activations too");
    assert!(weights > 0.0 && both > weights && both <= 2.1 * weights, "{weights} {both}");
}

/// Copies the `llama` test model, with `new` instead of `old` in its configuration.
fn changed(old: &str, new: &str) -> TempDir {
    let copy = TempDir::new().expect("a folder");
    for entry in std::fs::read_dir(folder("tests/models/llama")).expect("a folder").flatten() {
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("a copy");
    }
    let file = copy.path().join("config.json");
    let config = std::fs::read_to_string(&file).expect("a config");
    assert!(config.contains(old), "{config}");
    std::fs::write(&file, config.replace(old, new)).expect("a config");
    copy
}

/// Rotation, epsilon, tokenizer and block size are not in the weights' files, so the fingerprint must name
/// them.
#[test]
fn a_folder_that_differs_in_one_thing_is_another_model_and_the_thing_is_named() {
    let fingerprint = |folder: &Path, settings: &CpuSettings| {
        CpuBackend::open(folder, 1 << 20, settings).expect("it opens").model().fingerprint.clone()
    };
    let (same, base) = (changed("", ""), settings(1));
    let plain = fingerprint(same.path(), &base);
    assert_eq!(plain.agree(&fingerprint(&folder("tests/models/llama"), &base)), Ok(()));
    let differs = |folder: &TempDir, settings: &CpuSettings| {
        plain.agree(&fingerprint(folder.path(), settings)).expect_err("it is another").to_string()
    };
    let rope = differs(&changed("\"rope_theta\": 10000.0", "\"rope_theta\": 500000.0"), &base);
    assert_eq!(rope, "models differ: rope: theta 10000, None here, theta 500000, None there");
    let epsilon = differs(&changed("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06"), &base);
    assert_eq!(epsilon, "models differ: norm_epsilon: 0.00001 here, 0.000001 there");
    let block_size = differs(&same, &CpuSettings { block_tokens: 8, ..base.clone() });
    assert_eq!(block_size, "models differ: kv.block_tokens: 16 here, 8 there");
    std::fs::write(same.path().join("tokenizer.json"), "{}").expect("a file");
    let tokenizer = differs(&same, &base);
    assert!(tokenizer.starts_with("models differ: tokenizer: none here, blake3:"), "{tokenizer}");
}

#[test]
fn layers_that_see_alike_share_tables() {
    let windows = [None, Some(8), None, Some(8), Some(4)];
    let groups = groups(2, 8, &windows);
    let layers: Vec<Vec<u16>> =
        groups.iter().map(|group| group.layers.iter().map(|shape| shape.layer).collect()).collect();
    assert_eq!(layers, [vec![0, 2], vec![1, 3], vec![4]]);
    assert_eq!(groups[1].attention, Attention::SlidingWindow { tokens: 8 });
}

#[test]
fn a_missing_expert_is_refused_by_its_name() {
    let to = TempDir::new().expect("a folder");
    let from = folder("tests/models/deepseek-v2");
    std::fs::copy(from.join("config.json"), to.path().join("config.json")).expect("copied");
    let mut weights = std::fs::read(from.join("model.safetensors")).expect("read");
    // The tensor gets the name of one that need not be read.
    let name = "model.layers.1.mlp.experts.5.up_proj.weight";
    let other = format!("{}.rotary_emb.inv_freq", "x".repeat(name.len() - 20));
    let at = weights.windows(name.len()).position(|window| window == name.as_bytes()).expect("its name");
    weights[at..at + name.len()].copy_from_slice(other.as_bytes());
    std::fs::write(to.path().join("model.safetensors"), weights).expect("written");
    let error = CpuBackend::open(to.path(), 1 << 20, &settings(1)).expect_err("an expert is missing");
    let path = to.path().join("model.safetensors");
    assert_eq!(error.to_string(), format!("no tensor {name} in {}", path.display()));
}
