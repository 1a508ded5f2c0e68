//! What the machine, or the container, lets a process have: shared memory, locked memory, open files.

use rustix::process::{Resource, getrlimit};

use super::finding::Finding;

const GROUP: &str = "host";
/// Containers get 64 MiB by default; connectors through shared memory will want more than that.
const SHM_BYTES_MIN: u64 = 1 << 30;
/// Every client and every peer is a socket: the default of many shells, 1024, is soon spent.
const FILES_MIN: u64 = 4096;

pub(super) fn look() -> Vec<Finding> {
    vec![shared_memory(), locked_memory(), open_files()]
}

fn shared_memory() -> Finding {
    match rustix::fs::statvfs("/dev/shm") {
        Ok(stat) => shm_of(stat.f_blocks * stat.f_frsize),
        Err(error) => Finding::warn(GROUP, format!("/dev/shm: {error}"), "mount a tmpfs on /dev/shm"),
    }
}

fn shm_of(bytes: u64) -> Finding {
    let found = format!("/dev/shm holds {} MiB", bytes >> 20);
    if bytes >= SHM_BYTES_MIN {
        return Finding::ok(GROUP, found);
    }
    let advice = "tcp does not need it; for connectors through shared memory give it 1 GiB or more (docker: --shm-size, Kubernetes: an emptyDir with medium Memory)";
    Finding::warn(GROUP, found, advice)
}

fn locked_memory() -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok(GROUP, "memory may be locked without limit"),
        Some(bytes) => Finding::note(
            GROUP,
            format!("{} KiB of memory may be locked", bytes >> 10),
            "tcp locks none; RDMA registers all KV memory: `ulimit -l unlimited` (docker: --ulimit memlock=-1, Kubernetes: the runtime's limit)",
        ),
    }
}

fn open_files() -> Finding {
    match getrlimit(Resource::Nofile).current {
        Some(files) if files < FILES_MIN => Finding::warn(
            GROUP,
            format!("{files} files may be open at once; every client is one"),
            format!("raise the limit to {FILES_MIN} or more: `ulimit -n`, or LimitNOFILE in a systemd unit"),
        ),
        Some(files) => Finding::ok(GROUP, format!("{files} files may be open at once")),
        None => Finding::ok(GROUP, "files may be open without limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_containers_default_is_small() {
        assert_eq!(shm_of(64 << 20).level, Level::Warn);
        assert_eq!(shm_of(2 << 30).level, Level::Ok);
    }
}
