//! JSON Schema's own test suite, draft 2020-12: what is accepted is enforced, what is not is refused by name.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use super::{allows, compiler};
use crate::{check, sources};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/json-schema-test-suite");

fn groups() -> Vec<Value> {
    let text = include_str!("../../tests/json-schema-test-suite/draft2020-12.jsonl");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn what_is_accepted_is_enforced() {
    let compiler = compiler();
    let (mut refused, mut forbidden) = (String::new(), String::new());
    let (mut wrong, mut n_groups) = (Vec::new(), 0);
    for group in groups() {
        let name = format!("{}: {}", group["file"].as_str().expect("a file"), group["description"]);
        let grammar = sources::json_schema(&group["schema"].to_string());
        if let Err(error) = check(&grammar, 300) {
            writeln!(refused, "{name}: {error}").expect("a string takes all");
            continue;
        }
        n_groups += 1;
        for test in group["tests"].as_array().expect("tests") {
            let constraint = compiler.constraint(&grammar).expect("it was accepted");
            let (text, is_valid) = (test["data"].to_string(), test["valid"] == true);
            match (is_valid, allows(&constraint, &text)) {
                (false, true) => wrong.push(format!("{name}: {text}")),
                (true, false) => {
                    let is_allowed = |other: &Value| allows(&constraint, &other.to_string());
                    let why = if reordered(&test["data"]).iter().any(is_allowed) { "order" } else { "value" };
                    writeln!(forbidden, "{why}: {name}: {text}").expect("a string takes all");
                }
                (true, true) => {
                    for text in with_white_space(&test["data"]) {
                        assert!(allows(&constraint, &text), "{name}: {text}");
                    }
                }
                (false, false) => {}
            }
        }
    }
    assert!(wrong.is_empty(), "invalid, and allowed:\n{}", wrong.join("\n"));
    assert!(n_groups > 100, "{n_groups} groups");
    compare("forbidden.txt", &forbidden);
    compare("refused.txt", &refused);
}

/// Returns a value with its properties in all other orders, if they are few.
fn reordered(value: &Value) -> Vec<Value> {
    let Some(fields) = value.as_object().filter(|fields| fields.len() <= 5) else { return Vec::new() };
    let mut orders: Vec<Vec<(&String, &Value)>> = vec![Vec::new()];
    for field in fields {
        let places = |order: &Vec<_>| {
            let with_field = |place| {
                let mut order = order.clone();
                order.insert(place, field);
                order
            };
            (0..=order.len()).map(with_field).collect::<Vec<_>>()
        };
        orders = orders.iter().flat_map(places).collect();
    }
    let object = |order: Vec<(&String, &Value)>| {
        order.into_iter().map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    orders.into_iter().map(object).map(Value::Object).collect()
}

/// Returns a value's text with white space as programs write it: indented, and with a space after commas and colons.
fn with_white_space(value: &Value) -> [String; 2] {
    [serde_json::to_string_pretty(value).expect("JSON"), spaced(value)]
}

fn spaced(value: &Value) -> String {
    let joined = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Array(items) => format!("[{}]", joined(items.iter().map(spaced).collect())),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::from(name.as_str()), spaced(value))
            };
            format!("{{{}}}", joined(fields.iter().map(field).collect()))
        }
        other => other.to_string(),
    }
}

#[test]
fn white_space_has_three_forms() {
    let constraint = compiler().constraint(&sources::json_schema("true")).expect("a grammar");
    let array = |space: &str| format!("[1,{space}2]");
    for space in ["", " ", "\n", "\r\n", "\n  ", "\n\t", &format!("\n{}", " ".repeat(32))] {
        assert!(allows(&constraint, &array(space)), "{space:?}");
    }
    for space in ["  ", "\t", " \n", "\r", "\n\n", &format!("\n{}", " ".repeat(33))] {
        assert!(!allows(&constraint, &array(space)), "{space:?}");
    }
    assert!(!allows(&constraint, " 1") && !allows(&constraint, "1 "), "around the whole text");
}

fn compare(name: &str, found: &str) {
    let file = Path::new(FOLDER).join(name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, found).expect("the file is written");
    }
    let expected = std::fs::read_to_string(&file).expect("the list");
    assert_eq!(found, expected, "UPDATE_DOCS=1 writes {name}");
}
