//! Tests of FP8 checkpoints: the CPU computes with exactly the numbers that they represent.

use std::num::NonZero;
use std::path::{Path, PathBuf};

use baton_engine::equality::{Comparison, Tolerance, compare};
use baton_engine::load::made::{Form, rewrite};
use baton_engine::load::{Activations, Quantize};
use baton_engine::{Backend, CpuBackend, CpuSettings};
use tempfile::TempDir;
use types::{KvDtype, TokenId};

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
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        let sentence = format!("{error}: {cause}");
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
