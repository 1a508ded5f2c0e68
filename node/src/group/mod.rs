//! A node of several processes, on one host or several: each computes one pipeline stage, or some ranks of one.
//!
//! The head computes the last stage, or its first ranks. It schedules, answers, announces the node, and opens and grants
//! landings. Each follower computes its share, and sends and receives the KV of its layers and ranks itself. There is one
//! connection for each follower, over which ranks of one stage on CPUs also exchange columns. If it ends, or is silent
//! for too long, the node ends: its requests continue on other nodes. See
//! `docs/decisions/0033-one-process-speaks-for-a-node.md`.
//!
//! Suggested reading order: the connection, the messages, the entrance, the head, the follower, the exchange (`mates`).

mod connection;
mod connection_thread;
mod messages;
mod error;
mod executable;
mod joined;
mod mates;
mod entrance;
pub mod head;
pub mod follower;
#[cfg(test)]
mod tests;

pub use error::GroupError;
pub use follower::{FollowerParts, follow};
pub use head::{Group, HeadParts, gather};

use std::time::Duration;

use engine::EngineSettings;
use engine::process::PreparedStage;
use tokio::task::spawn_blocking;
use types::{Fingerprint, ProcessGrid};

/// The settings of a node of several processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSettings {
    pub grid: ProcessGrid,
    /// `host:port` where the head waits for its followers.
    pub listen: String,
    /// How long the head waits for all followers, and a follower for its head.
    pub join_within: Duration,
}

/// The settings that name the executable. Two builds with the same version and protocols may add numbers in different orders,
/// so all processes must run the same executable.
const VERSION: &str = "version";
const PROTOCOL: &str = "protocol";
const EXECUTABLE: &str = "executable";

/// Returns the fingerprint of all that must be equal in all processes of a node: the executable, settings,
/// and the model's files.
fn common_parts(
    engine: &EngineSettings,
    grid: ProcessGrid,
    prepared: &PreparedStage,
) -> Result<Fingerprint, GroupError> {
    let (cpu, limits) = (&engine.cpu, engine.limits);
    let settings = [
        (VERSION, env!("CARGO_PKG_VERSION").to_owned()),
        (PROTOCOL, types::node::PROTOCOL.to_string()),
        (EXECUTABLE, executable::digest().map_err(GroupError::Executable)?),
        ("hardware", prepared.hardware()),
        ("model.tp", engine.ranks.to_string()),
        ("model.deterministic", engine.deterministic.to_string()),
        ("model.kv_dtype", cpu.kv_dtype.to_string()),
        ("model.quantize", cpu.quantize.as_str().to_owned()),
        ("expert.model.activations", format!("{:?}", cpu.activations).to_lowercase()),
        ("expert.model.experts", format!("{:?}", engine.experts).to_lowercase()),
        ("expert.model.load_format", format!("{:?}", cpu.load_format).to_lowercase()),
        ("expert.model.processes", grid.n_processes().to_string()),
        ("expert.model.stages", engine.stages.n_stages.to_string()),
        ("expert.model.stage_layers", format!("{:?}", engine.stages.layers)),
        ("expert.scheduler.step_tokens_max", limits.tokens.to_string()),
        ("expert.scheduler.sequences_max", limits.rows.to_string()),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value));
    let model = prepared.fingerprint().map_err(GroupError::Open)?;
    let of_model = model.parts().map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(Fingerprint::new(of_model.chain(settings)))
}

/// A process's share of a model that is not loaded, and the fingerprint of all that must be equal in all
/// processes of its node.
#[derive(Debug)]
struct Prepared {
    stage: PreparedStage,
    common: Fingerprint,
}

/// Reads the config of the model for one of its processes, and samples of its weights.
async fn prepare(engine: &EngineSettings, grid: ProcessGrid, process: usize) -> Result<Prepared, GroupError> {
    let engine = engine.clone();
    let prepare = move || {
        let stage = PreparedStage::prepare(&engine, grid.share(process)).map_err(GroupError::Open)?;
        let common = common_parts(&engine, grid, &stage)?;
        Ok(Prepared { stage, common })
    };
    blocking(prepare).await
}

/// Runs what reads files on a thread that may block.
async fn blocking<T: Send + 'static>(
    open: impl FnOnce() -> Result<T, GroupError> + Send + 'static,
) -> Result<T, GroupError> {
    spawn_blocking(open).await.map_err(|error| GroupError::Lost(error.to_string()))?
}
