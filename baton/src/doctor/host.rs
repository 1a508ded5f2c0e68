//! Checks the limits of the machine or container: shared memory, locked memory, open files.

use rustix::process::{Resource, getrlimit};

use super::finding::Finding;

const GROUP: &str = "host";
const SHM: &str = "/dev/shm";
/// The number of open files that a process should be allowed. Every client and every peer needs a socket, so
/// the default of many shells, 1024, is too low.
const FILES_MIN: u64 = 4096;

pub(super) fn look() -> Vec<Finding> {
    vec![shared_memory(), locked_memory(), open_files()]
}

fn shared_memory() -> Finding {
    let may_write = rustix::fs::access(SHM, rustix::fs::Access::WRITE_OK);
    let file = rustix::fs::memfd_create("baton-doctor", rustix::fs::MemfdFlags::ALLOW_SEALING);
    shm_of(may_write.err(), file.err())
}

/// Reports whether `/dev/shm` works for the connector `shm`, which puts sockets there but no KV, so its size
/// does not matter. A node shares its memory through a file without a name.
fn shm_of(folder: Option<rustix::io::Errno>, file: Option<rustix::io::Errno>) -> Finding {
    if let Some(error) = folder {
        let advice = "the connector shm needs it for sockets; without it, nodes of one host use tcp. Mount a tmpfs there; containers that share memory must mount the same one";
        return Finding::warn(GROUP, format!("cannot create a file in {SHM}: {error}"), advice);
    }
    match file {
        Some(error) => Finding::warn(
            GROUP,
            format!("memory cannot be shared with other processes: {error}"),
            "allow memfd_create (seccomp); without it, the connector shm copies twice",
        ),
        None => {
            Finding::ok(GROUP, format!("nodes with this {SHM} can share memory; its size does not matter"))
        }
    }
}

fn locked_memory() -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok(GROUP, "no limit on locked memory"),
        Some(bytes) => Finding::note(
            GROUP,
            format!("at most {} KiB of memory can be locked", bytes >> 10),
            "tcp locks none; RDMA registers all KV memory: `ulimit -l unlimited` (docker: --ulimit memlock=-1, Kubernetes: the runtime's limit)",
        ),
    }
}

fn open_files() -> Finding {
    match getrlimit(Resource::Nofile).current {
        Some(files) if files < FILES_MIN => Finding::warn(
            GROUP,
            format!("at most {files} files can be open at once; every client needs one"),
            format!("raise the limit to {FILES_MIN} or more: `ulimit -n`, or LimitNOFILE in a systemd unit"),
        ),
        Some(files) => Finding::ok(GROUP, format!("at most {files} files can be open at once")),
        None => Finding::ok(GROUP, "no limit on open files"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn shared_memory_takes_a_folder_and_a_file_without_a_name() {
        use rustix::io::Errno;
        assert_eq!(shm_of(None, None).level, Level::Ok);
        assert_eq!(shm_of(Some(Errno::ROFS), None).level, Level::Warn);
        assert_eq!(shm_of(None, Some(Errno::PERM)).level, Level::Warn);
    }
}
