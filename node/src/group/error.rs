//! The errors of a node of several processes.

use std::io;
use std::time::Duration;

use engine::OpenError;
use kv_transfer::TransferError;

#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    #[error("listen for followers on {addr}")]
    Listen { addr: String, source: io::Error },
    #[error("no process has joined for {} within {} ms: start `baton rank --of {addr} --place PLACE` for each{}", .missing, .within.as_millis(), last_refusal(.refused))]
    Missing { missing: String, addr: String, within: Duration, refused: Option<String> },
    #[error("the head at {addr} cannot be reached within {} ms", .within.as_millis())]
    NoHead { addr: String, within: Duration, source: io::Error },
    #[error("the head at {addr} refuses this process: {why}")]
    Refused { addr: String, why: String },
    /// The process that listens there is no head, or a head of another cluster or version.
    #[error(
        "no head answers at {addr} ({why}): `--of` needs `expert.model.join` of a head with the same executable, `cluster.secret_file` and certificates as this process"
    )]
    NotAdmitted { addr: String, why: String },
    #[error("read the executable of this process")]
    Executable(#[source] io::Error),
    /// The other side closed the connection, was silent, or sent something that is no message.
    #[error("{0}")]
    Lost(String),
    /// A compute thread has panicked or has refused a step. The log says more.
    #[error("a compute thread of this process has ended")]
    Stage,
    #[error("open the model's stage")]
    Open(#[source] OpenError),
    #[error("move KV of this stage")]
    Transfer(#[source] TransferError),
    #[error("start a compute thread")]
    Thread(#[source] io::Error),
}

impl GroupError {
    pub(super) fn lost(what: &str, error: &io::Error) -> Self {
        Self::Lost(format!("{what}: {error}"))
    }
}

/// Says why the last process was refused, for the text of an error.
fn last_refusal(refused: &Option<String>) -> String {
    refused.as_ref().map_or_else(String::new, |why| format!(" (the last one was refused: {why})"))
}
