use std::num::NonZero;
use std::path::{Path, PathBuf};

use kernels::cpu::Format;
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tokenizers::Tokenizer;
use types::{KvDtype, TokenId};

use super::blocks::{Blocks, StoredAs};
use super::*;
use crate::conformance::alone::step;
use crate::load::made::{self, Form};
use crate::load::safetensors::TensorFile;
use crate::load::{Checkpoint, Quantize};
use crate::{CpuBackend, CpuSettings};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models");
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo");

fn golden(name: &str) -> PathBuf {
    Path::new(MODELS).join("gguf").join(name)
}

/// Makes the folder of a GGUF file, as `--model FILE.gguf` does.
fn unpacked(file: &Path) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    for (name, bytes) in files(file).expect("it is a model") {
        std::fs::write(folder.path().join(name), bytes).expect("written");
    }
    std::os::unix::fs::symlink(file, folder.path().join(LINK)).expect("a link");
    folder
}

/// A folder and the same model as a GGUF file, unpacked.
struct Both {
    file: TempDir,
    unpacked: TempDir,
}

impl Both {
    fn of(folder: &Path, kind: &str) -> Self {
        let file = TempDir::new().expect("a folder");
        let path = file.path().join("model.gguf");
        write::write(folder, &path, kind);
        Self { unpacked: unpacked(&path), file }
    }
}

/// Returns the log-probabilities of all tokens after a prompt, and after one token more.
fn logits(folder: &Path, quantize: Quantize) -> [Vec<(TokenId, f32)>; 2] {
    let one = NonZero::<u16>::MIN;
    let settings = CpuSettings { kv_dtype: KvDtype::F32, ranks: one, quantize, ..CpuSettings::default() };
    let mut backend = CpuBackend::open(folder, 16 << 20, &settings).expect("it opens");
    let prompt: Vec<TokenId> = (0..37).map(|nth| TokenId(3 + nth * 7 % 90)).collect();
    [(prompt.as_slice(), 0), (&[TokenId(5)], prompt.len())]
        .map(|(tokens, start)| step(&mut backend, tokens, start, u8::MAX).1)
}

/// Writes a model of another shape, with random weights.
fn made(from: &str, changes: &Json) -> TempDir {
    let (config, folder) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let path = Path::new(MODELS).join(from).join("config.json");
    let mut json: Json = serde_json::from_slice(&std::fs::read(path).expect("a config")).expect("JSON");
    let changes = changes.as_object().expect("an object").clone();
    json.as_object_mut().expect("an object").extend(changes);
    std::fs::write(config.path().join("config.json"), json.to_string()).expect("written");
    made::write(config.path(), folder.path(), 1, Form::Bf16).expect("written");
    folder
}

