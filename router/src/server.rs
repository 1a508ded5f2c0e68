//! The life of a router: bind, watch the cluster, serve, wait, drain.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use chassis::identity::admin_key::AdminKey;
use chassis::identity::settings::IdentityError;
use chassis::metrics::Metrics;
use chassis::rpc::Callers;
use chassis::server::{PortTls, ServerLimits};
use chassis::{Gate, Listener, Shutdown, StillHeld, Task, World, spawn_guarded};
use proto::v1::bootstrap_server::BootstrapServer;
use registry::embedded::{BootstrapService, bootstrap_server};
use registry::memory::TTL;
use registry::{MembersFile, MemoryRegistry, Registry, RegistryError, RegistryParts};
use tokio::task::{JoinError, spawn_blocking};
use tonic::service::Routes;
use tracing::{info, warn};

use crate::accept::Acceptor;
use crate::admission::{Admission, AdmissionParts};
use crate::balance::{Balance, BalanceParts, BalanceReport};
use crate::cluster::Cluster;
use crate::config::{ModelFolder, RouterConfig};
use crate::debug::DebugParts;
use crate::dispatch::{Dispatch, DispatchParts};
use crate::drain::Drain;
use crate::error::TextError;
use crate::grpc::GrpcApi;
use crate::http::{
    BodyLimits, Certificate, CertificateError, CertificateFiles, HttpApi, Passthrough, WriteTimeoutListener,
};
use crate::metrics::{RouterMetrics, VllmGauges};
use crate::serve::Serve;
use crate::tenants::{KeySources, Oidc, TableError, TenantTable, Tenants, TenantsFile};
use crate::text::{RouterModels, ServedModel, Tokenizer, Tokenizing};
use crate::upstream::{Pools, RequestLimit, Upstream, UpstreamParts};
use crate::{debug, grpc, http, policy};

/// The longest time that the router's own tasks may take to end after it stops serving.
const TASKS_CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// The time after the drain for the last bytes of an answer.
const END_GRACE: Duration = Duration::from_secs(1);

/// The time that a client may leave its answer unread before its connection is closed and its request
/// cancelled.
const CLIENT_WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// A router that has bound its ports and watches the cluster, but does not serve yet.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    world: World,
    http: (Box<dyn Listener>, SocketAddr),
    grpc: (Box<dyn Listener>, SocketAddr),
    admin: (Box<dyn Listener>, SocketAddr),
    cluster: Cluster,
    models: RouterModels,
    /// The keys and tokens of clients; `None`: none are required.
    tenants: Option<KeySources>,
    /// The HTTP port's certificate, if it has TLS.
    certificate: Option<Arc<Certificate>>,
    /// The admin keys of the HTTP port and of the admin port.
    keys: (AdminKey, AdminKey),
    /// The embedded registry; `None` if the registry is etcd.
    embedded: Option<MemoryRegistry>,
    following: Task<()>,
    /// The registry for the controller of roles; `None` if nodes are not moved.
    balance_registry: Option<Arc<dyn Registry>>,
    /// The pools of another engine, if the HTTP port serves them.
    upstream: Option<Pools>,
    gate: Gate,
}

