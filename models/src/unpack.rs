//! Folders that are made of contents in memory, in the user's cache.
//!
//! Nodes map weights from files, so a model is unpacked once. Existing files are compared byte for byte before use: a
//! cleaner may have changed them, and a shared folder is not trusted.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The contents of a folder.
#[derive(Clone, Copy, Debug)]
pub struct Contents<'a> {
    /// The beginning of the folder's name.
    pub name: &'a str,
    /// The files, by name.
    pub files: &'a [(&'a str, &'a [u8])],
    /// A link, and the absolute path to which it leads.
    pub link: Option<(&'a str, &'a Path)>,
}

/// The error of a model that could not be unpacked into any cache folder.
#[derive(Debug, thiserror::Error)]
#[error("cannot unpack the model to {}", folder.display())]
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

impl Contents<'_> {
    /// Unpacks the contents into the first of `caches` that is writable, unless they are there already. Returns their
    /// folder.
    pub fn unpacked(&self, caches: &[PathBuf]) -> Result<PathBuf, UnpackError> {
        let mut first_failure = None;
        for cache in caches {
            let folder = cache.join(format!("{}-{}", self.name, self.digest()));
            match self.unpack(&folder) {
                Ok(()) => return Ok(folder),
                Err(source) => first_failure = first_failure.or(Some(UnpackError { folder, source })),
            }
        }
        Err(first_failure.expect("there is always a folder for temporary files"))
    }

    /// Returns a digest of the contents. It is part of the folder's name, so that other contents use other folders.
    fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (name, bytes) in self.files {
            hasher.update(name.as_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        }
        if let Some((name, target)) = self.link {
            hasher.update(name.as_bytes()).update(target.as_os_str().as_encoded_bytes());
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }

    fn unpack(&self, folder: &Path) -> io::Result<()> {
        if self.is_whole(folder) {
            return Ok(());
        }
        let parent = folder.parent().expect("the folder lies in a cache");
        fs::create_dir_all(parent)?;
        // Dropping the value removes the temporary folder, unless it was renamed to its final name.
        let temporary = tempfile::Builder::new().prefix(&format!("{}-", self.name)).tempdir_in(parent)?;
        self.write(temporary.path())?;
        self.take_place(temporary.path(), folder)
    }

    pub(crate) fn is_whole(&self, folder: &Path) -> bool {
        let is_same =
            |(name, bytes): &(&str, &[u8])| fs::read(folder.join(name)).is_ok_and(|found| found == *bytes);
        let is_led = self
            .link
            .is_none_or(|(name, target)| fs::read_link(folder.join(name)).is_ok_and(|found| found == target));
        is_led && self.files.iter().all(is_same)
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        for (name, bytes) in self.files {
            let mut file = File::create(folder.join(name))?;
            file.write_all(bytes)?;
            file.sync_all()?;
        }
        self.link.map_or(Ok(()), |(name, target)| symlink(target, folder.join(name)))
    }

    /// Renames the complete folder, so that no reader sees a partial one. If another process was faster, the
    /// folder of that process is used.
    fn take_place(&self, temporary: &Path, folder: &Path) -> io::Result<()> {
        if fs::rename(temporary, folder).is_ok() || self.is_whole(folder) {
            return Ok(());
        }
        fs::remove_dir_all(folder)?;
        fs::rename(temporary, folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_part_of_the_contents() {
        let cache = tempfile::tempdir().expect("a folder");
        let caches = [cache.path().to_owned()];
        let unpacked = |target: &str| {
            let link = Some(("model.gguf", Path::new(target)));
            Contents { name: "gguf", files: &[("config.json", b"{}")], link }
                .unpacked(&caches)
                .expect("unpacked")
        };
        let (one, other) = (unpacked("/a.gguf"), unpacked("/b.gguf"));
        assert_ne!(one, other, "two files may have one description");
        assert_eq!(fs::read_link(one.join("model.gguf")).expect("a link"), Path::new("/a.gguf"));
        fs::remove_file(one.join("model.gguf")).expect("removed");
        assert_eq!(unpacked("/a.gguf"), one);
        assert!(fs::read_link(one.join("model.gguf")).is_ok(), "it was mended");
    }
}
