//! Checks for parameters: no function takes a `bool` or a tuple, because a call does not show what they mean.
//! The function takes an enum or a struct, or there are two functions.
//!
//! Closures, tests, benches and examples do not count.

use std::path::Path;

use super::{files, read, root};

/// Functions that may take one: the file, the function and the reason.
const MAY_STAY: &[(&str, &str, &str)] = &[
    ("chassis/src/telemetry/json.rs", "record_bool", "the trait is tracing's"),
    ("device/src/cuda/card.rs", "of", "CUDA's three dimensions of a grid"),
    ("device/src/cuda/error.rs", "ensure", "a condition, as in `assert!`"),
    ("engine/src/model/architecture.rs", "is_there", "the value of a model's setting"),
    ("kernels/src/cuda/ops/decode.rs", "launch_decode", "CUDA's three dimensions of a grid"),
    ("router/src/text/template/python.rs", "begin_array_value", "the trait is serde_json's"),
    ("router/src/text/template/python.rs", "begin_object_key", "the trait is serde_json's"),
];

#[test]
fn parameters_are_neither_booleans_nor_tuples() {
    let mut found = Vec::new();
    for file in files(&[".rs"]).iter().map(|file| file.strip_prefix(root()).expect("in the tree")) {
        if is_for_tests(file) {
            continue;
        }
        let text = read(file);
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        found.extend(
            nameless(text).into_iter().map(|(function, parameter)| (file.to_owned(), function, parameter)),
        );
    }
    let may_stay = |path: &Path, function: &str| {
        MAY_STAY.iter().any(|(file, name, _)| path == Path::new(file) && *name == function)
    };
    let wrong: Vec<String> = found
        .iter()
        .filter(|(path, function, _)| !may_stay(path, function))
        .map(|(path, function, parameter)| format!("{}: {function}({parameter})", path.display()))
        .collect();
    assert!(wrong.is_empty(), "{} parameters:\n{}", wrong.len(), wrong.join("\n"));
    for (file, name, reason) in MAY_STAY {
        assert!(!reason.is_empty(), "{file}: {name} may stay without a reason");
        let is_used = found.iter().any(|(path, function, _)| path == Path::new(file) && function == name);
        assert!(is_used, "{file}: {name} need not be in MAY_STAY");
    }
}

#[test]
fn booleans_and_tuples_are_found_in_every_place() {
    let text = r#"
        fn a(x: bool, y: &mut bool) {}
        pub fn b<F: Fn(bool) -> (u8, u8)>(
            &self,
            (x, y): Pair, // z: bool
        ) -> bool {}
        fn c(x: &'a (u8, u8), name: &'static str) { say("fn d(x: bool)", '"', '\'') }
        fn e(x: impl Fn(bool), y: &(dyn Error + 'static), z: [bool; 2], unit: ()) {}
    "#;
    let expected = [("a", "x: bool"), ("a", "y: &mut bool"), ("b", "(x, y): Pair"), ("c", "x: &'a (u8, u8)")];
    assert_eq!(nameless(text), expected.map(|(name, parameter)| (name.to_owned(), parameter.to_owned())));
}

fn is_for_tests(file: &Path) -> bool {
    let is_room = |part: std::path::Component<'_>| {
        ["tests", "examples", "benches"].iter().any(|room| part.as_os_str() == *room)
    };
    file.components().any(is_room)
        || file.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"))
}

/// Returns the parameters that are booleans or tuples, each with the name of its function.
fn nameless(text: &str) -> Vec<(String, String)> {
    let code = code(text);
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|before| before.is_alphanumeric() || before == '_') {
            continue;
        }
        let rest = &code[at + 3..];
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let mut rest = &rest[name.len()..];
        if rest.starts_with('<') {
            rest = &rest[inside(rest).len() + 2..];
        }
        if !rest.starts_with('(') {
            continue;
        }
        let parameters = split(inside(rest), ',').into_iter().map(|words| words.trim().to_owned());
        found.extend(parameters.filter(|words| is_nameless(words)).map(|words| (name.to_owned(), words)));
    }
    found
}

fn is_nameless(parameter: &str) -> bool {
    let [pattern, rest @ ..] = &split(parameter, ':')[..] else { return false };
    let mut kind = rest.join(":").trim().to_owned();
    if let Some(referenced) = kind.strip_prefix('&') {
        let lifetime = referenced.split_once(' ').filter(|(word, _)| word.starts_with('\''));
        let referenced = lifetime.map_or(referenced, |(_, after)| after);
        kind = referenced.strip_prefix("mut ").unwrap_or(referenced).to_owned();
    }
    let is_bounds = kind.starts_with("(dyn ") || kind.starts_with("(impl ");
    kind == "bool" || pattern.starts_with('(') || (kind.starts_with('(') && kind != "()" && !is_bounds)
}

/// Returns the text between the first bracket and the one that closes it.
fn inside(text: &str) -> &str {
    let mut depth = 0_usize;
    for (at, c) in text.char_indices() {
        depth = depth_after(depth, &text[..at], c);
        if depth == 0 {
            return &text[1..at];
        }
    }
    ""
}

/// Returns the parts between separators that stand in no bracket. A `::` separates nothing.
fn split(text: &str, separator: char) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        depth = depth_after(depth, &text[..at], c);
        let is_path = c == ':' && (text[..at].ends_with(':') || text[at + 1..].starts_with(':'));
        if c == separator && depth == 0 && !is_path {
            parts.push(&text[start..at]);
            start = at + 1;
        }
    }
    parts.push(&text[start..]);
    parts
}

fn depth_after(depth: usize, before: &str, c: char) -> usize {
    match c {
        '(' | '[' | '{' | '<' => depth + 1,
        '>' if before.ends_with(['-', '=']) => depth,
        ')' | ']' | '}' | '>' => depth.saturating_sub(1),
        _ => depth,
    }
}

/// Returns the text without comments, strings and characters, and with one space between words.
fn code(text: &str) -> String {
    let (mut code, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(next) = rest.chars().next() {
        let raw = rest.strip_prefix('r').map(|after| after.trim_start_matches('#'));
        let begins_word = !code.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let taken = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if next == '"' {
            quoted(rest, '"')
        } else if begins_word && raw.is_some_and(|raw| raw.starts_with('"')) {
            let hashes = &rest[1..rest.len() - raw.map_or(0, str::len)];
            let start = hashes.len() + 2;
            let end = format!("\"{hashes}");
            rest[start..].find(&end).map_or(rest.len(), |at| start + at + end.len())
        } else if next == '\'' && is_character(rest) {
            quoted(rest, '\'')
        } else {
            let is_space = next.is_whitespace();
            if !is_space {
                code.push(next);
            } else if !code.ends_with([' ', '(']) {
                code.push(' ');
            }
            next.len_utf8()
        };
        rest = &rest[taken..];
    }
    code
}

/// Returns whether a quote begins a character, not a lifetime.
fn is_character(text: &str) -> bool {
    let mut after = text.chars().skip(1);
    after.next() == Some('\\') || after.next() == Some('\'')
}

/// Returns the length of a string or a character with its quotes.
fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if c == quote && !is_escaped {
            return at + 1;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    text.len()
}
