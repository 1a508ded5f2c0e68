//! Selects the files of a repository that a router and a node read.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use serde::Deserialize;

use crate::error::HubError;

/// The small files that are downloaded if the repository has them.
const SMALL: [&str; 9] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    INDEX,
];
pub(crate) const CONFIG: &str = "config.json";
/// The name of the file that lists the shards, if the weights are in several files.
pub const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";

#[derive(Debug, Deserialize)]
struct Index {
    /// The file that contains each tensor, by the tensor's name.
    weight_map: std::collections::BTreeMap<String, String>,
}

/// Returns the small files that the repository `there` has.
pub(crate) fn small(there: &BTreeSet<String>) -> impl Iterator<Item = &str> {
    SMALL.into_iter().filter_map(|name| there.get(name)).map(String::as_str)
}

/// Returns the files with weights in the repository `there`: the single file, or the shards of the index.
/// `None` if it has no safetensors.
pub(crate) fn weights(snapshot: &Path, there: &BTreeSet<String>) -> Option<BTreeSet<String>> {
    match there.get(WEIGHTS) {
        Some(weights) => Some(BTreeSet::from([weights.clone()])),
        None if there.contains(INDEX) => shards(snapshot).filter(|shards| shards.is_subset(there)),
        None => None,
    }
}

/// Checks by the file names whether the repository may contain a model that Baton can read.
pub(crate) fn check_names(id: &str, there: &BTreeSet<String>) -> Result<(), HubError> {
    let id = id.to_owned();
    let has_safetensors = there.contains(INDEX) || there.contains(WEIGHTS);
    match () {
        () if !has_safetensors && there.iter().any(|name| name.ends_with(".gguf")) => {
            Err(HubError::Gguf { id })
        }
        () if !has_safetensors => Err(HubError::NoWeights { id }),
        () if !there.contains(CONFIG) => Err(HubError::NoConfig { id }),
        () => Ok(()),
    }
}

/// Returns the files that the index in a snapshot names; `None` if the index is invalid.
fn shards(snapshot: &Path) -> Option<BTreeSet<String>> {
    let index: Index = serde_json::from_slice(&fs::read(snapshot.join(INDEX)).ok()?).ok()?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let plain = |name: &String| !name.contains(['/', '\\']) && !name.starts_with('.');
    (!shards.is_empty() && shards.iter().all(plain)).then_some(shards)
}

/// Returns whether a snapshot has all files that a node needs, checked without the hub.
pub(crate) fn is_complete(snapshot: &Path) -> bool {
    let there = |name: &str| snapshot.join(name).exists();
    let has_shards = || shards(snapshot).is_some_and(|shards| shards.iter().all(|name| there(name)));
    there(CONFIG) && (there(WEIGHTS) || has_shards())
}

/// The beginning of the file that Git has in place of a large one.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// The number of bytes by which a file without a JSON object is recognized.
const BEGIN_BYTES: usize = 4096;

/// Returns the reason why a small file in a model's folder cannot be what it must be: it is a link to nowhere, as in a
/// snapshot without the rest of the hub's cache, a pointer of Git LFS, or has no JSON object. Weights are not looked at,
/// because a router needs none.
pub fn without_contents(folder: &Path) -> Option<String> {
    // An index next to the single file is not read.
    let is_unread = |name: &str| name == INDEX && folder.join(WEIGHTS).exists();
    let read = SMALL.into_iter().filter(|name| !is_unread(name));
    read.map(|name| folder.join(name)).find_map(|path| match File::open(&path) {
        Ok(file) => {
            let mut begin = Vec::new();
            file.take(BEGIN_BYTES as u64).read_to_end(&mut begin).ok()?;
            let shown = path.display();
            if begin.starts_with(LFS_POINTER) {
                return Some(format!("{shown} is a pointer of Git LFS: `git lfs pull` downloads the file"));
            }
            let found = found_for_object(&begin).filter(|_| path.extension().is_some_and(|it| it == "json"))?;
            Some(format!("{shown} has {found}, where a JSON object is expected"))
        }
        Err(error) => {
            let target = fs::read_link(&path).ok().filter(|_| error.kind() == ErrorKind::NotFound)?;
            Some(format!(
                "{} is a link to {}, which is not there: a snapshot of a hub's cache needs the cache's folder `blobs` too",
                path.display(),
                target.display()
            ))
        }
    })
}

