use std::error::Error as _;

use minijinja::value::Serde;
use serde_json::{Value, json};

use super::*;
use crate::error::AcceptError;
use crate::text::Chat;

fn demo() -> ServedModel {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    ServedModel::open(&folder, "demo").expect("the demo model is here")
}

fn chat(messages: Value, tools: Value) -> Chat {
    Chat {
        messages: Serde(messages).into(),
        tools: Serde(tools).into(),
        variables: Vec::new(),
        add_generation_prompt: true,
        unix_seconds: 0,
    }
}

fn hello() -> Chat {
    chat(json!([{"role": "user", "content": " Hello "}]), Value::Null)
}

/// Returns a folder with these files and the demo model's tokenizer.
fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/tokenizer.json");
    fs::copy(tokenizer, folder.path().join(TOKENIZER)).expect("copied");
    write(&folder, CONFIG, &json!({"vocab_size": 2048, "max_position_embeddings": 64, "eos_token_id": 1}));
    files.iter().for_each(|(name, value)| write(&folder, name, value));
    folder
}

fn write(folder: &tempfile::TempDir, name: &str, value: &Value) {
    fs::write(folder.path().join(name), value.to_string()).expect("written");
}

fn opened(files: &[(&str, Value)]) -> ServedModel {
    open(folder(files).path(), "test").expect("a model")
}

#[test]
fn the_demo_model_is_what_its_readme_says() {
    let demo = demo();
    assert_eq!((demo.context_tokens, demo.vocab, demo.eos.as_slice()), (2048, 2048, [TokenId(1)].as_slice()));
    assert_eq!(demo.defaults, Sampling::default(), "greedy");
    let template = demo.template.expect("it chats");
    assert_eq!(template.render(hello()).expect("renders"), "<|begin|><|user|>Hello<|end|><|assistant|>");
    let talk = json!([
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Why disaggregate?"},
        {"role": "assistant", "content": "Ask again."},
        {"role": "user", "content": "Why?"},
    ]);
    assert_eq!(
        template.render(chat(talk, Value::Null)).expect("renders"),
        "<|begin|><|system|>You are a helpful assistant.<|end|><|user|>Why disaggregate?<|end|>\
         <|assistant|>Ask again.<|end|><|user|>Why?<|end|><|assistant|>"
    );
    let tool = template.render(chat(json!([{"role": "tool", "content": "4"}]), Value::Null));
    assert_eq!(tool, Err(AcceptError::Template { reason: "unknown role: tool".to_owned() }));
}

#[test]
fn a_folder_without_a_tokenizer_serves_token_ids() {
    let folder = folder(&[(TOKENIZER_CONFIG, json!({"chat_template": "x"}))]);
    fs::remove_file(folder.path().join(TOKENIZER)).expect("removed");
    let model = open(folder.path(), "ids").expect("a model");
    assert_eq!(model.tokenizer.fingerprint(), "none");
    assert!(model.template.is_none());
    let error = model.tokenizer.encode_plain("text").expect_err("no tokenizer").at("prompt");
    assert_eq!(error.param(), "prompt");
}