/// A model whose rows are whole blocks of 256.
fn wide(from: &str) -> TempDir {
    let sizes =
        json!({"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256});
    made(from, &sizes)
}

#[test]
fn logits_are_those_of_the_same_weights_from_safetensors() {
    let experts = made("qwen3-moe", &json!({"norm_topk_prob": true, "mlp_only_layers": []}));
    let committed = |name: &str| Path::new(MODELS).join(name);
    for (folder, own) in [
        (committed("llama"), "F16"),
        (committed("llama3"), "BF16"),
        (committed("qwen2"), "BF16"),
        (committed("qwen3"), "F32"),
        (committed("mixtral"), "BF16"),
        (experts.path().to_owned(), "BF16"),
        (PathBuf::from(DEMO), "BF16"),
    ] {
        let expected = logits(&folder, Quantize::No);
        for kind in [own, "F32"] {
            let both = Both::of(&folder, kind);
            assert_eq!(
                logits(both.unpacked.path(), Quantize::No),
                expected,
                "{} in {kind}",
                folder.display()
            );
        }
    }
}

#[test]
fn quantized_tensors_are_those_of_the_dequantized_weights_from_safetensors() {
    for (model, kind) in [
        ("llama3", "Q8_0"),
        ("llama3", "Q4_K"),
        ("llama", "Q5_K"),
        ("qwen2", "Q6_K"),
        ("qwen3", "Q4_K"),
        ("mixtral", "Q4_K"),
        ("mixtral", "Q8_0"),
    ] {
        let folder = wide(model);
        let both = Both::of(folder.path(), kind);
        let types = TensorFile::open_gguf(&both.file.path().join("model.gguf")).expect("it opens");
        assert_eq!(types.format("model.layers.0.self_attn.q_proj.weight"), Some(Format::Bf16), "quantized");
        let dequantized = TempDir::new().expect("a folder");
        made::rewrite(both.unpacked.path(), dequantized.path(), Form::Bf16).expect("written");
        for quantize in [Quantize::No, Quantize::Fp8] {
            let found = logits(both.unpacked.path(), quantize);
            assert_eq!(found, logits(dequantized.path(), quantize), "{model} in {kind}, {quantize:?}");
        }
        // A wrong order of rows would be far off.
        if kind == "Q8_0" {
            let (found, exact) =
                (logits(both.unpacked.path(), Quantize::No), logits(folder.path(), Quantize::No));
            let of = |token| found[0].iter().find(|one| one.0 == token).expect("all are there").1;
            let off = exact[0].iter().map(|(token, value)| (of(*token) - value).abs()).fold(0.0, f32::max);
            assert!(off < 0.1, "{model}: {off}");
        }
    }
}

/// The numbers, names and orders are those of llama.cpp's own Python package: tests/models/make_gguf.py.
#[test]
fn every_type_is_read_as_llama_cpp_reads_it() {
    let found = TensorFile::open_gguf(&golden("tensors.gguf")).expect("it opens");
    let expected = TensorFile::open(&golden("tensors.safetensors")).expect("it opens");
    let names =
        |file: &TensorFile| file.names().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(names(&found), names(&expected));
    for name in expected.names() {
        let [found, expected] =
            [&found, &expected].map(|file| file.tensor(name).expect("there").expect("whole"));
        assert_eq!((&found.shape, found.format), (&expected.shape, expected.format), "{name}");
        assert_eq!(&*found.bytes, &*expected.bytes, "{name}");
    }
}

#[test]
fn large_tensors_are_dequantized_piece_by_piece() {
    let (rows, cols) = (3000, 256);
    let one_row: Vec<u8> = (0..StoredAs::Blocks(Blocks::Q8_0).row_bytes(cols).expect("whole blocks"))
        .map(|nth| {
            if nth % 34 == 1 {
                0x3C
            } else if nth % 34 == 0 {
                0
            } else {
                (nth % 34) as u8
            }
        })
        .collect();
    let bytes = SharedBytes::filled(rows * one_row.len(), |to| {
        for (nth, to) in to.chunks_mut(one_row.len()).enumerate() {
            to.copy_from_slice(&one_row);
            to[2] = (nth % 100) as u8;
        }
    });
    let read = StoredAs::Blocks(Blocks::Q8_0).read(&bytes.expect("memory"), cols, None).expect("read");
    for row in 0..rows {
        let first = u16::from_le_bytes([read[2 * row * cols], read[2 * row * cols + 1]]);
        assert_eq!(kernels::cpu::number::bf16_to_f32(first), (row % 100) as f32, "row {row}");
    }
}

fn file_of(file: &Path, name: &str) -> Json {
    let files = files(file).expect("it is a model");
    let (_, bytes) = files.iter().find(|(known, _)| *known == name).expect("it is there");
    serde_json::from_slice(bytes).expect("JSON")
}

#[test]
fn configs_say_what_the_keys_say() {
    let both = Both::of(&Path::new(MODELS).join("llama3"), "BF16");
    let config = file_of(&both.file.path().join("model.gguf"), "config.json");
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64.0});
    assert_eq!(config["rope_scaling"], scaling, "made of the divisors of frequencies");
    assert_eq!(config["tie_word_embeddings"], true);
    let both = Both::of(Path::new(DEMO), "BF16");
    let file = both.file.path().join("model.gguf");
    assert_eq!(file_of(&file, "generation_config.json")["eos_token_id"], json!([1]));
    let text = file_of(&file, "tokenizer_config.json");
    assert_eq!((&text["bos_token"], &text["eos_token"]), (&json!("<|begin|>"), &json!("<|end|>")));
    let original: Json =
        serde_json::from_slice(&std::fs::read(Path::new(DEMO).join("tokenizer_config.json")).expect("read"))
            .expect("JSON");
    assert_eq!(text["chat_template"], original["chat_template"]);
}

