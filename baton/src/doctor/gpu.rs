//! Checks GPUs, their driver and the libraries that the GPU backend loads at run time.

use std::path::{Path, PathBuf};

use super::finding::Finding;

const GROUP: &str = "gpu";
const USED: &str = "a node with model.device = `auto` or `cuda` computes on it";
const NOT_USED: &str =
    "a node with model.device = `auto` computes on the CPU, and one with `cuda` does not start";
/// The libraries that the GPU backend loads, each with its purpose.
const LIBRARIES: &[(&str, &str)] = &[
    ("libcuda.so.1", "the CUDA driver API"),
    ("libnvrtc.so", "compiles kernels for the GPU"),
    ("libcublasLt.so", "matrix products"),
];
/// The folders that the loader searches besides those in LD_LIBRARY_PATH.
const FOLDERS: &[&str] = &[
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
];

pub(super) fn look() -> Vec<Finding> {
    let Some(driver) = driver_here() else {
        return vec![Finding::note(GROUP, "no NVIDIA driver", NOT_USED)];
    };
    let mut findings = vec![Finding::note(GROUP, format!("{driver}; {} GPUs", n_gpus()), USED)];
    findings.extend(LIBRARIES.iter().map(|(library, what_for)| found_or_not(library, what_for)));
    findings
}

/// Returns a library's file, if the loader finds it.
pub(super) fn library(name: &str) -> Option<PathBuf> {
    find(name, &folders())
}

/// Returns the version line of this machine's GPU driver.
pub(super) fn driver_here() -> Option<String> {
    driver(Path::new("/proc/driver/nvidia/version"))
}

/// Returns the driver's version line from the file `version`.
fn driver(version: &Path) -> Option<String> {
    let text = std::fs::read_to_string(version).ok()?;
    text.lines().next().map(|line| line.trim_start_matches("NVRM version:").trim().to_owned())
}

fn n_gpus() -> usize {
    let entries = std::fs::read_dir("/proc/driver/nvidia/gpus");
    entries.map_or(0, |entries| entries.flatten().count())
}

/// Reports whether a library's file exists. The library is not loaded, because a broken one could crash the
/// doctor.
fn found_or_not(library: &str, what_for: &str) -> Finding {
    match self::library(library) {
        Some(path) => Finding::note(GROUP, format!("{} ({what_for})", path.display()), USED),
        None => Finding::note(
            GROUP,
            format!("{library} ({what_for}) was not found in the loader's folders"),
            format!("install it, or put its folder into LD_LIBRARY_PATH; without it {NOT_USED}"),
        ),
    }
}

fn folders() -> Vec<PathBuf> {
    let own = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&own).chain(FOLDERS.iter().map(PathBuf::from)).collect()
}

/// Returns the first file in `folders` whose name is `library`, or begins with it and a version.
fn find(library: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let names_it = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        name.strip_prefix(library).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    entries.map(|entry| entry.path()).find(names_it)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_with_and_without_a_version() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("libnvrtc.so.12.4"), "").expect("written");
        std::fs::write(folder.path().join("libnvrtc.sorry"), "").expect("written");
        let folders = [folder.path().to_owned()];
        assert_eq!(find("libnvrtc.so", &folders), Some(folder.path().join("libnvrtc.so.12.4")));
        assert_eq!(find("libnccl.so.2", &folders), None);
    }

    #[test]
    fn the_driver_says_its_version() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("version");
        std::fs::write(&file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1\nGCC version\n")
            .expect("written");
        assert_eq!(driver(&file).as_deref(), Some("NVIDIA UNIX x86_64 Kernel Module  570.1"));
        assert_eq!(driver(&folder.path().join("none")), None);
    }
}
