//! Checks that the tests that `CONTRACT.md` names exist, and that it names every case of the suite.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a folder of this crate") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn all_sources() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    sources(&root.join("src"), &mut found);
    sources(&root.join("tests"), &mut found);
    found.iter().map(read).collect()
}

/// Returns the names in backticks within square brackets.
fn named_tests() -> BTreeSet<String> {
    let contract = read("CONTRACT.md");
    let claims = contract.split('[').skip(1).filter_map(|rest| rest.split_once(']')).map(|(claim, _)| claim);
    claims.flat_map(|claim| claim.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

#[test]
fn every_test_named_in_the_contract_exists() {
    let sources = all_sources();
    let missing: Vec<_> =
        named_tests().into_iter().filter(|name| !sources.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "the contract names tests that do not exist: {missing:?}");
}

#[test]
fn every_case_of_the_suite_is_named_in_the_contract() {
    let (suite, named) = (read("src/conformance/mod.rs"), named_tests());
    let lists = suite.split("cases! {").skip(1).filter_map(|rest| rest.split_once('}')).map(|(list, _)| list);
    let cases = lists.flat_map(|list| list.split(',')).filter_map(|case| case.split_once("::"));
    let cases: BTreeSet<_> = cases.map(|(_, case)| case.trim()).collect();
    assert!(cases.len() > 30, "{cases:?}");
    let unnamed: Vec<_> = cases.iter().filter(|case| !named.contains(**case)).collect();
    assert!(unnamed.is_empty(), "the contract does not say why these cases exist: {unnamed:?}");
}

/// A case that is not in the list would never run.
#[test]
fn every_case_is_on_the_list() {
    let list = read("src/conformance/mod.rs");
    for module in ["abort", "delivery", "fault", "ranks", "refusal"] {
        let source = read(format!("src/conformance/{module}.rs"));
        for case in source.split("pub async fn ").skip(1).filter_map(|rest| rest.split_once('(')) {
            assert!(list.contains(&format!("{module}::{},", case.0)), "{module}::{} runs nowhere", case.0);
        }
    }
}

/// Every sentence has a test, except in the two framing sections and in the advice at the end of the
/// contract.
#[test]
fn every_claim_names_a_test() {
    let contract = read("CONTRACT.md");
    let claims =
        contract.split("\n## ").skip(1).filter(|section| !section.starts_with("Common errors of callers"));
    for section in claims {
        let (title, body) = section.split_once('\n').expect("a title has a text");
        let named = body.lines().filter(|line| line.contains("[`")).count();
        assert!(named > 0, "{title} claims without a test");
    }
}

/// Imports go one way: wires import links, and links import the core, never back.
#[test]
fn the_core_imports_no_connector_and_links_import_no_wire() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let wires = ["cuda_ipc", "gpu", "loopback", "nccl", "rdma", "shm", "tcp"];
    let mut n_read = 0;
    for (folder, forbidden) in [
        ("", vec!["use crate::connectors".to_owned()]),
        ("landing", vec!["use crate::connectors".to_owned()]),
        ("connectors/link", wires.iter().map(|wire| format!("connectors::{wire}")).collect()),
    ] {
        for entry in std::fs::read_dir(src.join(folder)).expect("a folder of the crate").flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(entry.path()).expect("a source file");
                let found = forbidden.iter().find(|import| text.contains(*import));
                assert!(found.is_none(), "{} contains {found:?}", entry.path().display());
                n_read += 1;
            }
        }
    }
    assert!(n_read > 30, "{n_read} files");
}

#[test]
fn no_source_file_is_longer_than_600_lines() {
    let mut found = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    assert!(found.len() > 60, "{} files", found.len());
    let n_lines = |path: &PathBuf| read(path).lines().count();
    let long: Vec<_> = found.iter().map(|path| (path, n_lines(path))).filter(|(_, n)| *n > 600).collect();
    assert!(long.is_empty(), "{long:?}");
}

/// The toy wire of the tests is `connectors/toy.rs`, and the rest of the crate has only a few lines for it.
#[test]
fn a_new_wire_is_one_file_and_its_line_in_the_list() {
    let mut found = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    let elsewhere = found.iter().filter(|path| !path.ends_with("connectors/toy.rs"));
    let text: String = elsewhere.map(read).collect();
    let named = |line: &&str| line.split(|c: char| !c.is_alphanumeric()).any(|word| word == "toy");
    let lines: Vec<_> = text.lines().map(str::trim).filter(named).collect();
    assert_eq!(lines, ["mod toy;", "toy::WIRE,"]);
}
