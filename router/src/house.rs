//! A router's life: bind, watch the cluster, serve, wait, drain.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::server::ServerLimits;
use chassis::{Gate, Listener, Shutdown, StillHeld, Task, World, spawn_guarded};
use registry::embedded::bootstrap_server;
use registry::memory::TTL;
use registry::{MemoryRegistry, Registry, RegistryError, RegistryParts};
use tokio::task::{JoinError, spawn_blocking};
use tonic::service::Routes;
use tracing::{info, warn};

use crate::accept::Acceptor;
use crate::admission::Admission;
use crate::cluster::Cluster;
use crate::config::{ModelFolder, RouterConfig};
use crate::dispatch::{Dispatch, Parts};
use crate::error::TextError;
use crate::grpc::GrpcDoor;
use crate::http::{BodyLimits, Door, ImpatientListener};
use crate::metrics::RouterMetrics;
use crate::serve::Serve;
use crate::text::{RouterModel, RouterModels};
use crate::{debug, http, policy};

/// How long the router's own tasks may take to end once it serves no more.
const TASKS_CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// How long a client may leave its answer unread before its connection is closed, and its request with it.
const CLIENT_PATIENCE: Duration = Duration::from_secs(60);

/// A router that has its ports and watches the cluster, but serves nobody yet.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    world: World,
    http: (Box<dyn Listener>, SocketAddr),
    grpc: (Box<dyn Listener>, SocketAddr),
    cluster: Cluster,
    models: RouterModels,
    /// The registry that this router is, if it is one.
    embedded: Option<MemoryRegistry>,
    following: Task<()>,
    gate: Gate,
}

/// Why a router did not come up.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("listen on {addr}")]
    Listen { addr: String, source: io::Error },
    #[error("watch the registry")]
    Registry(#[source] RegistryError),
    #[error("open the model in {}", folder.display())]
    Model { folder: PathBuf, source: TextError },
    #[error("open the model in {}", folder.display())]
    OpenModel { folder: PathBuf, source: JoinError },
}

impl Router {
    pub async fn bind(world: World, config: RouterConfig) -> Result<Self, BindError> {
        let gate = Gate::new("router");
        let http = bind(&world, &config.http).await?;
        let grpc = bind(&world, &config.grpc).await?;
        let models = RouterModels::new(open_model(config.model.clone()).await?);
        let cluster = Cluster::new(world.clone(), gate.clone(), models.clone(), config.wanted.clone());
        let embedded =
            config.registry_url.is_none().then(|| MemoryRegistry::new(TTL, world.clone(), gate.clone()));
        let registry: Arc<dyn Registry> = match (&embedded, &config.registry_url) {
            (Some(embedded), _) => Arc::new(embedded.clone()),
            (None, Some(url)) => {
                registry::open(url, RegistryParts { world: world.clone(), gate: gate.clone() })
                    .map_err(BindError::Registry)?
            }
            (None, None) => unreachable!("one of the two is always there"),
        };
        let following = cluster.follow(&*registry).await.map_err(BindError::Registry)?;
        Ok(Self { config, world, http, grpc, cluster, models, embedded, following, gate })
    }

    pub fn http_addr(&self) -> SocketAddr {
        self.http.1
    }

    pub fn grpc_addr(&self) -> SocketAddr {
        self.grpc.1
    }

    pub fn cluster(&self) -> Cluster {
        self.cluster.clone()
    }

