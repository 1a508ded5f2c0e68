//! The shared libraries of a GPU: the driver, NVRTC and cuBLASLt. They are loaded at run time, never linked.

use std::ops::Range;
use std::path::{Path, PathBuf};

use cudarc::driver::{result, sys};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::CudaError;

/// The folders where CUDA's toolkit installs its libraries by default.
const USUAL_FOLDERS: &[&str] =
    &["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/wsl/lib"];

/// The files of NVRTC. The builtins are first, because libnvrtc opens them by name alone, and only when it
/// compiles.
const NVRTC: &[&str] = &["libnvrtc-builtins.so.", "libnvrtc.so."];
const CUBLASLT: &[&str] = &["libcublasLt.so."];

/// Starts the driver and counts the GPUs.
pub(super) fn driver() -> Result<usize, CudaError> {
    // JUSTIFICATION: cudarc panics if the library is missing, so this check comes first.
    // SAFETY: loading libcuda runs NVIDIA's initializers, which take no arguments.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaError::NoDevice,
        _ => CudaError::during("start the CUDA driver")(error),
    })?;
    let n_cards = result::device::get_count().map_err(CudaError::during("count the GPUs"))?;
    if n_cards == 0 { Err(CudaError::NoDevice) } else { Ok(n_cards as usize) }
}

/// Returns the identifiers of these GPUs, as NVIDIA's tools write them.
pub fn gpu_uuids(ordinals: Range<usize>) -> Result<Vec<String>, CudaError> {
    let n_cards = driver()?;
    let uuid = |ordinal: usize| {
        if ordinal >= n_cards {
            return Err(CudaError::NoSuchDevice { ordinal, n_cards });
        }
        let found = result::device::get(ordinal as i32).and_then(result::device::get_uuid);
        let uuid = found.map_err(CudaError::during("ask for the GPU's identifier"))?;
        Ok(uuid_text(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])))
    };
    ordinals.map(uuid).collect()
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]];
    format!("GPU-{}", parts.map(|part| part.concat()).join("-"))
}

/// Returns the newest CUDA version whose code the driver can run.
pub(super) fn driver_version() -> Result<(i32, i32), CudaError> {
    let mut version = 0;
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: the pointer is to a number that outlives the call.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(CudaError::during("ask for the driver's version"))?;
    Ok((version / 1000, version % 1000 / 10))
}

/// Loads NVRTC: from `folder` if one is named, else from the loader's path, else from the usual folders.
pub(super) fn load_nvrtc(folder: Option<&Path>) -> Result<(), CudaError> {
    match folder {
        Some(folder) => preload(NVRTC, folder),
        None if nvrtc_is_present() => return Ok(()),
        None => USUAL_FOLDERS.iter().for_each(|folder| preload(NVRTC, Path::new(folder))),
    }
    let place = folder.map(|folder| format!(", nor in {}", folder.display())).unwrap_or_default();
    if nvrtc_is_present() { Ok(()) } else { Err(CudaError::NoNvrtc { place }) }
}

/// Loads cuBLASLt, from the same places as NVRTC.
pub fn load_cublaslt(folder: Option<&Path>) -> Result<(), CudaError> {
    match folder {
        Some(folder) => preload(CUBLASLT, folder),
        None if cublaslt_is_present() => return Ok(()),
        None => USUAL_FOLDERS.iter().for_each(|folder| preload(CUBLASLT, Path::new(folder))),
    }
    let place = folder.map(|folder| format!(", nor in {}", folder.display())).unwrap_or_default();
    if cublaslt_is_present() { Ok(()) } else { Err(CudaError::NoCublas { place }) }
}

fn cublaslt_is_present() -> bool {
    // JUSTIFICATION: cudarc panics if the library is missing, so this check comes first.
    // SAFETY: loading libcublasLt runs its initializers, which take no arguments.
    unsafe { cudarc::cublaslt::sys::is_culib_present() }
}

fn nvrtc_is_present() -> bool {
    // JUSTIFICATION: cudarc panics if the library is missing, so this check comes first.
    // SAFETY: loading libnvrtc runs its initializers, which take no arguments.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

/// Loads the files by path and never unloads them. A later load by name then finds the loaded library.
fn preload(stems: &[&str], folder: &Path) {
    for stem in stems {
        for path in versions_of(stem, folder) {
            // JUSTIFICATION: CUDA's Python packages install libraries outside of the loader's path.
            // SAFETY: the user names the folder of NVIDIA's library, whose initializers take no arguments.
            let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
            library.map(std::mem::forget).unwrap_or_default();
        }
    }
}

fn versions_of(stem: &str, folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let is_wanted = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(stem))
    };
    paths.filter(is_wanted).collect()
}