#[test]
fn yarn_has_the_trained_tokens_that_the_keys_say() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("model.gguf");
    let yarn = Raw::model().key("llama.rope.scaling.type", 8, &text("yarn")).key(
        "llama.rope.scaling.factor",
        6,
        &4_f32.to_le_bytes(),
    );
    std::fs::write(&path, yarn.bytes()).expect("written");
    let scaling = |trained: Json| json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": trained});
    assert_eq!(
        file_of(&path, "config.json")["rope_scaling"],
        scaling(Json::Null),
        "as llama.cpp: all tokens"
    );
    let yarn = yarn.key("llama.rope.scaling.original_context_length", 4, &2_u32.to_le_bytes());
    std::fs::write(&path, yarn.bytes()).expect("written");
    assert_eq!(file_of(&path, "config.json")["rope_scaling"], scaling(json!(2)));
}

// === tokenizers ===

fn tokenizer_of(file: &Path) -> Tokenizer {
    let json = file_of(file, "tokenizer.json");
    Tokenizer::from_bytes(json.to_string()).expect("a tokenizer")
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).expect("tokens").get_ids().to_vec()
}

#[derive(serde::Deserialize)]
struct Tokenized {
    text: String,
    tokens: Vec<u32>,
}

#[test]
fn a_byte_level_tokenizer_is_the_same() {
    let both = Both::of(Path::new(DEMO), "Q8_0");
    let (found, original) = (
        tokenizer_of(&both.file.path().join("model.gguf")),
        Tokenizer::from_file(Path::new(DEMO).join("tokenizer.json")).expect("a tokenizer"),
    );
    assert_eq!(found.get_vocab(true), original.get_vocab(true));
    let texts: Vec<Tokenized> =
        serde_json::from_slice(&std::fs::read(golden("pieces.json")).expect("read")).expect("JSON");
    for text in texts.iter().map(|one| one.text.as_str()).chain(["<|user|>What?<|end|>"]) {
        let expected = tokens(&original, text);
        assert_eq!(tokens(&found, text), expected, "{text:?}");
        assert_eq!(
            found.decode(&expected, false).expect("text"),
            original.decode(&expected, false).expect("text")
        );
    }
}

/// The peer is llama.cpp. It does not make Unicode's form C of a text, as the tokenizers of Qwen do.
#[test]
fn texts_are_divided_as_llama_cpp_divides_them() {
    let table: std::collections::BTreeMap<String, Vec<Tokenized>> =
        serde_json::from_slice(&std::fs::read(golden("bytes.json")).expect("read")).expect("JSON");
    assert_eq!(table.len(), 5);
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("a.gguf");
    let mut all = std::collections::BTreeSet::new();
    for (pre, texts) in table {
        write::write_divided(Path::new(DEMO), &file, "Q8_0", &pre);
        let found = tokenizer_of(&file);
        for Tokenized { text, tokens: expected } in texts {
            if pre == "qwen2" && text.contains('\u{301}') {
                continue;
            }
            assert_eq!(tokens(&found, &text), expected, "{pre}: {text:?}");
            all.insert((text, expected));
        }
    }
    assert!(all.len() > 11, "some texts are divided in several ways");
}

