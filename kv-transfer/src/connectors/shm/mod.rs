//! KV between two processes of one machine: the receiver copies it out of the sender's own pages.
//!
//! A [link](super::link) over Unix sockets, on which frames say where their KV lies instead of bringing it. The sender
//! shows the receiver the memory of its pages, to read and not to write, and the receiver copies from page to page: one
//! copy, made by whoever owns its target. So nobody writes another's pages, proof of quiet is in the receiver's own
//! hands, and a sender that is stopped or killed in the middle of it can do no harm: see
//! `docs/decisions/0007-shared-memory-is-read.md`.
//!
//! Suggested reading order: how two processes find each other (`door`), what the sender shows and how it points at it
//! (`shown`), KV that must be copied to be shown (`stage`), and what the receiver sees (`seen`).

pub(super) mod door;
mod seen;
mod shown;
mod stage;

use std::path::Path;
use std::sync::Arc;

use tracing::info;
use types::{Scheme, WireAddress};

use self::shown::Shown;
use super::link::check_pages;
use super::link::frame::PAYLOAD_BYTES_MAX;
use super::link::links::Makes;
use super::link::wire::Wire;
use crate::connector::ConnectorParts;
use crate::error::TransferError;
use crate::home::Home;

pub const SCHEME: &str = "shm";

/// Where the sockets are: a folder that all processes see that may share memory. Nothing else is put there.
pub const FOLDER: &str = "/dev/shm";

/// So much larger than other wires' are frames that only point at their KV: what they cost is a few words and wake-ups,
/// and the KV of a few still stays in a core's cache from digest to copy.
const FRAMES_LARGER: usize = 2;

/// Listens in [`FOLDER`].
pub async fn listen(parts: ConnectorParts) -> Result<Arc<Wire>, TransferError> {
    let in_place = parts.memory.has_files();
    info!(in_place, "kv transfer by shared memory");
    over(parts, Box::new(Shown::in_place))
}

/// The same, but for senders whose KV others cannot see, for whatever reason: all of it goes through a stage.
pub async fn listen_staged(parts: ConnectorParts) -> Result<Arc<Wire>, TransferError> {
    over(parts, Box::new(Shown::staged))
}

fn over(mut parts: ConnectorParts, medium: Box<Makes>) -> Result<Arc<Wire>, TransferError> {
    check_pages(&parts)?;
    parts.settings.frame_bytes =
        parts.settings.frame_bytes.saturating_mul(FRAMES_LARGER).min(PAYLOAD_BYTES_MAX);
    let refused = |source| TransferError::Listen { addr: FOLDER.to_owned(), source: Arc::new(source) };
    let (listener, socket) = door::bind(Path::new(FOLDER), parts.world.draw()).map_err(refused)?;
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint: socket.endpoint() };
    Ok(Wire::start(parts, Home::shared(), (address, Some(socket)), Box::new(listener), medium))
}
