//! The command line. Settings are in the configuration files; flags are for values that a user types.

use std::path::PathBuf;

use chassis::Shutdown;
use chassis::config::host_and_port;
use clap::{Args, Parser, Subcommand, ValueEnum};
use engine::Device;
use node::{KvMemorySize, ModelKvMemory};

use crate::bench_engine::EngineArgs;
use crate::bench_transfer::TransferArgs;
use crate::exit::CommandError;

/// Serve large language models with prefill and decode on different nodes.
#[derive(Debug, Parser)]
#[command(name = "baton", version, arg_required_else_help = true, max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    /// Check configuration files of any process, report errors, and exit.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) check_config: Vec<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a whole cluster on this machine: a router and its nodes, without etcd.
    Up(UpArgs),
    /// Run a router: the OpenAI-compatible endpoint and the embedded registry.
    Router(ProcessArgs),
    /// Run a prefill node, which computes the KV of prompts and sends it to decode nodes or pool nodes.
    Prefill(ProcessArgs),
    /// Run a decode node, which reserves room for KV and decodes the sequences that have arrived.
    Decode(ProcessArgs),
    /// Run one node that does prefill and decode, for comparison with separate nodes.
    Both(ProcessArgs),
    /// Run a pool node, which keeps KV between prefill nodes and decode nodes.
    Pool(ProcessArgs),
    /// Run a further process of a node with several processes: it computes one pipeline stage. It reads the
    /// node's file.
    Rank(RankArgs),
    /// Chat with a cluster in the terminal.
    Chat(ChatArgs),
    /// Check this machine and the requirements of a process's file, and give advice.
    Doctor(DoctorArgs),
    /// Check whether a process is ready: exit code 0 if it is. For health checks in images without a shell.
    Health(HealthArgs),
    /// Make a node release the memory of weights and KV. The node leaves the cluster first, and keeps its
    /// process and compiled kernels.
    Sleep(SwitchArgs),
    /// Make a sleeping node load its weights again and rejoin the cluster.
    Wake(WakeArgs),
    /// Change a running cluster.
    Admin(AdminArgs),
    /// Create a CA and certificates for the `[tls]` sections of a cluster, for first steps. Overwrites nothing.
    Certs(CertsArgs),
    /// Create an API key for a tenant. Print the key for the client, and the line for the router's tenants
    /// file.
    Keys(KeysArgs),
    /// Measure an OpenAI-compatible endpoint, the engine alone, or the transfer of KV.
    Bench(Box<BenchArgs>),
}

/// Measure a server, the engine alone, or the transfer of KV.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Clone, Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "a process has only one value")]
pub(crate) enum BenchCommand {
    #[command(flatten)]
    Server(bench::command::BenchCommand),
    /// Measure the engine alone: decode steps, first tokens, many requests at once, and the device's limits
    Engine(EngineArgs),
    /// Measure the KV transfer rate of connectors between two nodes of this machine, compared with plain copies of
    /// the same bytes
    Transfer(TransferArgs),
}

/// The arguments of a process. It reads one TOML file; `BATON_SECTION__KEY` in the environment overrides a
/// setting.
#[derive(Args, Clone, Debug)]
pub(crate) struct ProcessArgs {
    /// The configuration file. Without a file the defaults are used.
    #[arg(long, value_name = "FILE", env = "BATON_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Check the configuration, report errors, and exit.
    #[arg(long)]
    pub(crate) check: bool,
    /// Stop when standard input is closed: for processes that must not outlive their parent.
    #[arg(long, hide = true)]
    pub(crate) stop_with_stdin: bool,
}

