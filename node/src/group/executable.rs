//! The identity of the executable that this process runs.

use std::fs::File;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, io};

/// Returns a hash of the executable's file, as text. The file is read once, also if another one has replaced it on the disk.
pub(super) fn digest() -> io::Result<String> {
    static DIGEST: OnceLock<String> = OnceLock::new();
    if let Some(known) = DIGEST.get() {
        return Ok(known.clone());
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path()?)?)?;
    let digest = format!("blake3:{}", &hasher.finalize().to_hex()[..16]);
    Ok(DIGEST.get_or_init(|| digest).clone())
}

/// On Linux this link leads to the file that runs, also if its path leads to another one by now.
fn path() -> io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => env::current_exe(),
    }
}
