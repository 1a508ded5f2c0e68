//! `baton router`: config, telemetry, bind, serve, wait, drain.

use std::process::ExitCode;

use chassis::{Shutdown, telemetry};
use router::{RawRouterConfig, Router, RouterConfig};

use crate::cli::ProcessArgs;
use crate::config_file::ConfigFile;
use crate::exit::CommandError;
use crate::identity;
use crate::model;

pub(crate) fn run(args: &ProcessArgs) -> Result<ExitCode, CommandError> {
    let raw: RawRouterConfig =
        chassis::config::load(args.config.as_deref(), std::env::vars()).map_err(CommandError::usage)?;
    let config = RouterConfig::resolve(raw.clone()).map_err(CommandError::usage)?;
    identity::check_router(&config).map_err(CommandError::usage)?;
    if args.check {
        return ConfigFile::Router(Box::new(config)).is_valid();
    }
    let _telemetry = telemetry::init("router", &config.log).map_err(CommandError::start)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CommandError::start)?;
    runtime.block_on(async {
        let shutdown = args.shutdown()?;
        let config = with_model(raw, &shutdown).await?;
        let world = identity::of_router(&config.cluster, &config.tls)?;
        let _certificates = identity::follow_certificates(&world);
        let router = Router::bind(world, config).await.map_err(CommandError::start)?;
        router.serve(shutdown, std::future::ready(())).await.map_err(CommandError::drain)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the settings with the path of the model's folder. A model on a hub is downloaded meanwhile.
async fn with_model(mut raw: RawRouterConfig, shutdown: &Shutdown) -> Result<RouterConfig, CommandError> {
    let located = model::locate(&raw.model.path, &raw.model.name, shutdown).await?;
    (raw.model.path, raw.model.name) = (located.path, located.name);
    RouterConfig::resolve(raw).map_err(CommandError::usage)
}
