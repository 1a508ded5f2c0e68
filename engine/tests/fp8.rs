//! Tests of FP8 checkpoints: the CPU computes with exactly the numbers that they represent.

use std::num::NonZero;
use std::path::{Path, PathBuf};

use baton_engine::equality::{Comparison, Tolerance, compare};
use baton_engine::load::made::{Form, rewrite};
use baton_engine::load::{Activations, Quantize};
use baton_engine::{Backend, CpuBackend, CpuSettings, OpenError};
use kernels::cpu::number::{bf16_to_f32, f32_to_bf16};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use types::{KvDtype, TokenId, in_full};

const MODELS: [&str; 6] = ["llama", "llama3", "mistral", "qwen2", "qwen2-window", "qwen3"];

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model)
}

/// Opens a model whose activations are not rounded.
fn opened(folder: &Path, quantize: Quantize, ranks: u16) -> CpuBackend {
    rounding(folder, Activations::Full, quantize, ranks)
}

fn rounding(folder: &Path, activations: Activations, quantize: Quantize, ranks: u16) -> CpuBackend {
    let settings = CpuSettings {
        quantize,
        activations,
        threads: NonZero::new(1),
        ranks: NonZero::new(ranks).expect("some"),
        kv_dtype: KvDtype::F32,
        ..CpuSettings::default()
    };
    CpuBackend::open(folder, 4 << 20, &settings).expect("it opens")
}

/// Writes the model's weights in another format into a temporary folder.
fn in_form(from: &Path, form: Form) -> TempDir {
    let to = TempDir::new().expect("a folder");
    rewrite(from, to.path(), form).expect("it is written");
    to
}

fn compared(reference: &mut CpuBackend, subject: &mut CpuBackend, tolerance: Tolerance) -> Comparison {
    let prompt = |n: u32| (0..n).map(|nth| TokenId((nth * 7 + n) % 90)).collect();
    compare(reference, subject, &[prompt(5), prompt(33)], 6, tolerance).expect("it is compared").sampled
}

/// Every token and log-probability equals that of the same weights in f32, to the last bit, in any batch and
/// on two ranks.
#[test]
fn a_checkpoint_in_fp8_is_the_one_that_it_stands_for() {
    for model in MODELS {
        for form in [Form::CompressedTensors, Form::Fbgemm] {
            let narrow = in_form(&folder(model), form);
            let wide = in_form(narrow.path(), Form::F32);
            let mut reference = opened(wide.path(), Quantize::No, 1);
            for ranks in [1, 2] {
                let mut subject = opened(narrow.path(), Quantize::No, ranks);
                assert!(subject.weight_bytes() < reference.weight_bytes(), "{model}: one byte a weight");
                let comparison = compared(&mut reference, &mut subject, Tolerance::NONE);
                assert!(comparison.is_equal(), "{model} {form:?}: {:?}", comparison.wrong.first());
            }
        }
    }
}

/// The same with a scale for each block. The committed models have widths of more than one block.
#[test]
fn a_checkpoint_with_block_scales_is_the_one_that_it_stands_for() {
    let copies =
        MODELS.iter().chain(&["mixtral", "deepseek-v3"]).map(|model| in_form(&folder(model), Form::Blocks));
    let copies: Vec<TempDir> = copies.collect();
    let committed = ["qwen3-fp8", "deepseek-v3-fp8", "qwen3-moe-fp8"].map(folder);
    for narrow in copies.iter().map(TempDir::path).chain(committed.iter().map(PathBuf::as_path)) {
        let wide = in_form(narrow, Form::F32);
        let mut reference = opened(wide.path(), Quantize::No, 1);
        for ranks in [1, 2] {
            let mut subject = opened(narrow, Quantize::No, ranks);
            assert!(subject.weight_bytes() < reference.weight_bytes(), "one byte a weight");
            let comparison = compared(&mut reference, &mut subject, Tolerance::NONE);
            assert!(comparison.is_equal(), "{}: {:?}", narrow.display(), comparison.wrong.first());
        }
    }
}

