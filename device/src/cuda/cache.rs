//! A disk cache of compiled kernels, so that a second start compiles nothing.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{CudaError, Nvrtc, source::Source};

/// The length of the digest at the start of each file.
const DIGEST_BYTES: usize = 32;

/// A folder of compiled kernels. A file's name is the hash of everything that the compilation depends on.
///
/// The cache is optional: if it cannot be read or written, kernels are compiled again.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

/// Machine code, and whether it was compiled now.
#[derive(Debug)]
pub struct CachedCode {
    pub cubin: Vec<u8>,
    pub was_compiled: bool,
}

impl Cache {
    /// Returns a cache in this folder, which the first write creates.
    pub fn at(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    /// Returns a cache that keeps nothing.
    pub fn none() -> Self {
        Self { folder: None }
    }

    /// Returns the user's cache by the XDG convention: under `$XDG_CACHE_HOME`, else `$HOME/.cache`. With
    /// neither, nothing is kept.
    pub fn of_user(variable: impl Fn(&str) -> Option<String>) -> Self {
        let named = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
        Self { folder: base.map(|base| base.join("baton/kernels")) }
    }

    /// Returns the machine code of this source for this GPU, from the cache. Otherwise compiles it and stores
    /// it.
    pub fn fetch(&self, nvrtc: &Nvrtc, source: &Source, arch: &str) -> Result<CachedCode, CudaError> {
        let file = self.file(&nvrtc.recipe(source, arch));
        if let Some(cubin) = file.as_deref().and_then(read) {
            return Ok(CachedCode { cubin, was_compiled: false });
        }
        let cubin = nvrtc.compile(source, arch)?.cubin;
        if let Some(file) = file {
            // A failure is ignored: on a full or read-only disk, the next start compiles again.
            let _ = write(&file, &cubin);
        }
        Ok(CachedCode { cubin, was_compiled: true })
    }

    fn file(&self, recipe: &str) -> Option<PathBuf> {
        let name = format!("{}.cubin", blake3::hash(recipe.as_bytes()).to_hex());
        self.folder.as_ref().map(|folder| folder.join(name))
    }
}

/// Reads a cached file. Returns `None` if it is missing or damaged.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (digest, cubin) = bytes.split_at_checked(DIGEST_BYTES)?;
    (blake3::hash(cubin).as_bytes() == digest).then(|| cubin.to_vec())
}

/// Writes a temporary file and renames it, so that another process sees the whole file or none.
fn write(file: &Path, cubin: &[u8]) -> io::Result<()> {
    let folder = file.parent().expect("a file in the cache lies in its folder");
    std::fs::create_dir_all(folder)?;
    let beside = file.with_extension(format!("{}.part", std::process::id()));
    let mut part = std::fs::File::create(&beside)?;
    part.write_all(blake3::hash(cubin).as_bytes())?;
    part.write_all(cubin)?;
    std::fs::rename(&beside, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_comes_back_and_what_is_damaged_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = Cache::at(folder.path()).file("a recipe").unwrap();
        assert_eq!(read(&file), None);
        write(&file, b"machine code").unwrap();
        assert_eq!(read(&file).as_deref(), Some(&b"machine code"[..]));
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[DIGEST_BYTES + 2] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file), None);
        std::fs::write(&file, b"short").unwrap();
        assert_eq!(read(&file), None);
    }

    #[test]
    fn another_recipe_is_another_file() {
        let cache = Cache::at(Path::new("/cache"));
        assert_ne!(cache.file("sm_80"), cache.file("sm_90a"));
        assert_eq!(Cache::none().file("sm_80"), None);
    }

    #[test]
    fn the_user_says_where() {
        let place = |named: &'static str, value: &'static str| {
            Cache::of_user(move |name| (name == named).then(|| value.to_owned())).folder
        };
        assert_eq!(place("XDG_CACHE_HOME", "/x").unwrap(), Path::new("/x/baton/kernels"));
        assert_eq!(place("HOME", "/h").unwrap(), Path::new("/h/.cache/baton/kernels"));
        assert_eq!(place("HOME", "relative"), None);
    }
}