    /// Serves until `shutdown`, then lets requests under way end within the configured drain.
    ///
    /// The registry is served on until `farewell` has ended too, so that nodes can withdraw.
    pub async fn serve(
        self,
        shutdown: Shutdown,
        farewell: impl Future<Output = ()>,
    ) -> Result<(), StillHeld> {
        let metrics = Metrics::of_process("router");
        let serve = Arc::new(self.dispatch(&metrics));
        let watchdog = spawn_guarded(&self.gate, "watchdog", serve.watchdog(self.config.stuck_after));
        let acceptor = Acceptor::new(self.world.clone(), self.config.deadline);
        let connections = self.config.connections;
        let limits = ServerLimits { connections, drain: self.config.drain, ..ServerLimits::default() };
        let pages = self.pages(serve.clone(), acceptor.clone(), metrics);
        let door = GrpcDoor { serve, models: self.models.clone(), acceptor, shutdown: shutdown.clone() };
        let grpc_close = Shutdown::new();
        let routes = routes(self.embedded.as_ref(), door, &grpc_close);
        let http = chassis::server::serve(self.http.0, pages, shutdown.clone(), limits);
        let grpc = chassis::rpc::serve(self.grpc.0, routes, grpc_close.clone(), limits);
        info!(http = %self.http.1, grpc = %self.grpc.1, "router is up");
        let ports = Gate::new("router ports");
        let http = spawn_guarded(&ports, "http", http);
        let grpc = spawn_guarded(&ports, "grpc", grpc);
        shutdown.wait().await;
        info!("draining");
        let http = http.await;
        farewell.await;
        grpc_close.trigger();
        let grpc = grpc.await;
        drop((self.following, self.embedded, watchdog));
        self.cluster.forget();
        if let Err(late) = self.gate.close(TASKS_CLOSE_WITHIN).await {
            warn!(%late, "router tasks still run");
        }
        [http, grpc].into_iter().filter_map(Result::ok).collect()
    }

    /// The HTTP side: the API, health, and the operators' pages.
    fn pages(&self, serve: Arc<dyn Serve>, acceptor: Acceptor, metrics: Metrics) -> axum::Router {
        let door = Door {
            serve,
            models: self.models.clone(),
            acceptor: acceptor.clone(),
            world: self.world.clone(),
            body: BodyLimits::default(),
        };
        let pages = http::api(door.clone())
            .merge(http::health(door))
            .merge(debug::router(self.cluster.clone(), metrics));
        http::stack(pages, acceptor)
    }

    fn dispatch(&self, metrics: &Metrics) -> Dispatch {
        Dispatch::new(Parts {
            world: self.world.clone(),
            cluster: self.cluster.clone(),
            policy: policy::by_name(&self.config.policy).expect("RouterConfig::resolve has looked it up"),
            admission: Admission::new(self.config.requests_max),
            order: self.config.order,
            budget: self.config.budget,
            metrics: RouterMetrics::new(metrics),
        })
    }
}

/// Reads the model's text half on a thread of its own: a large vocabulary takes a second.
async fn open_model(folder: Option<ModelFolder>) -> Result<Option<RouterModel>, BindError> {
    let Some(ModelFolder { path, name }) = folder else { return Ok(None) };
    let opened = {
        let path = path.clone();
        spawn_blocking(move || RouterModel::open(&path, &name)).await
    };
    match opened {
        Ok(Ok(model)) => Ok(Some(model)),
        Ok(Err(source)) => Err(BindError::Model { folder: path, source }),
        Err(source) => Err(BindError::OpenModel { folder: path, source }),
    }
}

async fn bind(world: &World, addr: &str) -> Result<(Box<dyn Listener>, SocketAddr), BindError> {
    let failed = |source| BindError::Listen { addr: addr.to_owned(), source };
    let listener = world.net().listen(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((Box::new(ImpatientListener::new(listener, CLIENT_PATIENCE)), bound))
}

/// The gRPC services: generation for clients, the registry for nodes, health and reflection for everybody.
fn routes(embedded: Option<&MemoryRegistry>, door: GrpcDoor, shutdown: &Shutdown) -> Routes {
    let (routes, _health) = chassis::rpc::standard_services(&[proto::FILE_DESCRIPTOR_SET])
        .expect("our own descriptors are well-formed");
    let routes = routes.add_service(door.server());
    match embedded {
        Some(registry) => routes.add_service(bootstrap_server(registry.clone(), shutdown.clone())),
        None => routes,
    }
}
