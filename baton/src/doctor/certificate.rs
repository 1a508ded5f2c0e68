//! Checks this process's certificate as its peers do.

use std::time::Duration;

use chassis::World;
use chassis::identity::TlsFileError;
use types::{Role, in_full};

use crate::config_file::ConfigFile;
use crate::identity::{check_node_certificate, check_rank_certificate, check_router_certificate};

use super::finding::Finding;

const GROUP: &str = "tls";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// A certificate that is valid for a shorter time should have been renewed.
const RENEW_BEFORE: Duration = DAY.saturating_mul(7);

/// Nothing without `[tls]`.
pub(super) fn look(process: &ConfigFile, world: &World) -> Option<Finding> {
    let tls = world.identity().tls()?;
    let now = world.unix_time();
    if let Err(error) = tls.check(now).and_then(|()| role(process, world)) {
        return Some(unusable(&error));
    }
    let name = tls.name();
    let left = tls.not_after().map_or(Duration::ZERO, |end| end.saturating_sub(now));
    let found = format!("tls.cert names {name} and is valid for {} days", left.as_secs() / DAY.as_secs());
    Some(match left < RENEW_BEFORE {
        true => {
            Finding::warn(GROUP, found, "renew it: running processes read the new files without a restart")
        }
        false => Finding::ok(GROUP, found),
    })
}

/// The command of a node decides its role, so a node's file suits each of the three.
fn role(process: &ConfigFile, world: &World) -> Result<(), TlsFileError> {
    let identity = world.identity();
    match process {
        ConfigFile::Router(_) => check_router_certificate(identity),
        ConfigFile::Pool(config) => {
            check_node_certificate(identity, Role::Pool, config.id.as_ref()).map(drop)
        }
        ConfigFile::Node(config) => check_rank_certificate(identity, config.id.as_ref()),
    }
}

/// The finding for a file or a certificate that peers would refuse.
pub(super) fn unusable(error: &TlsFileError) -> Finding {
    Finding::bad(GROUP, in_full(error), advice(error))
}

fn advice(error: &TlsFileError) -> &'static str {
    match error {
        TlsFileError::Incomplete { .. } => "set all three files, or none",
        TlsFileError::Read { .. } => "create the file, and let the user of this process read it",
        TlsFileError::Content { .. } => {
            "write PEM: certificates in `tls.ca` and `tls.cert`, a PKCS #8 key in `tls.key`"
        }
        TlsFileError::OtherKey => "copy the certificate and the key of one request",
        TlsFileError::Unnamed => {
            "issue it with the URI name baton://CLUSTER/ROLE/NODE, as `baton certs` does"
        }
        TlsFileError::Expired => "renew the certificate, and synchronize the clock",
        TlsFileError::Authority => {
            "set `tls.ca` to the CA that signed this cluster's certificates, and add intermediate ones to `tls.cert`"
        }
        TlsFileError::Certificate(_) => "issue it for server and client authentication",
        TlsFileError::Role { .. } => "use a certificate for the role of this process",
        TlsFileError::Node { .. } => {
            "use this node's certificate, or leave `node.id` empty: the certificate then names the node"
        }
        TlsFileError::Renamed { .. } => "restart the process",
    }
}
