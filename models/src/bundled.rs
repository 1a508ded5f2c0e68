//! The demonstration model. It is part of the executable, so that the first command needs neither a download
//! nor a checkout.

use std::path::PathBuf;

use crate::unpack::{Contents, UnpackError};

macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/", $name)))),*]
    };
}

const FILES: &[(&str, &[u8])] = bundled![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];
const DEMO: Contents<'static> = Contents { name: "demo", files: FILES, link: None };

/// Unpacks the model into the first of `caches` that is writable, unless it is there already. Returns the
/// model's folder.
pub fn unpacked(caches: &[PathBuf]) -> Result<PathBuf, UnpackError> {
    DEMO.unpacked(caches)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn it_is_unpacked_once_and_mended_when_damaged() {
        let cache = tempfile::tempdir().expect("a folder");
        let folder = unpacked(&[cache.path().to_owned()]).expect("unpacked");
        assert!(DEMO.is_whole(&folder));
        let config = folder.join("config.json");
        let written = |file: &Path| fs::metadata(file).and_then(|data| data.modified()).expect("it is there");
        let before = written(&config);
        assert_eq!(unpacked(&[cache.path().to_owned()]).expect("it is there"), folder);
        assert_eq!(written(&config), before, "it was left alone");
        fs::write(&config, "{}").expect("written");
        unpacked(&[cache.path().to_owned()]).expect("mended");
        assert!(DEMO.is_whole(&folder));
        let left: Vec<_> = fs::read_dir(cache.path()).expect("a folder").flatten().collect();
        assert_eq!(left.len(), 1, "nothing temporary is left");
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_passed_over() {
        let cache = tempfile::tempdir().expect("a folder");
        let file = cache.path().join("file");
        fs::write(&file, "no folder").expect("written");
        let folder = unpacked(&[file.join("baton"), cache.path().to_owned()]).expect("unpacked");
        assert!(folder.starts_with(cache.path()) && DEMO.is_whole(&folder));
        let error = unpacked(&[file.join("baton")]).expect_err("nowhere");
        assert!(error.to_string().starts_with("cannot unpack the model to "), "{error}");
    }

    #[test]
    fn several_processes_may_unpack_at_one_time() {
        let cache = tempfile::tempdir().expect("a folder");
        let folders: Vec<PathBuf> = std::thread::scope(|scope| {
            let unpack = || scope.spawn(|| unpacked(&[cache.path().to_owned()]).expect("unpacked"));
            let threads = [unpack(), unpack(), unpack()];
            threads.into_iter().map(|thread| thread.join().expect("it ran")).collect()
        });
        assert!(folders.iter().all(|folder| *folder == folders[0] && DEMO.is_whole(folder)));
    }
}
