//! Checks for plain words: constructions that comments, log lines and pages avoid, and metaphors that need a
//! line in the glossary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{files, read, root};

/// A construction, its forms in lower case, and how many the tree may have.
const FORBIDDEN: &[(&str, &[&str], usize)] = &[
    ("nobody", &["nobody", "somebody", "anybody", "everybody", "whoever", "whom"], 5),
    ("of which", &["of which", "by whom"], 3),
    ("so many", &["so many", "so long"], 3),
];

/// The largest number of sentences that may begin with "Of" or "As".
const BEGIN_WITH_OF_OR_AS: usize = 3;

/// Words that are metaphors. Type names use one only if the glossary explains it.
const METAPHORS: &[&str] = &[
    "arrival",
    "block",
    "books",
    "cable",
    "carrier",
    "chassis",
    "chunk",
    "conformance",
    "connector",
    "courier",
    "crank",
    "credential",
    "credentials",
    "decode",
    "desk",
    "door",
    "drain",
    "epoch",
    "errand",
    "errands",
    "fabric",
    "farewell",
    "fault",
    "fence",
    "flight",
    "flights",
    "gate",
    "gift",
    "grant",
    "handoff",
    "home",
    "ladder",
    "landing",
    "lane",
    "lease",
    "link",
    "looker",
    "outbox",
    "page",
    "parcel",
    "parrot",
    "permit",
    "pool",
    "postman",
    "prefill",
    "puppet",
    "quarantine",
    "rank",
    "replica",
    "router",
    "rung",
    "seat",
    "shard",
    "shelf",
    "sink",
    "slate",
    "sleepless",
    "slot",
    "source",
    "span",
    "spin",
    "stage",
    "stream",
    "tally",
    "town",
    "turns",
    "vigil",
    "wakeless",
    "whereabouts",
    "wire",
    "wish",
    "wishes",
    "world",
];

/// Returns the texts in a file that a reader sees: comments, log lines and error texts of a source file, or a
/// whole page.
fn prose(file: &Path) -> Vec<String> {
    let text = read(file);
    let ending = file.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    prose_of(ending, &text).into_iter().map(without_marker).collect()
}

fn prose_of<'a>(ending: &str, text: &'a str) -> Vec<&'a str> {
    match ending {
        "md" => text.lines().collect(),
        "rs" => text.lines().filter(|line| is_prose(line)).collect(),
        "cu" | "cuh" => text.lines().filter_map(|line| after(line, "//")).collect(),
        "py" => {
            let docs = text.split("\"\"\"").skip(1).step_by(2).flat_map(str::lines);
            text.lines().filter_map(|line| after(line, "#")).chain(docs).collect()
        }
        _ => text.lines().filter_map(|line| after(line, "#")).collect(),
    }
}

fn is_prose(line: &str) -> bool {
    let macros = ["trace!(", "debug!(", "info!(", "warn!(", "error!(", "#[error("];
    let line = line.trim_start();
    line.starts_with("//") || line.starts_with('"') || macros.iter().any(|name| line.contains(name))
}

/// Returns the comment of a line: its text after a marker that is at the beginning or after a space.
fn after<'a>(line: &'a str, marker: &str) -> Option<&'a str> {
    let begins = |at: &usize| line[..*at].chars().next_back().is_none_or(char::is_whitespace);
    let at = line.match_indices(marker).map(|(at, _)| at).find(begins)?;
    Some(&line[at + marker.len()..])
}

fn without_marker(line: &str) -> String {
    line.trim().trim_start_matches(['/', '!', '#', '-', '*', '>', ' ']).to_owned()
}

/// A line of prose, with its file.
struct Line {
    file: String,
    text: String,
}

/// Returns all prose of the tree, without this list of forbidden words.
fn all_prose() -> Vec<Line> {
    let this = root().join("tests/tests/tidy/words.rs");
    let endings = [".rs", ".md", ".cu", ".cuh", ".py", ".sh", ".yaml", ".toml"];
    let sources = files(&endings).into_iter().filter(|file| *file != this);
    let lines = |file: PathBuf| {
        let name = file.strip_prefix(root()).expect("in the tree").display().to_string();
        prose(&file).into_iter().map(move |text| Line { file: name.clone(), text })
    };
    sources.flat_map(lines).collect()
}

fn count_words(line: &str, forms: &[&str]) -> usize {
    let line = line.to_lowercase();
    let is_letter = |c: Option<char>| c.is_some_and(|c| c.is_alphabetic() || c == '_');
    let stands_alone = |at: usize, form: &str| {
        !is_letter(line[..at].chars().next_back()) && !is_letter(line[at + form.len()..].chars().next())
    };
    let count = |form: &&str| line.match_indices(*form).filter(|(at, form)| stands_alone(*at, form)).count();
    forms.iter().map(count).sum()
}

fn count_beginnings(line: &str) -> usize {
    let begins = |text: &str| text.starts_with("Of ") || text.starts_with("As ");
    line.split(". ").filter(|sentence| begins(sentence)).count()
}

