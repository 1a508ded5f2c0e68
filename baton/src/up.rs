//! `baton up`: a router with the embedded registry in this process, and its nodes as child processes.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::process::ExitCode;
use std::time::Duration;

use chassis::Shutdown;
use chassis::telemetry;
use futures::future::join_all;
use node::kv_memory::available_bytes;
use node::{KvMemorySize, ModelKvMemory};
use router::{NodeState, RawRouterConfig, Router, RouterConfig};
use tokio::sync::oneshot;
use tokio::time::Instant;
use types::Role;

use crate::children::Node;
use crate::cli::{Order, UpArgs};
use crate::exit::CommandError;
use crate::identity;
use crate::model::{self, ModelLocation};
use crate::output;
use crate::process_variables;
use engine::Device;

/// The longest wait for the nodes to become ready. Loading a large model takes minutes.
const READY_WITHIN: Duration = Duration::from_secs(600);
/// The log level if `BATON_LOG__LEVEL` is not set. At this level a healthy cluster logs nothing.
const QUIET: &str = "warn";
/// The interval of the readiness checks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

pub(crate) fn run(args: UpArgs) -> Result<ExitCode, CommandError> {
    if let Some((name, _)) = std::env::vars().find(|(name, _)| name.starts_with("BATON_TLS__")) {
        return Err(CommandError::usage(format!(
            "{name} is set, and `baton up` uses no certificates: its processes are on one machine"
        )));
    }
    if args.pool > 0 && args.order() == Order::DecodeFirst {
        let wrong = "--pool needs --order prefill-first: with decode-first, KV goes to the decode node at once, and pool \
                     nodes get none";
        return Err(CommandError::usage(wrong));
    }
    let raw = router_config(&args, std::env::vars())?;
    let config = RouterConfig::resolve(raw.clone()).map_err(CommandError::usage)?;
    let _telemetry = telemetry::init("router", &config.log).map_err(CommandError::start)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CommandError::start)?;
    runtime.block_on(async {
        let name = std::env::var("BATON_MODEL__NAME").unwrap_or_default();
        let shutdown = Shutdown::from_signals().map_err(CommandError::start)?;
        let model = model::locate(&args.model, &name, &shutdown).await?;
        up(&args, raw, &model, shutdown).await
    })
}

async fn up(
    args: &UpArgs,
    mut raw: RawRouterConfig,
    model: &ModelLocation,
    shutdown: Shutdown,
) -> Result<ExitCode, CommandError> {
    (raw.model.path, raw.model.name) = (model.path.clone(), model.name.clone());
    let config = RouterConfig::resolve(raw).map_err(CommandError::usage)?;
    identity::check_router(&config).map_err(CommandError::usage)?;
    check_host_memory(args)?;
    let world = identity::of_router(&config.cluster, &config.tls)?;
    let router = Router::bind(world, config).await.map_err(CommandError::start)?;
    let mut nodes = start_nodes(args, model, &router)?;
    let (http, grpc, admin) = (router.http_addr(), router.grpc_addr(), router.admin_addr());
    let cluster = router.cluster();
    let (leave, leaving) = oneshot::channel::<Vec<Node>>();
    let stop_nodes = async {
        join_all(leaving.await.unwrap_or_default().into_iter().map(Node::stop)).await;
    };
    let serving = router.serve(shutdown.clone(), stop_nodes);
    let serving = chassis::spawn_guarded(&chassis::Gate::new("up"), "router", serving);

    let came_up = tokio::select! {
        came_up = all_ready(&cluster, &mut nodes) => came_up,
        () = shutdown.wait() => Ok(()),
    };
    if came_up.is_ok() && !shutdown.requested() {
        output::tell_later(format!("{}\nlive page: http://{admin}/", table(&cluster)));
        // Scripts wait for this line, the only one on standard output.
        output::print(&format!("ready http=http://{http} grpc=http://{grpc}\n"))?;
        tokio::select! {
            () = shutdown.wait() => {}
            _ = join_all(nodes.iter_mut().map(Node::keep_running)) => {}
        }
    }
    if shutdown.requested() {
        let stopping = "stopping: running requests end first; Ctrl-C again ends them at once";
        output::tell_later(stopping.to_owned());
    }
    shutdown.trigger();
    // The nodes are stopped after the router has answered its last request, and the registry after the nodes.
    let _ = leave.send(nodes);
    let served = serving.await;
    came_up?;
    served.map_err(CommandError::work)?.map(|()| ExitCode::SUCCESS).map_err(CommandError::drain)
}

