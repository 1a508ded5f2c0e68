//! Checks sizes: a file has at most 600 lines, and a function at most 80.

use super::{files, read, root};

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 80;

/// A function's name, and the number of its lines from `fn` to the closing brace.
type Function<'a> = (&'a str, usize);

/// Returns the functions of a Rust source, by the depth of braces. Braces in comments, strings and characters
/// do not count.
fn functions(text: &str) -> Vec<Function<'_>> {
    let (mut found, mut open): (Vec<Function<'_>>, Vec<Open<'_>>) = (Vec::new(), Vec::new());
    let mut depth = 0_usize;
    let mut quoted = Quoted::No;
    for (nth, line) in text.lines().enumerate() {
        if matches!(quoted, Quoted::No)
            && let Some(name) = function_name(line)
        {
            open.push(Open { name, line: nth, depth, has_body: false });
        }
        for brace in braces(line, &mut quoted) {
            match brace {
                '{' => {
                    depth += 1;
                    if let Some(function) = open.last_mut().filter(|function| function.depth + 1 == depth) {
                        function.has_body = true;
                    }
                }
                '}' => {
                    depth = depth.saturating_sub(1);
                    if let Some(ended) = open.pop_if(|function| function.has_body && function.depth == depth)
                    {
                        found.push((ended.name, nth - ended.line + 1));
                    }
                }
                // The semicolon ends a function of a trait without a body.
                _ => drop(open.pop_if(|function| !function.has_body && function.depth == depth)),
            }
        }
    }
    found
}

/// A function whose end has not been read.
struct Open<'a> {
    name: &'a str,
    line: usize,
    depth: usize,
    has_body: bool,
}

/// Returns the name after `fn`, if a function begins on this line.
fn function_name(line: &str) -> Option<&str> {
    let words = ["pub", "const", "async", "unsafe", "extern", "default"];
    let (before, after) = line.trim_start().split_once("fn ")?;
    let is_item = before.split_whitespace().all(|word| {
        words.iter().any(|known| word == *known || word.starts_with("pub("))
            || word.starts_with('"')
            || word.ends_with(')')
    });
    let name = after.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (is_item && !name.is_empty()).then_some(name)
}

/// Whether the last line ended inside a string, and with how many `#` that string closes.
enum Quoted {
    No,
    Plain,
    Raw(usize),
}

/// Returns the braces and semicolons of a line that are code.
fn braces(line: &str, quoted: &mut Quoted) -> Vec<char> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(next) = rest.chars().next() {
        let mut taken = next.len_utf8();
        match quoted {
            Quoted::Plain if next == '\\' => taken += rest[1..].chars().next().map_or(0, char::len_utf8),
            Quoted::Plain if next == '"' => *quoted = Quoted::No,
            Quoted::Plain => {}
            Quoted::Raw(hashes) => {
                let end = format!("\"{}", "#".repeat(*hashes));
                if rest.starts_with(&end) {
                    taken = end.len();
                    *quoted = Quoted::No;
                }
            }
            Quoted::No if rest.starts_with("//") => break,
            Quoted::No if next == '"' => *quoted = Quoted::Plain,
            Quoted::No if next == 'r' => {
                let hashes = rest[1..].len() - rest[1..].trim_start_matches('#').len();
                if rest[1 + hashes..].starts_with('"') {
                    taken = hashes + 2;
                    *quoted = Quoted::Raw(hashes);
                }
            }
            Quoted::No if next == '\'' => taken = character(rest),
            Quoted::No if ['{', '}', ';'].contains(&next) => found.push(next),
            Quoted::No => {}
        }
        rest = &rest[taken..];
    }
    found
}

/// Returns the length of a character literal, or 1 for the quote of a lifetime.
fn character(text: &str) -> usize {
    let inner = text[1..].chars().next().map_or(0, char::len_utf8);
    if text[1..].starts_with('\\') {
        return text[3..].find('\'').map_or(1, |end| end + 4);
    }
    if text[1 + inner..].starts_with('\'') { inner + 2 } else { 1 }
}

#[test]
fn files_are_short() {
    for file in files(&[".rs", ".py", ".cu"]) {
        let lines = read(&file).lines().count();
        assert!(lines <= FILE_LINES_MAX, "{}: {lines} lines, {FILE_LINES_MAX} allowed", file.display());
    }
}

#[test]
fn functions_are_short() {
    let (mut n_measured, mut n_declared) = (0, 0);
    for file in files(&[".rs"]) {
        let text = read(&file);
        n_declared += text.lines().filter(|line| function_name(line).is_some()).count();
        for (name, lines) in functions(&text) {
            n_measured += 1;
            let path = file.strip_prefix(root()).expect("in the tree").display();
            assert!(
                lines <= FUNCTION_LINES_MAX,
                "{path}: `{name}` has {lines} lines, {FUNCTION_LINES_MAX} allowed"
            );
        }
    }
    // Nearly all functions must be measured. The rest are declared in traits, without a body.
    assert!(n_measured * 20 > n_declared * 19, "{n_measured} of {n_declared} functions were measured");
}

#[test]
fn lengths_of_functions_are_counted() {
    let long = format!("fn long() {{\n{}}}\n", "    work();\n".repeat(FUNCTION_LINES_MAX));
    for (text, expected) in [
        ("fn one() {}", vec![("one", 1)]),
        ("pub(crate) async fn two(\n) -> u8 {\n    { 1 }\n}", vec![("two", 4)]),
        ("trait T {\n    fn none(&self);\n    fn some(&self) {\n    }\n}", vec![("some", 2)]),
        ("fn outer() {\n    fn inner() {\n    }\n}", vec![("inner", 2), ("outer", 4)]),
        ("fn text() {\n    let a = \"}\"; // }\n    let b = ('}', '\\'', r#\"\"}\"#);\n}", vec![("text", 4)]),
        ("fn lines() {\n    let a = \"{\n    fn no() {\n\";\n}", vec![("lines", 5)]),
        ("fn life<'a>(x: &'a str) -> &'a str {\n    x\n}\n// fn no() {}", vec![("life", 3)]),
        (long.as_str(), vec![("long", FUNCTION_LINES_MAX + 2)]),
    ] {
        assert_eq!(functions(text), expected, "{text}");
    }
}
