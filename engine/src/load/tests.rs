use std::num::NonZero;
use std::path::Path;

use kernels::cpu::number::f32_to_bf16;
use kernels::cpu::{Arithmetic, Format, Processor};
use serde_json::json;
use tempfile::TempDir;

use super::weights::{HasFp8, LoadedFormats};
use super::*;
use crate::error::LoadError;
use crate::model::ActivationFormat;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/llama3");

/// Writes a safetensors file with these tensors, one after the other.
fn write_tensors(path: &Path, tensors: &[(&str, &str, &[usize], &[u8])]) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    write_raw(path, &serde_json::to_vec(&header).expect("JSON"), &data);
}

fn write_raw(path: &Path, header: &[u8], data: &[u8]) {
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length, header, data].concat()).expect("a file");
}

fn opened(write: impl Fn(&Path)) -> (TempDir, Result<Checkpoint, LoadError>) {
    let folder = TempDir::new().expect("a folder");
    write(folder.path());
    let checkpoint = Checkpoint::open(folder.path());
    (folder, checkpoint)
}

/// Returns the error for tensor `a`, 2 x 3, in a file that `write` makes. In the error, F stands for the
/// folder.
fn problem(write: impl Fn(&Path)) -> String {
    let (folder, checkpoint) = opened(write);
    let error = match checkpoint {
        Ok(checkpoint) => checkpoint.matrix("a", 2, 3).expect_err("something is wrong"),
        Err(error) => error,
    };
    error.to_string().replace(&folder.path().display().to_string(), "F")
}

#[test]
fn a_tensor_is_read_whatever_its_type_and_place() {
    let f32s: Vec<u8> =
        [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let bf16s: Vec<u8> = [0x3F80u16, 0x4000, 0x4040].iter().flat_map(|value| value.to_le_bytes()).collect();
    let (_folder, checkpoint) = opened(|folder| {
        // The odd byte comes first, so that it misaligns everything after it.
        let tensors: [(&str, &str, &[usize], &[u8]); 3] =
            [("odd", "U8", &[1], &[0]), ("a", "F32", &[2, 3], &f32s), ("b", "BF16", &[3], &bf16s)];
        write_tensors(&folder.join("model.safetensors"), &tensors);
    });
    let checkpoint = checkpoint.expect("it opens");
    let mut row = [0.0; 3];
    checkpoint.matrix("a", 2, 3).expect("a").read_row(1, &mut row);
    assert_eq!(row, [4.0, 5.0, 6.0]);
    assert_eq!(checkpoint.vector("b", 3).expect("b"), [1.0, 2.0, 3.0]);
}

#[test]
fn what_is_wrong_with_a_file_is_said_by_name() {
    let file = |folder: &Path| folder.join("model.safetensors");
    let header = br#"{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}"#;
    assert_eq!(
        problem(|_| {}),
        "no model.safetensors, no model.safetensors.index.json and no .gguf file in F"
    );
    assert_eq!(
        problem(|folder| write_raw(&file(folder), header, &[0; 23])),
        "F/model.safetensors is too short: tensor a ends at byte 24 of its data, which has 23"
    );
    assert_eq!(
        problem(|folder| write_tensors(&file(folder), &[("b", "F32", &[1], &[0; 4])])),
        "no tensor a in F/model.safetensors"
    );
    assert_eq!(
        problem(|folder| write_tensors(&file(folder), &[("a", "F32", &[3, 2], &[0; 24])])),
        "tensor a in F/model.safetensors has shape [3, 2], not [2, 3]"
    );
    assert_eq!(
        problem(|folder| write_tensors(&file(folder), &[("a", "F8_E5M2", &[2, 3], &[0; 6])])),
        "tensor a in F/model.safetensors is of F8_E5M2, which is not implemented: BF16, F16, F32 and F8_E4M3 are"
    );
    assert_eq!(
        problem(|folder| write_tensors(&file(folder), &[("a", "F32", &[2, 3], &[0; 20])])),
        "read header of F/model.safetensors: a: 2 x 3 numbers of F32 take 24 bytes, not 20"
    );
}

/// The FP8 bytes of 1, 2, 3, then 1.5, -2 and 0.
const IN_FP8: [u8; 6] = [0x38, 0x40, 0x44, 0x3C, 0xC0, 0x00];

#[test]
fn a_matrix_in_fp8_has_a_scale_for_each_row_or_one_for_all() {
    let (halves, in_bf16): (Vec<u8>, Vec<u8>) = (
        [0.5f32, 4.0].iter().flat_map(|scale| scale.to_le_bytes()).collect(),
        [0x3F00u16, 0x4080].iter().flat_map(|scale| scale.to_le_bytes()).collect(),
    );
    let (each, one) = ([0.5, 4.0], [0.5, 0.5]);
    type Case<'a> = (&'a str, &'a [usize], &'a [u8], [f32; 2]);
    let cases: [Case<'_>; 7] = [
        ("F32", &[2, 1], &halves, each),
        ("F32", &[2], &halves, each),
        ("BF16", &[2, 1], &in_bf16, each),
        ("F32", &[1], &halves[..4], one),
        ("F32", &[], &halves[..4], one),
        ("BF16", &[1, 1], &in_bf16[..2], one),
        ("BF16", &[1], &in_bf16[..2], one),
    ];
    for (dtype, shape, bytes, scales) in cases {
        let (_folder, checkpoint) = opened(|folder| {
            let tensors: [(&str, &str, &[usize], &[u8]); 2] =
                [("a", "F8_E4M3", &[2, 3], &IN_FP8), ("a_scale", dtype, shape, bytes)];
            write_tensors(&folder.join("model.safetensors"), &tensors);
        });
        let checkpoint = checkpoint.expect("it opens");
        let formats = ["a", "a_scale", "b"].map(|name| checkpoint.fp8_format(name));
        assert_eq!(formats, [Some(Format::Fp8), None, None]);
        let matrix = checkpoint.matrix("a", 2, 3).expect("a");
        let mut rows = [[0.0; 3]; 2];
        rows.iter_mut().enumerate().for_each(|(nth, row)| matrix.read_row(nth, row));
        let expected =
            [[1.0, 2.0, 3.0].map(|one| one * scales[0]), [1.5, -2.0, 0.0].map(|one| one * scales[1])];
        assert_eq!(rows, expected, "{dtype} {shape:?}");
    }
}