#[test]
fn a_tokenizer_of_another_kind_is_refused_by_name() {
    let list = |kind: u32, items: &[&str]| {
        let items: Vec<u8> = items.iter().flat_map(|item| text(item)).collect();
        [kind.to_le_bytes().as_slice(), &2_u64.to_le_bytes(), &items].concat()
    };
    let raw = || Raw::model().key("tokenizer.ggml.tokens", 9, &list(8, &["a", "b"]));
    let of = |raw: Raw, model: &str| raw.key("tokenizer.ggml.model", 8, &text(model));
    let pre = |raw: Raw, pre: &str| of(raw, "gpt2").key("tokenizer.ggml.pre", 8, &text(pre));
    let merges = list(8, &["a b", "b a"]);
    for (raw, expected) in [
        (of(raw(), "t5"), "tokenizer.ggml.model \"t5\" is not implemented: gpt2 and llama are"),
        (of(raw(), "gpt2"), "there is no key tokenizer.ggml.pre: "),
        (pre(raw(), "default"), "tokenizer.ggml.pre \"default\" is not implemented: llama-bpe, "),
        (pre(raw(), "gpt-2"), "there is no key tokenizer.ggml.merges"),
        (
            pre(raw(), "gpt-2").key("tokenizer.ggml.merges", 9, &merges),
            "tokenizer.ggml.merges: \"a b\" does not join two tokens to a third",
        ),
        (of(raw(), "llama"), "there is no key tokenizer.ggml.scores"),
        (
            of(raw(), "llama").key("tokenizer.ggml.bos_token_id", 4, &[2, 0, 0, 0]).key(
                "tokenizer.ggml.scores",
                9,
                &[6_u32.to_le_bytes().as_slice(), &2_u64.to_le_bytes(), &[0; 8]].concat(),
            ),
            "key tokenizer.ggml.bos_token_id is 2, of 2 tokens",
        ),
        (
            of(Raw::model(), "llama").key("tokenizer.ggml.tokens", 9, &list(8, &["a", "a"])),
            "tokens 0 and 1 have the same text, \"a\"",
        ),
    ] {
        let error = read_all(&raw.bytes()).expect_err(expected);
        assert!(error.starts_with(expected), "{error}\nnot {expected}");
    }
}

/// The peer is SentencePiece itself.
#[test]
fn a_tokenizer_of_scores_is_sentence_pieces() {
    let found = tokenizer_of(&golden("pieces.gguf"));
    let texts: Vec<Tokenized> =
        serde_json::from_slice(&std::fs::read(golden("pieces.json")).expect("read")).expect("JSON");
    for Tokenized { text, tokens: expected } in texts {
        assert_eq!(tokens(&found, &text), expected, "{text:?}");
        assert_eq!(found.decode(&expected, false).expect("text"), text);
    }
}

// === bad files ===

/// Reads everything but the tensors' numbers.
fn read_all(bytes: &[u8]) -> Result<(), String> {
    let header = Header::parse(bytes)?;
    tensors::tensors(&header, &Model::of(&header)?)?;
    files_of(&header).map(drop)
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    for name in ["tensors.gguf", "pieces.gguf"] {
        let whole = std::fs::read(golden(name)).expect("read");
        read_all(&whole).expect("the whole file is a model");
        let header_end = Header::parse(&whole).expect("a header").data_start;
        for end in (0..header_end).chain((header_end..whole.len()).step_by(97)) {
            let error = read_all(&whole[..end]).expect_err("it is truncated");
            assert!(
                error.contains("the file ends at byte") || error.contains("the file has"),
                "{name}, {end}: {error}"
            );
        }
    }
}

/// No byte of the header leads to a panic, or to more memory than there are bytes in the file.
#[test]
fn a_damaged_file_is_refused_or_read() {
    for name in ["tensors.gguf", "pieces.gguf"] {
        let whole = std::fs::read(golden(name)).expect("read");
        let header_end = Header::parse(&whole).expect("a header").data_start;
        for at in 0..header_end.min(4000) {
            for value in [0, 1, 0x7F, 0xFF] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                let _ = read_all(&damaged);
                damaged[at..(at + 8).min(header_end)].fill(value);
                let _ = read_all(&damaged);
            }
        }
    }
}

