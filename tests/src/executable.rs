//! The paths of the programs that tests start.

use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output};
use std::sync::OnceLock;

use crate::hosts;

/// Returns the executable to test: `TEST_EXECUTABLE`, or the one that cargo builds now.
pub fn baton() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| std::env::var_os("TEST_EXECUTABLE").map_or_else(build, PathBuf::from)).clone()
}

/// Returns the command that runs [`baton`] without any `BATON_` variable in its environment.
pub fn command() -> Command {
    without_our_variables(Command::new(baton()))
}

/// Returns the command that runs [`baton`] on the host with this network namespace.
pub fn command_on(namespace: &str) -> Command {
    without_our_variables(hosts::command_on(namespace, baton()))
}

/// Takes all `BATON_` variables out of a command's environment.
pub fn without_our_variables(mut command: Command) -> Command {
    let ours = std::env::vars().map(|(name, _)| name).filter(|name| name.starts_with("BATON_"));
    ours.for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// The result of a command that has ended.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Runs [`baton`] with these arguments to its end.
pub fn run(arguments: &[&str]) -> Finished {
    finish(command().args(arguments))
}

/// Runs a command to its end.
pub fn finish(command: &mut Command) -> Finished {
    let Output { status, stdout, stderr } = command.output().expect("the command runs");
    let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Finished { status, stdout, stderr }
}

fn build() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--package", "baton"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(status.success(), "baton does not build");
    // The path of this test is target/<profile>/deps/<test>, and the executable is in target/<profile>.
    let test = std::env::current_exe().expect("this test has a path");
    test.parent().and_then(|deps| deps.parent()).expect("a test lies in target/<profile>/deps").join("baton")
}

/// Returns a program of Prometheus: `prometheus` or `promtool`, from `TEST_PROMETHEUS`, the path, or the
/// cache of `./test.sh`.
pub fn prometheus(program: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("TEST_PROMETHEUS") {
        return PathBuf::from(folder).join(program);
    }
    let cached = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.cache/prometheus/usr/bin").join(program);
    if cached.exists() { cached } else { PathBuf::from(program) }
}

/// Returns a Chromium: `TEST_CHROMIUM`, or the first one on the path.
pub fn chromium() -> PathBuf {
    let known = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let paths =
        known.iter().flat_map(|name| std::env::split_paths(&folders).map(move |folder| folder.join(name)));
    let found = || paths.into_iter().find(|path| path.exists()).expect("./test.sh installs Chromium");
    std::env::var_os("TEST_CHROMIUM").map_or_else(found, PathBuf::from)
}

/// Returns the Python that `./test.sh` sets up: `TEST_PYTHON`, or the one in the cache.
pub fn python() -> PathBuf {
    let cached = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.cache/python/bin/python");
    std::env::var_os("TEST_PYTHON").map_or_else(cached, PathBuf::from)
}
