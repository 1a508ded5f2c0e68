//! Finds circles of files: within a crate no file uses a file that uses it, directly or through others.
//!
//! `lib.rs`, `main.rs` and `mod.rs` do not count, because they name their children, and the children use
//! their declarations. Test modules do not count either.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{files, members, read, root};

/// The circles that may stay, with the reason. A circle with another file fails the test.
const MAY_STAY: &[(&str, &[&str], &str)] = &[
    (
        "baton",
        &["exit", "output"],
        "writing to the terminal fails with an exit code, and an exit code is written to the terminal",
    ),
    (
        "baton",
        &["bench_transfer::cards", "bench_transfer::contents", "bench_transfer::ends"],
        "one command in three files: its ends, their GPUs and their contents",
    ),
    (
        "bench",
        &["client::exchange", "client::reception"],
        "an exchange hands its assignment to the reception of its answer",
    ),
    ("device", &["memory", "regions"], "regions answer with the errors of the memory that has them"),
    (
        "kernels",
        &["cuda::ops::endings", "cuda::ops::few_rows", "cuda::ops::skinny"],
        "an ending is chosen by the form of the product before it",
    ),
    (
        "kv-transfer",
        &["connectors::nccl::pair_queue", "connectors::nccl::thread"],
        "a queue and the thread that empties it",
    ),
    ("router", &["continuation", "dispatch"], "a continuation dispatches the request again"),
    ("types", &["block", "node", "prompt", "step", "transfer"], "values of the protocol name each other"),
];

/// A file's path within its crate's `src`, as a module: `backend::cuda::rank`.
type Module = Vec<String>;

#[test]
fn files_of_a_crate_use_each_other_in_one_direction() {
    let mut wrong = Vec::new();
    for member in members().into_iter().filter(|member| member != "tests") {
        let source = root().join(&member).join("src");
        for circle in circles(&uses(&source)) {
            let may_stay = MAY_STAY.iter().any(|(name, files, reason)| {
                assert!(!reason.is_empty(), "{files:?} may stay without a reason");
                *name == member && circle.iter().all(|file| files.contains(&file.as_str()))
            });
            if !may_stay {
                wrong.push(format!("{member}: {}", circle.iter().cloned().collect::<Vec<_>>().join(", ")));
            }
        }
    }
    assert!(wrong.is_empty(), "files that use each other:\n{}", wrong.join("\n"));
}

#[test]
fn circles_are_found_through_other_files_and_through_parents() {
    let texts = [
        ("a", "use super::inner::{self, b::{B, C}};"),
        ("inner", "pub mod b;"),
        ("inner::b", "use crate::c::Thing; // use crate::d::Thing;"),
        ("c", "fn f(a: &crate::a::A) {}"),
        ("d", "use crate::a::A;"),
    ];
    let modules: BTreeSet<Module> = texts.iter().map(|(name, _)| module(name)).collect();
    let uses = texts
        .iter()
        .filter(|(name, _)| *name != "inner")
        .map(|(name, text)| (module(name), used(&module(name), text, &modules)))
        .collect();
    let expected: BTreeSet<String> = ["a", "c", "inner::b"].map(str::to_owned).into();
    assert_eq!(circles(&uses), [expected]);
}

fn module(name: &str) -> Module {
    name.split("::").map(str::to_owned).collect()
}

/// Returns, for each file below `source`, the files that it names.
fn uses(source: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut texts = BTreeMap::new();
    let mut modules = BTreeSet::new();
    for file in files(&[".rs"]).into_iter().filter(|file| file.starts_with(source)) {
        let relative = file.strip_prefix(source).expect("it lies below").with_extension("");
        let mut name: Module = relative.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if name.iter().any(|part| part == "tests") {
            continue;
        }
        let own = ["mod", "lib", "main"].iter().any(|own| name.last().is_some_and(|last| last == own));
        if own {
            name.pop();
        }
        modules.insert(name.clone());
        if !own {
            texts.insert(name, read(&file));
        }
    }
    texts.iter().map(|(name, text)| (name.clone(), used(name, text, &modules))).collect()
}

/// Returns the modules that a text names by paths that begin with `crate`, `super` or `self`.
fn used(name: &Module, text: &str, modules: &BTreeSet<Module>) -> BTreeSet<Module> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let text: String = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let mut found = BTreeSet::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in text.match_indices(start) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(|before| before.is_alphanumeric() || before == '_' || before == ':') {
                continue;
            }
            let mut paths = Vec::new();
            read_paths(&text[at..], &mut Vec::new(), &mut paths);
            found.extend(paths.iter().filter_map(|path| resolve(name, path, modules)));
        }
    }
    found.remove(name);
    found
}

/// Reads a path or a tree of paths, as in `use`. Returns the rest of the text.
fn read_paths<'a>(mut text: &'a str, prefix: &mut Vec<String>, paths: &mut Vec<Vec<String>>) -> &'a str {
    let n_prefix = prefix.len();
    loop {
        text = text.trim_start();
        if let Some(inner) = text.strip_prefix('{') {
            text = inner;
            loop {
                text = read_paths(text, prefix, paths).trim_start();
                match text.strip_prefix(',') {
                    Some(rest) => text = rest,
                    None => break,
                }
            }
            text = text.strip_prefix('}').unwrap_or(text);
            break;
        }
        let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
        prefix.push(text[..end].to_owned());
        text = &text[end..];
        match text.strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                paths.push(prefix.clone());
                // The path is followed by an `as` name, which is skipped.
                if let Some(rest) = text.strip_prefix(" as ") {
                    text = rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
                }
                break;
            }
        }
    }
    prefix.truncate(n_prefix);
    text
}

/// Resolves a path to its file: the deepest module that it names.
fn resolve(from: &Module, path: &[String], modules: &BTreeSet<Module>) -> Option<Module> {
    let n_supers = path.iter().take_while(|part| *part == "super").count();
    let (mut at, rest) = match path.first()?.as_str() {
        "crate" => (Module::new(), &path[1..]),
        "self" => (from.clone(), &path[1..]),
        _ => (from[..from.len().checked_sub(n_supers)?].to_vec(), &path[n_supers..]),
    };
    for part in rest {
        let next: Module = at.iter().chain([part]).cloned().collect();
        if !modules.contains(&next) {
            break;
        }
        at = next;
    }
    Some(at)
}

/// Returns the groups of files that reach each other.
fn circles(uses: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<BTreeSet<String>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        uses.keys().map(|file| (file, reached_from(file, uses))).collect();
    let mut circles: Vec<BTreeSet<String>> = Vec::new();
    for (file, others) in &reached {
        let circle: BTreeSet<String> = others
            .iter()
            .filter(|other| reached.get(**other).is_some_and(|back| back.contains(*file)))
            .map(|other| other.join("::"))
            .collect();
        if circle.len() > 1 && !circles.contains(&circle) {
            circles.push(circle);
        }
    }
    circles
}

fn reached_from<'a>(file: &'a Module, uses: &'a BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut next = vec![file];
    while let Some(file) = next.pop() {
        for used in uses.get(file).into_iter().flatten() {
            if uses.contains_key(used) && reached.insert(used) {
                next.push(used);
            }
        }
    }
    reached
}