/// A model quantized during loading equals its checkpoint with f32 scales.
#[test]
fn quantizing_at_load_is_as_good_as_before() {
    for model in MODELS {
        // The reference is made from bf16 weights, because weights that are not quantized are in bf16 there,
        // and not all weights of these models are in bf16.
        let plain = in_form(&folder(model), Form::Bf16);
        let narrow = in_form(plain.path(), Form::Fbgemm);
        let mut reference = opened(narrow.path(), Quantize::No, 1);
        let mut subject = opened(plain.path(), Quantize::Fp8, 1);
        let comparison = compared(&mut reference, &mut subject, Tolerance::NONE);
        assert!(comparison.is_equal(), "{model}: {:?}", comparison.wrong.first());
    }
}

/// Weights with 3 bits of mantissa are near the original weights, so a trained model gives similar results.
#[test]
fn fp8_is_near_what_it_was_and_not_the_same() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let (mut reference, mut subject) = (opened(&demo, Quantize::No, 1), opened(&demo, Quantize::Fp8, 1));
    assert!(!compared(&mut reference, &mut subject, Tolerance::NONE).is_equal());
    let near = Tolerance { epsilon: 1.0, logprob: 1.0, logprob_share: 0.1, routing: 0.0 };
    let near = compared(&mut reference, &mut subject, near);
    assert!(near.is_equal(), "{} {} {:?}", near.worst_logprob, near.worst_lead, near.wrong.first());
}

/// A checkpoint that was made for activations in FP8 gets them, with the same bits on two ranks.
#[test]
fn activations_are_rounded_as_the_checkpoint_says() {
    let copies = MODELS.map(|model| in_form(&folder(model), Form::CompressedTensors));
    let of_rows = copies.iter().map(|copy| (copy.path().to_owned(), "fp8"));
    let of_blocks = ["qwen3-fp8", "deepseek-v3-fp8", "qwen3-moe-fp8"]
        .map(|model| (folder(model), "fp8, scales by 128x128"));
    for (narrow, dtype) in of_rows.chain(of_blocks) {
        let mut reference = rounding(&narrow, Activations::Fp8, Quantize::No, 1);
        for ranks in [1, 2] {
            let mut subject = rounding(&narrow, Activations::Auto, Quantize::No, ranks);
            let comparison = compared(&mut reference, &mut subject, Tolerance::NONE);
            assert!(comparison.is_equal(), "{}: {:?}", narrow.display(), comparison.wrong.first());
            let apart = opened(&narrow, Quantize::No, ranks);
            let error = apart.model().fingerprint.agree(&subject.model().fingerprint).expect_err("rounded");
            let expected =
                format!("models differ: dtype: {dtype} here, {dtype}, activations in fp8 by 128 there");
            assert_eq!(error.to_string(), expected);
        }
        let mut full = opened(&narrow, Quantize::No, 1);
        assert!(!compared(&mut full, &mut reference, Tolerance::NONE).is_equal(), "{}", narrow.display());
    }
}

/// The one file of a checkpoint that [`rewrite`] has made.
struct Tensors {
    header: Map<String, Value>,
    data: Vec<u8>,
}

const FILE: &str = "model-00001-of-00001.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Tensors {
    fn read(folder: &Path) -> Self {
        let mut header = std::fs::read(folder.join(FILE)).expect("a file");
        let len = u64::from_le_bytes(header[..8].try_into().expect("8 bytes"));
        let data = header.split_off(8 + len as usize);
        Self { header: serde_json::from_slice(&header[8..]).expect("a header"), data }
    }

    /// Multiplies a tensor in bf16.
    fn multiply(&mut self, name: &str, factor: f32) {
        let entry = &self.header[name];
        assert_eq!(entry["dtype"], "BF16", "{name}");
        let at = |nth: usize| entry["data_offsets"][nth].as_u64().expect("an offset") as usize;
        for number in self.data[at(0)..at(1)].chunks_exact_mut(2) {
            let wide = bf16_to_f32(u16::from_le_bytes([number[0], number[1]]));
            number.copy_from_slice(&f32_to_bf16(wide * factor).to_le_bytes());
        }
    }

    fn add(&mut self, name: String, numbers: &[f32]) {
        let begin = self.data.len();
        self.data.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let offsets = [begin, self.data.len()];
        let entry = json!({"dtype": "F32", "shape": [numbers.len()], "data_offsets": offsets});
        self.header.insert(name, entry);
    }

    fn write(&self, folder: &Path) {
        let header = serde_json::to_vec(&self.header).expect("JSON");
        let file = [&(header.len() as u64).to_le_bytes(), &header[..], &self.data].concat();
        std::fs::write(folder.join(FILE), file).expect("a file");
        let files: Map<String, Value> = self.header.keys().map(|name| (name.clone(), FILE.into())).collect();
        std::fs::write(folder.join(INDEX), json!({"weight_map": files}).to_string()).expect("a file");
    }
}

