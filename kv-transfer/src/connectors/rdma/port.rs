//! Selects the RDMA port, and its address, for KV.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use device::verbs::Device;
use types::in_full;

use crate::error::TransferError;
use crate::landing::bad_request;

/// The system's list of RDMA devices.
pub const DEVICES: &str = "/sys/class/infiniband";

/// One port of one device, and one of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAt {
    pub device: String,
    pub port: u8,
    /// The address of the port: an index into its table of GIDs.
    pub gid_index: u8,
}

/// One entry of a port's table of GIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    pub index: u8,
    pub text: String,
    /// The kind of address: `RoCE v2`, `IB/RoCE v1`.
    pub kind: String,
}

/// The configured device and, if given, its port and address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedPort {
    device: Option<String>,
    port: Option<u8>,
    gid_index: Option<u8>,
}

impl WantedPort {
    /// Parses `device`, `device:port` or `device:port:gid`; an empty text is any port.
    pub fn parse(text: &str) -> Result<Self, TransferError> {
        let wrong = || bad_request(&format!("{text:?} is not device:port:gid, as in mlx5_0:1:3"));
        let mut parts = text.split(':');
        let device = parts.next().filter(|name| !name.is_empty()).map(str::to_owned);
        let mut number = || parts.next().map(|part| part.parse().map_err(|_| wrong())).transpose();
        let (port, gid_index) = (number()?, number()?);
        let is_half = device.is_none() && !text.is_empty();
        if is_half || parts.next().is_some() {
            return Err(wrong());
        }
        Ok(Self { device, port, gid_index })
    }

    /// Returns the first port that matches, is up, and has an address.
    pub fn find(&self, devices: &Path) -> Result<PortAt, TransferError> {
        let device = |path: &PathBuf| self.device.as_ref().is_none_or(|name| name_of(path) == *name);
        let ports =
            folders(devices).into_iter().filter(device).flat_map(|device| folders(&device.join("ports")));
        let mut seen = 0;
        for port in ports.filter(|port| self.port.is_none_or(|wanted| name_of(port) == wanted.to_string())) {
            seen += 1;
            if let Some(found) = self.at(&port) {
                return Ok(found);
            }
        }
        Err(bad_request(&self.why_none(seen)))
    }

    fn at(&self, port: &Path) -> Option<PortAt> {
        let gid_index = self.gid_index.or_else(|| best_gid(port).map(|gid| gid.index))?;
        let device = name_of(port.parent()?.parent()?);
        is_up(port).then(|| PortAt { device, port: name_of(port).parse().unwrap_or(1), gid_index })
    }

    fn why_none(&self, seen: usize) -> String {
        match (&self.device, seen) {
            (None, 0) => "there is no RDMA device on this machine".to_owned(),
            (Some(name), 0) => format!("there is no RDMA device {name} with such a port"),
            (_, _) => "no RDMA port is up and has a routable address".to_owned(),
        }
    }
}

/// Returns whether a port is up.
pub fn is_up(port: &Path) -> bool {
    state(port).contains("ACTIVE")
}

/// Returns the address to use: RoCE v2 with an IPv4 address if there is one, else any RoCE v2, else any that
/// is not empty.
pub fn best_gid(port: &Path) -> Option<Gid> {
    let mut all: Vec<Gid> = folders(&port.join("gids")).iter().filter_map(|path| gid(port, path)).collect();
    all.sort_by_key(|gid| gid.index);
    let second = |gid: &&Gid| gid.kind == "RoCE v2";
    let routable = |gid: &&Gid| second(gid) && is_ipv4(&gid.text);
    all.iter().find(routable).or_else(|| all.iter().find(second)).or_else(|| all.first()).cloned()
}

/// Returns whether a GID is an IPv4 address. Link-local GIDs have the device's hardware address in them, which can
/// contain any group of digits.
fn is_ipv4(gid: &str) -> bool {
    gid.parse::<Ipv6Addr>().is_ok_and(|gid| gid.to_ipv4_mapped().is_some())
}

fn gid(port: &Path, path: &Path) -> Option<Gid> {
    let index = name_of(path);
    let (text, kind) = (read(path), read(&port.join("gid_attrs/types").join(&index)));
    let is_empty = text.chars().all(|digit| matches!(digit, '0' | ':'));
    (!is_empty).then(|| Some(Gid { index: index.parse().ok()?, text, kind }))?
}

