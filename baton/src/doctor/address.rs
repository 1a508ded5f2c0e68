//! Checks whether other machines can reach a node at the address that it announces.

use crate::config_file::ConfigFile;

use super::finding::Finding;

const GROUP: &str = "address";

pub(super) fn look(process: &ConfigFile) -> Vec<Finding> {
    match process {
        ConfigFile::Router(_) => Vec::new(),
        ConfigFile::Node(config) => vec![announced(&config.listen, config.advertise.as_deref())],
        ConfigFile::Pool(config) => vec![announced(&config.listen, config.advertise.as_deref())],
    }
}

/// Checks the address that a node announces: `node.advertise`, or else the address that it listens on.
fn announced(listen: &str, advertise: Option<&str>) -> Finding {
    let listens_everywhere = |addr: &str| addr.starts_with("0.0.0.0:") || addr.starts_with("[::]:");
    match advertise {
        Some(host) => Finding::ok(GROUP, format!("announces itself as {host}")),
        None if listens_everywhere(listen) => Finding::bad(
            GROUP,
            format!(
                "listens on {} and would announce this address, to which no other host can connect",
                listen
            ),
            "set node.advertise to this machine's address or name (in Kubernetes: BATON_NODE__ADVERTISE from status.podIP)",
        ),
        None if listen.starts_with("127.") || listen.starts_with("localhost:") => Finding::note(
            GROUP,
            format!("announces {}: only this machine can connect to it", listen),
            "for nodes on other machines set node.listen to 0.0.0.0:PORT and node.advertise to this machine's address",
        ),
        None => Finding::ok(GROUP, format!("announces {}", listen)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn what_is_announced() {
        for (listen, advertise, level) in [
            ("127.0.0.1:0", "", Level::Note),
            ("0.0.0.0:7000", "", Level::Bad),
            ("[::]:7000", "", Level::Bad),
            ("0.0.0.0:7000", "10.0.0.5", Level::Ok),
            ("10.0.0.5:7000", "", Level::Ok),
        ] {
            let advertise = (!advertise.is_empty()).then_some(advertise);
            assert_eq!(announced(listen, advertise).level, level, "{listen} {advertise:?}");
        }
    }
}
