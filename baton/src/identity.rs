//! The identity of a process in its cluster, and whether it may listen on its configured addresses.

use chassis::identity::settings::{ClusterSection, IdentityError, TlsSection};
use chassis::identity::{CertRole, Identity, TlsFileError};
use chassis::{Gate, Task, World, spawn_guarded};
use node::NodeConfig;
use pool_node::PoolConfig;
use router::RouterConfig;
use types::{NodeId, Role};

use crate::config_file::ConfigFile;
use crate::exit::CommandError;

/// The world of a router of this cluster, with the cluster's secret and the router's certificate, as far as they are set.
pub(crate) fn of_router(cluster: &ClusterSection, tls: &TlsSection) -> Result<World, CommandError> {
    let world = world(cluster, tls)?;
    check_router_certificate(world.identity()).map_err(CommandError::start)?;
    Ok(world)
}

/// The same for a node. Returns also its name: `node.id`, or the one in the certificate; `None`: neither names it.
pub(crate) fn of_node(
    cluster: &ClusterSection,
    tls: &TlsSection,
    role: Role,
    id: Option<&NodeId>,
) -> Result<(World, Option<NodeId>), CommandError> {
    let world = world(cluster, tls)?;
    let named = check_node_certificate(world.identity(), role, id).map_err(CommandError::start)?;
    Ok((world, named))
}

/// The same for a further process of a node with several processes. It shows the certificate of its node. Its
/// settings do not contain the node's role.
pub(crate) fn of_rank(
    cluster: &ClusterSection,
    tls: &TlsSection,
    id: Option<&NodeId>,
) -> Result<World, CommandError> {
    let world = world(cluster, tls)?;
    check_rank_certificate(world.identity(), id).map_err(CommandError::start)?;
    Ok(world)
}

fn world(cluster: &ClusterSection, tls: &TlsSection) -> Result<World, CommandError> {
    let world = World::real().with_identity(cluster.identity(tls).map_err(CommandError::start)?);
    if let Some(tls) = world.identity().tls() {
        tls.check(world.unix_time()).map_err(CommandError::start)?;
    }
    Ok(world)
}

/// Takes over changed certificates for as long as the task is held.
pub(crate) fn follow_certificates(world: &World) -> Option<Task<()>> {
    let tls = world.identity().tls()?.clone();
    Some(spawn_guarded(&Gate::new("certificates"), "certificates", tls.follow(world.clone())))
}

/// Refuses a certificate of another role.
pub(crate) fn check_router_certificate(identity: &Identity) -> Result<(), TlsFileError> {
    match identity.tls().map(|tls| tls.name()) {
        Some(name) if name.role != CertRole::Router => Err(TlsFileError::Role { name, role: "router" }),
        _ => Ok(()),
    }
}

/// Refuses a certificate of another role, or of another node than `id`. Returns the node's name.
pub(crate) fn check_node_certificate(
    identity: &Identity,
    role: Role,
    id: Option<&NodeId>,
) -> Result<Option<NodeId>, TlsFileError> {
    let Some(name) = identity.tls().map(|tls| tls.name()) else { return Ok(id.cloned()) };
    if !name.role.covers(role) {
        return Err(TlsFileError::Role { name, role: role.as_str() });
    }
    match id {
        Some(id) if !name.is_for(role, id) => Err(TlsFileError::Node { name, id: id.to_string() }),
        Some(id) => Ok(Some(id.clone())),
        None => Ok(name.node().map(NodeId::new)),
    }
}

/// Refuses a certificate of a process that computes no model, or of another node than `id`.
pub(crate) fn check_rank_certificate(identity: &Identity, id: Option<&NodeId>) -> Result<(), TlsFileError> {
    let Some(name) = identity.tls().map(|tls| tls.name()) else { return Ok(()) };
    match [Role::Prefill, Role::Decode].into_iter().find(|role| name.role.covers(*role)) {
        Some(role) => check_node_certificate(identity, role, id).map(drop),
        None => Err(TlsFileError::Role { name, role: "prefill or decode node" }),
    }
}

/// Refuses a process that other machines can reach and that does not authenticate callers.
pub(crate) fn check(process: &ConfigFile) -> Result<(), IdentityError> {
    match process {
        ConfigFile::Router(config) => check_router(config),
        ConfigFile::Node(config) => check_node(config),
        ConfigFile::Pool(config) => check_pool(config),
    }
}

/// Refuses a node that other machines can reach and that does not authenticate callers. Its admin port is not checked,
/// because it has a key of its own.
pub(crate) fn check_node(config: &NodeConfig) -> Result<(), IdentityError> {
    let listening = without_admin(config.listening());
    config.cluster.check(&config.tls, Some(&config.registry_url), &listening)
}

/// The same for a pool node.
pub(crate) fn check_pool(config: &PoolConfig) -> Result<(), IdentityError> {
    let listening = without_admin(config.listening());
    config.cluster.check(&config.tls, Some(&config.registry_url), &listening)
}

fn without_admin<'a>(mut listening: Vec<(&'static str, &'a str)>) -> Vec<(&'static str, &'a str)> {
    listening.retain(|(setting, _)| *setting != "node.admin");
    listening
}

/// Refuses a router that other machines can reach and that does not authenticate nodes. Its HTTP port is not
/// checked, because it is for clients.
pub(crate) fn check_router(config: &RouterConfig) -> Result<(), IdentityError> {
    let listening = [("router.grpc", &*config.grpc)];
    config.cluster.check(&config.tls, config.registry_url.as_deref(), &listening)
}
