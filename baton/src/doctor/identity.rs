//! Checks whether the process can prove its identity to the cluster.

use chassis::World;
use chassis::identity::settings::IdentityError;
use types::in_full;

use crate::config_file::ConfigFile;
use crate::identity;

use super::certificate;
use super::finding::Finding;

const GROUP: &str = "identity";

/// Checks the cluster's secret. Returns the world for the other checks, with the secret if it can be read.
pub(super) fn look(process: &ConfigFile) -> (World, Vec<Finding>) {
    let cluster = process.cluster();
    let identity = match cluster.identity(process.tls()) {
        Ok(identity) => identity,
        Err(IdentityError::Tls(error)) => return (World::real(), vec![certificate::unusable(&error)]),
        Err(error) => {
            let advice = "create the file that `cluster.secret_file` names, with the same content on all machines of the cluster";
            return (World::real(), vec![Finding::bad(GROUP, in_full(&error), advice)]);
        }
    };
    let world = World::real().with_identity(identity);
    let finding = match identity::check(process) {
        Err(error) => Finding::bad(GROUP, in_full(&error), "set one of the two settings"),
        Ok(()) if cluster.insecure && !process.tls().is_set() => Finding::warn(
            GROUP,
            "cluster.insecure = true: every machine that reaches the ports can read and change prompts",
            "set cluster.secret_file or the files of [tls], and cluster.insecure = false",
        ),
        Ok(()) if world.identity().secret().is_some() => {
            Finding::ok(GROUP, "callers are authenticated with the cluster's secret")
        }
        Ok(()) if world.identity().tls().is_some() => {
            Finding::ok(GROUP, "callers are authenticated with certificates")
        }
        Ok(()) => {
            Finding::ok(GROUP, "only this machine reaches the ports, and callers are not authenticated")
        }
    };
    let findings = std::iter::once(finding).chain(certificate::look(process, &world)).collect();
    (world, findings)
}