/// The keys and values of [`with_large_kv`] are as many times those of the original: too large for FP8.
const LARGE: f32 = 4096.0;

/// The same model with large keys and values, and with scales for them in the checkpoint.
fn with_large_kv(model: &str, scales: &[f32]) -> TempDir {
    let copy = in_form(&folder(model), Form::CompressedTensors);
    let mut tensors = Tensors::read(copy.path());
    let has = |tensors: &Tensors, name: &str| tensors.header.contains_key(name);
    for layer in (0..).map(|nth| format!("model.layers.{nth}.self_attn")) {
        if !has(&tensors, &format!("{layer}.o_proj.weight")) {
            break;
        }
        let has_norms = has(&tensors, &format!("{layer}.k_norm.weight"));
        let (keys, queries): (&[&str], &[&str]) = match has_norms {
            true => (&["k_norm.weight"], &["q_norm.weight"]),
            false => (&["k_proj.weight_scale", "k_proj.bias"], &["q_proj.weight_scale", "q_proj.bias"]),
        };
        let enlarged = keys.iter().chain(&["v_proj.weight_scale", "v_proj.bias"]).map(|name| (name, LARGE));
        let reduced = queries.iter().chain(&["o_proj.weight_scale"]).map(|name| (name, LARGE.recip()));
        for (name, factor) in enlarged.chain(reduced) {
            let name = format!("{layer}.{name}");
            if has(&tensors, &name) {
                tensors.multiply(&name, factor);
            }
        }
        for part in ["k", "v"] {
            tensors.add(format!("{layer}.{part}_scale"), scales);
        }
    }
    tensors.write(copy.path());
    let scheme = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false});
    edit_config(copy.path(), |config| config["quantization_config"]["kv_cache_scheme"] = scheme);
    copy
}

fn edit_config(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let file = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).expect("a file")).expect("JSON");
    edit(&mut config);
    std::fs::write(&file, config.to_string()).expect("a file");
}

/// Opens a model with KV in this format.
fn keeping(folder: &Path, kv_dtype: KvDtype, ranks: u16) -> Result<CpuBackend, OpenError> {
    let ranks = NonZero::new(ranks).expect("some");
    let settings = CpuSettings { threads: NonZero::new(1), ranks, kv_dtype, ..CpuSettings::default() };
    CpuBackend::open(folder, 4 << 20, &settings)
}

/// With their scales, large keys and values in FP8 give what small ones give, to the last bit.
#[test]
fn scales_of_kv_bring_it_into_the_range_of_fp8() {
    for model in MODELS {
        let small = in_form(&folder(model), Form::CompressedTensors);
        let opened = |folder: &Path, kv_dtype, ranks| keeping(folder, kv_dtype, ranks).expect("it opens");
        for (scales, ranks) in [(&[LARGE][..], 1), (&[0.6 * LARGE], 2)] {
            let large = with_large_kv(model, scales);
            for kv_dtype in [KvDtype::F32, KvDtype::Fp8E4m3] {
                let mut reference = opened(small.path(), kv_dtype, 1);
                let mut subject = opened(large.path(), kv_dtype, ranks);
                let comparison = compared(&mut reference, &mut subject, Tolerance::NONE);
                assert!(comparison.is_equal(), "{model} {kv_dtype}: {:?}", comparison.wrong.first());
            }
        }
        let unscaled = with_large_kv(model, &[1.0]);
        let mut reference = opened(small.path(), KvDtype::Fp8E4m3, 1);
        let mut subject = opened(unscaled.path(), KvDtype::Fp8E4m3, 1);
        assert!(!compared(&mut reference, &mut subject, Tolerance::NONE).is_equal(), "{model}: out of range");
    }
}

#[test]
fn the_largest_scale_of_the_heads_counts() {
    let of_layer = with_large_kv("qwen3", &[LARGE]);
    let of_heads = with_large_kv("qwen3", &[LARGE / 64.0, LARGE]);
    let mut reference = keeping(of_layer.path(), KvDtype::Fp8E4m3, 1).expect("it opens");
    let mut subject = keeping(of_heads.path(), KvDtype::Fp8E4m3, 2).expect("it opens");
    let comparison = compared(&mut reference, &mut subject, Tolerance::NONE);
    assert!(comparison.is_equal(), "{:?}", comparison.wrong.first());
}

