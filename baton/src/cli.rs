//! What can be typed. Settings live in the configuration files; a flag is for what one types by hand.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use engine::Device;
use node::{KvMemorySize, ModelKvMemory};

use crate::bench_engine::EngineArgs;
use crate::bench_transfer::TransferArgs;

/// Large language models served with prefill and decode on different nodes.
#[derive(Debug, Parser)]
#[command(name = "baton", version, arg_required_else_help = true, max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    /// Check configuration files of any process, say what is wrong with them, and leave.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) check_config: Vec<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a whole cluster on this machine: a router and its nodes, no etcd needed.
    Up(UpArgs),
    /// Run a router: the OpenAI-compatible endpoint, and the embedded registry.
    Router(ProcessArgs),
    /// Run a prefill node: it computes the KV of prompts and sends it where it is wanted.
    Prefill(ProcessArgs),
    /// Run a decode node: it holds room for KV on its way, and decodes what has arrived.
    Decode(ProcessArgs),
    /// Run one node that does both, for comparison.
    Both(ProcessArgs),
    /// Run a pool node: it keeps KV between the nodes that compute it and those that decode it.
    Pool(ProcessArgs),
    /// Talk to a cluster in the terminal.
    Chat(ChatArgs),
    /// Look at this machine and what a process's file asks of it, and say what to do.
    Doctor(DoctorArgs),
    /// Ask a process whether it is ready: 0 if it is. For health checks in images that have no shell.
    Health(HealthArgs),
    /// Have a node give back the memory of weights and KV, and keep what takes time to make. It leaves the cluster first.
    Sleep(SwitchArgs),
    /// Have a node that sleeps load its weights again, and come back into the cluster.
    Wake(WakeArgs),
    /// Make an API key for a tenant: the key for the client, and its line for the router's tenants file.
    Keys(KeysArgs),
    /// Measure an OpenAI-compatible endpoint, this one or another, or the engine by itself: TTFT, TBT, goodput.
    Bench(Box<BenchArgs>),
}

/// Measure a server, or the engine by itself.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Clone, Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it in a process")]
pub(crate) enum BenchCommand {
    #[command(flatten)]
    Server(bench::command::BenchCommand),
    /// Measure the engine by itself: decode steps, first tokens, many requests at once, and the device's limits
    Engine(EngineArgs),
    /// Measure how fast connectors move KV between two nodes of this machine, against plain copies of the same bytes
    Transfer(TransferArgs),
}

/// Every process has one TOML file. `BATON_SECTION__KEY` in the environment overrides a setting.
#[derive(Args, Clone, Debug)]
pub(crate) struct ProcessArgs {
    /// The configuration file. Without it the defaults hold.
    #[arg(long, value_name = "FILE", env = "BATON_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Check the configuration, say what is wrong with it, and leave.
    #[arg(long)]
    pub(crate) check: bool,
    /// Stop when standard input is closed: for processes that must not outlive their parent.
    #[arg(long, hide = true)]
    pub(crate) stop_with_stdin: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    /// Prefill nodes.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    pub(crate) prefill: u16,
    /// Decode nodes.
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) decode: u16,
    /// Pool nodes: the prompt is computed first then, and its KV waits in the pool for a decode node.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    pub(crate) pool: u16,
    /// Memory for KV on each pool node: `4GiB`, or a share of what is free when it starts, `30%`. By default what
    /// `pool.memory` is by default.
    #[arg(long, value_name = "SIZE", requires = "pool")]
    pub(crate) pool_memory: Option<KvMemorySize>,
    /// One node that does both instead, for comparison.
    #[arg(long, conflicts_with_all = ["prefill", "decode", "pool"])]
    pub(crate) colocated: bool,
    /// The model: `demo` (bundled), a folder, `org/name[@revision]` on a hub, `mock`, or `mock:NAME` for one that takes
    /// its time.
    #[arg(long, default_value = "demo")]
    pub(crate) model: String,
    /// What computes: `auto` (the first GPU, or the CPU where there is none), `cpu`, `cuda`, or `cuda:N`. If several are named,
    /// separated by commas, the nodes take one each in turn, prefill nodes first.
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_delimiter = ',')]
    pub(crate) device: Vec<Device>,
    /// Tensor-parallel ranks of each prefill node: groups of threads that share the heads, or GPUs from the node's
    /// device on.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = ranks())]
    pub(crate) prefill_tp: u16,
    /// Those of each decode node, which may be more or fewer. With `--colocated`, the one node's.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = ranks())]
    pub(crate) decode_tp: u16,
    /// Memory for KV on each node: `4GiB`, a share of what is free when it starts, `30%`, or `auto/N`: what suits the model
    /// on a device that N nodes share. By default that, for as many as there are.
    #[arg(long, value_name = "SIZE", env = "BATON_MODEL__KV_MEMORY")]
    pub(crate) kv_memory: Option<ModelKvMemory>,
    /// The wire on which KV travels; `auto` is the fastest that works here.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub(crate) connector: String,
    /// Which node is asked first: decode reserves room, or prefill computes and decode is chosen then. By default
    /// decode-first, and prefill-first with a pool, which is for nothing else.
    #[arg(long, value_enum)]
    pub(crate) order: Option<Order>,
    /// Where the OpenAI-compatible endpoint listens.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "HOST:PORT", value_parser = listen_addr)]
    pub(crate) http: String,
    /// Where the gRPC endpoint listens.
    #[arg(long, default_value = "127.0.0.1:50051", value_name = "HOST:PORT", value_parser = listen_addr)]
    pub(crate) grpc: String,
    /// `embedded`, or `etcd://host:2379/cluster`.
    #[arg(long, default_value = "embedded", value_name = "URL")]
    pub(crate) registry: String,
    /// How a route is chosen: random, round-robin or least-loaded.
    #[arg(long, default_value = "least-loaded", value_name = "NAME")]
    pub(crate) policy: String,
}

