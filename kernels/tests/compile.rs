//! Checks that every kernel compiles for every architecture, without a GPU, and that registers and spills
//! equal those in `cu/registers.txt`.
//!
//! The compiler is in `.cache/nvrtc`, where `./test.sh` installs it, or in the folder named by `TEST_NVRTC`.
//! Without a compiler these tests fail.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use baton_kernels::cuda::source::SOURCES;
use device::cuda::source::{Source, WIRE};
use device::cuda::{Cache, Nvrtc, report};

/// The architectures: the oldest supported one, Hopper without its own instructions, and Hopper with them.
const ARCHS: &[&str] = &["sm_80", "sm_90", "sm_90a"];
/// The version of the compiler that made the table. Other versions allocate registers differently.
const TABLE_OF: (i32, i32) = (13, 0);

fn nvrtc() -> Nvrtc {
    let folder = std::env::var_os("TEST_NVRTC").map(PathBuf::from).or_else(cached);
    let folder = folder.expect("no compiler: ./test.sh gets one, or TEST_NVRTC names the folder of libnvrtc");
    Nvrtc::load(Some(&folder)).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// Returns the folder where `./test.sh` has installed it, below the folder of the Python version.
fn cached() -> Option<PathBuf> {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/nvrtc/lib");
    let versions = std::fs::read_dir(cache).ok()?.flatten();
    let mut folders = versions.map(|version| version.path().join("site-packages/nvidia/cu13/lib"));
    folders.find(|folder| folder.join("libnvrtc.so.13").exists())
}

/// Returns the programs of both crates, in the order of the table.
fn sources() -> impl Iterator<Item = &'static Source> {
    let n_before = SOURCES.iter().take_while(|source| source.name != "skinny.cu").count();
    SOURCES[..n_before].iter().chain([&WIRE]).chain(&SOURCES[n_before..])
}

/// Makes one line for each kernel: architecture, kernel, registers, bytes spilled.
fn table(nvrtc: &Nvrtc, source: &Source) -> String {
    let mut table = String::new();
    for arch in ARCHS.iter().filter(|arch| source.is_for(arch)) {
        let compiled = nvrtc.compile(source, arch).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(&compiled.cubin[..4], b"\x7fELF", "{}", source.name);
        assert!(!compiled.log.contains(": warning"), "{}", compiled.log);
        let usages = report::usages(&compiled.log);
        let names: Vec<_> = usages.iter().map(|usage| usage.kernel.as_str()).collect();
        let mut declared = source.kernels.to_vec();
        declared.sort_unstable();
        assert_eq!(names, declared, "{}: SOURCES names what can be launched", source.name);
        for usage in usages {
            writeln!(table, "{arch} {} {} {}", usage.kernel, usage.registers, usage.spill_bytes)
                .expect("a string has room");
        }
    }
    table
}

#[test]
fn every_kernel_compiles_for_every_card_within_its_registers() {
    let nvrtc = nvrtc();
    // One thread: whole clusters run beside this test, and on two cores a thread for each source delays their
    // steps until the watchdogs report them.
    let tables: String = sources().map(|source| table(&nvrtc, source)).collect();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("cu/registers.txt");
    if std::env::var_os("UPDATE_REGISTERS").is_some() {
        std::fs::write(&file, &tables).expect("the table can be written");
    }
    if nvrtc.version() == TABLE_OF {
        let expected = std::fs::read_to_string(&file).unwrap();
        assert_eq!(tables, expected, "look at what changed, then run once with UPDATE_REGISTERS=1");
    }
}

#[test]
fn a_second_start_compiles_nothing() {
    let nvrtc = nvrtc();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let fetch = |arch| cache.fetch(&nvrtc, &SOURCES[0], arch).unwrap();
    let first = fetch("sm_80");
    let second = fetch("sm_80");
    assert!(first.was_compiled && !second.was_compiled);
    assert_eq!(first.cubin, second.cubin);
    assert!(fetch("sm_90a").was_compiled, "another card's code is other code");
}

#[test]
fn a_mistake_in_a_kernel_is_shown_with_its_line() {
    let nvrtc = nvrtc();
    let source =
        Source { name: "wrong.cu", text: "#line 7 \"wrong.cu\"\nint x = ;", kernels: &[], only_on: None };
    let error = nvrtc.compile(&source, "sm_80").expect_err("it is wrong").to_string();
    assert!(error.contains("wrong.cu(7)"), "{error}");
}

#[test]
fn a_folder_without_nvrtc_is_named() {
    let folder = tempfile::tempdir().unwrap();
    if let Err(error) = Nvrtc::load(Some(folder.path())) {
        assert!(error.to_string().contains(&folder.path().display().to_string()), "{error}");
    }
}