/// A file of keys and tensors as they are written.
#[derive(Default)]
struct Raw {
    keys: Vec<u8>,
    n_keys: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Raw {
    /// A model of one layer, with its embedding.
    fn model() -> Self {
        let raw = Self::default().key("general.architecture", 8, &text("llama"));
        let counts = [
            ("block_count", 1_u32),
            ("embedding_length", 16),
            ("attention.head_count", 8),
            ("context_length", 8),
            ("feed_forward_length", 8),
        ];
        let raw = counts
            .into_iter()
            .fold(raw, |raw, (key, count)| raw.key(&format!("llama.{key}"), 4, &count.to_le_bytes()));
        let epsilon = 1e-5_f32.to_le_bytes();
        raw.key("llama.attention.layer_norm_rms_epsilon", 6, &epsilon).tensor(
            "token_embd.weight",
            &[16, 2],
            0,
            0,
        )
    }

    fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.extend([&text(name), kind.to_le_bytes().as_slice(), value].concat());
        self.n_keys += 1;
        self
    }

    fn tensor(mut self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Self {
        let n_dimensions = (dimensions.len() as u32).to_le_bytes();
        let dimensions: Vec<u8> = dimensions.iter().flat_map(|count| count.to_le_bytes()).collect();
        self.tensors.extend([&text(name), n_dimensions.as_slice(), &dimensions].concat());
        self.tensors.extend([kind.to_le_bytes().as_slice(), &offset.to_le_bytes()].concat());
        self.n_tensors += 1;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let counts = [self.n_tensors.to_le_bytes(), self.n_keys.to_le_bytes()].concat();
        let mut all = [b"GGUF".as_slice(), &3_u32.to_le_bytes(), &counts, &self.keys, &self.tensors].concat();
        all.resize(all.len().next_multiple_of(32) + 128, 0);
        all
    }
}

#[test]
fn a_bad_file_is_refused_by_key_or_tensor() {
    let changed = |at: usize, bytes: &[u8]| {
        let mut all = Raw::model().bytes();
        all[at..at + bytes.len()].copy_from_slice(bytes);
        all
    };
    let list = |kind: u32, count: u64| [kind.to_le_bytes().as_slice(), &count.to_le_bytes()].concat();
    let huge = u64::MAX.to_le_bytes();
    read_all(&Raw::model().bytes()).expect("it is a model");
    for (bytes, expected) in [
        (b"GGML and more".to_vec(), "it does not begin with GGUF"),
        (changed(4, &1_u32.to_le_bytes()), "version 1 is not supported: 2 and 3 are"),
        (changed(8, &huge), "18446744073709551615 tensors and 7 keys are too many"),
        (changed(16, &huge), "1 tensors and 18446744073709551615 keys are too many"),
        (changed(24, &huge), "key 0 of 7: the file ends at byte "),
        (
            Raw::model().key("x", 9, &list(4, u64::MAX)).bytes(),
            "key x: a list of 18446744073709551615 values is too long",
        ),
        (Raw::model().key("x", 9, &list(9, 1)).bytes(), "key x: values of type 9 are not known"),
        (Raw::model().key("x", 8, &huge).bytes(), "key x: the file ends at byte "),
        (Raw::model().key("x", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xFF]).bytes(), "key x: a text is not UTF-8"),
        (Raw::model().key("llama.block_count", 7, &[1]).bytes(), "key llama.block_count is there twice"),
        (Raw::model().key("general.alignment", 4, &0_u32.to_le_bytes()).bytes(), "general.alignment is 0"),
        (
            Raw::model().key("split.count", 2, &[3, 0]).bytes(),
            "it is one of 3 parts, which is not implemented",
        ),
        (
            Raw::model().key("llama.logit_scale", 6, &[0; 4]).bytes(),
            "key llama.logit_scale is not known, and may change results",
        ),
        (
            Raw::model().key("llama.expert_count", 4, &[0xFF; 4]).bytes(),
            "key llama.expert_count is 4294967295",
        ),
        (
            Raw::model().key("llama.rope.freq_base", 8, &text("x")).bytes(),
            "key llama.rope.freq_base is not a number",
        ),
        (
            Raw::model()
                .key("llama.attention.key_length", 4, &[2, 0, 0, 0])
                .key("llama.rope.dimension_count", 4, &[1, 0, 0, 0])
                .bytes(),
            "key llama.rope.dimension_count is 1, and a head has 2",
        ),
        (
            Raw::model().key("tokenizer.ggml.model", 8, &text("bert")).bytes(),
            "there is no key tokenizer.ggml.tokens",
        ),
        (Raw::default().bytes(), "there is no key general.architecture"),
        (
            Raw::default().key("general.architecture", 8, &text("gemma3")).bytes(),
            "general.architecture \"gemma3\" is not implemented: llama, qwen2",
        ),
        (
            Raw::default().key("general.architecture", 8, &text("llama")).bytes(),
            "there is no key llama.embedding_length",
        ),
    ] {
        let error = read_all(&bytes).expect_err(expected);
        assert!(error.starts_with(expected), "{error}\nnot {expected}");
    }
}

