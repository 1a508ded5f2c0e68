//! The arguments of `baton bench transfer`.

use std::path::PathBuf;

use chassis::byte_size::ByteSize;
use clap::Args;

use crate::bench_transfer::case::{Blocks, Digests, Layers, Memory};

#[derive(Clone, Debug, Args)]
pub(crate) struct TransferArgs {
    /// Connectors to measure that work within one machine: tcp, shm, loopback, cuda-ipc, nccl
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm", value_name = "NAMES")]
    pub(crate) connectors: Vec<String>,
    /// Bytes of KV in one transfer; each size is measured
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZES",
        default_value = "16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB,1GiB,4GiB"
    )]
    pub(crate) sizes: Vec<ByteSize>,
    /// How the sequence's blocks lie in memory, on both sides
    #[arg(long, value_enum, value_delimiter = ',', default_value = "contiguous,scattered")]
    pub(crate) blocks: Vec<Blocks>,
    /// How layers are passed to the connector
    #[arg(long, value_enum, value_delimiter = ',', default_value = "at-once,streamed")]
    pub(crate) layers: Vec<Layers>,
    /// Whether pages are verified. Off is for measurements only: nodes have no such setting
    #[arg(long, value_enum, value_delimiter = ',', default_value = "on,off")]
    pub(crate) digests: Vec<Digests>,
    /// The memory that holds the KV. Connectors between GPUs always use the first and the second GPU
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) memory: Memory,
    /// Also measure tcp over TLS, which has twice as many streams, next to tcp without it
    #[arg(long)]
    pub(crate) tls: bool,
    /// Number of streams of the connector, and of the plain copy
    #[arg(long, default_value_t = 2)]
    pub(crate) streams: u16,
    /// The approximate time for each combination, in seconds
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    pub(crate) seconds: f64,
    /// Write the numbers to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Write the page with the plots to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Write only the plots to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Measure nothing: combine files that earlier runs on one machine have written with --out
    #[arg(long, value_delimiter = ',', value_name = "FILES")]
    pub(crate) from: Vec<PathBuf>,
}
