//! RDMA devices, their ports, and the GID by which a peer would reach them.
//!
//! This version has no rdma connector. What is there is said all the same, so that a machine can be made ready.

use std::path::{Path, PathBuf};

use super::finding::Finding;

const GROUP: &str = "rdma";
const NO_CONNECTOR: &str = "this version has no rdma connector; KV goes over tcp";

pub(super) fn look() -> Vec<Finding> {
    look_in(Path::new("/sys/class/infiniband"))
}

fn look_in(class: &Path) -> Vec<Finding> {
    let ports: Vec<PathBuf> =
        folders(class).into_iter().flat_map(|device| folders(&device.join("ports"))).collect();
    if ports.is_empty() {
        return vec![Finding::note(GROUP, "no RDMA devices", NO_CONNECTOR)];
    }
    ports.iter().map(|port| describe(port)).collect()
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn describe(port: &Path) -> Finding {
    let name = name_of(port);
    let (state, link) = (read(&port.join("state")), read(&port.join("link_layer")));
    if !state.contains("ACTIVE") {
        let advice = format!("bring the link up (`rdma link`, `ip link`); {NO_CONNECTOR}");
        return Finding::warn(GROUP, format!("{name} is {state}"), advice);
    }
    match gid(port) {
        Some((index, gid, kind)) => Finding::note(
            GROUP,
            format!("{name} is active on {link}, GID {index} {gid} ({kind})"),
            NO_CONNECTOR,
        ),
        None => Finding::warn(
            GROUP,
            format!("{name} is active on {link} and has no GID that a peer could route to"),
            format!(
                "give its network interface an IP address (RoCE v2 takes its GID from it); {NO_CONNECTOR}"
            ),
        ),
    }
}

/// `mlx5_0 port 1`.
fn name_of(port: &Path) -> String {
    let part = |path: Option<&Path>| {
        path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let device = port.parent().and_then(Path::parent);
    format!("{} port {}", part(device), part(Some(port)))
}

/// The GID to use: RoCE v2 with an IPv4 address if there is one, else any RoCE v2, else any that is not empty.
fn gid(port: &Path) -> Option<(String, String, String)> {
    let all: Vec<(String, String, String)> = folders(&port.join("gids"))
        .iter()
        .filter_map(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
        .map(|index| {
            let kind = read(&port.join("gid_attrs/types").join(&index));
            (index.clone(), read(&port.join("gids").join(&index)), kind)
        })
        .filter(|(_, gid, _)| gid.chars().any(|digit| !matches!(digit, '0' | ':')))
        .collect();
    let routable = |(_, gid, kind): &&(String, String, String)| kind == "RoCE v2" && gid.contains(":ffff:");
    let second = |(_, _, kind): &&(String, String, String)| kind == "RoCE v2";
    all.iter().find(routable).or_else(|| all.iter().find(second)).or_else(|| all.first()).cloned()
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).map(|text| text.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
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
            "mlx5_0 port 1 is active on Ethernet, GID 3 0000:0000:0000:0000:0000:ffff:0a00:0001 (RoCE v2)"
        );
        put(&port, "state", "1: DOWN\n");
        assert!(look_in(class.path())[0].found.contains("DOWN"));
    }
}