impl UpArgs {
    pub(crate) fn order(&self) -> Order {
        let usual = if self.pool > 0 { Order::PrefillFirst } else { Order::DecodeFirst };
        self.order.unwrap_or(usual)
    }
}

/// Where a process listens: an IP address or a name of this machine, and a port.
fn listen_addr(text: &str) -> Result<String, String> {
    let is_host_name = |host: &str| {
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    let named =
        text.rsplit_once(':').is_some_and(|(host, port)| is_host_name(host) && port.parse::<u16>().is_ok());
    if named || text.parse::<std::net::SocketAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    Err("expected HOST:PORT, for example 127.0.0.1:8000, localhost:8000 or [::1]:8000".to_owned())
}

fn ranks() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=i64::from(types::layout::RANKS_MAX))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    DecodeFirst,
    PrefillFirst,
}

impl Order {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::DecodeFirst => "decode-first",
            Self::PrefillFirst => "prefill-first",
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ChatArgs {
    /// The endpoint to talk to, with or without `http://` and `/v1`.
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub(crate) url: String,
    /// The model; by default the first that is served.
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// The longest answer.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) max_tokens: u32,
    /// Ask this one thing, print the answer, and leave.
    #[arg(value_name = "MESSAGE")]
    pub(crate) message: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// The configuration file of the process that is to run here. Without it: the router of `baton up`.
    #[arg(long, value_name = "FILE", env = "BATON_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Send KV to the decode node at this gRPC address too, over every wire that both ends have, and say how fast it went.
    #[arg(long, value_name = "ADDR")]
    pub(crate) peer: Option<String>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SwitchArgs {
    /// The node: its admin port, `host:port`, or its name, if it is awake and the router knows it.
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// The router that knows where a node of this name is.
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub(crate) router: String,
    /// The file with the admin key that the node wants.
    #[arg(long, value_name = "FILE", env = "BATON_CLUSTER__ADMIN_KEY_FILE")]
    pub(crate) key_file: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct WakeArgs {
    #[command(flatten)]
    pub(crate) switch: SwitchArgs,
    /// The role that it comes back in; without it, the one that it had.
    #[arg(long, value_name = "ROLE", value_parser = ["prefill", "decode", "both"])]
    pub(crate) role: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    pub(crate) command: KeysCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Print a new key, which is stored nowhere, and the line with its hash
    New {
        /// The tenant: a section [tenants.TENANT] of the tenants file.
        #[arg(value_name = "TENANT")]
        tenant: String,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct HealthArgs {
    /// The process to ask: `host:port` of a router's HTTP port or of a node's admin port. Another page than `/ready` is
    /// asked for by its whole address.
    #[arg(default_value = "http://127.0.0.1:8000/ready", value_name = "URL")]
    pub(crate) url: String,
}