impl ProcessArgs {
    /// Makes the process's shutdown, which signals trigger, and the end of standard input if that is wanted.
    pub(crate) fn shutdown(&self) -> Result<Shutdown, CommandError> {
        let shutdown = match self.stop_with_stdin {
            true => Shutdown::from_signals_and_stdin(),
            false => Shutdown::from_signals(),
        };
        shutdown.map_err(CommandError::start)
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct RankArgs {
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// Where the node's first process waits for the others: `expert.model.join` there.
    #[arg(long, value_name = "HOST:PORT", value_parser = address, env = "BATON_RANK_OF")]
    pub(crate) of: String,
    /// The stage that this process computes: 0 is the first. The node's first process computes the last.
    #[arg(long, value_name = "STAGE", env = "BATON_RANK_PLACE")]
    pub(crate) place: u16,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    /// Number of prefill nodes.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    pub(crate) prefill: u16,
    /// Number of decode nodes.
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) decode: u16,
    /// Number of pool nodes. If there are any, prompts are computed first, and their KV waits on a pool node
    /// for a decode node.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    pub(crate) pool: u16,
    /// KV memory of each pool node: `4GiB`, or a share of the memory that is free at its start, `30%`. The
    /// default is that of the setting `pool.memory`.
    #[arg(long, value_name = "SIZE", requires = "pool")]
    pub(crate) pool_memory: Option<KvMemorySize>,
    /// Start one node that does prefill and decode, for comparison with separate nodes.
    #[arg(long, conflicts_with_all = ["prefill", "decode", "pool"])]
    pub(crate) colocated: bool,
    /// The model: `demo` (bundled), a folder, a GGUF file, `org/name[@revision]` on a hub, `mock`, or `mock:NAME`
    /// with simulated step times.
    #[arg(long, default_value = "demo", env = "BATON_MODEL__PATH")]
    pub(crate) model: String,
    /// The device: `auto` (the first GPU, or the CPU if there is none), `cpu`, `cuda`, or `cuda:N`. Several devices,
    /// separated by commas, are given to the nodes in turn, prefill nodes first.
    #[arg(
        long,
        default_value = "auto",
        value_name = "DEVICE",
        value_delimiter = ',',
        env = "BATON_MODEL__DEVICE"
    )]
    pub(crate) device: Vec<Device>,
    /// Tensor-parallel ranks of each prefill node: groups of threads that share the heads, or GPUs from the
    /// node's device on.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = ranks(), env = "BATON_MODEL__TP")]
    pub(crate) prefill_tp: u16,
    /// Tensor-parallel ranks of each decode node; their number may differ from that of prefill nodes. With
    /// `--colocated`, the ranks of the one node.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = ranks(), env = "BATON_MODEL__TP")]
    pub(crate) decode_tp: u16,
    /// Pipeline stages of each prefill node: GPUs, or groups of threads, that share the layers. Each stage uses
    /// `--prefill-tp` GPUs.
    #[arg(
        long,
        default_value_t = 1,
        value_name = "STAGES",
        value_parser = stages(),
        env = "BATON_EXPERT__MODEL__STAGES"
    )]
    pub(crate) prefill_stages: u16,
    /// Pipeline stages of each decode node; their number may differ from that of prefill nodes. With `--colocated`,
    /// the stages of the one node.
    #[arg(
        long,
        default_value_t = 1,
        value_name = "STAGES",
        value_parser = stages(),
        env = "BATON_EXPERT__MODEL__STAGES"
    )]
    pub(crate) decode_stages: u16,
    /// KV memory of each node: `4GiB`, a share of the memory that is free at its start, `30%`, or `auto/N`: an amount
    /// that suits the model on a device that N nodes share. The default is `auto/N` with the actual number of nodes.
    #[arg(long, value_name = "SIZE", env = "BATON_MODEL__KV_MEMORY")]
    pub(crate) kv_memory: Option<ModelKvMemory>,
    /// The connector for KV. The default is the setting `transfer.connectors`: `auto` uses the fastest connector that
    /// works on this machine.
    #[arg(long, value_name = "NAME")]
    pub(crate) connector: Option<String>,
    /// The first node that a request uses: `decode-first` reserves room before the prefill, `prefill-first`
    /// chooses the decode node after it. The default is decode-first, or prefill-first with a pool, which
    /// needs it.
    #[arg(long, value_enum, env = "BATON_ROUTER__ORDER")]
    pub(crate) order: Option<Order>,
    /// The address that the OpenAI-compatible endpoint listens on.
    #[arg(
        long,
        default_value = "127.0.0.1:8000",
        value_name = "HOST:PORT",
        value_parser = address,
        env = "BATON_ROUTER__HTTP"
    )]
    pub(crate) http: String,
    /// The address that the gRPC endpoint listens on.
    #[arg(
        long,
        default_value = "127.0.0.1:50051",
        value_name = "HOST:PORT",
        value_parser = address,
        env = "BATON_ROUTER__GRPC"
    )]
    pub(crate) grpc: String,
    /// The registry: `embedded` in the router, or `etcd://host:2379/cluster`.
    #[arg(long, default_value = "embedded", value_name = "URL", env = "BATON_REGISTRY__URL")]
    pub(crate) registry: String,
    /// The routing policy: random, round-robin, least-loaded, session-affinity, prefix-aware or cost.
    #[arg(long, default_value = "least-loaded", value_name = "NAME", env = "BATON_ROUTER__POLICY")]
    pub(crate) policy: String,
}