/// Makes the router's settings: those of the environment, overridden by the flags. A flag that is not given has the
/// value of its variable.
fn router_config(
    args: &UpArgs,
    env: impl Iterator<Item = (String, String)>,
) -> Result<RawRouterConfig, CommandError> {
    let own_sections = ["BATON_ROUTER__", "BATON_BALANCE__", "BATON_CLUSTER__", "BATON_LOG__"];
    let for_router = |key: &str| {
        own_sections.iter().any(|section| key.starts_with(section)) || process_variables::is_for_router(key)
    };
    // The environment may override these defaults. No load balancer is in front of this router, so it needs
    // no time to notice the drain.
    let defaults = [
        ("BATON_LOG__LEVEL", QUIET),
        ("BATON_ROUTER__NOTICE_MS", "0"),
        ("BATON_ROUTER__ADMIN", "127.0.0.1:0"),
    ];
    let mut settings: BTreeMap<String, String> =
        defaults.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    settings.extend(env.filter(|(key, _)| for_router(key)));
    let mut raw: RawRouterConfig = chassis::config::load(None, settings).map_err(CommandError::usage)?;
    raw.router.http.clone_from(&args.http);
    raw.router.grpc.clone_from(&args.grpc);
    raw.router.policy.clone_from(&args.policy);
    raw.router.order = args.order().as_str().to_owned();
    raw.registry.url.clone_from(&args.registry);
    Ok(raw)
}

fn start_nodes(args: &UpArgs, model: &ModelLocation, router: &Router) -> Result<Vec<Node>, CommandError> {
    let registry = match args.registry.as_str() {
        "embedded" => format!("embedded://{}", router.grpc_addr()),
        url => url.to_owned(),
    };
    let of_all = settings_of_all(args, registry);
    let computing = roles(args).into_iter().zip(args.device.iter().cycle());
    let computing = computing.map(|((role, idx), device)| {
        let own = computing_node(args, role, model, device);
        Node::start(role, format!("{role}-{idx}"), [&of_all[..], &own].concat())
    });
    let memory = args.pool_memory.map(|size| ("BATON_POOL__MEMORY", size.to_string()));
    let keeping = (0..args.pool).map(|idx| {
        let own = memory.as_slice();
        Node::start(Role::Pool, format!("{}-{idx}", Role::Pool), [&of_all[..], own].concat())
    });
    computing.chain(keeping).collect()
}

/// Makes the settings that all nodes get besides their own. Nodes also inherit the environment of this process.
fn settings_of_all(args: &UpArgs, registry: String) -> Vec<(&'static str, String)> {
    let level = std::env::var("BATON_LOG__LEVEL").unwrap_or_else(|_| QUIET.to_owned());
    let connector = args.connector.as_ref().map(|name| ("BATON_TRANSFER__CONNECTORS", format!("[{name:?}]")));
    [("BATON_REGISTRY__URL", registry), ("BATON_LOG__LEVEL", level)].into_iter().chain(connector).collect()
}

