//! The identity of a process in its cluster, and whether it may listen on its configured addresses.

use chassis::World;
use chassis::identity::settings::{ClusterSection, IdentityError};
use node::NodeConfig;
use pool_node::PoolConfig;
use router::RouterConfig;

use crate::exit::Failed;
use crate::process_file::ProcessFile;

/// Makes the world of a process, with the cluster's secret if one is set.
pub(crate) fn world(cluster: &ClusterSection) -> Result<World, Failed> {
    Ok(World::real().with_identity(cluster.identity().map_err(Failed::start)?))
}

/// Refuses a process that other machines can reach and that does not authenticate callers.
pub(crate) fn check(process: &ProcessFile) -> Result<(), IdentityError> {
    match process {
        ProcessFile::Router(config) => check_router(config),
        ProcessFile::Node(config) => check_node(config),
        ProcessFile::Pool(config) => check_pool(config),
    }
}

/// Refuses a node that other machines can reach and that does not authenticate callers.
pub(crate) fn check_node(config: &NodeConfig) -> Result<(), IdentityError> {
    let transfer = &config.transfer;
    config.cluster.check(&[
        ("node.listen", &config.listen),
        ("transfer.listen", &transfer.listen),
        ("transfer.rdma_listen", &transfer.rdma_listen),
    ])
}

/// Refuses a pool node that other machines can reach and that does not authenticate callers.
pub(crate) fn check_pool(config: &PoolConfig) -> Result<(), IdentityError> {
    let transfer = &config.transfer;
    config.cluster.check(&[
        ("node.listen", &config.listen),
        ("transfer.listen", &transfer.listen),
        ("transfer.rdma_listen", &transfer.rdma_listen),
    ])
}

/// Refuses a router that other machines can reach and that does not authenticate nodes. Its HTTP port is not
/// checked, because it is for clients.
pub(crate) fn check_router(config: &RouterConfig) -> Result<(), IdentityError> {
    config.cluster.check(&[("router.grpc", &config.grpc)])
}
