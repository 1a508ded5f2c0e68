//! Describes the machine of a measurement. A number without its machine cannot be repeated.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine that the harness runs on. The server may be on another machine, which its own configuration
/// describes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub n_cores: usize,
    pub memory_gib: u64,
    pub gpus: Vec<String>,
    pub kernel: String,
    /// The frequency governor of the first core, if there is one: `powersave` changes the numbers.
    pub governor: Option<String>,
}

impl Machine {
    pub fn here() -> Self {
        Self {
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            n_cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_gib(),
            gpus: gpus(),
            kernel: first_line("/proc/sys/kernel/osrelease").unwrap_or_default(),
            governor: first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        }
    }
}

/// Returns the commit of the current folder, with `+` if files differ from the commit.
pub fn commit() -> Option<String> {
    let hash = git(&["rev-parse", "--short=12", "HEAD"])?;
    let is_changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    Some(if is_changed { hash + "+" } else { hash })
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn first_line(path: impl AsRef<Path>) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}

/// Returns the value after `name : ` in a file of the kernel.
fn field(path: impl AsRef<Path>, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim().to_owned())
}

fn memory_gib() -> u64 {
    let kib = field("/proc/meminfo", "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or(0) >> 20
}

/// Returns the models of the GPUs, from the driver's files in /proc, without a library.
fn gpus() -> Vec<String> {
    let cards = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let mut names: Vec<_> =
        cards.filter_map(|card| field(card.path().join("information"), "Model")).collect();
    names.sort_unstable();
    names
}
