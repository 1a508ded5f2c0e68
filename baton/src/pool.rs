//! `baton pool`: config, telemetry, bind, wait for the model, announce, serve, wait, drain.

use std::process::ExitCode;
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::{Gate, telemetry};
use node::NodeError;
use pool_node::{Life, PoolConfig, RawPoolConfig, live};
use registry::RegistryParts;
use tracing::info;
use types::Role;

use crate::cli::ProcessArgs;
use crate::config_file::ConfigFile;
use crate::exit::CommandError;
use crate::identity;
use crate::node::bind;

/// The longest wait for the registry to remove the node.
const REGISTRY_CLOSE_WITHIN: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &ProcessArgs) -> Result<ExitCode, CommandError> {
    let raw: RawPoolConfig =
        chassis::config::load(args.config.as_deref(), std::env::vars()).map_err(CommandError::usage)?;
    let config = PoolConfig::resolve(raw).map_err(CommandError::usage)?;
    identity::check_pool(&config).map_err(CommandError::usage)?;
    if args.check {
        return ConfigFile::Pool(Box::new(config)).is_valid();
    }
    let _telemetry = telemetry::init(Role::Pool.as_str(), &config.log).map_err(CommandError::start)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CommandError::start)?;
    runtime.block_on(serve(&config, args))
}

async fn serve(config: &PoolConfig, args: &ProcessArgs) -> Result<ExitCode, CommandError> {
    let shutdown = args.shutdown()?;
    let (world, named) = identity::of_node(&config.cluster, &config.tls, Role::Pool, config.id.as_ref())?;
    let _certificates = identity::follow_certificates(&world);
    let grpc = bind(&world, &config.listen).await?;
    let admin = bind(&world, &config.admin).await?;
    let bound = grpc.local_addr().map_err(CommandError::start)?;
    let id = named.unwrap_or_else(|| node::host::default_id(Role::Pool, bound));
    let announcing = Gate::new("registry");
    let parts = RegistryParts { world: world.clone(), gate: announcing.clone() };
    let registry = registry::open(&config.registry_url, parts).map_err(CommandError::usage)?;
    let metrics = Metrics::of_node(Role::Pool.as_str());
    let life = Life { config, id, world, metrics, registry: &*registry, shutdown, grpc, admin };
    let ended = live(life).await;
    let _ = announcing.close(REGISTRY_CLOSE_WITHIN).await;
    info!("pool node has stopped");
    ended.map(|()| ExitCode::SUCCESS).map_err(|error| match error {
        pool_node::PoolNodeError::Node(NodeError::Drain(_)) => CommandError::drain(error),
        error => CommandError::start(error),
    })
}
