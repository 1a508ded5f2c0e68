//! The memory that this process may still allocate, on the machine and in its cgroups.

use std::fs;
use std::path::{Path, PathBuf};

use super::MemoryError;

/// Returns the bytes that can be allocated now without swapping or exceeding a cgroup's limit; `None` if the
/// system does not report it.
pub fn available_bytes() -> Option<u64> {
    available_under(Path::new("/"))
}

/// Fails if the machine or this process's container has less available memory than `asked`. Otherwise the
/// kernel would kill the process when it uses the memory. If the system does not report it, the check passes.
pub fn check(asked: u64) -> Result<(), MemoryError> {
    match available_bytes() {
        Some(available) if asked > available => Err(MemoryError::TooMuch { asked, available }),
        Some(_) | None => Ok(()),
    }
}

/// Like [`available_bytes`], with `proc` and `sys` under `root`.
fn available_under(root: &Path) -> Option<u64> {
    let machine = of_machine(&fs::read_to_string(root.join("proc/meminfo")).ok()?)?;
    let memberships = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = memberships.lines().flat_map(|line| cgroups(root, line)).filter_map(|cgroup| cgroup.left());
    Some(limits.fold(machine, u64::min))
}

/// Returns the available memory in `/proc/meminfo`.
fn of_machine(meminfo: &str) -> Option<u64> {
    let kib = value(meminfo, "MemAvailable:")?;
    Some(kib << 10)
}

/// Returns the number after a name at the start of a line.
fn value(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A cgroup's folder, and the file names of its version.
struct Cgroup {
    folder: PathBuf,
    files: &'static Files,
}

/// The file names of cgroup v1 and v2.
struct Files {
    max: &'static str,
    current: &'static str,
    /// Keys of `memory.stat` for the page cache, which the kernel reclaims before it kills a process.
    cache: [&'static str; 2],
}

const V1: Files = Files {
    max: "memory.limit_in_bytes",
    current: "memory.usage_in_bytes",
    cache: ["total_inactive_file ", "total_active_file "],
};
const V2: Files =
    Files { max: "memory.max", current: "memory.current", cache: ["inactive_file ", "active_file "] };

/// Returns the cgroups of a line in `/proc/self/cgroup`: the named one and all its parents, whose limits
/// apply too.
fn cgroups(root: &Path, line: &str) -> Vec<Cgroup> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let (mount, files) = match controllers {
        "" => ("sys/fs/cgroup", &V2),
        names if names.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", &V1),
        _ => return Vec::new(),
    };
    let path = Path::new(path.trim_start_matches('/'));
    let folders = path.ancestors().map(|path| root.join(mount).join(path));
    folders.map(|folder| Cgroup { folder, files }).collect()
}

impl Cgroup {
    /// Returns the bytes left in the cgroup; `None` if it has no limit or is not visible.
    fn left(&self) -> Option<u64> {
        let read = |file: &str| fs::read_to_string(self.folder.join(file)).ok();
        let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
        let (max, current) = (number(self.files.max)?, number(self.files.current)?);
        let stat = read("memory.stat").unwrap_or_default();
        let cache: u64 = self.files.cache.iter().filter_map(|name| value(&stat, name)).sum();
        Some(max.saturating_sub(current.saturating_sub(cache)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  9000 kB\nMemAvailable:   4096 kB\n";

    /// Makes a folder with these files, in place of the system's root.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (file, text) in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder above")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    fn available(files: &[(&str, &str)]) -> Option<u64> {
        available_under(system(files).path())
    }

    #[test]
    fn without_a_limit_it_is_the_machine_s() {
        assert_eq!(available(&[]), None);
        assert_eq!(available(&[("proc/meminfo", "MemTotal: 9 kB\n")]), None);
        assert_eq!(available(&[("proc/meminfo", MEMINFO)]), Some(4 << 20));
        let unlimited = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.current", "100\n"),
        ];
        assert_eq!(available(&unlimited), Some(4 << 20));
    }

    #[test]
    fn a_cgroup_s_limit_counts_and_that_of_one_above_it() {
        let limited = |max: &'static str, folder: &str| {
            let file = |name: &str| format!("sys/fs/cgroup/{folder}{name}");
            let (max_file, current) = (file("memory.max"), file("memory.current"));
            available(&[
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "0::/a.slice/b.service\n"),
                (&max_file, max),
                (&current, "100\n"),
            ])
        };
        for folder in ["a.slice/b.service/", "a.slice/", ""] {
            assert_eq!(limited("1000\n", folder), Some(900), "{folder:?}");
            assert_eq!(limited("50\n", folder), Some(0), "{folder:?}");
        }
        assert_eq!(limited("99999999999\n", ""), Some(4 << 20), "the machine has less");
    }

    #[test]
    fn the_page_cache_does_not_count_as_taken() {
        let read_a_model = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "1000\n"),
            ("sys/fs/cgroup/memory.current", "950\n"),
            ("sys/fs/cgroup/memory.stat", "anon 50\ninactive_file 600\nactive_file 300\n"),
        ];
        assert_eq!(available(&read_a_model), Some(950));
    }

    #[test]
    fn the_first_version_of_cgroups_counts_too() {
        let first = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "12:cpu:/x\n7:hugetlb,memory:/docker/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "700\n"),
            ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100\n"),
        ];
        assert_eq!(available(&first), Some(400));
    }

    #[test]
    fn more_than_there_is_is_refused_with_both_numbers() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
        check(1 << 20).expect("1 MiB is available");
        let refused = check(1 << 60).expect_err("an EiB").to_string();
        assert!(refused.starts_with("1099511627776 MiB of memory are requested, but only "), "{refused}");
    }
}