#[test]
fn a_matrix_in_fp8_without_its_scales_is_refused() {
    let written = |scales: Option<(&[usize], [f32; 2])>| {
        problem(|folder| {
            let bytes = scales.map(|(_, scales)| scales.map(f32::to_le_bytes).concat());
            let mut tensors: Vec<(&str, &str, &[usize], &[u8])> = vec![("a", "F8_E4M3", &[2, 3], &IN_FP8)];
            if let (Some((shape, _)), Some(bytes)) = (scales, &bytes) {
                tensors.push(("a_scale", "F32", shape, &bytes[..4 * shape.iter().product::<usize>().min(2)]));
            }
            write_tensors(&folder.join("model.safetensors"), &tensors);
        })
    };
    let which = "tensor a in F/model.safetensors is of F8_E4M3, and its scales";
    let missing = "are missing: no tensor a_scale or a_scale_inv in F/model.safetensors";
    assert_eq!(written(None), format!("{which} {missing}"));
    assert_eq!(
        written(Some((&[1, 2], [1.0, 1.0]))),
        format!("{which} a_scale have shape [1, 2], not [2, 1], [2], [1] or [1, 1] for blocks of 128 by 128")
    );
    assert_eq!(
        written(Some((&[2], [1.0, f32::NAN]))),
        format!("{which} a_scale of shape [2] have NaN among them")
    );
    let (_folder, checkpoint) = opened(|folder| {
        write_tensors(&folder.join("model.safetensors"), &[("a", "F8_E4M3", &[6], &IN_FP8)]);
    });
    let error = checkpoint.expect("it opens").vector("a", 6).expect_err("a norm in FP8").to_string();
    assert!(error.contains("is a vector of F8_E4M3, which is not implemented"), "{error}");
}

