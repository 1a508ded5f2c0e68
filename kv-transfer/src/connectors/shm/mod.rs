//! KV between two processes of one machine: the receiver copies it from the sender's pages.
//!
//! A [link](super::link) over Unix sockets, whose frames name the place of their KV and do not carry it. The sender
//! shares the memory of its pages with the receiver, read-only, and the receiver copies from page to page. There is
//! one copy, made by the owner of its target. So no process writes another's pages, the receiver can prove by itself
//! that the wire is quiet, and a sender that stops or dies during a copy does no harm: see
//! `docs/decisions/0007-shared-memory-is-read.md`.
//!
//! KV on GPUs goes through slots of a stage: the sender's GPU copies it into a slot, and the receiver's GPU reads the
//! slot in place.
//!
//! Suggested reading order: connecting two processes (`accept`), the sender (`send`), KV that must be copied to be
//! shared (`stage`), the receiver (`receive`) and its copies (`copy`).

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
use super::gpu::double::DoubleStaging;
use super::gpu::slot_set::SlotSet;
use super::gpu::staging::{HostStaging, of_cards};
use super::link::check_pages;
use super::link::connector::{LinkAddress, LinkConnector};
use super::link::frame::PAYLOAD_BYTES_MAX;
use super::link::links::MakeSendPath;
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "shm";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfItWorks,
};

/// The folder of the sockets, which all processes that may share memory see. Nothing else is put there.
pub const FOLDER: &str = "/dev/shm";

/// The factor by which frames are larger than on other wires. Frames are larger because a frame carries no
/// KV, and costs a short message and a wake-up. The KV of a few such frames still stays in a core's cache
/// from digest to copy.
const FRAMES_LARGER: usize = 2;

/// The further factor for KV on GPUs: each frame costs both GPUs a kernel.
const FRAMES_LARGER_ON_GPUS: usize = 4;

/// The streams of a link between GPUs. Each has one frame in progress at a time.
const STREAMS_ON_GPUS: u16 = 6;

/// Listens on a socket in [`FOLDER`].
pub async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let in_place = parts.memory.has_files();
    info!(in_place, "shm connector listens");
    match of_cards(&parts)? {
        Some(staging) => over_gpus(parts, staging).await,
        None => over(parts, None, Box::new(ShmSendPath::in_place)).await,
    }
}

/// Like [`listen`], but all KV goes through a stage, as it does if the sender's pages cannot be shared.
pub async fn listen_staged(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    over(parts, None, Box::new(|parts| ShmSendPath::staged(parts, None))).await
}

/// Like [`listen`], but KV in host memory goes through a stage, as on GPUs.
pub async fn listen_double(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let staging = Arc::new(DoubleStaging(parts.memory.clone()));
    over_gpus(parts, staging).await
}

pub(super) async fn over_gpus(
    mut parts: ConnectorParts,
    staging: Arc<dyn HostStaging>,
) -> Result<Arc<LinkConnector>, TransferError> {
    parts.settings.frame_bytes = parts.settings.frame_bytes.saturating_mul(FRAMES_LARGER_ON_GPUS);
    parts.settings.streams = STREAMS_ON_GPUS;
    let of_link = Arc::clone(&staging);
    let send_path = move |parts: &ConnectorParts| ShmSendPath::staged(parts, Some(Arc::clone(&of_link)));
    over(parts, Some(staging), Box::new(send_path)).await
}

async fn over(
    mut parts: ConnectorParts,
    staging: Option<Arc<dyn HostStaging>>,
    send_path: Box<MakeSendPath>,
) -> Result<Arc<LinkConnector>, TransferError> {
    check_pages(&parts)?;
    parts.settings.frame_bytes =
        parts.settings.frame_bytes.saturating_mul(FRAMES_LARGER).min(PAYLOAD_BYTES_MAX);
    if let Some(staging) = &staging {
        let set = SlotSet::of(SCHEME, &parts)?;
        set.check(staging, stage::memory_of(set)?).await?;
    }
    let refused = |source| TransferError::Listen { addr: FOLDER.to_owned(), source: Arc::new(source) };
    let (listener, socket) = super::unix::bind(Path::new(FOLDER), parts.world.draw()).map_err(refused)?;
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint: socket.endpoint(), within_host: true };
    let acceptor = ShmAcceptor { listener, world: parts.world.clone(), staging };
    Ok(LinkConnector::start(
        parts,
        WireThreads::shared(),
        LinkAddress { wire: address, socket: Some(socket) },
        Box::new(acceptor),
        send_path,
    ))
}
