//! The addresses on which a process listens, each with the setting that names it.

use std::net::{IpAddr, Ipv6Addr};

/// The error of an address that no process can listen on, or not beside another of its addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{setting}`: {address:?} is not {wanted}")]
pub struct ListenError {
    pub setting: &'static str,
    pub address: String,
    pub wanted: String,
}

/// Checks that each address is `host:port`, and that no two of them are the same port of this machine. Resolves no names.
pub fn check_listening(listening: &[(&'static str, &str)]) -> Result<(), ListenError> {
    let mut ports: Vec<(&str, &str, u16)> = Vec::new();
    for (setting, address) in listening {
        let refused = |wanted| Err(ListenError { setting, address: (*address).to_owned(), wanted });
        let Some((host, port)) = host_and_port(address) else {
            return refused("`host:port`, such as 127.0.0.1:7000".to_owned());
        };
        let same = ports.iter().find(|(_, other, taken)| *taken == port && overlap(host, other));
        if let Some((other, ..)) = same.filter(|_| port != 0) {
            return refused(format!("free: `{other}` has the same port"));
        }
        ports.push((setting, host, port));
    }
    Ok(())
}

/// Divides `host:port`. The host is a name, an IPv4 address, or an IPv6 address in brackets, which are left out.
pub fn host_and_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_name = !host.is_empty() && host.bytes().all(is_plain);
    let in_brackets = || host.strip_prefix('[')?.strip_suffix(']').filter(|inside| is_ipv6(inside));
    let host = if is_name { host } else { in_brackets()? };
    Some((host, port.parse().ok()?))
}

/// Returns whether the text is an IPv6 address, perhaps with an interface: `fe80::1%eth0`.
fn is_ipv6(text: &str) -> bool {
    text.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

/// Returns whether a port of one host is a port of the other too: of all addresses of a machine, for instance.
fn overlap(one: &str, other: &str) -> bool {
    let address = |host: &str| host.replace("localhost", "127.0.0.1").parse::<IpAddr>().ok();
    match (address(one), address(other)) {
        (Some(one), Some(other)) => one == other || one.is_unspecified() || other.is_unspecified(),
        (Some(all), None) | (None, Some(all)) => all.is_unspecified(),
        (None, None) => one == other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(first: &str, second: &str) -> Option<String> {
        let checked = check_listening(&[("node.listen", first), ("node.admin", second)]);
        checked.err().map(|error| error.to_string())
    }

    #[test]
    fn addresses_are_host_and_port() {
        for right in [
            "127.0.0.1:7000",
            "0.0.0.0:0",
            "[::1]:7000",
            "localhost:1",
            "node-1.nodes:65535",
            "[fe80::1%eth0]:7000",
        ] {
            assert_eq!(refusal(right, "127.0.0.1:0"), None, "{right}");
        }
        for wrong in [
            "7000",
            ":7000",
            "",
            "localhost",
            "127.0.0.1:",
            "127.0.0.1:70000",
            "[::1]",
            "[::1:7",
            "::1:7",
            "[node]:7",
            "http://node:7",
        ] {
            let said = refusal(wrong, "127.0.0.1:0").expect(wrong);
            let wanted = format!("`node.listen`: {wrong:?} is not `host:port`, such as 127.0.0.1:7000");
            assert_eq!(said, wanted);
        }
    }

    #[test]
    fn two_settings_with_one_port_collide() {
        for (first, second) in [
            ("127.0.0.1:7000", "127.0.0.1:7000"),
            ("127.0.0.1:7000", "0.0.0.0:7000"),
            ("[::]:7000", "10.0.0.5:7000"),
            ("localhost:7000", "127.0.0.1:7000"),
            ("node-1:7000", "node-1:7000"),
            ("node-1:7000", "0.0.0.0:7000"),
        ] {
            let said = refusal(first, second).expect(second);
            let wanted = format!("`node.admin`: {second:?} is not free: `node.listen` has the same port");
            assert_eq!(said, wanted);
        }
        for (first, second) in [
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("127.0.0.1:7000", "127.0.0.1:7001"),
            ("127.0.0.1:7000", "10.0.0.5:7000"),
            ("127.0.0.1:7000", "[::1]:7000"),
        ] {
            assert_eq!(refusal(first, second), None, "{first} and {second}");
        }
    }
}