/// Opens a checkpoint with matrix `a`, 130 x 260, whose numbers are all 1, and with these tensors.
fn with_blocks(others: &[(&str, &str, &[usize], &[u8])]) -> (TempDir, Checkpoint) {
    let ones = [0x38; 130 * 260];
    let (folder, checkpoint) = opened(|folder| {
        let mut tensors: Vec<(&str, &str, &[usize], &[u8])> = vec![("a", "F8_E4M3", &[130, 260], &ones)];
        tensors.extend(others);
        write_tensors(&folder.join("model.safetensors"), &tensors);
    });
    (folder, checkpoint.expect("it opens"))
}

#[test]
fn a_matrix_in_fp8_has_a_scale_for_each_block() {
    let scales = [2.0f32, 3.0, 5.0, 7.0, 11.0, 13.0];
    let wide: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let narrow: Vec<u8> = scales.iter().flat_map(|scale| f32_to_bf16(*scale).to_le_bytes()).collect();
    for (name, dtype, bytes) in
        [("a_scale_inv", "F32", &wide), ("a_scale_inv", "BF16", &narrow), ("a_scale", "F32", &wide)]
    {
        let (_folder, checkpoint) = with_blocks(&[(name, dtype, &[2, 3], bytes)]);
        assert_eq!(checkpoint.fp8_format("a"), Some(Format::Fp8Blocks), "{name}");
        let matrix = checkpoint.matrix("a", 130, 260).expect("a");
        let mut row = vec![0.0; 260];
        for nth in [0, 127, 128, 129] {
            matrix.read_row(nth, &mut row);
            let found = [0, 127, 128, 255, 256, 259].map(|column| row[column]);
            let [x, y, z] = [0, 1, 2].map(|column| scales[nth / 128 * 3 + column]);
            assert_eq!(found, [x, x, y, y, z, z], "{name} of {dtype}, row {nth}");
        }
    }
}

#[test]
fn scales_of_other_blocks_are_refused() {
    let refusal = |name: &str, shape: &[usize], scale: f32| {
        let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(|_| scale.to_le_bytes()).collect();
        let (folder, checkpoint) = with_blocks(&[(name, "F32", shape, &bytes)]);
        let error = checkpoint.matrix("a", 130, 260).expect_err("refused").to_string();
        error.replace(&folder.path().display().to_string(), "F")
    };
    let which = "tensor a in F/model.safetensors is of F8_E4M3, and its scales";
    let wanted = "[2, 3] for blocks of 128 by 128";
    let cases: [(&str, &[usize], String); 5] = [
        ("a_scale_inv", &[3, 5], format!("a_scale_inv have shape [3, 5], not {wanted}")),
        ("a_scale_inv", &[3, 2], format!("a_scale_inv have shape [3, 2], not {wanted}")),
        ("a_scale_inv", &[130, 1], format!("a_scale_inv have shape [130, 1], not {wanted}")),
        ("a_scale_inv", &[], format!("a_scale_inv have shape [], not {wanted}")),
        ("a_scale", &[3, 2], format!("a_scale have shape [3, 2], not [130, 1], [130], [1] or {wanted}")),
    ];
    for (name, shape, expected) in cases {
        assert_eq!(refusal(name, shape, 1.0), format!("{which} {expected}"));
    }
    let infinite = refusal("a_scale_inv", &[2, 3], f32::INFINITY);
    assert_eq!(infinite, format!("{which} a_scale_inv of shape [2, 3] have inf among them"));
}

#[test]
fn what_is_no_header_is_refused() {
    let file = |folder: &Path| folder.join("model.safetensors");
    assert_eq!(
        problem(|folder| std::fs::write(file(folder), b"abc").expect("a file")),
        "read header of F/model.safetensors: 3 bytes are no file"
    );
    assert_eq!(
        problem(|folder| std::fs::write(file(folder), [0xFF; 20]).expect("a file")),
        "read header of F/model.safetensors: a header of 18446744073709551615 bytes in a file of 20"
    );
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9515400\n";
    assert_eq!(
        problem(|folder| std::fs::write(file(folder), pointer).expect("a file")),
        "read header of F/model.safetensors: it is a pointer of Git LFS: `git lfs pull` downloads the file"
    );
    let nonsense = problem(|folder| write_raw(&file(folder), b"{]", &[]));
    assert!(nonsense.starts_with("read header of F/model.safetensors: "), "{nonsense}");
}

