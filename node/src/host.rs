//! The identity of the machine that a node runs on.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;

use types::{NodeId, Role};

/// Returns an id that is equal on two nodes if they can share memory: the kernel's boot id and the device of
/// `/dev/shm`. Containers on one machine have separate `/dev/shm` devices unless they are configured to share one.
pub fn host_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let folder = fs::metadata("/dev/shm").map(|folder| folder.dev().to_string()).unwrap_or_default();
    format!("{} shm:{folder}", boot.trim())
}

/// Returns the default name of a node: role, host name and bound port.
pub fn default_id(role: Role, bound: SocketAddr) -> NodeId {
    let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    NodeId::new(format!("{role}-{}-{}", machine.trim(), bound.port()))
}
