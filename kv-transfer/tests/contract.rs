//! `CONTRACT.md` names tests. They exist, and every case of the suite is named.

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

/// What stands between backticks within square brackets.
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

/// A case that is written but not on the list would run nowhere.
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

/// Every sentence outside of the two framing sections, and of the advice at the end, has its test.
#[test]
fn every_claim_names_a_test() {
    let contract = read("CONTRACT.md");
    let claims =
        contract.split("\n## ").skip(1).filter(|section| !section.starts_with("What a caller gets wrong"));
    for section in claims {
        let (title, body) = section.split_once('\n').expect("a title has a text");
        let named = body.lines().filter(|line| line.contains("[`")).count();
        assert!(named > 0, "{title} claims without a test");
    }
}
