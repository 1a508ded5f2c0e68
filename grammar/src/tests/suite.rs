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
    let (mut refused, mut formats, mut wrong, mut missing) =
        (String::new(), String::new(), Vec::new(), Vec::new());
    let (mut n_groups, mut n_valid) = (0, 0);
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
            let allowed = allows(&constraint, &text);
            n_valid += usize::from(is_valid);
            match (is_valid, allowed) {
                (false, true) if name.starts_with("optional/format/") => {
                    writeln!(formats, "{name}: {text}").expect("a string takes all");
                }
                (false, true) => wrong.push(format!("{name}: {text}")),
                (true, false) => missing.push(format!("{name}: {text}")),
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "invalid, and allowed:\n{}", wrong.join("\n"));
    // A grammar may leave out some valid texts: the order of properties is the schema's, for example.
    let share = missing.len() as f64 / n_valid as f64;
    assert!(
        n_groups > 100 && share < 0.1,
        "{n_groups} groups; {} of {n_valid} valid texts are forbidden:\n{}",
        missing.len(),
        missing.join("\n")
    );
    compare("refused.txt", &refused);
    compare("formats.txt", &formats);
}

fn compare(name: &str, found: &str) {
    let file = Path::new(FOLDER).join(name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, found).expect("the file is written");
    }
    let expected = std::fs::read_to_string(&file).expect("the list");
    assert_eq!(found, expected, "UPDATE_DOCS=1 writes {name}");
}
