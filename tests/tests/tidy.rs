//! Checks the rules of the tree that no compiler checks: dependencies between crates, documents that name
//! existing things, and habits of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/parameters.rs"]
mod parameters;
#[path = "tidy/sizes.rs"]
mod sizes;
#[path = "tidy/words.rs"]
mod words;

/// The crates of this tree that each crate may depend on. A new arrow is a design decision:
/// `docs/decisions/`.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("grammar", &["types"]),
    ("device", &[]),
    ("kernels", &["device"]),
    ("chassis", &["types"]),
    ("proto", &["types"]),
    ("registry", &["types", "proto", "chassis"]),
    ("kv-cache", &["types", "device"]),
    ("kv-transfer", &["types", "kv-cache", "device", "chassis"]),
    ("engine", &["types", "kv-cache", "device", "kernels", "chassis", "grammar"]),
    ("scheduler", &["types", "kv-cache", "engine", "chassis", "grammar"]),
    (
        "node",
        &[
            "types",
            "proto",
            "registry",
            "chassis",
            "kv-cache",
            "kv-transfer",
            "engine",
            "scheduler",
            "device",
            "grammar",
        ],
    ),
    (
        "prefill-node",
        &["node", "types", "proto", "chassis", "kv-cache", "kv-transfer", "engine", "scheduler"],
    ),
    (
        "decode-node",
        &["node", "types", "proto", "chassis", "kv-cache", "kv-transfer", "engine", "scheduler", "grammar"],
    ),
    ("pool-node", &["node", "types", "proto", "registry", "chassis", "device", "kv-cache", "kv-transfer"]),
    ("router", &["types", "proto", "registry", "chassis", "grammar"]),
    ("bench", &["chassis"]),
    ("models", &[]),
];

/// Crates in which `unsafe` may stand, each block with its reason.
const MAY_BE_UNSAFE: &[&str] = &["device", "kernels"];

/// The largest number of folders in the root.
const FOLDERS_MAX: usize = 22;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn members() -> Vec<String> {
    let manifest: toml::Table = read("Cargo.toml").parse().expect("TOML");
    let members = manifest["workspace"]["members"].as_array().expect("a list");
    members.iter().map(|member| member.as_str().expect("a name").to_owned()).collect()
}

