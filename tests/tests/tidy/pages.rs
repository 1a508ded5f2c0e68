//! Checks of whole pages: the drawings, the references to decisions, the data of measurements, and the length of all
//! pages together.

use std::path::PathBuf;
use std::process::Command;

use super::{files, read, root};

/// Limit of the words of all pages together, without the list of changes: each fact stands once.
const WORDS_MAX: usize = 34_200;

#[test]
fn the_drawings_are_what_the_script_makes() {
    let script = root().join("tests/python/house.py");
    let output = Command::new("python3").arg(script).arg("--check").output().expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the numbers of decisions that a text names, as in `docs/decisions/0007`.
fn decisions_in(text: &str) -> impl Iterator<Item = &str> {
    text.split("docs/decisions/").skip(1).filter_map(|rest| rest.get(..4))
}

#[test]
fn the_code_names_every_decision() {
    let sources = files(&[".rs", ".toml", ".cu", ".cuh", ".sh"]);
    let ours = sources.iter().filter(|file| !file.starts_with(root().join("tests/tests/tidy")));
    let texts: Vec<String> = ours.map(read).collect();
    let named: Vec<&str> = texts.iter().flat_map(|text| decisions_in(text)).collect();
    for page in std::fs::read_dir(root().join("docs/decisions")).expect("decisions").flatten() {
        let name = page.file_name().into_string().expect("UTF-8");
        let number = &name[..4];
        assert!(named.contains(&number), "no code names docs/decisions/{name}, which governs it");
    }
}

#[test]
fn a_measurement_is_one_table_with_its_data() {
    let is_page = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "md") && !path.ends_with("README.md")
    };
    let folder = std::fs::read_dir(root().join("docs/measurements")).expect("measurements");
    let pages: Vec<PathBuf> = folder.flatten().map(|entry| entry.path()).filter(is_page).collect();
    assert!(pages.len() > 10, "{pages:?}");
    for page in pages {
        let text = read(&page);
        assert!(text.contains(".json)"), "{}: no JSON with its numbers", page.display());
        let n_tables = text.lines().filter(|line| line.starts_with("|---")).count();
        assert_eq!(n_tables, 1, "{}: tables", page.display());
    }
}

/// `mdbook` makes a book of exactly the pages that docs/SUMMARY.md lists, each with this title.
#[test]
fn the_book_has_every_page_once() {
    let docs = root().join("docs");
    let book: toml::Table = read("book.toml").parse().expect("TOML");
    assert_eq!(book["book"]["src"].as_str(), Some("docs"));
    let summary = read("docs/SUMMARY.md");
    let mut listed = Vec::new();
    for line in summary.lines().filter_map(|line| line.trim_start().strip_prefix("- ")) {
        let entry = line.strip_prefix('[').and_then(|line| line.strip_suffix(')')).unwrap_or(line);
        let (title, page) = entry.rsplit_once("](").unwrap_or_else(|| panic!("no link: {line}"));
        let text = read(docs.join(page));
        assert_eq!(text.lines().next(), Some(format!("# {title}").as_str()), "docs/SUMMARY.md: {page}");
        listed.push(docs.join(page));
    }
    let is_page = |file: &PathBuf| file.starts_with(&docs) && !file.ends_with("SUMMARY.md");
    let pages: Vec<PathBuf> = files(&[".md"]).into_iter().filter(is_page).collect();
    listed.sort();
    assert_eq!(listed, pages, "left: docs/SUMMARY.md, right: the pages of docs/");
}

#[test]
fn the_pages_are_short() {
    let docs = root().join("docs");
    let readme = root().join("README.md");
    let counts = |page: &PathBuf| {
        (page.starts_with(&docs) || *page == readme)
            && !["changes.md", "SUMMARY.md"].iter().any(|name| page.ends_with(name))
    };
    let words: usize =
        files(&[".md"]).into_iter().filter(counts).map(|page| read(page).split_whitespace().count()).sum();
    assert!(words <= WORDS_MAX, "README.md and docs have {words} words, {WORDS_MAX} allowed");
}