#[test]
fn an_index_may_not_promise_too_much() {
    let index = |folder: &Path, map: serde_json::Value| {
        let text = serde_json::to_vec(&json!({ "weight_map": map })).expect("JSON");
        std::fs::write(folder.join("model.safetensors.index.json"), text).expect("a file");
    };
    let missing_file = problem(|folder| index(folder, json!({"a": "one.safetensors"})));
    assert_eq!(missing_file, "read F/one.safetensors");
    let in_no_file = problem(|folder| {
        write_tensors(&folder.join("one.safetensors"), &[("b", "F32", &[1], &[0; 4])]);
        index(folder, json!({"a": "one.safetensors"}));
    });
    assert_eq!(in_no_file, "no tensor a in F/one.safetensors");
    let in_no_index = problem(|folder| {
        write_tensors(&folder.join("one.safetensors"), &[("b", "F32", &[1], &[0; 4])]);
        index(folder, json!({"b": "one.safetensors"}));
    });
    assert_eq!(in_no_index, "no tensor a in F/model.safetensors.index.json");
    let (_folder, checkpoint) = opened(|folder| {
        write_tensors(&folder.join("model.safetensors"), &[("a", "F32", &[1], &[0; 4])]);
        index(folder, json!({"b": "one.safetensors"}));
    });
    assert_eq!(checkpoint.expect("one file").shape("a"), Some(vec![1]), "an index of an older checkpoint");
}

#[test]
fn an_output_layer_that_differs_from_the_embedding_is_used() {
    let tied = |output: Option<[u8; 4]>| {
        let folder = TempDir::new().expect("a folder");
        let config = r#"{"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true}"#;
        std::fs::write(folder.path().join("config.json"), config).expect("a file");
        let output = output.iter().map(|bytes| ("lm_head.weight", "F32", &[1][..], bytes.as_slice()));
        let embedding = ("model.embed_tokens.weight", "F32", &[1][..], [1, 2, 3, 4].as_slice());
        let tensors: Vec<_> = [embedding].into_iter().chain(output).collect();
        write_tensors(&folder.path().join("model.safetensors"), &tensors);
        let config = ModelFolder::open(folder.path()).expect("it opens").config;
        let is_read = tensors::tensors(&config).iter().any(|tensor| tensor.name == "lm_head.weight");
        assert_ne!(config.tied, is_read);
        config.tied
    };
    assert!(tied(None));
    assert!(tied(Some([1, 2, 3, 4])), "the same numbers");
    assert!(!tied(Some([1, 2, 3, 5])));
}

#[test]
fn an_unknown_architecture_is_refused_with_those_that_are_known() {
    let folder = TempDir::new().expect("a folder");
    let config = std::fs::read_to_string(Path::new(TINY).join("config.json")).expect("a config");
    std::fs::write(folder.path().join("config.json"), config.replace("LlamaFor", "GptFor")).expect("a file");
    let error = crate::CpuBackend::open(folder.path(), 1 << 20, &crate::CpuSettings::default());
    let error = error.expect_err("no such architecture").to_string();
    assert!(
        error
            .contains("\"GptForCausalLM\", which is not implemented: LlamaForCausalLM, MistralForCausalLM, "),
        "{error}"
    );
    std::fs::write(folder.path().join("config.json"), "{}").expect("a file");
    assert!(matches!(ModelFolder::open(folder.path()), Err(LoadError::Config { .. })));
    assert!(matches!(ModelFolder::open(Path::new("/nowhere")), Err(LoadError::Read { .. })));
}

#[test]
fn names_end_where_they_began() {
    let processor = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
    let checkpoint = Checkpoint::open(Path::new(TINY)).expect("it opens");
    let seen = LoadedFormats::default();
    let weights = Weights::new(&checkpoint, &processor, Quantize::No, &seen);
    let norm = weights.under("model").under("norm").vector("weight", 32).expect("a norm");
    assert_eq!(norm, checkpoint.vector("model.norm.weight", 32).expect("the same"));
    weights.under("model.embed_tokens").matrix("weight", 96, 32).expect("an embedding");
    assert_eq!(seen.bytes(), 96 * 32 * 2);
}

