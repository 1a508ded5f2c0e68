//! The demonstration model. It is part of the executable, so that the first command needs neither a download
//! nor a checkout.
//!
//! Nodes map weights from files, so the model is unpacked once into the user's cache. Existing files are compared
//! byte for byte before use: a cleaner may have changed them, and a shared folder is not trusted.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// A file of the bundled model: its name and its content.
type BundledFile = (&'static str, &'static [u8]);

macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/", $name)))),*]
    };
}

const FILES: &[BundledFile] = bundled![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The error of a bundled model that could not be unpacked into any cache folder.
#[derive(Debug, thiserror::Error)]
#[error("cannot unpack the demo model to {}", folder.display())]
pub struct UnpackError {
    folder: PathBuf,
    source: io::Error,
}

/// Returns the possible cache folders, best first. A container may have no home, or a read-only one.
pub fn cache_folders() -> Vec<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = [
        folder("XDG_CACHE_HOME"),
        folder("HOME").map(|home| home.join(".cache")),
        Some(std::env::temp_dir()),
    ];
    caches.into_iter().flatten().map(|cache| cache.join("baton")).collect()
}

/// Unpacks the model into the first of `caches` that is writable, unless it is there already. Returns the
/// model's folder.
pub fn unpacked(caches: &[PathBuf]) -> Result<PathBuf, UnpackError> {
    let mut first_failure = None;
    for cache in caches {
        let folder = cache.join(format!("demo-{}", digest()));
        match unpack(&folder) {
            Ok(()) => return Ok(folder),
            Err(source) => first_failure = first_failure.or(Some(UnpackError { folder, source })),
        }
    }
    Err(first_failure.expect("there is always a folder for temporary files"))
}

/// Returns a digest of the model's files. It is part of the folder's name, so that other versions use other
/// folders.
fn digest() -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in FILES {
        hasher.update(name.as_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

fn unpack(folder: &Path) -> io::Result<()> {
    if is_whole(folder) {
        return Ok(());
    }
    let parent = folder.parent().expect("the folder lies in a cache");
    fs::create_dir_all(parent)?;
    // Dropping the value removes the temporary folder, unless it was renamed to its final name.
    let temporary = tempfile::Builder::new().prefix("demo-").tempdir_in(parent)?;
    write(temporary.path())?;
    take_place(temporary.path(), folder)
}

fn is_whole(folder: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| fs::read(folder.join(name)).is_ok_and(|found| found == *bytes))
}

fn write(folder: &Path) -> io::Result<()> {
    for (name, bytes) in FILES {
        let mut file = File::create(folder.join(name))?;
        file.write_all(bytes)?;
        file.sync_all()?;
    }
    Ok(())
}

/// Renames the complete folder, so that no reader sees a partial one. If another process was faster, the
/// folder of that process is used.
fn take_place(temporary: &Path, folder: &Path) -> io::Result<()> {
    if fs::rename(temporary, folder).is_ok() || is_whole(folder) {
        return Ok(());
    }
    fs::remove_dir_all(folder)?;
    fs::rename(temporary, folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_unpacked_once_and_mended_when_damaged() {
        let cache = tempfile::tempdir().expect("a folder");
        let folder = unpacked(&[cache.path().to_owned()]).expect("unpacked");
        assert!(is_whole(&folder));
        let config = folder.join("config.json");
        let written = |file: &Path| fs::metadata(file).and_then(|data| data.modified()).expect("it is there");
        let before = written(&config);
        assert_eq!(unpacked(&[cache.path().to_owned()]).expect("it is there"), folder);
        assert_eq!(written(&config), before, "it was left alone");
        fs::write(&config, "{}").expect("written");
        unpacked(&[cache.path().to_owned()]).expect("mended");
        assert!(is_whole(&folder));
        let left: Vec<_> = fs::read_dir(cache.path()).expect("a folder").flatten().collect();
        assert_eq!(left.len(), 1, "nothing temporary is left");
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_passed_over() {
        let cache = tempfile::tempdir().expect("a folder");
        let file = cache.path().join("file");
        fs::write(&file, "no folder").expect("written");
        let folder = unpacked(&[file.join("baton"), cache.path().to_owned()]).expect("unpacked");
        assert!(folder.starts_with(cache.path()) && is_whole(&folder));
        let error = unpacked(&[file.join("baton")]).expect_err("nowhere");
        assert!(error.to_string().starts_with("cannot unpack the demo model to "), "{error}");
    }

    #[test]
    fn several_processes_may_unpack_at_one_time() {
        let cache = tempfile::tempdir().expect("a folder");
        let folders: Vec<PathBuf> = std::thread::scope(|scope| {
            let unpack = || scope.spawn(|| unpacked(&[cache.path().to_owned()]).expect("unpacked"));
            let threads = [unpack(), unpack(), unpack()];
            threads.into_iter().map(|thread| thread.join().expect("it ran")).collect()
        });
        assert!(folders.iter().all(|folder| *folder == folders[0] && is_whole(folder)));
    }
}