/// Makes the settings of a node that computes the model on this device.
fn computing_node(
    args: &UpArgs,
    role: Role,
    model: &ModelLocation,
    device: &Device,
) -> Vec<(&'static str, String)> {
    let (ranks, stages) = match role.decodes() {
        true => (args.decode_tp, args.decode_stages),
        false => (args.prefill_tp, args.prefill_stages),
    };
    let settings = [
        ("BATON_MODEL__PATH", model.path.clone()),
        ("BATON_MODEL__NAME", model.name.clone()),
        ("BATON_MODEL__DEVICE", device.to_string()),
        ("BATON_MODEL__TP", ranks.to_string()),
        ("BATON_EXPERT__MODEL__STAGES", stages.to_string()),
    ];
    let kv_memory = args.kv_memory.unwrap_or_else(|| ModelKvMemory::Auto { nodes: sharers(args, device) });
    settings.into_iter().chain([("BATON_MODEL__KV_MEMORY", kv_memory.to_string())]).collect()
}

/// Refuses KV memory on CPUs if the nodes together need more than is available, because the kernel would kill
/// a node later. GPU nodes check their own GPU's memory.
fn check_host_memory(args: &UpArgs) -> Result<(), CommandError> {
    let on_cpu = |(_, device): &((Role, u16), &Device)| **device == Device::Cpu;
    let n_computing = roles(args).into_iter().zip(args.device.iter().cycle()).filter(on_cpu).count() as u64;
    let computing = match args.kv_memory {
        Some(ModelKvMemory::Size(size)) => {
            size.bytes().map_err(CommandError::start)?.saturating_mul(n_computing)
        }
        Some(ModelKvMemory::Auto { .. }) | None => 0,
    };
    let pool =
        args.pool_memory.map(KvMemorySize::bytes).transpose().map_err(CommandError::start)?.unwrap_or(0);
    let asked = computing.saturating_add(pool.saturating_mul(u64::from(args.pool)));
    match available_bytes() {
        Some(available) if asked > available => Err(CommandError::start(format!(
            "all nodes together ask for {} MiB of KV memory, and {} MiB are available here: set --kv-memory or \
             --pool-memory lower",
            asked >> 20,
            available >> 20
        ))),
        _ => Ok(()),
    }
}

/// Returns the number of nodes that use this device, counting the devices of all ranks and stages.
fn sharers(args: &UpArgs, device: &Device) -> NonZero<u16> {
    let gpus = |tp: u16, stages: u16| usize::from(tp) * usize::from(stages);
    let gpus_max = gpus(args.prefill_tp, args.prefill_stages).max(gpus(args.decode_tp, args.decode_stages));
    let first = |device: &Device| match device {
        Device::Cpu => None,
        Device::Auto => Some(0),
        Device::Cuda(ordinal) => Some(*ordinal),
    };
    let near = |other: &Device| match (first(device), first(other)) {
        (Some(one), Some(other)) => one.abs_diff(other) < gpus_max,
        (one, other) => one == other,
    };
    let n = roles(args).iter().zip(args.device.iter().cycle()).filter(|(_, other)| near(other)).count();
    NonZero::new(n as u16).unwrap_or(NonZero::<u16>::MIN)
}

/// Returns the nodes that compute, in the order in which they get devices.
fn roles(args: &UpArgs) -> Vec<(Role, u16)> {
    if args.colocated {
        return vec![(Role::Both, 0)];
    }
    let prefill = (0..args.prefill).map(|idx| (Role::Prefill, idx));
    prefill.chain((0..args.decode).map(|idx| (Role::Decode, idx))).collect()
}