fn hold(what: &str, found: usize, allowed: usize, lines: &[&Line]) {
    let lines: Vec<String> = lines.iter().map(|line| format!("{}: {}", line.file, line.text)).collect();
    assert!(found <= allowed, "{what}: {found} in the tree, {allowed} allowed:\n{}", lines.join("\n"));
}

#[test]
fn comments_logs_and_pages_avoid_forbidden_constructions() {
    let prose = all_prose();
    // All lines are joined to one text, because a construction may continue on the next line.
    let text = prose.iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join(" ");
    for (what, forms, allowed) in FORBIDDEN {
        let lines: Vec<&Line> = prose.iter().filter(|line| count_words(&line.text, forms) > 0).collect();
        hold(what, count_words(&text, forms), *allowed, &lines);
    }
    let lines: Vec<&Line> = prose.iter().filter(|line| count_beginnings(&line.text) > 0).collect();
    let beginnings = prose.iter().map(|line| count_beginnings(&line.text)).sum();
    hold("sentences that begin with Of or As", beginnings, BEGIN_WITH_OF_OR_AS, &lines);
}

#[test]
fn forbidden_constructions_are_found() {
    assert_eq!(count_words("Nobody, of which nobodys, is_nobody_there", &["nobody", "of which"]), 2);
    assert_eq!(count_beginnings("As before. Of these two. A part of it"), 2);
    assert!(is_prose("    /// A comment") && is_prose("warn!(\"text\")") && !is_prose("let x = 1;"));
    for (ending, text, comments) in [
        ("cu", "int a; // one\nint b;\n/// two", vec![" one", "/ two"]),
        ("py", "a = 1  # one\ndef f():\n    \"\"\"two\"\"\"\n", vec![" one", "two"]),
        ("sh", "#!/bin/sh\necho ${#a}  # one", vec!["!/bin/sh", " one"]),
        ("toml", "a = 1\n# one", vec![" one"]),
    ] {
        assert_eq!(prose_of(ending, text), comments, "{ending}");
    }
}

/// Returns the words of the glossary, each with its sentence.
fn glossary() -> BTreeMap<String, String> {
    let page = read("docs/glossary.md");
    let lines = page.lines().filter_map(|line| line.strip_prefix("- **")?.split_once("**: "));
    lines.map(|(word, sentence)| (word.to_owned(), sentence.to_owned())).collect()
}

/// Returns the words of a name like `BlockLease`, in lower case.
fn words_of(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for letter in name.chars() {
        match words.last_mut() {
            Some(word) if !letter.is_uppercase() => word.push(letter),
            _ => words.push(letter.to_lowercase().collect()),
        }
    }
    words
}

fn type_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = if line.starts_with("pub") { line.split_once(' ')?.1 } else { line };
    let (kind, rest) = line.split_once(' ')?;
    let name = rest.split(|c: char| !c.is_alphanumeric()).next()?;
    (["struct", "enum", "trait", "type"].contains(&kind) && name.starts_with(char::is_uppercase))
        .then_some(name)
}

fn unexplained<'a>(name: &'a str, glossary: &BTreeMap<String, String>) -> Option<&'a str> {
    let is_unexplained = |word: &String| {
        METAPHORS.contains(&word.as_str()) && !glossary.contains_key(word.trim_end_matches('s'))
    };
    words_of(name).iter().any(is_unexplained).then_some(name)
}

#[test]
fn the_glossary_is_one_short_page() {
    let glossary = glossary();
    assert!((20..=40).contains(&glossary.len()), "{} words", glossary.len());
    for (word, sentence) in &glossary {
        assert!(sentence.ends_with('.') && sentence.matches(". ").count() == 0, "{word}: one sentence");
    }
    let entries = read("docs/glossary.md").lines().filter(|line| line.starts_with("- **")).count();
    assert_eq!(entries, glossary.len(), "each word once, as `- **word**: sentence`");
}

#[test]
fn the_glossary_explains_metaphors_in_type_names() {
    let glossary = glossary();
    let mut names = BTreeSet::new();
    for file in files(&[".rs"]) {
        let text = read(&file);
        names.extend(
            text.lines()
                .filter_map(type_name)
                .filter_map(|name| unexplained(name, &glossary))
                .map(str::to_owned),
        );
    }
    assert!(names.is_empty(), "not in docs/glossary.md: {names:?}");
}

#[test]
fn a_metaphor_in_a_type_name_is_found() {
    let known = BTreeMap::from([("lease".to_owned(), String::new())]);
    assert_eq!(type_name("pub(crate) struct CourierSize {"), Some("CourierSize"));
    assert_eq!(type_name("    type Leases = u8;"), Some("Leases"));
    assert_eq!(type_name("/// struct Courier"), None);
    assert!(unexplained("CourierSize", &known).is_some());
    assert!(unexplained("BoundLease", &known).is_none());
}