#[test]
fn a_changed_weight_is_another_fingerprint() {
    let copy = TempDir::new().expect("a folder");
    for entry in std::fs::read_dir(TINY).expect("a folder").flatten() {
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("a copy");
    }
    let of = |folder: &Path| fingerprint::of_weights(&Checkpoint::open(folder).expect("it opens"));
    assert_eq!(of(Path::new(TINY)), of(copy.path()));
    let file = copy.path().join("model-00002-of-00003.safetensors");
    let mut bytes = std::fs::read(&file).expect("a file");
    *bytes.last_mut().expect("not empty") ^= 1;
    std::fs::write(&file, bytes).expect("a file");
    assert_ne!(of(Path::new(TINY)), of(copy.path()));
}

/// Returns the `llama` test model with one more tensor and one changed config key.
fn with_tensor(name: &str, dtype: &str, key: &str, value: serde_json::Value) -> TempDir {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/llama");
    let copy = TempDir::new().expect("a folder");
    let config = std::fs::read(from.join("config.json")).expect("a config");
    let mut config: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&config).expect("JSON");
    config.insert(key.to_owned(), value);
    std::fs::write(copy.path().join("config.json"), serde_json::to_vec(&config).expect("JSON"))
        .expect("a file");
    let original = Checkpoint::open(&from).expect("it opens");
    let file = &original.files()[0];
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(file.header()).expect("JSON");
    let end = file.data().len();
    header.insert(name.to_owned(), json!({"dtype": dtype, "shape": [1], "data_offsets": [end, end + 4]}));
    let data = [file.data(), &[0; 4]].concat();
    write_raw(&copy.path().join("model.safetensors"), &serde_json::to_vec(&header).expect("JSON"), &data);
    copy
}

#[test]
fn a_tensor_that_nothing_reads_is_refused_by_name() {
    let opened = |name: &str, key: &str, value: serde_json::Value| {
        let folder = with_tensor(name, "F32", key, value);
        let opened = crate::CpuBackend::open(folder.path(), 1 << 20, &crate::CpuSettings::default());
        opened.map(drop).map_err(|error| error.to_string().replace(&folder.path().display().to_string(), "F"))
    };
    let unread =
        |name: &str| Err(format!("tensor {name} in F/model.safetensors is not read by LlamaForCausalLM"));
    for name in [
        "model.layers.0.self_attn.sinks",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.7.input_layernorm.weight",
        // The next names are scales of a matrix that is not in FP8, so they are not read.
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "lm_head.bias",
    ] {
        assert_eq!(opened(name, "tie_word_embeddings", json!(false)), unread(name));
    }
    assert_eq!(opened("model.layers.1.self_attn.rotary_emb.inv_freq", "use_cache", json!(true)), Ok(()));
    assert_eq!(
        opened("model.embed_tokens.bias", "tie_word_embeddings", json!(true)),
        unread("model.embed_tokens.bias")
    );
    let fewer = opened("model.norm.bias", "num_hidden_layers", json!(1)).expect_err("a layer too many");
    assert!(
        fewer.contains("model.layers.1.input_layernorm.weight in F/model.safetensors is not read"),
        "{fewer}"
    );
    assert!(fewer.ends_with("LlamaForCausalLM, nor are 16 other tensors"), "{fewer}");
}

#[test]
fn a_checkpoint_says_how_activations_are_rounded_unless_a_setting_does() {
    for (setting, of_checkpoint, has_fp8, expected) in [
        (Activations::Auto, ActivationFormat::Fp8, true, Some(ActivationFormat::Fp8)),
        (Activations::Auto, ActivationFormat::Full, true, Some(ActivationFormat::Full)),
        // A config may name a format that no tensor has.
        (Activations::Auto, ActivationFormat::Fp8, false, Some(ActivationFormat::Full)),
        (Activations::Full, ActivationFormat::Fp8, true, Some(ActivationFormat::Full)),
        (Activations::Fp8, ActivationFormat::Full, true, Some(ActivationFormat::Fp8)),
        (Activations::Fp8, ActivationFormat::Fp8, false, None),
    ] {
        let found = setting.resolve(of_checkpoint, HasFp8(has_fp8)).ok();
        assert_eq!(found, expected, "{setting:?}, {of_checkpoint:?}, {has_fp8}");
    }
}
