use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::text::{Detokenizer, StopStrings};

fn hugging_face(json: &[u8]) -> HuggingFace {
    HuggingFace::new(json).expect("a tokenizer")
}

fn demo() -> Tokenizer {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/tokenizer.json");
    Tokenizer::HuggingFace(Box::new(hugging_face(&std::fs::read(file).expect("the demo model is here"))))
}

/// Loads a tokenizer that is built like Llama 2's: `▁` for spaces, and bytes for characters without a token.
/// `tests/python/tokenizer_fixtures.py` makes its file.
fn llama_like() -> HuggingFace {
    hugging_face(include_bytes!("fixtures/llama_like.tokenizer.json"))
}

fn boxed(tokenizer: HuggingFace) -> Tokenizer {
    Tokenizer::HuggingFace(Box::new(tokenizer))
}

/// Compares encoding and decoding with the results of Python's `tokenizers`.
fn check_fixtures(tokenizer: &Tokenizer, lines: &str) {
    assert!(lines.lines().count() >= 300);
    for line in lines.lines() {
        let (text, ids, back): (String, Vec<u32>, String) = serde_json::from_str(line).expect("a fixture");
        let tokens: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
        assert_eq!(tokenizer.encode(&text).expect("encodes"), tokens, "{text:?}");
        assert_eq!(tokenizer.text_of(&tokens), back, "{tokens:?}");
    }
}

/// Returns the text of the tokens, decoded piece by piece as an answer.
fn streamed(tokenizer: Tokenizer, tokens: &[TokenId]) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer.into(), &StopStrings::default(), 0);
    let mut text = String::new();
    for token in tokens {
        let _ = detokenizer.push(*token, &mut text);
    }
    detokenizer.finish(&mut text);
    text
}

// === bytes ===

#[test]
fn text_comes_back() {
    for text in ["", "plain", "ünïcode → 🦀", "<|almost|", "\0"] {
        let tokens = Tokenizer::Bytes.encode(text).expect("any text has bytes");
        assert_eq!(tokens.len(), text.len());
        assert_eq!(Tokenizer::Bytes.text_of(&tokens), text);
    }
}

#[test]
fn names_become_special_tokens_and_special_tokens_become_nothing() {
    let tokens = Tokenizer::Bytes.encode("<|user|>a<|end|>").expect("any text has bytes");
    assert_eq!(tokens, [TokenId(258), TokenId(97), END]);
    assert_eq!(Tokenizer::Bytes.text_of(&tokens), "a");
    assert_eq!(Tokenizer::Bytes.shown(TokenId(258)), "<|user|>");
    assert_eq!(Tokenizer::Bytes.shown(TokenId(97)), "a");
}

#[test]
fn a_token_outside_the_vocabulary_is_nothing() {
    assert_eq!(Tokenizer::Bytes.vocab(), 261);
    assert_eq!(Tokenizer::Absent.shown(TokenId(7)), "token_id:7");
    assert_eq!(Tokenizer::Absent.whole_text_of(&[TokenId(7)]), "", "no token has text");
    for tokenizer in [Tokenizer::Bytes, demo(), boxed(llama_like())] {
        assert!(tokenizer.bytes_of(TokenId(u32::MAX)).is_empty());
        assert!(tokenizer.bytes_of(TokenId(tokenizer.vocab())).is_empty());
        assert_eq!(tokenizer.shown(TokenId(tokenizer.vocab())), "");
    }
}

// === the demo model's tokenizer ===

#[test]
fn the_demo_models_prompts_have_the_tokens_that_they_were_trained_with() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/golden.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(file).expect("it is here")).expect("JSON");
    let tokens = |value: &Value| -> Vec<TokenId> {
        let ids = value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id"));
        ids.map(|id| TokenId(id as u32)).collect()
    };
    let prompts = golden["prompts"].as_array().expect("prompts");
    assert!(prompts.len() >= 8);
    for prompt in prompts {
        let (demo, text) = (demo(), prompt["prompt"].as_str().expect("a text"));
        assert_eq!(demo.encode(text).expect("encodes"), tokens(&prompt["prompt_ids"]), "{text}");
        assert_eq!(
            demo.encode_plain(text).expect("encodes"),
            tokens(&prompt["prompt_ids"]),
            "no token in front"
        );
        let expected = prompt["continuation"].as_str().expect("a text").trim_end_matches("<|end|>");
        assert_eq!(streamed(demo, &tokens(&prompt["continuation_ids"])), expected);
    }
}

#[test]
fn texts_are_cut_as_python_cuts_them() {
    check_fixtures(&demo(), include_str!("fixtures/demo.jsonl"));
}

#[test]
fn special_tokens_have_names_and_no_text() {
    let demo = demo();
    let tokens = demo.encode("<|begin|><|user|>Hello").expect("encodes");
    assert_eq!(tokens[..2], [TokenId(0), TokenId(3)]);
    assert_eq!(demo.text_of(&tokens), "Hello");
    assert_eq!((demo.shown(TokenId(3)).as_ref(), demo.vocab()), ("<|user|>", 2048));
}

#[test]
fn router_and_nodes_compute_the_same_fingerprint() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/tokenizer.json");
    let digest = types::node::tokenizer_digest(&std::fs::read(file).expect("it is here"));
    assert_eq!(demo().fingerprint(), digest);
    assert_eq!((Tokenizer::Bytes.fingerprint(), Tokenizer::Absent.fingerprint()), ("bytes", "none"));
}

// === a tokenizer like Llama's ===

