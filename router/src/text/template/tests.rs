use minijinja::value::Serde;
use serde_json::json;

use super::*;

fn chat(messages: serde_json::Value, tools: serde_json::Value) -> Chat {
    Chat {
        messages: Serde(messages).into(),
        tools: Serde(tools).into(),
        variables: Vec::new(),
        add_generation_prompt: true,
        unix_seconds: 1_767_225_600,
    }
}

fn check(source: &str, chat: Chat, expected: &str) {
    let specials = vec![("bos_token".to_owned(), "<s>".to_owned())];
    let template = ChatTemplate::new(source, specials).expect("compiles");
    assert_eq!(template.render(chat).expect("renders"), expected, "{source}");
}

fn hello() -> Chat {
    chat(json!([{"role": "user", "content": " hi <b> "}]), json!(null))
}

#[test]
fn the_plain_template() {
    let text = ChatTemplate::plain().render(hello()).expect("renders");
    assert_eq!(text, "<|user|> hi <b> <|end|><|assistant|>");
}

#[test]
fn what_real_templates_use() {
    check("{{ bos_token }}{{ messages[0]['content'].strip() }}", hello(), "<s>hi <b>");
    check(
        "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{% endfor %}x",
        hello(),
        "x",
    );
    check("{{ messages[0].role.upper() }}{{ messages[::-1][0].content | trim }}", hello(), "USERhi <b>");
    check("{{ strftime_now('%d %b %Y') }}", hello(), "01 Jan 2026");
    check("{% if tools is none %}none{% endif %}{% if not tools %}!{% endif %}", hello(), "none!");
    check("{% if add_generation_prompt %}go{% endif %}", hello(), "go");
    check("{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}", hello(), "none");
}

#[test]
fn tools_are_written_as_python_writes_json() {
    let tools = json!([{"name": "f", "about": "<ü>", "z": 1.0, "a": [1, null, true]}]);
    let with_tools = || chat(json!([]), tools.clone());
    check(
        "{{ tools[0] | tojson }}",
        with_tools(),
        r#"{"name": "f", "about": "<ü>", "z": 1.0, "a": [1, null, true]}"#,
    );
    check("{{ tools[0].a | tojson(indent=2) }}", with_tools(), "[\n  1,\n  null,\n  true\n]");
    check("{{ '🦀ü' | tojson(ensure_ascii=true) }}", with_tools(), r#""\ud83e\udd80\u00fc""#);
}

#[test]
fn a_template_for_tools_is_used_where_there_are_tools() {
    let template = ChatTemplate::new("chat", vec![]).and_then(|template| template.with_tools("tools"));
    let template = template.expect("compiles");
    assert_eq!(template.render(hello()).expect("renders"), "chat");
    let with_tools = chat(json!([]), json!([{"name": "f"}]));
    assert_eq!(template.render(with_tools).expect("renders"), "tools");
    check("chat", chat(json!([]), json!([{"name": "f"}])), "chat");
}

#[test]
fn a_template_that_raises_names_the_messages() {
    let template =
        ChatTemplate::new("{{ raise_exception('no ' + messages[0].role) }}", vec![]).expect("compiles");
    let error = template.render(hello()).expect_err("raises");
    assert_eq!(error, AcceptError::Template { reason: "no user".to_owned() });
    assert_eq!(error.param(), "messages");
}

#[test]
fn variables_cannot_replace_what_the_request_says() {
    let mut chat = hello();
    chat.variables =
        vec![("messages".to_owned(), Value::from("forged")), ("thinking".to_owned(), Value::from(true))];
    check("{{ messages[0].role }} {{ thinking }}", chat, "user True");
}

#[test]
fn a_broken_template_is_found_at_the_start() {
    assert!(ChatTemplate::new("{% for %}", vec![]).is_err());
}

/// Renders a template that uses all known features. Python's Jinja2 wrote the expected text, with the
/// settings of `transformers`: `tests/python/template_fixtures.py`.
#[test]
fn a_template_gives_what_python_gives() {
    let specials = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let specials = specials.map(|(name, token)| (name.to_owned(), token.to_owned())).to_vec();
    let template = ChatTemplate::new(include_str!("fixtures/features.jinja"), specials).expect("compiles");
    let context: serde_json::Value =
        serde_json::from_str(include_str!("fixtures/features.json")).expect("JSON");
    let mut chat = chat(context["messages"].clone(), context["tools"].clone());
    chat.variables = vec![("enable_thinking".to_owned(), Value::from(false))];
    let text = template.render(chat).expect("renders");
    for (ours, theirs) in text.lines().zip(include_str!("fixtures/features.txt").lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(text, include_str!("fixtures/features.txt"));
}