impl UpArgs {
    pub(crate) fn order(&self) -> Order {
        let usual = if self.pool > 0 { Order::PrefillFirst } else { Order::DecodeFirst };
        self.order.unwrap_or(usual)
    }
}

/// Parses an address: an IP address or a host name, and a port.
fn address(text: &str) -> Result<String, String> {
    let expected = "expected HOST:PORT, for example 127.0.0.1:8000, localhost:8000 or [::1]:8000";
    host_and_port(text).map(|_| text.to_owned()).ok_or_else(|| expected.to_owned())
}

fn ranks() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=i64::from(types::layout::RANKS_MAX))
}

fn stages() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..)
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
    /// The address of the endpoint, with or without `http://` and `/v1`.
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub(crate) url: String,
    /// The model to chat with; the default is the first one that is served.
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// The system prompt.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// A header for every request, `name: value`; may be repeated. An API key is `authorization: Bearer KEY`.
    #[arg(long, value_parser = bench::command::measure::parse_header, value_name = "HEADER")]
    pub(crate) header: Vec<(String, String)>,
    /// The largest number of tokens in an answer.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) max_tokens: u32,
    /// Send this message, print the answer, and exit.
    #[arg(value_name = "MESSAGE")]
    pub(crate) message: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// The configuration file of the process that is to run on this machine. The default is the router of
    /// `baton up`.
    #[arg(long, value_name = "FILE", env = "BATON_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Also send KV to the decode node at this gRPC address, over every connector that both nodes have, and
    /// report the rate.
    #[arg(long, value_name = "ADDR")]
    pub(crate) peer: Option<String>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SwitchArgs {
    /// The node: the `host:port` of its admin port, or its name if it is awake and the router knows it.
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// The router that knows the address of a node with this name.
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub(crate) router: String,
    /// The file with the admin key of the node.
    #[arg(long, value_name = "FILE", env = "BATON_CLUSTER__ADMIN_KEY_FILE")]
    pub(crate) key_file: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct WakeArgs {
    #[command(flatten)]
    pub(crate) switch: SwitchArgs,
    /// The role after the wake; the default is the role before the sleep.
    #[arg(long, value_name = "ROLE", value_parser = ["prefill", "decode", "both"])]
    pub(crate) role: Option<String>,
}

/// Change a running cluster.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdminArgs {
    #[command(subcommand)]
    pub(crate) command: AdminCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum AdminCommand {
    /// Change the role of an awake node. It drains and keeps its weights, KV memory and prefix cache.
    Role(RoleArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct RoleArgs {
    #[command(flatten)]
    pub(crate) switch: SwitchArgs,
    /// The new role: prefill, decode or both.
    #[arg(value_name = "ROLE", value_parser = ["prefill", "decode", "both"])]
    pub(crate) role: String,
    /// Change the role even if no other node does the work that this node stops doing.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CertsArgs {
    /// The folder. Its `ca.pem` and `ca.key` are used if they are there, otherwise made.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// The processes that get a certificate: router, prefill, decode, both, pool, registry (an etcd) or operator. With
    /// a role alone every process of that role may use it. Without any: one for each role but `both`.
    #[arg(value_name = "ROLE[/NODE]")]
    pub(crate) processes: Vec<String>,
    /// The cluster's name. Processes refuse certificates of other clusters.
    #[arg(long, default_value = "baton", value_name = "NAME")]
    pub(crate) cluster: String,
    /// A host name or address for gRPC clients other than Baton's, which compare it. May be repeated.
    #[arg(long = "host", value_name = "HOST")]
    pub(crate) hosts: Vec<String>,
    /// Days until the certificates expire.
    #[arg(long, default_value_t = 365, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub(crate) days: u32,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    pub(crate) command: KeysCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Print a new key, which is not stored, and the line with its hash
    New {
        /// The name of the tenant: a section [tenants.TENANT] of the tenants file.
        #[arg(value_name = "TENANT")]
        tenant: String,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct HealthArgs {
    /// The process to check: `host:port` of a router's HTTP port or of a node's admin port. For a page other
    /// than `/ready`, give the whole address.
    #[arg(default_value = "http://127.0.0.1:8000/ready", value_name = "URL")]
    pub(crate) url: String,
}
