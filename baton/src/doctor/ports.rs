//! Checks whether the process can listen on its configured addresses.

use std::io::ErrorKind;
use std::net::TcpListener;

use node::config::JOIN;

use crate::config_file::ConfigFile;

use super::finding::Finding;
use super::join;

const GROUP: &str = "ports";

/// Checks that the addresses are free, by listening on each of them briefly. A process that joins a head does not listen
/// where the head waits.
pub(super) fn look(process: &ConfigFile) -> Vec<Finding> {
    let listening = process.listening().into_iter();
    let own = listening.filter(|(setting, _)| *setting != JOIN || join::is_head());
    own.map(|(setting, addr)| port(setting, addr)).collect()
}

fn port(setting: &str, addr: &str) -> Finding {
    match TcpListener::bind(addr) {
        Ok(_) if addr.ends_with(":0") => Finding::ok(GROUP, format!("{setting} {addr}: takes a free port")),
        Ok(_) => Finding::ok(GROUP, format!("{setting} {addr}: free")),
        Err(error) => {
            Finding::bad(GROUP, format!("{setting} {addr}: {error}"), advice(setting, error.kind()))
        }
    }
}

fn advice(setting: &str, kind: ErrorKind) -> String {
    match kind {
        ErrorKind::AddrInUse => {
            format!(
                "another process listens there: stop it (`ss -ltnp` shows it), or set {setting} to another port"
            )
        }
        ErrorKind::PermissionDenied => {
            format!("ports below 1024 need CAP_NET_BIND_SERVICE: set {setting} to a higher one")
        }
        ErrorKind::AddrNotAvailable => {
            format!(
                "this machine does not have that address: set {setting} to one of `ip addr`, or to 0.0.0.0"
            )
        }
        _ => format!("set {setting} to `host:port` of this machine"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_taken_port_is_named_with_what_to_do() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = taken.local_addr().expect("bound").to_string();
        let found = port("router.http", &addr);
        assert_eq!(found.level, Level::Bad);
        assert!(found.found.contains(&addr), "{found:?}");
        assert!(found.advice.contains("router.http"), "{found:?}");
        drop(taken);
        assert_eq!(port("router.http", &addr).level, Level::Ok);
    }

    #[test]
    fn an_address_of_another_machine_is_named() {
        let found = port("node.listen", "192.0.2.1:7000");
        assert_eq!(found.level, Level::Bad);
        assert!(found.advice.contains("does not have that address"), "{found:?}");
    }
}
