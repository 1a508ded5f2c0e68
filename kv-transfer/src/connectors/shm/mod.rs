//! KV between two processes of one machine: the receiver copies it out of the sender's own pages.
//!
//! A [link](super::link) over Unix sockets, on which frames say where their KV lies instead of bringing it. The sender
//! shows the receiver the memory of its pages, to read and not to write, and the receiver copies from page to page: one
//! copy, made by the owner of its target. So no process writes another's pages, proof of quiet is in the receiver's own
//! hands, and a sender that is stopped or killed in the middle of it can do no harm: see
//! `docs/decisions/0007-shared-memory-is-read.md`.
//!
//! Suggested reading order: how two processes find each other (`accept`), what the sender shows and how it points at it
//! (`send`), KV that must be copied to be shown (`stage`), what the receiver sees (`receive`) and how it copies (`copy`).

mod accept;
mod copy;
mod receive;
mod send;
mod stage;

use std::path::Path;
use std::sync::Arc;

use tracing::info;
use types::{Scheme, WireAddress};

use self::accept::ShmAcceptor;
use self::send::ShmSendPath;
use super::link::check_pages;
use super::link::connector::LinkConnector;
use super::link::frame::PAYLOAD_BYTES_MAX;
use super::link::links::MakeSendPath;
use crate::connector::{Auto, ConnectorParts, KvConnector, WireKind};
use crate::error::TransferError;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "shm";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfItWorks,
};

/// Where the sockets are: a folder that all processes see that may share memory. Nothing else is put there.
pub const FOLDER: &str = "/dev/shm";

/// So much larger than other wires' are frames that only point at their KV: what they cost is a few words and wake-ups,
/// and the KV of a few still stays in a core's cache from digest to copy.
const FRAMES_LARGER: usize = 2;

/// Listens in [`FOLDER`].
pub async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let in_place = parts.memory.has_files();
    info!(in_place, "kv transfer by shared memory");
    over(parts, Box::new(ShmSendPath::in_place))
}

/// The same, but for senders whose KV others cannot see, for whatever reason: all of it goes through a stage.
pub async fn listen_staged(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    over(parts, Box::new(ShmSendPath::staged))
}

fn over(
    mut parts: ConnectorParts,
    send_path: Box<MakeSendPath>,
) -> Result<Arc<LinkConnector>, TransferError> {
    check_pages(&parts)?;
    parts.settings.frame_bytes =
        parts.settings.frame_bytes.saturating_mul(FRAMES_LARGER).min(PAYLOAD_BYTES_MAX);
    let refused = |source| TransferError::Listen { addr: FOLDER.to_owned(), source: Arc::new(source) };
    let (listener, socket) = super::unix::bind(Path::new(FOLDER), parts.world.draw()).map_err(refused)?;
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint: socket.endpoint(), within_host: true };
    let acceptor = ShmAcceptor { listener, world: parts.world.clone() };
    Ok(LinkConnector::start(
        parts,
        WireThreads::shared(),
        (address, Some(socket)),
        Box::new(acceptor),
        send_path,
    ))
}