/// Returns the content that a file with this beginning has in place of a JSON object; `None` if it has one.
fn found_for_object(begin: &[u8]) -> Option<String> {
    let found = match begin.trim_ascii_start() {
        [b'{', ..] => return None,
        [] if begin.len() == BEGIN_BYTES => return None,
        [] => "nothing",
        [b'[', ..] => "a list",
        [b'"', ..] => "a string",
        [b'-' | b'0'..=b'9', ..] => "a number",
        rest if [&b"true"[..], b"false", b"null"].iter().any(|word| rest.starts_with(word)) => "a word",
        rest => {
            return Some(format!("no JSON in UTF-8, but `{}…`", rest[..rest.len().min(8)].escape_ascii()));
        }
    };
    Some(found.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn with_index(index: &str) -> tempfile::TempDir {
        let snapshot = tempfile::tempdir().expect("a folder");
        fs::write(snapshot.path().join(INDEX), index).expect("written");
        snapshot
    }

    #[test]
    fn other_formats_are_left_alone() {
        let there = there(&[
            "README.md",
            "config.json",
            "model.safetensors",
            "model.gguf",
            "pytorch_model.bin",
            "tokenizer.json",
        ]);
        assert_eq!(small(&there).collect::<Vec<_>>(), ["config.json", "tokenizer.json"]);
        let nowhere = Path::new("/nowhere");
        assert_eq!(weights(nowhere, &there), Some(BTreeSet::from(["model.safetensors".to_owned()])));
        assert_eq!(weights(nowhere, &BTreeSet::from(["pytorch_model.bin".to_owned()])), None);
    }

    #[test]
    fn links_to_nowhere_and_pointers_of_git_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("blob"), "{}").expect("written");
        std::os::unix::fs::symlink("blob", path(CONFIG)).expect("linked");
        std::os::unix::fs::symlink("../away", path(WEIGHTS)).expect("linked");
        assert_eq!(without_contents(folder.path()), None, "a link that leads to a file, and weights");
        std::os::unix::fs::symlink("../blobs/4d7a", path("tokenizer.json")).expect("linked");
        let why = without_contents(folder.path()).expect("its target is absent");
        assert!(why.contains("tokenizer.json is a link to ../blobs/4d7a, which is not there"), "{why}");
        fs::write(path("generation_config.json"), "version https://git-lfs.github.com/spec/v1\nsize 9\n")
            .expect("written");
        let why = without_contents(folder.path()).expect("it is a pointer");
        assert!(why.contains("generation_config.json is a pointer of Git LFS: `git lfs pull`"), "{why}");
    }

    #[test]
    fn files_without_a_json_object_are_named_with_what_they_have() {
        let wrong = |name: &str, content: &[u8]| {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join(name), content).expect("written");
            without_contents(folder.path())
                .map(|why| why.replace(&format!("{}/", folder.path().display()), ""))
        };
        for name in [CONFIG, "generation_config.json", "tokenizer_config.json", INDEX] {
            for (content, found) in [
                (&b"[1, 2]"[..], "a list"),
                (b" 42", "a number"),
                (b"null", "a word"),
                (b"\"a\"", "a string"),
                (b"\n", "nothing"),
                (b"\xff\xfe{\0}\0", "no JSON in UTF-8, but `\\xff\\xfe{\\x00}\\x00…`"),
                (b"\xef\xbb\xbf{}", "no JSON in UTF-8, but `\\xef\\xbb\\xbf{}…`"),
            ] {
                let expected = format!("{name} has {found}, where a JSON object is expected");
                assert_eq!(wrong(name, content), Some(expected));
            }
            assert_eq!(wrong(name, b"\r\n {}"), None);
        }
        assert_eq!(wrong("chat_template.jinja", b"[1]"), None);
        let folder = with_index("42");
        fs::write(folder.path().join(WEIGHTS), "x").expect("written");
        assert_eq!(without_contents(folder.path()), None, "the index is not read");
    }

    #[test]
    fn shards_are_those_of_the_index() {
        let snapshot = with_index(
            r#"{"weight_map": {"a": "s-1.safetensors", "b": "s-2.safetensors", "c": "s-1.safetensors"}}"#,
        );
        let all = there(&[INDEX, "s-1.safetensors", "s-2.safetensors", "consolidated.safetensors"]);
        assert_eq!(weights(snapshot.path(), &all), Some(there(&["s-1.safetensors", "s-2.safetensors"])));
        assert_eq!(weights(snapshot.path(), &there(&[INDEX, "s-1.safetensors"])), None, "a shard is missing");
        let single = weights(snapshot.path(), &there(&[INDEX, WEIGHTS]));
        assert_eq!(single, Some(there(&[WEIGHTS])), "the index is of an older checkpoint");
        for bad in [r#"{"weight_map": {"a": "../../x"}}"#, r#"{"weight_map": {}}"#, "{"] {
            assert_eq!(weights(with_index(bad).path(), &all), None, "{bad}");
        }
    }

    #[test]
    fn a_snapshot_is_complete_when_a_node_can_start_from_it() {
        let snapshot = with_index(r#"{"weight_map": {"a": "s-1.safetensors"}}"#);
        assert!(!is_complete(snapshot.path()));
        for name in ["config.json", "s-1.safetensors"] {
            fs::write(snapshot.path().join(name), "x").expect("written");
        }
        assert!(is_complete(snapshot.path()));
    }
}
