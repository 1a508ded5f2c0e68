//! The machine that a node runs on.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;

use types::{NodeId, Role};

/// Tells whether two nodes share a machine and what it takes to share memory: the kernel's boot id, and which
/// `/dev/shm` the node sees. Containers of one machine have one each, unless they were given one in common.
pub fn host_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let folder = fs::metadata("/dev/shm").map(|folder| folder.dev().to_string()).unwrap_or_default();
    format!("{} shm:{folder}", boot.trim())
}

/// A name for a node that was given none: the machine's, and the port that is its own.
pub fn default_id(role: Role, bound: SocketAddr) -> NodeId {
    let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    NodeId::new(format!("{role}-{}-{}", machine.trim(), bound.port()))
}