/// The error of starting a router.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("listen on {addr}")]
    Listen { addr: String, source: io::Error },
    #[error("read the admin key")]
    AdminKey(#[source] IdentityError),
    #[error("watch the registry")]
    Registry(#[source] RegistryError),
    #[error("read the tenants file")]
    Tenants(#[source] TableError),
    #[error("prepare the upstream servers: {reason}")]
    Upstream { reason: String },
    #[error("read the keys of the OpenID provider")]
    Provider(#[source] TableError),
    #[error("read the HTTP port's certificate")]
    Certificate(#[source] CertificateError),
    #[error("open the model in {}", folder.display())]
    Model { folder: PathBuf, source: TextError },
    #[error("open the model in {}", folder.display())]
    OpenModel { folder: PathBuf, source: JoinError },
}

impl Router {
    pub async fn bind(world: World, config: RouterConfig) -> Result<Self, BindError> {
        let gate = Gate::new("router");
        let key = |address| config.cluster.admin_key(address).map_err(BindError::AdminKey);
        let keys = (key(&config.http)?, key(&config.admin)?);
        let http = bind(&world, &config.http).await?;
        let certificate = open_certificate(config.certificate.clone()).await?;
        let grpc = bind(&world, &config.grpc).await?;
        let admin = bind(&world, &config.admin).await?;
        let tenants = open_keys(&config).await?;
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
        let upstream = config.upstream.as_ref().map(|settings| Pools::new(settings, &gate)).transpose();
        let upstream = upstream.map_err(|reason| BindError::Upstream { reason })?;
        let file = config.members_file.clone().map(MembersFile::new);
        let following = cluster.follow(&*registry, file).await.map_err(BindError::Registry)?;
        let balance_registry = config.balance.map(|_| registry);
        Ok(Self {
            config,
            world,
            http,
            grpc,
            admin,
            cluster,
            models,
            tenants,
            certificate,
            keys,
            embedded,
            following,
            balance_registry,
            upstream,
            gate,
        })
    }

    pub fn http_addr(&self) -> SocketAddr {
        self.http.1
    }

    /// Returns the address of the admin port, which serves the live page.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.1
    }

    pub fn grpc_addr(&self) -> SocketAddr {
        self.grpc.1
    }

    pub fn cluster(&self) -> Cluster {
        self.cluster.clone()
    }

    /// Serves until `shutdown`, then lets running requests end within the configured drain.
    ///
    /// The registry is served until the future `nodes_stopped` has ended too, so that nodes can withdraw.
    pub async fn serve(
        mut self,
        shutdown: Shutdown,
        nodes_stopped: impl Future<Output = ()>,
    ) -> Result<(), StillHeld> {
        let metrics = Metrics::of_process("router");
        self.show_identity(&metrics);
        let drain = Drain { requested: shutdown.clone(), ..Drain::default() };
        let router_metrics = RouterMetrics::new(&metrics);
        let tenants = self.tenants(router_metrics.clone());
        let serve = Arc::new(self.dispatch(router_metrics.clone(), drain.clone()));
        let upstream = self.upstream(&serve, &tenants);
        self.show_requests(&metrics, &router_metrics, &serve);
        show_upstream(&metrics, &router_metrics, upstream.clone());
        let tasks = [
            spawn_guarded(&self.gate, "lines", serve.serve_lines()),
            spawn_guarded(&self.gate, "watchdog", serve.watchdog(self.config.stuck_after)),
            spawn_guarded(&self.gate, "drain", drain.clone().run(self.config.drain)),
            spawn_guarded(&self.gate, "tenants file", tenants.clone().follow_files()),
        ];
        let balance = self.balance(&serve, &router_metrics);
        let acceptor = Acceptor::new(self.world.clone(), self.config.deadlines, router_metrics.clone());
        let acceptor = acceptor.with_tenants(tenants).with_requests_max(self.config.requests_max);
        show_text(&metrics, &router_metrics, acceptor.tokenizing().clone(), self.models.clone());
        let (connections, whole) = (self.config.connections, self.config.drain.whole + END_GRACE);
        let limits = |port| {
            let counts = router_metrics.connections(port);
            ServerLimits { connections, counts, drain: whole, ..ServerLimits::default() }
        };
        let api = self.api(serve.clone(), acceptor.clone());
        let (balance, balancing) = balance.unzip();
        let shown = DebugParts { balance, ..self.shown(&serve, metrics, upstream.clone()) };
        let routes_of_api = ApiRoutes::new(api, upstream, &self.gate);
        let refusals = self.world.identity().refusals().clone();
        let (http_key, admin_key) = self.keys.clone();
        let on_http = debug::router(shown.clone(), http_key, refusals.clone());
        let on_admin = debug::admin_router(shown, routes_of_api.chat_box, admin_key, refusals);
        let on_admin = on_admin.merge(routes_of_api.pages.clone());
        let on_http = on_http.merge(routes_of_api.pages);
        let pages =
            http::stack(routes_of_api.requests.merge(on_http), acceptor.clone(), router_metrics.clone());
        let pages = self.config.cors.layer(pages);
        let operators = http::stack(on_admin, acceptor.clone(), router_metrics.clone());
        let closing = drain.closing.clone();
        let (models, metrics, world) = (self.models.clone(), router_metrics.clone(), self.world.clone());
        let api = GrpcApi { serve, models, acceptor, metrics, world, shutdown: closing.clone() };
        let grpc_close = Shutdown::new();
        let routes = routes(self.embedded.as_ref(), api, &grpc_close, &self.gate).await;
        let tls = self.certificate.as_ref().map_or(PortTls::Plaintext, Certificate::port_tls);
        let following_certificate = self
            .certificate
            .map(|it| spawn_guarded(&self.gate, "certificate", it.follow_files(self.world.clone())));
        let http = chassis::server::serve(self.http.0, tls, pages, closing, limits("http"));
        let grpc = chassis::rpc::serve(
            self.grpc.0,
            routes,
            grpc_close.clone(),
            limits("grpc"),
            // Nodes may call a router by several host names.
            Callers::known_to(&self.world).calling_this_instance(),
        );
        let counts = router_metrics.connections("admin");
        let admin = chassis::admin::serve(self.admin.0, operators, grpc_close.clone(), connections, counts);
        info!(http = %self.http.1, grpc = %self.grpc.1, admin = %self.admin.1, "router is up");
        let ports = Gate::new("router ports");
        let http = spawn_guarded(&ports, "http", http);
        let grpc = spawn_guarded(&ports, "grpc", grpc);
        let admin = spawn_guarded(&ports, "admin", admin);
        shutdown.wait().await;
        let http = http.await;
        nodes_stopped.await;
        grpc_close.trigger();
        let (grpc, admin) = tokio::join!(grpc, admin);
        drop((self.following, self.embedded, tasks, balancing, following_certificate));
        self.cluster.forget();
        if let Err(late) = self.gate.close(TASKS_CLOSE_WITHIN).await {
            warn!(%late, "router tasks are still running at the end of the drain");
        }
        [http, grpc, admin].into_iter().filter_map(Result::ok).collect()
    }

    fn shown(&self, serve: &Dispatch, metrics: Metrics, upstream: Option<Upstream>) -> DebugParts {
        DebugParts {
            cluster: self.cluster.clone(),
            breakers: serve.breakers().clone(),
            requests: serve.requests().clone(),
            admission: serve.admission().clone(),
            balance: None,
            metrics,
            settings: self.config.shown.clone(),
            upstream,
        }
    }

    /// Starts the controller of roles, if it is configured.
    fn balance(&mut self, serve: &Dispatch, metrics: &RouterMetrics) -> Option<(BalanceReport, Task<()>)> {
        let (settings, registry) = (self.config.balance?, self.balance_registry.take()?);
        let report = BalanceReport::default();
        let parts = BalanceParts {
            settings,
            world: self.world.clone(),
            cluster: self.cluster.clone(),
            admission: serve.admission().clone(),
            registry,
            moves: metrics.role_moves.clone(),
        };
        let balance = Balance::new(parts, report.clone());
        Some((report, spawn_guarded(&self.gate, "balance", balance.run())))
    }

    /// Adds the counts of refused callers and the ends of certificates to the page.
    fn show_identity(&self, page: &Metrics) {
        let (identity, certificate) = (self.world.identity().clone(), self.certificate.clone());
        page.show_refusals(identity.refusals());
        page.show_certificates(move || {
            let http = certificate.as_ref().and_then(|certificate| certificate.expiry());
            identity.expiries().into_iter().chain(http).collect()
        });
    }

    /// Adds the gauges of requests under way and of nodes' caches to the page, and vLLM's names where the setting asks for them.
    fn show_requests(&self, page: &Metrics, metrics: &RouterMetrics, serve: &Dispatch) {
        let (own, shown, admission) = (metrics.clone(), serve.requests().clone(), serve.admission().clone());
        let vllm = self.config.vllm_metrics.then(|| VllmGauges::add(page));
        let cluster = self.cluster.clone();
        page.before_page(move || {
            own.show(&shown, vllm.as_ref());
            own.show_caches(&cluster);
            own.line.show(&admission);
        });
    }

    fn tenants(&mut self, metrics: RouterMetrics) -> Tenants {
        match self.tenants.take() {
            None => Tenants::without_keys(self.config.trusted_proxies.clone()),
            Some(sources) => Tenants::with_keys(sources, self.world.clone(), metrics),
        }
    }

    fn api(&self, serve: Arc<dyn Serve>, acceptor: Acceptor) -> HttpApi {
        let (models, world) = (self.models.clone(), self.world.clone());
        HttpApi { serve, models, acceptor, world, body: BodyLimits::default() }
    }

    /// Makes the server of requests for another engine, which shares records, metrics and drain with `dispatch`.
    fn upstream(&mut self, dispatch: &Dispatch, tenants: &Tenants) -> Option<Upstream> {
        let (settings, pools) = (self.config.upstream.clone()?, self.upstream.take()?);
        let parts = dispatch.parts();
        Some(Upstream::new(UpstreamParts {
            settings,
            pools,
            world: self.world.clone(),
            limit: RequestLimit::new(self.config.requests_max),
            tenants: tenants.clone(),
            requests: dispatch.requests().clone(),
            attempts_max: parts.budget.attempts_max,
            metrics: parts.metrics.clone(),
            drain: parts.drain.clone(),
            gate: self.gate.clone(),
        }))
    }

    fn dispatch(&self, metrics: RouterMetrics, drain: Drain) -> Dispatch {
        let policy = policy::by_name(&self.config.policy).expect("RouterConfig::resolve has looked it up");
        Dispatch::new(DispatchParts {
            world: self.world.clone(),
            cluster: self.cluster.clone(),
            admission: Admission::new(AdmissionParts {
                world: self.world.clone(),
                cluster: self.cluster.clone(),
                order: self.config.order,
                computing: policy.computing(),
                requests_max: self.config.requests_max,
                wait_max: self.config.budget.wait_max,
                metrics: metrics.clone(),
            }),
            policy,
            order: self.config.order,
            budget: self.config.budget,
            explain_share: self.config.explain_share,
            metrics,
            drain,
        })
    }
}

/// Adds the gauges of another engine's servers to the page.
fn show_upstream(page: &Metrics, metrics: &RouterMetrics, upstream: Option<Upstream>) {
    let Some(upstream) = upstream else { return };
    let own = metrics.clone();
    page.before_page(move || own.show_upstream(&upstream.members()));
}

/// Adds the gauges of tokenizing to the page.
fn show_text(page: &Metrics, metrics: &RouterMetrics, tokenizing: Tokenizing, models: RouterModels) {
    let own = metrics.text.clone();
    page.before_page(move || own.show(tokenizing.waiting_bytes(), &models));
}

/// The routes of a router's API, on the HTTP port and on the admin port.
struct ApiRoutes {
    requests: axum::Router,
    chat_box: axum::Router,
    /// The routes about the process, on both ports.
    pages: axum::Router,
}

impl ApiRoutes {
    /// Makes the routes of Baton's own API, or of the engine's.
    fn new(api: HttpApi, upstream: Option<Upstream>, gate: &Gate) -> Self {
        let bounded = |routes| chassis::unread::bounded(routes, CLIENT_WRITE_TIMEOUT, gate);
        match upstream {
            None => Self {
                requests: bounded(http::api(api.clone())),
                chat_box: http::chat_box(api.clone()),
                pages: http::health(api.serve.clone()).merge(http::description(api)),
            },
            Some(upstream) => {
                let ready = Arc::new(upstream.clone());
                let state = Passthrough { api, upstream };
                Self {
                    requests: bounded(http::passthrough(state.clone())),
                    chat_box: http::passthrough_chat_box(state),
                    pages: http::health(ready),
                }
            }
        }
    }
}

/// Opens the tenants file and the provider's keys; `None` if the configuration has neither.
async fn open_keys(config: &RouterConfig) -> Result<Option<KeySources>, BindError> {
    let (file, oidc) = (config.tenants_file.clone(), config.oidc.clone());
    let open = move || {
        let table = |path: PathBuf| Ok(TenantsFile { table: TenantTable::load(&path, None)?, path });
        let file = file.map(table).transpose().map_err(BindError::Tenants)?;
        let oidc = oidc.map(Oidc::load).transpose().map_err(BindError::Provider)?;
        Ok((file.is_some() || oidc.is_some()).then_some(KeySources { file, oidc }))
    };
    spawn_blocking(open).await.expect("reading files does not panic")
}

async fn open_certificate(files: Option<CertificateFiles>) -> Result<Option<Arc<Certificate>>, BindError> {
    let Some(files) = files else { return Ok(None) };
    let loaded = spawn_blocking(move || Certificate::load(files)).await;
    loaded.expect("reading a certificate does not panic").map(Some).map_err(BindError::Certificate)
}

/// Loads the model's tokenizer and template. It uses a blocking thread, because a large vocabulary takes a
/// second.
async fn open_model(folder: Option<ModelFolder>) -> Result<Option<ServedModel>, BindError> {
    let Some(ModelFolder { path, name, tool_format }) = folder else { return Ok(None) };
    let opened = {
        let path = path.clone();
        spawn_blocking(move || ServedModel::open(&path, &name)).await
    };
    match opened {
        Ok(Ok(model)) => {
            warn_of_missing_text(&model, &path);
            Ok(Some(model.with_tool_format(tool_format)))
        }
        Ok(Err(source)) => Err(BindError::Model { folder: path, source }),
        Err(source) => Err(BindError::OpenModel { folder: path, source }),
    }
}

/// Warns about a missing tokenizer or chat template: the model then serves only some requests.
fn warn_of_missing_text(model: &ServedModel, folder: &Path) {
    let (name, folder) = (&model.name, folder.display());
    if matches!(*model.tokenizer, Tokenizer::Absent) {
        warn!(model = name, %folder, "model has no tokenizer.json: requests must bring token ids, text is refused");
    } else if model.template.is_none() {
        warn!(model = name, %folder, "model has no chat template: /v1/chat/completions is refused, /v1/completions is served");
    }
}

async fn bind(world: &World, addr: &str) -> Result<(Box<dyn Listener>, SocketAddr), BindError> {
    let failed = |source| BindError::Listen { addr: addr.to_owned(), source };
    let listener = world.net().listen(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((Box::new(WriteTimeoutListener::new(listener, CLIENT_WRITE_TIMEOUT)), bound))
}

/// Returns the gRPC services: generation for clients, the registry for nodes, health and reflection for all
/// callers.
async fn routes(embedded: Option<&MemoryRegistry>, api: GrpcApi, shutdown: &Shutdown, gate: &Gate) -> Routes {
    let bootstrap = embedded.map(|_| proto::v1::bootstrap_server::SERVICE_NAME);
    let own: Vec<_> = [proto::v1::inference_server::SERVICE_NAME].into_iter().chain(bootstrap).collect();
    let (routes, health) = chassis::rpc::standard_services(&[proto::FILE_DESCRIPTOR_SET], &own)
        .expect("our own descriptors are well-formed");
    let following = grpc::health::follow(health.clone(), api.serve.clone(), shutdown.clone());
    spawn_guarded(gate, "grpc health", following).detach();
    let routes = routes.add_service(api.server()).into_axum_router();
    let routes = Routes::from(chassis::unread::bounded(routes, CLIENT_WRITE_TIMEOUT, gate));
    match embedded {
        Some(registry) => {
            health.set_serving::<BootstrapServer<BootstrapService>>().await;
            routes.add_service(bootstrap_server(registry.clone(), shutdown.clone()))
        }
        None => routes,
    }
}
