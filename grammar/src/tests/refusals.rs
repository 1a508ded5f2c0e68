//! Tests of refusals, and of the time that they take.

use std::time::{Duration, Instant};

use crate::{check, sources};

fn refusal(grammar: &types::Grammar) -> String {
    check(grammar, 300).expect_err("it cannot be enforced").to_string()
}

#[test]
fn a_schema_is_refused_with_its_place() {
    for (schema, reason) in [
        (
            r#"{"type":"object","properties":{"a":{"type":"array","items":{"uniqueItems":true}}}}"#,
            "at /properties/a/items: ",
        ),
        (
            r##"{"$defs":{"a/b":{"not":{}}},"anyOf":[{"type":"string"},{"$ref":"#/$defs/x"}]}"##,
            "at /anyOf/1: ",
        ),
        (r#"{"type":"string","pattern":"("}"#, "at the root: "),
        (r#"{"x-guidance":{"lenient":true},"not":{}}"#, "at the root: `x-guidance` is not supported"),
        ("false", "at the root: no JSON is valid by the schema `false`"),
        ("7", "at the root: a schema is an object or a boolean"),
        ("{", "not JSON: "),
    ] {
        let found = refusal(&sources::json_schema(schema));
        assert!(found.starts_with(reason), "{schema}: {found}");
    }
}

#[test]
fn wrong_texts_are_refused() {
    for grammar in [
        sources::regex("("),
        sources::lark("start: missing"),
        sources::lark(""),
        sources::lark("start: \"a"),
        sources::lark("start: <|special|>"),
        sources::lark("start: <[300]>"),
        sources::lark(&format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        sources::regex(&"(".repeat(100_000)),
        sources::json_schema(&"[".repeat(100_000)),
        sources::json_schema(&" ".repeat(200_000)),
    ] {
        let found = refusal(&grammar);
        assert!(!found.is_empty() && found.len() < 1000, "{grammar:?}: {found}");
    }
}

#[test]
fn a_grammar_that_nothing_matches_is_refused() {
    for grammar in [
        sources::regex(r"[^\s\S]"),
        sources::lark("start: start"),
        sources::json_schema(r##"{"$ref":"#"}"##),
        sources::json_schema(r##"{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}"##),
        sources::json_schema(
            r##"{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}"##,
        ),
    ] {
        let found = refusal(&grammar);
        assert!(found.ends_with("nothing matches it"), "{grammar:?}: {found}");
    }
}

/// Texts that are small and expand. Each is accepted or refused within the bound, which leaves room for a loaded
/// machine.
#[test]
fn no_text_takes_long() {
    let any_of = format!("{{\"anyOf\":[{}]}}", vec![r#"{"properties":{"a":{"minimum":1}}}"#; 30].join(","));
    let all_of = format!("{{\"allOf\":[{}]}}", vec![any_of; 12].join(","));
    let nested = (0..100).fold("{}".to_owned(), |inner, _| format!("{{\"properties\":{{\"a\":{inner}}}}}"));
    let deep_regex = (0..200).fold("a".to_owned(), |inner, _| format!("({inner}|b)*"));
    for grammar in [
        sources::regex("((a{1,1000}){1,1000}){1,1000}"),
        sources::regex("(.*a.*b.*c.*d.*){1,500}e"),
        sources::regex(r"(\w{1,50}\d){1,100}"),
        sources::regex(&deep_regex),
        sources::json_schema(&all_of),
        sources::json_schema(&nested),
        sources::json_schema(r#"{"type":"string","maxLength":1000000000}"#),
        sources::json_schema(r#"{"type":"array","minItems":1000000000}"#),
        sources::json_schema(r#"{"type":"number","multipleOf":0.0000001,"maximum":1e300}"#),
        sources::json_schema(r##"{"$ref":"#"}"##),
        sources::json_schema(r##"{"allOf":[{"$ref":"#"},{"$ref":"#"}]}"##),
        sources::lark(&format!(
            "start: {}",
            (0..4000).map(|n| format!("\"a{n}\"")).collect::<Vec<_>>().join("|")
        )),
    ] {
        #[allow(clippy::disallowed_methods, reason = "a measurement of real time")]
        let started = Instant::now();
        let found = check(&grammar, 300);
        let took = started.elapsed();
        assert!(took < Duration::from_secs(20), "{grammar:?} took {took:?}: {found:?}");
    }
}
