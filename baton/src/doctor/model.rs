//! Checks whether the model exists at its configured path, and whether its KV fits into memory.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use engine::load::gguf;
use engine::{AutoRoom, KvRoom};
use node::kv_memory::available_bytes;

use crate::config_file::ConfigFile;
use crate::model::{Place, not_a_model};

use super::finding::{Finding, Level};

const GROUP: &str = "model";
const TOKENIZER: &str = "tokenizer.json";

pub(super) fn look(process: &ConfigFile) -> Vec<Finding> {
    match process {
        // A router reads the tokenizer and the chat template.
        ConfigFile::Router(config) => {
            let path = config.model.iter().filter_map(|model| model.path.to_str());
            path.map(|path| model(path, described)).collect()
        }
        ConfigFile::Node(config) => {
            vec![model(&config.engine.model, with_weights), kv_room(config.engine.kv)]
        }
        // A pool node reads no model, so only its memory is checked. Other nodes announce the model whose KV
        // it keeps.
        ConfigFile::Pool(config) => {
            config.memory.bytes().map(|bytes| kv_memory("pool.memory", bytes)).into_iter().collect()
        }
    }
}

/// Checks the model that `model.path` names; `folder` checks a model's folder.
fn model(name: &str, folder: fn(&Path) -> Finding) -> Finding {
    match name.split_once(':') {
        Some(("mock", file)) if file.ends_with(".toml") => mock_file(file),
        _ if name == "mock" || name.starts_with("mock:") => Finding::ok(GROUP, format!("{name}: built in")),
        _ => placed(name, folder),
    }
}

fn placed(name: &str, folder: fn(&Path) -> Finding) -> Finding {
    match Place::of(name) {
        Ok(Place::Bundled) => Finding::ok(GROUP, format!("{name}: bundled in this executable")),
        Ok(Place::Hub(id)) => {
            Finding::ok(GROUP, format!("{id}: downloaded from the hub when the process starts"))
        }
        Ok(Place::Here) | Err(_) => folder(Path::new(name)),
    }
}

fn mock_file(file: &str) -> Finding {
    match std::fs::read_to_string(file) {
        Ok(_) => Finding::ok(GROUP, format!("mock with the costs in {file}")),
        Err(error) => {
            Finding::bad(GROUP, format!("{file}: {error}"), "put the file there, or set model.path to `mock`")
        }
    }
}

/// Checks the files that a node reads from a model's folder.
fn with_weights(folder: &Path) -> Finding {
    let found = described(folder);
    let is_gguf = matches!(gguf::find(folder), Ok(Some(_)));
    if found.level == Level::Bad || is_gguf || has_weights(folder) {
        return found;
    }
    let found = format!("{}: no .safetensors file that can be read", folder.display());
    Finding::bad(GROUP, found, "download the weights as safetensors, and let the process read them")
}

/// Checks the files that routers and nodes read from a model's folder, in the format of Hugging Face, or of a
/// GGUF file.
fn described(folder: &Path) -> Finding {
    let shown = folder.display();
    match gguf::find(folder).map(|file| file.map(|file| (gguf::files(&file), file))) {
        Ok(None) => {}
        Ok(Some((Ok(_), file))) => {
            return Finding::ok(GROUP, format!("{}: a GGUF file of a supported model", file.display()));
        }
        Ok(Some((Err(error), _))) | Err(error) => {
            return Finding::bad(
                GROUP,
                types::in_full(&error),
                "use another file, or the model's safetensors",
            );
        }
    }
    if let Some(found) = not_a_model(folder) {
        let advice = "set model.path to a folder with config.json and safetensors, or mount its volume";
        return Finding::bad(GROUP, found, advice);
    }
    match File::open(folder.join(TOKENIZER)) {
        Ok(_) => Finding::ok(GROUP, format!("{shown}: configuration and tokenizer found")),
        Err(error) if error.kind() == ErrorKind::NotFound => Finding::warn(
            GROUP,
            format!("{shown}: {TOKENIZER} missing: requests must bring token ids"),
            "download the whole model again; a download may have been interrupted",
        ),
        Err(error) => Finding::bad(
            GROUP,
            format!("{shown}/{TOKENIZER}: {error}"),
            "give the process the right to read the model's files",
        ),
    }
}

fn has_weights(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .any(|path| File::open(path).is_ok())
}

fn kv_room(room: KvRoom) -> Finding {
    match room {
        KvRoom::Bytes(bytes) | KvRoom::OnHost(bytes) => kv_memory("model.kv_memory", bytes as u64),
        KvRoom::Auto(AutoRoom { host_bytes, gpu_percent }) => Finding::ok(
            GROUP,
            format!(
                "model.kv_memory is auto: {gpu_percent} % of a GPU's memory with the weights, or {} MiB at most on a CPU",
                host_bytes >> 20
            ),
        ),
    }
}

fn kv_memory(setting: &str, wanted: u64) -> Finding {
    match available_bytes() {
        Some(available) if available < wanted => Finding::bad(
            GROUP,
            format!("{setting} is {} MiB, {} MiB are available", wanted >> 20, available >> 20),
            format!("set {setting} lower, or give the machine or container more memory"),
        ),
        Some(available) => Finding::ok(
            GROUP,
            format!("{setting} is {} MiB of {} MiB available", wanted >> 20, available >> 20),
        ),
        None => Finding::note(
            GROUP,
            "/proc/meminfo does not say how much memory is available",
            "check the memory of this machine yourself",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_must_hold_a_whole_model() {
        let model = |name: &str| model(name, with_weights);
        for elsewhere in ["mock:slow", "demo", "org/name"] {
            assert_eq!(model(elsewhere).level, Level::Ok, "{elsewhere}");
        }
        assert!(model("no-such-model").found.contains("No such file"));
        assert!(model("/nowhere/at/all").found.contains("No such file"));
        let here = tempfile::tempdir().expect("a folder");
        let name = here.path().display().to_string();
        let put = |file: &str| std::fs::write(here.path().join(file), "{}").expect("written");
        assert!(
            model(&name).found.contains("has no config.json and no GGUF file: it is not a model's folder")
        );
        put("weights.gguf");
        for place in [&name, &format!("{name}/weights.gguf")] {
            let found = model(place).found;
            assert!(found.contains("weights.gguf: the file ends at byte 2, within this"), "{found}");
        }
        std::fs::remove_file(here.path().join("weights.gguf")).expect("removed");
        put("config.json");
        assert!(model(&name).found.contains("no .safetensors file"));
        put("model.safetensors");
        // Requests may bring token ids.
        let without_tokenizer = model(&name);
        assert_eq!(without_tokenizer.level, Level::Warn);
        assert!(without_tokenizer.found.contains("tokenizer.json missing"));
        put("tokenizer.json");
        assert_eq!(model(&name).level, Level::Ok);
        std::fs::remove_file(here.path().join("model.safetensors")).expect("removed");
        assert_eq!(super::model(&name, described).level, Level::Ok, "a router reads no weights");
    }
}
