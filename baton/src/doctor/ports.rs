//! Checks whether the process can listen on its configured addresses.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::TcpListener;

use crate::config_file::ConfigFile;

use super::finding::Finding;
use super::join;

const GROUP: &str = "ports";

pub(super) fn look(process: &ConfigFile) -> Vec<Finding> {
    let mut listens: Vec<(&str, &str)> = match process {
        ConfigFile::Router(config) => vec![
            ("router.http", &config.http),
            ("router.admin", &config.admin),
            ("router.grpc", &config.grpc),
        ],
        ConfigFile::Node(config) => vec![
            ("node.listen", &config.listen),
            ("node.admin", &config.admin),
            ("transfer.listen", &config.transfer.listen),
        ],
        ConfigFile::Pool(config) => vec![
            ("node.listen", &config.listen),
            ("node.admin", &config.admin),
            ("transfer.listen", &config.transfer.listen),
        ],
    };
    if let Some(join) = join::listens(process) {
        listens.push(("expert.model.join", join));
    }
    check(&listens)
}

/// Checks that the addresses are free, by listening on all of them briefly.
fn check(listens: &[(&str, &str)]) -> Vec<Finding> {
    let mut taken = BTreeMap::new();
    listens.iter().map(|(setting, addr)| port(setting, addr, &mut taken)).collect()
}

/// Checks one address. `taken` has the listeners of the settings before it, by port.
fn port<'a>(setting: &'a str, addr: &str, taken: &mut BTreeMap<u16, (&'a str, TcpListener)>) -> Finding {
    let listener = match TcpListener::bind(addr) {
        Ok(listener) => listener,
        Err(error) => {
            let port = addr.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
            let other =
                port.and_then(|port: u16| taken.get(&port)).filter(|_| error.kind() == ErrorKind::AddrInUse);
            return match other {
                Some((other, _)) => Finding::bad(
                    GROUP,
                    format!("{setting} {addr}: {other} has the same port"),
                    format!("set {setting} or {other} to another port"),
                ),
                None => {
                    Finding::bad(GROUP, format!("{setting} {addr}: {error}"), advice(setting, error.kind()))
                }
            };
        }
    };
    if let Ok(bound) = listener.local_addr() {
        taken.insert(bound.port(), (setting, listener));
    }
    let found = if addr.ends_with(":0") { "takes a free port" } else { "free" };
    Finding::ok(GROUP, format!("{setting} {addr}: {found}"))
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

    fn only(setting: &str, addr: &str) -> Finding {
        check(&[(setting, addr)]).pop().expect("a finding")
    }

    #[test]
    fn two_settings_with_one_port_collide() {
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound").port();
        let (near, all, own) = (format!("127.0.0.1:{free}"), format!("0.0.0.0:{free}"), "127.0.0.1:0");
        for (first, second, level) in [
            (&*near, &*near, Level::Bad),
            (&*near, &*all, Level::Bad),
            (&*all, &*near, Level::Bad),
            (own, own, Level::Ok),
        ] {
            let found = check(&[("router.http", first), ("router.admin", second)]);
            assert_eq!((found[0].level, found[1].level), (Level::Ok, level), "{found:?}");
            assert_eq!(
                found[1].advice.contains("router.admin or router.http"),
                level == Level::Bad,
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_taken_port_is_named_with_what_to_do() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = taken.local_addr().expect("bound").to_string();
        let found = only("router.http", &addr);
        assert_eq!(found.level, Level::Bad);
        assert!(found.found.contains(&addr), "{found:?}");
        assert!(found.advice.contains("router.http"), "{found:?}");
        drop(taken);
        assert_eq!(only("router.http", &addr).level, Level::Ok);
    }

    #[test]
    fn an_address_of_another_machine_is_named() {
        let found = only("node.listen", "192.0.2.1:7000");
        assert_eq!(found.level, Level::Bad);
        assert!(found.advice.contains("does not have that address"), "{found:?}");
    }
}