#[test]
fn wrong_scales_of_kv_are_refused_by_name() {
    let refusal = |folder: &Path| {
        let error = keeping(folder, KvDtype::Fp8E4m3, 1).expect_err("it is refused");
        in_full(&error).replace(&folder.display().to_string(), "F")
    };
    let scale = "model.layers.0.self_attn.k_scale";
    for (scales, shown) in [
        (&[0.0][..], "[0.0]"),
        (&[f32::NAN], "[NaN]"),
        (&[1e9], "[1000000000.0]"),
        (&[1.0; 3], "[1.0, 1.0, 1.0]"),
    ] {
        let sentence = refusal(with_large_kv("qwen3", scales).path());
        let expected =
            format!("tensor {scale} in F/{FILE} is {shown}, not one scale of KV or one for each KV head");
        assert!(sentence.contains(&expected), "{sentence}");
    }
    let copy = with_large_kv("qwen3", &[1.0]);
    edit_config(copy.path(), |config| config["quantization_config"]["kv_cache_scheme"] = Value::Null);
    let sentence = refusal(copy.path());
    assert!(sentence.contains("self_attn.k_scale") && sentence.contains("not read"), "{sentence}");
    let copy = with_large_kv("qwen3", &[1.0]);
    let mut tensors = Tensors::read(copy.path());
    tensors.header.remove(scale);
    tensors.write(copy.path());
    let sentence = refusal(copy.path());
    assert!(sentence.contains(&format!("tensor {scale}")), "{sentence}");
    let latent = in_form(&folder("deepseek-v2"), Form::CompressedTensors);
    let scheme = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
    edit_config(latent.path(), |config| config["quantization_config"]["kv_cache_scheme"] = scheme);
    let sentence = refusal(latent.path());
    assert!(sentence.contains("kv_cache_scheme is not implemented for latent attention"), "{sentence}");
}

#[test]
fn activations_of_a_model_without_fp8_are_not_rounded() {
    let settings = CpuSettings { activations: Activations::Fp8, ..CpuSettings::default() };
    let error = CpuBackend::open(&folder("llama3"), 1 << 20, &settings).expect_err("bf16");
    let sentence = error.to_string();
    assert!(sentence.contains("no matrix of the model is in FP8: set model.quantize"), "{sentence}");
}

#[test]
fn checkpoints_in_other_forms_are_refused_by_name() {
    for (form, published, other, expected) in [
        (
            Form::CompressedTensors,
            "float-quantized",
            "pack-quantized",
            "format \"pack-quantized\" is not implemented: float-quantized is",
        ),
        (
            Form::Blocks,
            "\"dynamic\"",
            "\"static\"",
            "activation_scheme \"static\" is not implemented: dynamic is",
        ),
    ] {
        let copy = in_form(&folder("qwen3"), form);
        let file = copy.path().join("config.json");
        let config = std::fs::read_to_string(&file).expect("a config");
        assert!(config.contains(published), "{config}");
        std::fs::write(&file, config.replace(published, other)).expect("a file");
        let error = CpuBackend::open(copy.path(), 1 << 20, &CpuSettings::default()).expect_err(expected);
        let sentence = in_full(&error);
        assert!(sentence.contains(expected) && sentence.contains("config.json"), "{sentence}");
    }
}

#[test]
fn nodes_with_other_weights_are_told_apart() {
    let fingerprint = |folder: &Path, quantize| opened(folder, quantize, 1).model().fingerprint.clone();
    let narrow = in_form(&folder("llama3"), Form::Fbgemm);
    let plain = fingerprint(&folder("llama3"), Quantize::No);
    let error = plain.agree(&fingerprint(&folder("llama3"), Quantize::Fp8)).expect_err("8 bits are not 16");
    assert_eq!(error.to_string(), "models differ: dtype: bf16 here, fp8 there");
    let error = plain.agree(&fingerprint(narrow.path(), Quantize::No)).expect_err("another checkpoint");
    assert!(error.to_string().contains("dtype: bf16 here, fp8 there"), "{error}");
}
