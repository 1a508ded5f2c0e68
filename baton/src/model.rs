//! The values of `--model` and `model.path`: a mock, the bundled demonstration model, a folder, a GGUF file, or a model on a hub.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use chassis::Shutdown;
use engine::load::gguf;
use models::unpack::{self, Contents};
use models::{Hub, HubError, HubSettings, ModelId, bundled};

use crate::exit::CommandError;

const DEMO: &str = "demo";

/// The path and name of a model, as a router and a node need them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelLocation {
    /// The path of the model's folder, or a mock.
    pub(crate) path: String,
    /// The name for requests. Empty: the model's own name.
    pub(crate) name: String,
}

/// Finds the model at `path`, and downloads a model on a hub. A configured name is kept.
///
/// If the process is stopped meanwhile, the error reports it; downloaded data is kept.
pub(crate) async fn locate(
    path: &str,
    name: &str,
    shutdown: &Shutdown,
) -> Result<ModelLocation, CommandError> {
    tokio::select! {
        located = found(path, name) => located,
        () = shutdown.wait() => Err(CommandError::drain(
            "stopped before the model was downloaded: the next start continues the download",
        )),
    }
}

async fn found(path: &str, name: &str) -> Result<ModelLocation, CommandError> {
    let (path, own_name) = match Place::of(path)? {
        Place::Here => match from_gguf(Path::new(path))? {
            Some(folder) => (text(&folder)?, gguf_name(Path::new(path))),
            None => {
                check_folder(path)?;
                (path.to_owned(), String::new())
            }
        },
        Place::Bundled => {
            let folder = bundled::unpacked(&unpack::cache_folders()).map_err(CommandError::start)?;
            (text(&folder)?, DEMO.to_owned())
        }
        Place::Hub(id) => {
            let refused = |source| NotFetched { path: path.to_owned(), source: Box::new(source) };
            let folder = fetch(&id).await.map_err(|source| CommandError::start(refused(source)))?;
            (text(&folder)?, id.repository())
        }
    };
    Ok(ModelLocation { path, name: if name.is_empty() { own_name } else { name.to_owned() } })
}

/// Makes a model's folder of a GGUF file, or of a folder with one; `None` if it is neither.
pub(crate) fn from_gguf(path: &Path) -> Result<Option<PathBuf>, CommandError> {
    let Some(file) = gguf::find(path).map_err(CommandError::start)? else { return Ok(None) };
    let file = file.canonicalize().map_err(CommandError::start)?;
    let files = gguf::files(&file).map_err(CommandError::start)?;
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    let contents = Contents { name: "gguf", files: &files, link: Some((gguf::LINK, &file)) };
    contents.unpacked(&unpack::cache_folders()).map(Some).map_err(CommandError::start)
}

/// Returns the name of the model of a GGUF file: the file's or the folder's name, without the ending.
fn gguf_name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
}

fn check_folder(path: &str) -> Result<(), CommandError> {
    let refused = |why| Err(CommandError::start(why));
    if names_a_backend(path) { Ok(()) } else { not_a_model(Path::new(path)).map_or(Ok(()), refused) }
}

/// Returns the reason why no model's folder is at the path. GGUF files are looked for before.
pub fn not_a_model(path: &Path) -> Option<String> {
    let shown = path.display();
    match path.metadata() {
        Err(error) => return Some(format!("no model at {shown}: {error}")),
        Ok(found) if !found.is_dir() => {
            let why = "a model is a folder with config.json and safetensors, or a GGUF file";
            return Some(format!("{shown} is a file: {why}"));
        }
        Ok(_) => {}
    }
    if let Some(why) = models::needed::without_contents(path) {
        return Some(why);
    }
    match File::open(path.join("config.json")) {
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Some(format!("{shown} has no config.json and no GGUF file: it is not a model's folder"))
        }
        Err(error) => Some(format!("{shown}/config.json: {error}")),
    }
}

/// The error of a model that could not be downloaded. It also tells a user who meant a folder that there is
/// none.
#[derive(Debug, thiserror::Error)]
#[error("{path:?} is not a folder, and was not downloaded from the hub")]
struct NotFetched {
    path: String,
    source: Box<HubError>,
}

async fn fetch(id: &ModelId) -> Result<PathBuf, HubError> {
    Hub::new(HubSettings::from_env(|name| std::env::var_os(name)))?.judged_by(judge).fetch(id).await
}

/// Checks whether a node can compute the model of this `config.json`.
fn judge(path: &Path, config: &[u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    engine::load::check_config(path, config).map_err(Into::into)
}

/// Where a model is found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The path is a folder, a mock, or invalid: the router and the node check it.
    Here,
    Bundled,
    Hub(ModelId),
}

impl Place {
    /// Decides where the model at `path` is found. A folder has precedence over a hub, and `demo` over a
    /// folder: a folder with that name is `./demo`.
    pub(crate) fn of(path: &str) -> Result<Self, CommandError> {
        if names_a_backend(path) || looks_like_a_path(path) || Path::new(path).is_dir() && path != DEMO {
            return Ok(Self::Here);
        }
        if path == DEMO {
            return Ok(Self::Bundled);
        }
        if Path::new(path).is_file() {
            return Ok(Self::Here);
        }
        ModelId::parse(path).map(Self::Hub).ok_or_else(|| {
            CommandError::usage(format!(
                "no model {path:?}: a model is `demo`, `mock`, a folder, a GGUF file, or one on a hub, `org/name` or `org/name@revision`"
            ))
        })
    }
}

/// Returns whether the text is empty, or names the mock or a backend with its model instead of a file: `mock:NAME`,
/// `cpu:FOLDER`.
fn names_a_backend(path: &str) -> bool {
    path.is_empty() || path == "mock" || path.contains(':')
}

/// Returns whether the text is a path and not the name of a model on a hub.
fn looks_like_a_path(path: &str) -> bool {
    ["/", "./", "../", "~"].iter().any(|start| path.starts_with(start)) || [".", ".."].contains(&path)
}

fn text(folder: &Path) -> Result<String, CommandError> {
    let text = folder.to_str().map(str::to_owned);
    text.ok_or_else(|| CommandError::start(format!("{}: a folder's name must be UTF-8", folder.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_where_its_name_says() {
        let hub = |text: &str| Place::Hub(ModelId::parse(text).expect("an id"));
        for (path, expected) in [
            ("", Place::Here),
            ("mock", Place::Here),
            ("mock:paced", Place::Here),
            ("demo", Place::Bundled),
            ("./demo", Place::Here),
            ("/models/x", Place::Here),
            ("../x", Place::Here),
            ("cpu:x/y", Place::Here),
            ("src", Place::Here),
            ("src/doctor", Place::Here),
            ("org/name", hub("org/name")),
            ("org/name@v1", hub("org/name@v1")),
        ] {
            assert_eq!(Place::of(path).expect("a place"), expected, "{path}");
        }
        Place::of("no-such-model").expect_err("neither");
    }
}