#[test]
fn spaces_and_bytes_of_a_llama_are_exact() {
    check_fixtures(&boxed(llama_like()), include_str!("fixtures/llama_like.jsonl"));
}

#[test]
fn an_answer_keeps_the_space_that_a_whole_text_would_lose() {
    let llama = llama_like();
    let tokens = llama.encode("the cache").expect("encodes");
    assert_eq!(boxed(llama_like()).text_of(&tokens), "the cache");
    assert_eq!(streamed(boxed(llama), &tokens), " the cache");
}

#[test]
fn a_plain_text_begins_as_the_model_expects() {
    let bos = llama_like().named("<s>").expect("it has one");
    for (begin, expected) in [(Bos::PostProcessor, true), (Bos::Nothing, false), (Bos::Token(bos), true)] {
        let llama = llama_like().with_bos(begin);
        let tokens = llama.encode_plain("Hello").expect("encodes");
        assert_eq!(tokens.first() == Some(&bos), expected, "{begin:?}");
        assert_eq!(tokens.iter().filter(|token| **token == bos).count(), usize::from(expected));
        assert!(!llama.encode("Hello").expect("encodes").contains(&bos), "a template writes its own");
    }
}

#[test]
fn tokens_that_were_added_but_are_not_special_are_text() {
    let llama = boxed(llama_like());
    let tokens = llama.encode("<think>").expect("encodes");
    assert!(tokens.contains(&TokenId(600)));
    assert_eq!(llama.bytes_of(TokenId(600)), b"<think>");
}

// === decoders ===

/// Returns a vocabulary of three tokens with this decoder.
fn with_decoder(decoder: Value) -> Result<HuggingFace, TokenizerError> {
    let json = json!({
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"▁a▁b": 0, "<0xE2>": 1, "Ġé→": 2}, "unk_token": "Ġé→"},
        "decoder": decoder,
    });
    HuggingFace::new(json.to_string().as_bytes())
}

#[test]
fn decoders_are_taken_apart() {
    let metaspace = |scheme| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme});
    let fallback = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let literal = "Ġé→".as_bytes();
    for (decoder, expected, whole) in [
        (metaspace("always"), [b" a b".as_slice(), b"<0xE2>", literal], "a b"),
        (metaspace("never"), [b" a b", b"<0xE2>", literal], " a b"),
        (fallback, [b" a b", b"\xe2", literal], "a b"),
        (byte_level, ["▁a▁b".as_bytes(), b"<0xE2>", literal], "▁a▁b"),
        (json!({"type": "Fuse"}), ["▁a▁b".as_bytes(), b"<0xE2>", literal], "▁a▁b"),
    ] {
        let tokenizer = with_decoder(decoder.clone()).expect("works token by token");
        let found: Vec<&[u8]> = (0..3).map(|id| tokenizer.bytes().of(TokenId(id))).collect();
        assert_eq!(found, expected, "{decoder}");
        assert_eq!(boxed(tokenizer).text_of(&[TokenId(0)]), whole, "{decoder}");
    }
}

#[test]
fn decoders_that_cannot_be_taken_apart_are_named() {
    for (decoder, name) in [
        (json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), "WordPiece"),
        (json!({"type": "BPEDecoder", "suffix": "</w>"}), "BPEDecoder"),
        (json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}), "Strip"),
        (
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}),
            "ByteFallback",
        ),
        (Value::Null, "none"),
    ] {
        let error = with_decoder(decoder).expect_err("not token by token").to_string();
        assert_eq!(error, format!("`decoder`: {name}, which gives tokens no bytes of their own"));
    }
}

#[test]
fn every_byte_has_its_character() {
    let json = json!({
        "version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "merges": [], "vocab": {}},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}});
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut json = json;
    json["model"]["vocab"] =
        alphabet.iter().enumerate().map(|(id, character)| (character.to_string(), json!(id))).collect();
    let tokenizer = hugging_face(json.to_string().as_bytes());
    let mut bytes: Vec<u8> = (0..256).flat_map(|id| tokenizer.bytes().of(TokenId(id))).copied().collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    for text in ["\0\u{7f}\u{a0}\u{ad}", "ÿ"] {
        let tokens = tokenizer.encode(text).expect("encodes");
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| tokenizer.bytes().of(*token)).copied().collect();
        assert_eq!(bytes, text.as_bytes());
    }
}

proptest! {
    /// Streams random tokens. The joined pieces must be the text of their bytes, in whole characters.
    #[test]
    fn any_tokens_stream_as_the_text_of_their_bytes(ids in proptest::collection::vec(0u32..2060, 0..40)) {
        thread_local! { static DEMO: std::sync::Arc<Tokenizer> = std::sync::Arc::new(demo()); }
        let demo = DEMO.with(std::sync::Arc::clone);
        let tokens: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
        let mut detokenizer = Detokenizer::new(demo.clone(), &StopStrings::default(), 0);
        let mut text = String::new();
        for token in &tokens {
            let _ = detokenizer.push(*token, &mut text);
        }
        detokenizer.finish(&mut text);
        prop_assert_eq!(text, demo.text_of(&tokens));
    }

    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}") {
        thread_local! { static DEMO: std::sync::Arc<Tokenizer> = std::sync::Arc::new(demo()); }
        let demo = DEMO.with(std::sync::Arc::clone);
        prop_assume!(!text.contains("<|"));
        prop_assert_eq!(demo.text_of(&demo.encode(&text).expect("encodes")), text);
    }
}
