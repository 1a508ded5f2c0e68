//! Checks RDMA devices, their ports, and the GID that a peer would connect to.

#[cfg(feature = "rdma")]
use std::path::Path;

#[cfg(feature = "rdma")]
use kv_transfer::connectors::rdma::port::{
    DEVICES, best_gid, folders, is_up, knows_dmabuf, link_layer, name_of, opens, state,
};

use super::finding::Finding;

const GROUP: &str = "rdma";

#[cfg(not(feature = "rdma"))]
pub(super) fn look() -> Vec<Finding> {
    vec![Finding::note(GROUP, "this executable has no rdma connector", "build it with the feature `rdma`")]
}

#[cfg(feature = "rdma")]
pub(super) fn look() -> Vec<Finding> {
    let mut findings = look_in(Path::new(DEVICES), opens);
    if !folders(Path::new(DEVICES)).is_empty() {
        findings.extend(gpu_memory(super::gpu::driver_here().as_deref(), knows_dmabuf));
    }
    findings
}

/// Checks without a GPU library whether KV on a GPU can be sent over rdma. `driver` is the version line of
/// the GPU driver.
#[cfg(feature = "rdma")]
fn gpu_memory(driver: Option<&str>, knows_dmabuf: impl Fn() -> Result<(), String>) -> Option<Finding> {
    let does_not = |why: &str, advice| {
        Finding::note(GROUP, format!("KV on a GPU cannot be sent over rdma: {why}"), advice)
    };
    let driver = driver?;
    Some(match knows_dmabuf() {
        Err(why) => does_not(&why, "install rdma-core 34 or later"),
        Ok(()) if !driver.contains("Open Kernel Module") => {
            let advice =
                "install the driver with open kernel modules, which share GPU memory with other devices";
            does_not(&format!("the driver is {driver}"), advice)
        }
        Ok(()) => Finding::note(
            GROUP,
            "rdma may be able to send KV on a GPU (dmabuf)",
            "a node reports at its start whether the RDMA device's driver supports it",
        ),
    })
}

/// Checks the RDMA devices in this folder. `opens` opens a device by its name, and returns the reason if that
/// fails.
#[cfg(feature = "rdma")]
fn look_in(devices: &Path, opens: impl Fn(&str) -> Result<(), String>) -> Vec<Finding> {
    let devices = folders(devices);
    if devices.is_empty() {
        return vec![Finding::note(GROUP, "no RDMA devices", "KV between hosts goes over tcp")];
    }
    devices.iter().flat_map(|device| look_at(device, &opens)).collect()
}

#[cfg(feature = "rdma")]
fn look_at(device: &Path, opens: &impl Fn(&str) -> Result<(), String>) -> Vec<Finding> {
    let name = name_of(device);
    if let Err(why) = opens(&name) {
        let advice = "install libibverbs1 and ibverbs-providers (rdma-core); give a container /dev/infiniband, in Kubernetes by a device plugin";
        return vec![Finding::warn(GROUP, format!("{name} cannot be used: {why}"), advice)];
    }
    folders(&device.join("ports")).iter().map(|port| describe(&name, port)).collect()
}

#[cfg(feature = "rdma")]
fn describe(device: &str, port: &Path) -> Finding {
    let number = name_of(port);
    let name = format!("{device} port {number}");
    if !is_up(port) {
        let advice = "bring the link up (`rdma link`, `ip link`)";
        return Finding::warn(GROUP, format!("{name} is {}", state(port)), advice);
    }
    let link = link_layer(port);
    match best_gid(port) {
        Some(gid) => Finding::ok(
            GROUP,
            format!(
                "{name} is active on {link}, GID {} {} ({}): expert.transfer.rdma_device = \"{device}:{number}:{}\"",
                gid.index, gid.text, gid.kind, gid.index
            ),
        ),
        None => Finding::warn(
            GROUP,
            format!("{name} is active on {link} and has no routable GID"),
            "give its network interface an IP address (RoCE v2 takes its GID from it)",
        ),
    }
}

#[cfg(all(test, feature = "rdma"))]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    fn put(port: &Path, file: &str, text: &str) {
        let file = port.join(file);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        std::fs::write(file, text).expect("written");
    }

    #[test]
    fn ports_are_described() {
        let class = tempfile::tempdir().expect("a folder");
        let look_in = |class| look_in(class, |_| Ok(()));
        assert_eq!(look_in(class.path())[0].found, "no RDMA devices");
        let port = class.path().join("mlx5_0/ports/1");
        put(&port, "state", "4: ACTIVE\n");
        put(&port, "link_layer", "Ethernet\n");
        put(&port, "gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        assert_eq!(look_in(class.path())[0].level, Level::Warn);
        put(&port, "gids/1", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
        put(&port, "gid_attrs/types/1", "IB/RoCE v1\n");
        put(&port, "gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
        put(&port, "gid_attrs/types/3", "RoCE v2\n");
        let found = look_in(class.path());
        assert_eq!(
            found[0].found,
            "mlx5_0 port 1 is active on Ethernet, GID 3 0000:0000:0000:0000:0000:ffff:0a00:0001 (RoCE v2): \
             expert.transfer.rdma_device = \"mlx5_0:1:3\""
        );
        put(&port, "state", "1: DOWN\n");
        assert!(look_in(class.path())[0].found.contains("DOWN"));
    }

    #[test]
    fn whether_gpu_memory_can_be_registered_is_said_with_the_reason() {
        let (open, closed) =
            ("NVIDIA UNIX Open Kernel Module for x86_64  580.1", "NVIDIA UNIX x86_64 Kernel Module  580.1");
        assert!(gpu_memory(None, || Ok(())).is_none(), "there is no GPU");
        let found = |driver, knows: Result<(), &str>| {
            gpu_memory(Some(driver), || knows.map_err(str::to_owned)).expect("there is a GPU").found
        };
        assert_eq!(found(open, Ok(())), "rdma may be able to send KV on a GPU (dmabuf)");
        assert!(found(closed, Ok(())).contains("the driver is NVIDIA UNIX x86_64"));
        assert!(found(open, Err("libibverbs is too old")).contains("libibverbs is too old"));
    }

    #[test]
    fn a_device_that_does_not_open_is_said_with_the_reason() {
        let class = tempfile::tempdir().expect("a folder");
        put(&class.path().join("mlx5_0/ports/1"), "state", "4: ACTIVE\n");
        let found = look_in(class.path(), |_| Err("libibverbs is not installed".to_owned()));
        assert_eq!(found[0].level, Level::Warn);
        assert_eq!(found[0].found, "mlx5_0 cannot be used: libibverbs is not installed");
    }
}