/// Returns all files of the tree with one of these endings.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let skipped = name == "target" || (name.starts_with('.') && name != ".ci");
            if path.is_dir() && !skipped {
                folders.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn crates_depend_only_on_what_the_table_allows() {
    let members = members();
    let table: BTreeMap<&str, &[&str]> = MAY_DEPEND_ON.iter().copied().collect();
    for member in &members {
        if ["baton", "tests"].contains(&member.as_str()) {
            continue;
        }
        let allowed = table.get(member.as_str()).unwrap_or_else(|| panic!("{member} is not in the table"));
        let manifest: toml::Table = read(format!("{member}/Cargo.toml")).parse().expect("TOML");
        let Some(dependencies) = manifest.get("dependencies").and_then(toml::Value::as_table) else {
            continue;
        };
        for dependency in dependencies.keys().filter(|name| members.contains(name)) {
            assert!(allowed.contains(&dependency.as_str()), "{member} may not depend on {dependency}");
        }
    }
}

/// Modules that only tests use. `engine/src/conformance` is not among them: `baton bench engine --check` runs
/// it on a GPU.
const ONLY_FOR_TESTS: &[(&str, &str)] = &[
    ("chassis/src/net/mod.rs", "mod memory;"),
    ("engine/src/backend/mod.rs", "pub mod flaky;"),
    ("kv-transfer/src/connectors/mod.rs", "pub mod flaky;"),
    ("kv-transfer/src/lib.rs", "pub mod conformance;"),
    ("registry/src/lib.rs", "pub mod conformance;"),
    ("registry/src/lib.rs", "pub mod flaky;"),
];

#[test]
fn doubles_and_conformance_suites_are_not_in_the_executable() {
    let mut declared = BTreeSet::new();
    for file in files(&[".rs"]) {
        let path = file.strip_prefix(root()).expect("in the tree").to_string_lossy().into_owned();
        let text = read(&file);
        let lines: Vec<&str> = text.lines().collect();
        for pair in lines.windows(2) {
            let is_double = ["pub mod flaky;", "pub mod conformance;"].contains(&pair[1])
                || ONLY_FOR_TESTS.contains(&(path.as_str(), pair[1]));
            if !is_double || path == "engine/src/lib.rs" {
                continue;
            }
            assert_eq!(pair[0], r#"#[cfg(any(test, feature = "test-support"))]"#, "{path}: {}", pair[1]);
            declared.insert((path.clone(), pair[1].to_owned()));
        }
    }
    let expected = ONLY_FOR_TESTS.iter().map(|(path, line)| ((*path).to_owned(), (*line).to_owned()));
    assert_eq!(declared, expected.collect(), "left: found, right: ONLY_FOR_TESTS");
    for member in members().iter().filter(|member| *member != "tests") {
        let manifest: toml::Table = read(format!("{member}/Cargo.toml")).parse().expect("TOML");
        for (name, dependency) in manifest["dependencies"].as_table().into_iter().flatten() {
            let features = dependency.get("features").and_then(toml::Value::as_array);
            let is_on = features.is_some_and(|features| {
                features.iter().any(|feature| feature.as_str() == Some("test-support"))
            });
            assert!(!is_on, "{member}: {name} has test-support in [dependencies]");
        }
    }
}

#[test]
fn all_versions_stand_in_the_workspace_manifest() {
    for member in members() {
        let manifest: toml::Table = read(format!("{member}/Cargo.toml")).parse().expect("TOML");
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(dependencies) = manifest.get(section).and_then(toml::Value::as_table) else { continue };
            for (name, dependency) in dependencies {
                let inherited = dependency.get("workspace").and_then(toml::Value::as_bool);
                assert_eq!(inherited, Some(true), "{member}: {name} must have `workspace = true`");
            }
        }
    }
}

#[test]
fn a_crate_says_in_one_sentence_what_it_is() {
    for member in members() {
        let lib = root().join(&member).join("src/lib.rs");
        let file = if lib.exists() { lib } else { root().join(&member).join("src/main.rs") };
        let text = read(&file);
        let first = text.lines().next().unwrap_or_default();
        assert!(first.starts_with("//! ") && first.len() > 20, "{member}: the first line is {first:?}");
        let forbids = text.contains("#![forbid(unsafe_code)]");
        assert_eq!(forbids, !MAY_BE_UNSAFE.contains(&member.as_str()), "{member}: #![forbid(unsafe_code)]");
    }
}

#[test]
fn every_source_file_begins_with_what_it_is() {
    let is_test = |file: &Path| {
        file.to_string_lossy().ends_with("tests.rs")
            || file.components().any(|part| part.as_os_str() == "tests")
    };
    let sources = files(&[".rs"]).into_iter().filter(|file| !is_test(file));
    for file in sources {
        let text = read(&file);
        assert!(text.starts_with("//!"), "{}", file.display());
    }
}

#[test]
fn no_room_is_called_utils() {
    for file in files(&[".rs"]) {
        let name = file.file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(
            !["utils", "util", "common", "helpers", "misc"].contains(&name.as_str()),
            "{}",
            file.display()
        );
    }
}

#[test]
fn protobuf_json_and_etcd_each_have_one_home() {
    let homes: &[(&str, &[&str])] = &[
        ("etcd::client", &["registry/src/etcd", "registry/tests", "tests/tests"]),
        (
            "StatusCode",
            &[
                "router/src/http",
                "chassis/src",
                "node/src/switch.rs",
                "bench/",
                "models/",
                "baton/src/chat.rs",
                "baton/src/switch.rs",
                "tests/",
            ],
        ),
        (
            "prost::",
            &[
                "chassis/src/metrics/protobuf.rs",
                "proto/",
                "registry/src/etcd",
                "registry/src/members_file.rs",
                "registry/tests",
                "tests/fuzz/",
                "tests/tests/otlp.rs",
                "tests/tests/corpus.rs",
                "tests/tests/strangers.rs",
            ],
        ),
    ];
    for file in files(&[".rs"]) {
        let path = file.strip_prefix(root()).expect("in the tree").to_string_lossy().into_owned();
        let text = read(&file);
        for (word, rooms) in homes {
            let at_home = rooms.iter().any(|room| path.starts_with(room));
            assert!(
                at_home || !text.contains(word) || path == "tests/tests/tidy.rs",
                "{path} speaks of {word}"
            );
        }
    }
}

#[test]
fn the_engine_sees_no_request_and_no_socket() {
    for file in files(&[".rs"]) {
        let path = file.strip_prefix(root()).expect("in the tree").to_string_lossy().into_owned();
        if path.starts_with("engine/src") {
            for word in ["RequestId", "tokio::net", "chassis::net"] {
                assert!(!read(&file).contains(word), "{path} speaks of {word}");
            }
        }
    }
}

/// Computes FNV-1a: enough to notice a change, and the same on every machine.
fn hash(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[test]
fn the_protocol_page_knows_the_protocol() {
    let ours = |file: &PathBuf| file.starts_with(root().join("proto"));
    let protos: String = files(&[".proto"]).into_iter().filter(ours).map(read).collect();
    let expected = format!("protos: {}", hash(&protos));
    let page = read("docs/protocol.md");
    assert!(
        page.contains(&expected),
        "read docs/protocol.md again beside proto/, then put `{expected}` into it"
    );
}

/// Returns the texts between backticks that look like a path of this tree.
fn paths_in(page: &str) -> BTreeSet<String> {
    let looks_like_a_path = |word: &&str| {
        word.contains('/') && word.ends_with(".rs") && !word.contains([' ', '*', '{', '<', '…'])
    };
    page.split('`').filter(looks_like_a_path).map(str::to_owned).collect()
}

#[test]
fn documents_name_files_that_exist() {
    let mut n_paths = 0;
    for page in files(&[".md"]) {
        for path in paths_in(&read(&page)) {
            n_paths += 1;
            let beside = page.parent().expect("a folder").join(&path);
            assert!(root().join(&path).exists() || beside.exists(), "{} speaks of {path}", page.display());
        }
    }
    assert!(n_paths > 30, "the walk alone names more than {n_paths} files");
}

#[test]
fn the_readme_describes_every_folder() {
    let page = read("README.md");
    let (_, list) = page.split_once("\nThe folders:\n").expect("README.md lists the folders");
    let lines = list.lines().filter_map(|line| line.strip_prefix("- `")?.split_once("/`: "));
    let described: BTreeSet<String> = lines.map(|(name, _)| name.to_owned()).collect();
    let ignored = read(".gitignore");
    let is_ignored =
        |name: &str| name.starts_with('.') || ignored.lines().any(|line| line.trim_matches('/') == name);
    let entries =
        std::fs::read_dir(root()).expect("the tree").flatten().filter(|entry| entry.path().is_dir());
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let folders: BTreeSet<String> = names.filter(|name| !is_ignored(name)).collect();
    assert_eq!(folders, described, "README.md, `The folders`, left: in the tree, right: described");
    assert!(folders.len() <= FOLDERS_MAX, "{} folders in the root, at most {FOLDERS_MAX}", folders.len());
}

#[test]
fn documents_link_to_pages_that_exist() {
    for page in files(&[".md"]) {
        let text = read(&page);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let target = page.parent().expect("a folder").join(target);
            assert!(target.exists(), "{} links to {link}", page.display());
        }
    }
}

#[test]
fn every_decision_has_a_number_of_its_own() {
    let pages = std::fs::read_dir(root().join("docs/decisions")).expect("decisions").flatten();
    let name = |page: std::fs::DirEntry| page.file_name().into_string().expect("UTF-8");
    let mut numbers: Vec<String> = pages.map(name).map(|name| name.chars().take(4).collect()).collect();
    numbers.sort_unstable();
    let expected: Vec<String> = (1..=numbers.len()).map(|number| format!("{number:04}")).collect();
    assert_eq!(numbers, expected);
}

/// Returns the functions of a text, and the tests that a macro makes: `name => What,`.
fn named_in(text: &str) -> Vec<String> {
    let functions = text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next());
    let made = text.lines().filter_map(|line| line.trim().strip_suffix(',')?.split_once(" => "));
    functions.chain(made.map(|(name, _)| name)).map(str::to_owned).collect()
}