/// Waits until every node is usable. If a node ends instead, returns an error; the node has printed the
/// reason.
async fn all_ready(cluster: &router::Cluster, nodes: &mut [Node]) -> Result<(), CommandError> {
    let give_up = Instant::now() + READY_WITHIN;
    loop {
        let states = cluster.everyone();
        if states.iter().filter(|(_, state)| *state == NodeState::Ready).count() == nodes.len() {
            return Ok(());
        }
        for node in nodes.iter_mut() {
            if let Some(status) = node.has_ended() {
                return Err(CommandError::start(format!(
                    "node {} ended with {status} before it was ready",
                    node.id
                )));
            }
        }
        if Instant::now() > give_up {
            return Err(CommandError::start(format!("the nodes were not ready within {READY_WITHIN:?}")));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Returns the table of the nodes and their addresses, for the terminal.
fn table(cluster: &router::Cluster) -> String {
    let mut table = format!(
        "{:<12} {:<8} {:>8}  {:<22} {:<22} {}",
        "NODE", "ROLE", "PID", "ADDRESS", "ADMIN", "CONNECTORS"
    );
    for (info, _) in cluster.everyone() {
        let wires: Vec<&str> = info.wires.iter().map(|wire| wire.scheme.as_str()).collect();
        table.push_str(&format!(
            "\n{:<12} {:<8} {:>8}  {:<22} {:<22} {}",
            info.id,
            info.role,
            info.pid,
            info.address,
            info.admin,
            wires.join(", ")
        ));
    }
    table
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};
    use node::RawNodeConfig;

    use super::*;
    use crate::cli::{Cli, Command};

    /// Returns the log level of the router of `baton up` if the environment sets `set`.
    fn level(set: Option<&str>) -> String {
        let Some(Command::Up(args)) = Cli::parse_from(["baton", "up"]).command else { panic!("it is `up`") };
        let env = set.map(|level| ("BATON_LOG__LEVEL".to_owned(), level.to_owned()));
        router_config(&args, env.into_iter()).expect("valid settings").log.level
    }

    #[test]
    fn a_flag_that_is_not_given_has_the_value_of_its_variable() {
        let cli = Cli::command();
        let up = cli.find_subcommand("up").expect("it is a command");
        let variable = |flag: &clap::Arg| Some(flag.get_env()?.to_str()?.to_owned());
        let variables: BTreeMap<&str, String> =
            up.get_arguments().filter_map(|flag| Some((flag.get_long()?, variable(flag)?))).collect();
        for (flag, expected) in [
            ("model", "BATON_MODEL__PATH"),
            ("device", "BATON_MODEL__DEVICE"),
            ("prefill-tp", "BATON_MODEL__TP"),
            ("decode-tp", "BATON_MODEL__TP"),
            ("prefill-stages", "BATON_EXPERT__MODEL__STAGES"),
            ("decode-stages", "BATON_EXPERT__MODEL__STAGES"),
            ("kv-memory", "BATON_MODEL__KV_MEMORY"),
            ("order", "BATON_ROUTER__ORDER"),
            ("http", "BATON_ROUTER__HTTP"),
            ("grpc", "BATON_ROUTER__GRPC"),
            ("registry", "BATON_REGISTRY__URL"),
            ("policy", "BATON_ROUTER__POLICY"),
        ] {
            assert_eq!(variables.get(flag).map(String::as_str), Some(expected), "{flag}");
            let is_setting = chassis::config::has_setting::<RawRouterConfig>(expected)
                || chassis::config::has_setting::<RawNodeConfig>(expected);
            assert!(is_setting, "{expected}");
        }
    }

    #[test]
    fn without_a_connector_the_nodes_setting_applies() {
        for (flags, expected) in
            [(&["baton", "up"][..], None), (&["baton", "up", "--connector", "tcp"], Some("[\"tcp\"]"))]
        {
            let Some(Command::Up(args)) = Cli::parse_from(flags).command else { panic!("it is `up`") };
            let settings = settings_of_all(&args, "embedded".to_owned());
            let connectors = settings.iter().find(|(name, _)| *name == "BATON_TRANSFER__CONNECTORS");
            assert_eq!(connectors.map(|(_, value)| value.as_str()), expected);
        }
    }

    #[test]
    fn the_log_level_of_the_environment_reaches_the_router() {
        for set in ["trace", "debug", "info", "error"] {
            assert_eq!(level(Some(set)), set);
        }
        assert_eq!(level(None), QUIET);
    }
}
