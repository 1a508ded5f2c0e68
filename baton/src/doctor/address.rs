//! Whether others can reach a node at the address that it announces.

use node::NodeConfig;

use crate::process_file::ProcessFile;

use super::finding::Finding;

const GROUP: &str = "address";

pub(super) fn look(process: &ProcessFile) -> Vec<Finding> {
    match process {
        ProcessFile::Router(_) => Vec::new(),
        ProcessFile::Node(config) => vec![announced(config)],
    }
}

/// A node announces `node.advertise`, or else the address that it listens on.
fn announced(config: &NodeConfig) -> Finding {
    let listens_everywhere = |addr: &str| addr.starts_with("0.0.0.0:") || addr.starts_with("[::]:");
    match &config.advertise {
        Some(host) => Finding::ok(GROUP, format!("announces itself as {host}")),
        None if listens_everywhere(&config.listen) => Finding::bad(
            GROUP,
            format!("listens on {} and would announce that; nobody can connect to it", config.listen),
            "set node.advertise to this machine's address or name (in Kubernetes: BATON_NODE__ADVERTISE from status.podIP)",
        ),
        None if config.listen.starts_with("127.") || config.listen.starts_with("localhost:") => {
            Finding::note(
                GROUP,
                format!("announces {}: only this machine can connect to it", config.listen),
                "for nodes on other machines set node.listen to 0.0.0.0:PORT and node.advertise to this machine's address",
            )
        }
        None => Finding::ok(GROUP, format!("announces {}", config.listen)),
    }
}

#[cfg(test)]
mod tests {
    use node::RawNodeConfig;

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
            let mut raw = RawNodeConfig::default();
            raw.node.listen = listen.to_owned();
            raw.node.advertise = advertise.to_owned();
            let config = NodeConfig::resolve(raw).expect("it is valid");
            assert_eq!(announced(&config).level, level, "{listen} {advertise}");
        }
    }
}
