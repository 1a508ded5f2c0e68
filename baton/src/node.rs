//! `baton prefill`, `baton decode`, `baton both`: config, telemetry, build, bind, announce, serve, wait, drain.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::error::StartError;
use chassis::metrics::Metrics;
use chassis::{Gate, Listener, Shutdown, World, telemetry};
use decode_node::DecodeService;
use engine::Backend;
use node::group::{Group, HeadParts, gather};
use node::{
    DecodeExpertSettings, Drive, KeptListener, Lives, NodeConfig, NodeError, NodeParts, Ports, RawNodeConfig,
};
use prefill_node::PrefillService;
use registry::RegistryParts;
use tonic::service::Routes;
use tracing::info;
use types::{NodeId, Role};

use crate::cli::ProcessArgs;
use crate::config_file::ConfigFile;
use crate::exit::CommandError;
use crate::identity;
use crate::model;

/// The longest wait for the registry to remove the node.
const REGISTRY_CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// A node's settings, as written and checked.
pub(crate) struct Settings {
    raw: RawNodeConfig,
    pub(crate) config: NodeConfig,
}

impl Settings {
    pub(crate) fn read(args: &ProcessArgs) -> Result<Self, CommandError> {
        let raw: RawNodeConfig =
            chassis::config::load(args.config.as_deref(), std::env::vars()).map_err(CommandError::usage)?;
        let config = NodeConfig::resolve(raw.clone()).map_err(CommandError::usage)?;
        identity::check_node(&config).map_err(CommandError::usage)?;
        Ok(Self { raw, config })
    }

    /// Runs `serve` in a runtime, with the path of the model's folder. `name` is this kind of process in logs.
    pub(crate) fn run(
        self,
        name: &'static str,
        args: &ProcessArgs,
        serve: impl AsyncFnOnce(NodeConfig, Shutdown) -> Result<ExitCode, CommandError>,
    ) -> Result<ExitCode, CommandError> {
        let _telemetry = telemetry::init(name, &self.config.log).map_err(CommandError::start)?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CommandError::start)?;
        runtime.block_on(async {
            let shutdown = args.shutdown()?;
            serve(with_model(self.raw, &shutdown).await?, shutdown).await
        })
    }
}

pub(crate) fn run(role: Role, args: &ProcessArgs) -> Result<ExitCode, CommandError> {
    let settings = Settings::read(args)?;
    if args.check {
        return ConfigFile::Node(Box::new(settings.config)).is_valid();
    }
    settings.run(role.as_str(), args, async |config, shutdown| serve(role, &config, shutdown).await)
}

/// Returns the settings with the path of the model's folder. A model on a hub is downloaded meanwhile.
async fn with_model(mut raw: RawNodeConfig, shutdown: &Shutdown) -> Result<NodeConfig, CommandError> {
    let located = model::locate(&raw.model.path, &raw.model.name, shutdown).await?;
    (raw.model.path, raw.model.name) = (located.path, located.name);
    NodeConfig::resolve(raw).map_err(CommandError::usage)
}

async fn serve(role: Role, config: &NodeConfig, shutdown: Shutdown) -> Result<ExitCode, CommandError> {
    let (world, named) = identity::of_node(&config.cluster, &config.tls, role, config.id.as_ref())?;
    let _certificates = identity::follow_certificates(&world);
    let grpc = bind(&world, &config.listen).await?;
    let admin = bind(&world, &config.admin).await?;
    let admin = KeptListener::new(admin).map_err(CommandError::start)?;
    let bound = grpc.local_addr().map_err(CommandError::start)?;
    let id = named.unwrap_or_else(|| node::host::default_id(role, bound));
    let metrics = Metrics::of_node(role.as_str());
    let (group, backend) = if config.group.grid.n_processes() == 1 {
        let backend = engine::open(&config.engine).map_err(NodeError::Model).map_err(CommandError::start)?;
        (None, backend)
    } else {
        let pages =
            chassis::admin::router(Readiness::unready("waiting for the other processes"), metrics.clone());
        let ports = Ports::admin(Box::new(admin.clone()), pages, config.connections);
        let gathered = tokio::select! {
            biased;
            () = shutdown.wait() => return Ok(ExitCode::SUCCESS),
            gathered = gathered(role, config, &world, &id) => gathered?,
        };
        ports.close().await;
        gathered
    };
    let announcing = Gate::new("registry");
    let registry_parts = RegistryParts { world: world.clone(), gate: announcing.clone() };
    let registry = registry::open(&config.registry_url, registry_parts).map_err(CommandError::usage)?;
    let services = |role, parts: &NodeParts| services(role, parts, &config.decode);
    let lives = Lives {
        config,
        id,
        role,
        registry: &*registry,
        services: &services,
        world,
        metrics,
        drive: Drive::Thread,
        shutdown,
        grpc,
        admin: Box::new(admin),
        group,
    };
    let ended = node::lives::run(lives, backend).await;
    let _ = announcing.close(REGISTRY_CLOSE_WITHIN).await;
    info!("node has stopped");
    ended.map(|()| ExitCode::SUCCESS).map_err(|error| match error {
        NodeError::Drain(_) | NodeError::WorkerLate(_) => CommandError::drain(error),
        NodeError::Sleep(_) | NodeError::BackendLost | NodeError::WorkerDead(_) | NodeError::Group(_) => {
            CommandError::work(error)
        }
        error => CommandError::start(error),
    })
}

/// Waits for the other processes of the node, and opens the model with them.
async fn gathered(
    role: Role,
    config: &NodeConfig,
    world: &World,
    id: &NodeId,
) -> Result<(Option<Arc<Group>>, Box<dyn Backend>), CommandError> {
    let parts = HeadParts {
        world: world.clone(),
        gate: Gate::new("followers"),
        id: id.clone(),
        role,
        settings: config.group.clone(),
        engine: config.engine.clone(),
    };
    let gathered = gather(parts).await.map_err(NodeError::Group).map_err(CommandError::start);
    gathered.map(|(group, backend)| (Some(group), backend))
}

pub(crate) async fn bind(world: &World, addr: &str) -> Result<Box<dyn Listener>, CommandError> {
    let listen = world.net().listen(addr).await;
    listen.map_err(|source| CommandError::start(NodeError::Listen { addr: addr.to_owned(), source }))
}

/// Makes the gRPC services of a role. A node with both roles has both services over one worker and one pool.
fn services(role: Role, parts: &NodeParts, decode: &DecodeExpertSettings) -> Result<Routes, StartError> {
    let prefill = role.prefills().then_some(proto::v1::prefill_server::SERVICE_NAME);
    let decode_service = role.decodes().then_some(proto::v1::decode_server::SERVICE_NAME);
    let own: Vec<_> = [proto::v1::node_status_server::SERVICE_NAME]
        .into_iter()
        .chain(prefill)
        .chain(decode_service)
        .collect();
    let (mut routes, _health) = chassis::rpc::standard_services(&[proto::FILE_DESCRIPTOR_SET], &own)?;
    if role.prefills() {
        routes = routes.add_service(PrefillService::new(parts.clone()).server());
    }
    if role.decodes() {
        routes = routes.add_service(DecodeService::new(parts.clone(), decode.clone()).server());
    }
    Ok(routes)
}