/// Returns the entries of a folder, sorted.
pub fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// Returns whether this process can use the device: the library is present, and the system permits it. The
/// error says why not.
pub fn opens(device: &str) -> Result<(), String> {
    Device::open(device).map(|_| ()).map_err(|error| in_full(&TransferError::rdma(error)))
}

/// Returns whether the library can register memory of other devices, such as GPUs. The error says why not.
pub fn knows_dmabuf() -> Result<(), String> {
    device::verbs::knows_dmabuf().map_err(|error| in_full(&TransferError::rdma(error)))
}

/// Returns the state of a port, such as `4: ACTIVE`. `port` is its folder, as in the other functions.
pub fn state(port: &Path) -> String {
    read(&port.join("state"))
}

/// Returns the link layer of a port: `Ethernet` or `InfiniBand`.
pub fn link_layer(port: &Path) -> String {
    read(&port.join("link_layer"))
}

/// Returns the last part of a path.
pub fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).map(|text| text.trim().to_owned()).unwrap_or_default()
}

impl fmt::Display for PortAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.device, self.port, self.gid_index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(port: &Path, file: &str, text: &str) {
        let file = port.join(file);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        std::fs::write(file, text).expect("written");
    }

    fn found(devices: &Path, wanted: &str) -> Result<String, String> {
        let wanted = WantedPort::parse(wanted).map_err(|error| error.to_string())?;
        wanted.find(devices).map(|port| port.to_string()).map_err(|error| error.to_string())
    }

    /// Writes the files of two devices: the first device is down on its first port.
    fn machine(devices: &Path) {
        for (port, state) in
            [("mlx5_0/ports/1", "1: DOWN"), ("mlx5_0/ports/2", "4: ACTIVE"), ("mlx5_1/ports/1", "4: ACTIVE")]
        {
            let port = devices.join(port);
            put(&port, "state", state);
            put(&port, "gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001");
            put(&port, "gid_attrs/types/0", "IB/RoCE v1");
            put(&port, "gids/1", "fe80:0000:0000:0000:0211:22ff:fe33:4455");
            put(&port, "gid_attrs/types/1", "RoCE v2");
            put(&port, "gids/2", "0000:0000:0000:0000:0000:0000:0000:0000");
            put(&port, "gids/10", "0000:0000:0000:0000:0000:ffff:0a00:0001");
            put(&port, "gid_attrs/types/10", "RoCE v2");
        }
    }

    #[test]
    fn the_first_port_that_is_up_is_taken_or_the_one_that_is_named() {
        let devices = tempfile::tempdir().expect("a folder");
        machine(devices.path());
        for (wanted, expected) in [
            ("", "mlx5_0:2:10"),
            ("mlx5_1", "mlx5_1:1:10"),
            ("mlx5_1:1", "mlx5_1:1:10"),
            ("mlx5_1:1:0", "mlx5_1:1:0"),
        ] {
            assert_eq!(found(devices.path(), wanted).expect("there is one"), expected, "{wanted}");
        }
        for (wanted, expected) in [
            ("mlx5_0:1", "no RDMA port is up"),
            ("mlx5_2", "no RDMA device mlx5_2"),
            ("mlx5_0:3", "no RDMA device mlx5_0"),
            ("mlx5_0:one", "is not device:port:gid"),
            ("mlx5_0:1:2:3", "is not device:port:gid"),
            (":1", "is not device:port:gid"),
        ] {
            let error = found(devices.path(), wanted).expect_err("there is none");
            assert!(error.contains(expected), "{wanted}: {error}");
        }
    }

    #[test]
    fn only_an_ipv4_address_is_one() {
        for (gid, expected) in [
            ("0000:0000:0000:0000:0000:ffff:0a00:0001", true),
            // The third byte of this hardware address is ff.
            ("fe80:0000:0000:0000:0211:ffff:fe33:4455", false),
            ("2001:0db8:0000:0000:0000:ffff:0a00:0001", false),
            ("", false),
        ] {
            assert_eq!(is_ipv4(gid), expected, "{gid}");
        }
    }

    #[test]
    fn a_machine_without_devices_says_so() {
        let error = found(Path::new("/nowhere"), "").expect_err("there is none");
        assert!(error.contains("there is no RDMA device on this machine"), "{error}");
    }
}