#[test]
fn a_bad_tensor_is_refused_by_name() {
    for (bytes, expected) in [
        (
            Raw::model().tensor("a", &[32], 2, 0).bytes(),
            "tensor a is of Q4_0, which is not implemented: F32, F16",
        ),
        (Raw::model().tensor("a", &[32], 99, 0).bytes(), "tensor a is of type 99, which is not implemented"),
        (
            Raw::model().tensor("a", &[8], 0, 4096).bytes(),
            "tensor a ends at byte 4128 of the data, and the file has 128",
        ),
        (Raw::model().tensor("a", &[8], 0, 8).bytes(), "tensor a is at 8, which is no multiple of 32"),
        (Raw::model().tensor("a", &[8], 0, u64::MAX - 31).bytes(), "tensor a is at 18446744073709551584"),
        (Raw::model().tensor("a", &[1 << 31, 1 << 31, 1 << 31], 0, 0).bytes(), "tensor a has shape"),
        (Raw::model().tensor("a", &[0], 0, 0).bytes(), "tensor a has a dimension of 0"),
        (
            Raw::model().tensor("a", &[33], 8, 0).bytes(),
            "tensor a has shape [33], and its type cannot have that many columns",
        ),
        (Raw::model().tensor("a", &[1; 5], 0, 0).bytes(), "tensor a has 5 dimensions"),
        (Raw::model().tensor("a", &[8], 0, 0).tensor("a", &[8], 0, 0).bytes(), "tensor a is there twice"),
        (
            Raw::model().tensor("blk.0.ffn_up_exps.weight", &[8], 0, 0).bytes(),
            "tensor blk.0.ffn_up_exps.weight has shape [8], not three dimensions",
        ),
    ] {
        let error = read_all(&bytes).expect_err(expected);
        assert!(error.starts_with(expected), "{error}\nnot {expected}");
    }
}

#[test]
fn an_unread_tensor_is_refused_by_its_name() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("a.gguf");
    std::fs::write(&file, Raw::model().tensor("blk.0.surprise.weight", &[8], 0, 0).bytes()).expect("written");
    let unpacked = unpacked(&file);
    let settings = CpuSettings::default();
    let error = CpuBackend::open(unpacked.path(), 16 << 20, &settings).expect_err("it is not read");
    assert!(types::in_full(&error).contains("tensor blk.0.surprise.weight in "), "{error}");
}

#[test]
fn a_gguf_file_is_found() {
    let folder = TempDir::new().expect("a folder");
    let put = |name: &str| std::fs::write(folder.path().join(name), "").expect("written");
    let found =
        |path: &Path| find(path).map(|file| file.map(|file| file.file_name().expect("a name").to_owned()));
    assert_eq!(found(folder.path()).expect("none"), None);
    put("a.gguf");
    assert_eq!(found(folder.path()).expect("one"), Some("a.gguf".into()));
    assert_eq!(found(&folder.path().join("a.gguf")).expect("one"), Some("a.gguf".into()));
    put("b.gguf");
    let error = found(folder.path()).expect_err("two").to_string();
    assert!(error.ends_with(" has several GGUF files, among them a.gguf and b.gguf: name one"), "{error}");
    put("model.safetensors");
    assert_eq!(found(folder.path()).expect("safetensors come first"), None);
    assert!(Checkpoint::open(folder.path()).is_err(), "an empty file");
}
