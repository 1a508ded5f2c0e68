//! `baton rank`: a further process of a prefill node of several.

use std::process::ExitCode;

use chassis::admin::Readiness;
use chassis::metrics::Metrics;
use chassis::{Gate, Shutdown, telemetry};
use kv_transfer::TransferMetrics;
use node::group::{FollowerParts, follow};
use node::{NodeConfig, NodeError, Ports, RawNodeConfig};
use tracing::info;
use types::Role;

use crate::cli::RankArgs;
use crate::config_file::ConfigFile;
use crate::exit::CommandError;
use crate::identity;
use crate::node::{bind, with_model};

/// The name of this kind of process in logs and metrics.
const NAME: &str = "rank";

pub(crate) fn run(args: &RankArgs) -> Result<ExitCode, CommandError> {
    let raw: RawNodeConfig = chassis::config::load(args.process.config.as_deref(), std::env::vars())
        .map_err(CommandError::usage)?;
    let config = NodeConfig::resolve(raw.clone()).map_err(CommandError::usage)?;
    identity::check_node(&config).map_err(CommandError::usage)?;
    if args.process.check {
        return ConfigFile::Node(Box::new(config)).is_valid();
    }
    if config.group.n_processes < 2 {
        let why = "expert.model.processes is 1: a node of one process has no others";
        return Err(CommandError::usage(NodeError::Config(why.to_owned())));
    }
    let _telemetry = telemetry::init(NAME, &config.log).map_err(CommandError::start)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CommandError::start)?;
    runtime.block_on(async {
        let shutdown = match args.process.stop_with_stdin {
            true => Shutdown::from_signals_and_stdin(),
            false => Shutdown::from_signals(),
        };
        let shutdown = shutdown.map_err(CommandError::start)?;
        serve(&with_model(raw, &shutdown).await?, args, shutdown).await
    })
}

async fn serve(config: &NodeConfig, args: &RankArgs, shutdown: Shutdown) -> Result<ExitCode, CommandError> {
    let (world, _) = identity::of_node(&config.cluster, &config.tls, Role::Prefill, config.id.as_ref())?;
    let _certificates = identity::follow_certificates(&world);
    let metrics = Metrics::of_node(NAME);
    let readiness = Readiness::unready("waiting for the head");
    let pages = chassis::admin::router(readiness.clone(), metrics.clone());
    let ports = Ports::admin(bind(&world, &config.admin).await?, pages, config.connections);
    let parts = FollowerParts {
        world,
        gate: Gate::new("follower"),
        config,
        head: args.of.clone(),
        place: args.place,
        metrics: TransferMetrics::new(&metrics),
        readiness,
    };
    let ended = follow(parts, shutdown).await;
    ports.close().await;
    info!("process has stopped");
    ended.map(|()| ExitCode::SUCCESS).map_err(|error| CommandError::work(NodeError::Group(error)))
}
