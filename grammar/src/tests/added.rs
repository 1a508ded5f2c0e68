//! Tests of the tokens beside a `tokenizer.json`.

use serde_json::json;
use types::TokenId;

use crate::{AddedTokens, TokenBytes};

/// Returns what the demo model's tokenizer makes of a text with the tokens of these files: the token ids, and the tokens
/// that are left out.
fn with_added(files: &[(&str, serde_json::Value)], text: &str) -> (Vec<u32>, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, value) in files {
        std::fs::write(folder.path().join(name), value.to_string()).expect("written");
    }
    let added = AddedTokens::in_folder(folder.path()).expect("tokens");
    let json = include_bytes!("../../../models/demo/tokenizer.json");
    let (tokenizer, left_out) = added.tokenizer(json).expect("a tokenizer");
    let encoding = tokenizer.encode_fast(text, false).expect("it encodes");
    (encoding.get_ids().to_vec(), left_out.into_iter().map(str::to_owned).collect())
}

#[test]
fn tokens_beside_the_tokenizer_are_added_with_their_ids() {
    let listed =
        |tokens: serde_json::Value| ("tokenizer_config.json", json!({"added_tokens_decoder": tokens}));
    let special = |text: &str| json!({"content": text, "special": true});
    let [a, b] = ["<|a|>", "<|b|>"].map(special);
    let text = "<|a|><|b|>";
    let both = || vec![2048, 2049];
    assert_eq!(with_added(&[listed(json!({"2049": b, "2048": a}))], text), (both(), vec![]));
    let (tokens, left_out) = with_added(&[listed(json!({"2048": a, "2050": b}))], text);
    assert_eq!((tokens[0], left_out), (2048, vec!["<|b|>".to_owned()]), "the next id is 2049");
    let (tokens, left_out) =
        with_added(&[listed(json!({"0": special("<|begin|>"), "7": a, "5": special("<|end|>")}))], text);
    assert!(tokens.len() > 2, "{tokens:?}");
    assert_eq!(left_out, ["<|end|>", "<|a|>"], "token 1 and no token");
    let older = ("added_tokens.json", json!({"<|a|>": 2048, "<|b|>": 2049}));
    assert_eq!(with_added(std::slice::from_ref(&older), text), (both(), vec![]));
    let newer = listed(json!({}));
    assert_ne!(with_added(&[older, newer], text).0, both(), "the newer file counts");
}

#[test]
fn older_files_name_special_tokens_elsewhere() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, value) in [
        ("added_tokens.json", json!({"<|a|>": 2048, "<|b|>": 2049, "<|c|>": 2050})),
        ("tokenizer_config.json", json!({"pad_token": {"content": "<|a|>"}})),
        ("special_tokens_map.json", json!({"additional_special_tokens": ["<|b|>"]})),
    ] {
        std::fs::write(folder.path().join(name), value.to_string()).expect("written");
    }
    let added = AddedTokens::in_folder(folder.path()).expect("tokens");
    let json = include_bytes!("../../../models/demo/tokenizer.json");
    let bytes = TokenBytes::of_tokenizer(&added.tokenizer(json).expect("a tokenizer").0).expect("bytes");
    let bytes = [2048, 2049, 2050].map(|token| bytes.of(TokenId(token)));
    assert_eq!(bytes, [b"".as_slice(), b"", b"<|c|>"], "special tokens have none");
    std::fs::write(folder.path().join("added_tokens.json"), "[").expect("written");
    let error = AddedTokens::in_folder(folder.path()).expect_err("no JSON").to_string();
    assert!(error.ends_with("added_tokens.json"), "{error}");
}