#[test]
fn special_tokens_stand_in_an_older_file_too() {
    let map = || (SPECIAL_TOKENS, json!({"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}));
    let shown = |config: Value| {
        let mut config = config;
        config["chat_template"] = json!("{{ bos_token }}{{ eos_token }}");
        let template = opened(&[(TOKENIZER_CONFIG, config), map()]).template.expect("it chats");
        template.render(hello()).expect("renders")
    };
    assert_eq!(shown(json!({})), "<|begin|><|end|>");
    assert_eq!(shown(json!({"bos_token": null, "eos_token": "old"})), "<|begin|><|end|>");
    assert_eq!(shown(json!({"eos_token": "own", "added_tokens_decoder": {}})), "own", "as in transformers");
    let first = opened(&[(TOKENIZER_CONFIG, json!({"add_bos_token": true})), map()]);
    assert_eq!(first.tokenizer.encode_plain("Hello").expect("encodes")[0], TokenId(0));
}

#[test]
fn tokens_beside_the_tokenizer_are_tokens() {
    let added = json!({"added_tokens_decoder": {"2048": {"content": "<|more|>", "special": true}}, "add_bos_token": true,
        "bos_token": "<|more|>"});
    let tokenizer = opened(&[(TOKENIZER_CONFIG, added)]).tokenizer;
    assert_eq!(tokenizer.encode("<|more|>"), Ok(vec![TokenId(2048)]));
    assert_eq!(tokenizer.encode_plain("Hello").expect("encodes")[0], TokenId(2048));
    assert_eq!(tokenizer.fingerprint(), demo().tokenizer.fingerprint());
}

#[test]
fn yarn_lengthens_the_context_as_on_nodes() {
    let yarn = |more: &str, rope: Value| {
        let mut config = json!({"vocab_size": 2048, "max_position_embeddings": 64});
        config[more] = json!(32);
        config["rope_scaling"] = rope;
        opened(&[(CONFIG, config)]).context_tokens
    };
    for (rope, expected) in [
        (json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}), 256),
        (json!({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}), 64),
        (json!({"type": "yarn", "factor": 4}), 256),
        (json!({"type": "linear", "factor": 4.0}), 64),
        (Value::Null, 64),
    ] {
        assert_eq!(yarn("other", rope.clone()), expected, "{rope}");
    }
    let rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    assert_eq!(yarn("original_max_position_embeddings", rope), 128, "it has priority");
}

#[test]
fn templates_stand_in_any_of_three_places() {
    let in_config =
        |template: Value| json!({"bos_token": {"content": "<|begin|>"}, "chat_template": template});
    let named = json!([{"name": "default", "template": "{{ bos_token }}named"}, {"name": "tool_use", "template": "tools"}]);
    let tools = || chat(json!([]), json!([{"name": "f"}]));
    for (template, expected, expected_with_tools) in
        [(json!("{{ bos_token }}one"), "<|begin|>one", "<|begin|>one"), (named, "<|begin|>named", "tools")]
    {
        let model = opened(&[(TOKENIZER_CONFIG, in_config(template))]);
        let template = model.template.expect("it chats");
        assert_eq!(template.render(hello()).expect("renders"), expected);
        assert_eq!(template.render(tools()).expect("renders"), expected_with_tools);
    }
    let folder = folder(&[(TOKENIZER_CONFIG, in_config(json!("one")))]);
    fs::write(folder.path().join(CHAT_TEMPLATE), "{{ bos_token }}own").expect("written");
    let template = open(folder.path(), "test").expect("a model").template.expect("it chats");
    assert_eq!(template.render(hello()).expect("renders"), "<|begin|>own");
    let additional = folder.path().join(TOOL_TEMPLATE);
    fs::create_dir(additional.parent().expect("a folder")).expect("made");
    fs::write(&additional, "{{ bos_token }}own tools").expect("written");
    let template = open(folder.path(), "test").expect("a model").template.expect("it chats");
    assert_eq!(template.render(hello()).expect("renders"), "<|begin|>own");
    assert_eq!(template.render(tools()).expect("renders"), "<|begin|>own tools");
    fs::write(&additional, "{% for %}").expect("written");
    let error = open(folder.path(), "test").expect_err("refused").to_string();
    assert!(error.ends_with("/additional_chat_templates/tool_use.jinja"), "{error}");
    assert!(opened(&[]).template.is_none(), "completions only");
}

#[test]
fn the_authors_sampling_settings_are_the_defaults() {
    let sampling = |generation| opened(&[(GENERATION_CONFIG, generation)]).defaults;
    let all = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1});
    let expected = Sampling {
        temperature: 0.6,
        top_p: 0.95,
        top_k: 20,
        min_p: 0.1,
        repetition_penalty: 1.1,
        ..Sampling::default()
    };
    assert_eq!(sampling(all), expected);
    assert_eq!(sampling(json!({"do_sample": false, "temperature": 0.6})).temperature, 0.0);
    assert_eq!(sampling(json!({})).temperature, 1.0);
    assert_eq!(opened(&[]).defaults.temperature, 1.0);
    let eos = |generation| opened(&[(GENERATION_CONFIG, generation)]).eos;
    assert_eq!(eos(json!({"eos_token_id": [5, 6]})), [TokenId(5), TokenId(6)]);
    assert_eq!(eos(json!({"eos_token_id": 5})), [TokenId(5)]);
    assert_eq!(eos(json!({"eos_token_id": null})), [TokenId(1)], "config.json says so");
}

#[test]
fn a_token_in_front_is_put_there_if_the_config_says_so() {
    let first = |config: Value| {
        let model = opened(&[(TOKENIZER_CONFIG, config)]);
        model.tokenizer.encode_plain("Hello").expect("encodes")[0]
    };
    assert_eq!(first(json!({"add_bos_token": true, "bos_token": "<|begin|>"})), TokenId(0));
    assert_ne!(first(json!({"add_bos_token": false, "bos_token": "<|begin|>"})), TokenId(0));
    assert_ne!(first(json!({"bos_token": "<|begin|>"})), TokenId(0));
}

/// Returns the error and its causes in one line, without the folder's path.
fn refusal(files: &[(&str, Value)]) -> String {
    let folder = folder(files);
    let error = open(folder.path(), "test").expect_err("refused");
    let (mut line, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    line.replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn errors_name_the_file_and_the_field() {
    for (file, value, expected) in [
        (CONFIG, json!({"vocab_size": 1}), "read config.json: missing field `max_position_embeddings`"),
        (
            CONFIG,
            json!({"vocab_size": "a"}),
            "read config.json: `vocab_size`: invalid type: string \"a\", expected u32",
        ),
        (
            GENERATION_CONFIG,
            json!({"eos_token_id": "x"}),
            "read generation_config.json: `eos_token_id`: expected a token id",
        ),
        (GENERATION_CONFIG, json!({"top_p": 2}), "read generation_config.json: `top_p` is out of range: 2"),
        (
            TOKENIZER_CONFIG,
            json!({"bos_token": 3}),
            "read tokenizer_config.json: `bos_token`: expected a token's text",
        ),
        (
            TOKENIZER_CONFIG,
            json!({"add_bos_token": true}),
            "read tokenizer_config.json: `bos_token` must be a token of tokenizer.json",
        ),
        (
            TOKENIZER_CONFIG,
            json!({"chat_template": [{"name": "x", "template": "y"}]}),
            "read tokenizer_config.json: `chat_template` has no template named `default`",
        ),
        (
            TOKENIZER_CONFIG,
            json!({"chat_template": "{% for %}"}),
            "compile the chat template of tokenizer_config.json: syntax error",
        ),
        (TOKENIZER, json!({"model": {}}), "read tokenizer.json: "),
    ] {
        let refusal = refusal(&[(file, value)]);
        assert!(refusal.starts_with(expected), "{refusal}");
    }
    let empty = tempfile::tempdir().expect("a folder");
    let error = open(empty.path(), "test").expect_err("nothing is there");
    assert!(error.to_string().ends_with(CONFIG), "{error}");
}