/// The pages whose tables name tests as proofs, in the last column.
const PAGES_WITH_PROOFS: &[&str] = &["docs/specification.md", "docs/failures.md", "docs/security.md"];

/// Returns the tests that a page's tables name: words between backticks in the last column, such as `a_test`.
fn proofs_in(page: &str) -> Vec<&str> {
    let is_test = |word: &&str| {
        word.contains('_') && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let columns =
        page.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|')?.rsplit('|').next());
    columns.flat_map(|column| column.split('`').skip(1).step_by(2)).filter(is_test).collect()
}

#[test]
fn every_test_named_as_a_proof_exists() {
    let tests: BTreeSet<String> = files(&[".rs"]).iter().flat_map(|file| named_in(&read(file))).collect();
    for page in PAGES_WITH_PROOFS {
        let text = read(page);
        let proofs = proofs_in(&text);
        assert!(proofs.len() > 10, "{page}: {proofs:?}");
        for proof in proofs {
            assert!(tests.contains(proof), "{page} names {proof}");
        }
    }
}

#[test]
fn proofs_are_found_in_the_last_column() {
    assert_eq!(proofs_in("| `not_this` | `a_test`, `a/path_of.rs`, `b_2` |\n`nor_this`"), ["a_test", "b_2"]);
}

/// Returns the reason why `./test.sh` does not run the test that begins at `line` of a file, if it does not.
fn kept_from_running(lines: &[&str], line: usize, script: &str) -> Option<String> {
    let is_attribute = |text: &&&str| text.trim_start().starts_with(['#', '/']);
    let above = lines[..line].iter().rev().take_while(is_attribute);
    let whole_file = lines.iter().filter(|text| text.starts_with("#![cfg(feature"));
    for attribute in above.chain(whole_file) {
        let argument = attribute.split('"').nth(1).unwrap_or_default();
        let text = attribute.trim_start();
        if text.starts_with("#[ignore") {
            // The reason names the script that runs the test: `#[ignore = "wants DEVICES: PATH runs it"]`.
            let runner = argument.split(' ').find(|word| word.ends_with(".sh"));
            if !runner.is_some_and(|runner| script.contains(runner)) {
                return Some(format!("{text}, and test.sh calls nothing that runs it"));
            }
        } else if text.contains("cfg(feature") && !script.contains(&format!("baton-tests/{argument}")) {
            return Some(format!("{text}, and test.sh does not enable it"));
        }
    }
    None
}

#[test]
fn every_test_named_as_a_proof_is_run() {
    let script = read("test.sh");
    // The text between `run_test()` and `run_long()` runs tests by default. The rest is cut off: lints enable
    // features too, and CI does not run `long`.
    let (_, tests) = script.split_once("run_test()").expect("it tests");
    let (script, _) = tests.split_once("run_long()").expect("`long` follows");
    let mut kept: BTreeMap<String, Option<String>> = BTreeMap::new();
    for text in files(&[".rs"]).iter().map(read) {
        let lines: Vec<&str> = text.lines().collect();
        for (nth, line) in lines.iter().enumerate() {
            for name in named_in(line) {
                let reason = kept_from_running(&lines, nth, script);
                // A name counts as run if one of its definitions is run.
                kept.entry(name)
                    .and_modify(|known| *known = known.take().and(reason.clone()))
                    .or_insert(reason);
            }
        }
    }
    for page in PAGES_WITH_PROOFS {
        for proof in proofs_in(&read(page)) {
            if let Some(Some(reason)) = kept.get(proof) {
                panic!("{page} names {proof}, which is not run: {reason}");
            }
        }
    }
}

#[test]
fn a_test_that_is_not_run_is_noticed() {
    let ignored = ["#[test]", "#[ignore = \"slow\"]", "fn proof() {}"];
    assert!(kept_from_running(&ignored, 2, "cargo test").is_some());
    let by_script = ["#[test]", "#[ignore = \"wants cards: tests/vm/run.sh runs it\"]", "fn proof() {}"];
    assert!(kept_from_running(&by_script, 2, "tests/vm/run.sh").is_none());
    let behind_a_feature = ["#![cfg(feature = \"mutations\")]", "", "#[test]", "fn proof() {}"];
    assert!(kept_from_running(&behind_a_feature, 3, "cargo nextest run --workspace").is_some());
    assert!(kept_from_running(&behind_a_feature, 3, "--features baton-tests/mutations").is_none());
    assert!(kept_from_running(&["#[test]", "fn proof() {}"], 1, "").is_none());
}

#[test]
fn every_failure_has_a_line() {
    let page = read("docs/failures.md");
    let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("| F")).collect();
    for (nth, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("| F{} |", nth + 1)), "{line}");
        assert!(!proofs_in(line).is_empty() || line.contains("waits for"), "{line}");
    }
    assert_eq!(lines.len(), 57);
}
