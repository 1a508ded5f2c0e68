//! KV from one GPU to another of the same machine: the receiver's GPU copies it out of the sender's memory.
//!
//! A [link](super::link) over Unix sockets, as [`shm`] has one. The sender gives the receiver a file descriptor
//! of each of its cards' memory, once for each link; frames say where their KV lies in it, and a card of the receiver's pulls it over
//! NVLink, by its copy engines where the KV lies in large pieces and by a kernel where it does not. What the KV must be is
//! said a moment later: the sender's card makes the digests while the receiver's copies. So no process writes into another's memory: that a landing is quiet is this side's own
//! knowledge, and a sender that is stopped or killed in the middle of it can do no harm. Its memory lives for as long as
//! the receiver has it mapped. See `docs/decisions/0010-gpus-pull.md`.
//!
//! Suggested reading order: how two processes find each other (`accept`), who waits for a card (`copy_thread`), pages as a card
//! is told of them (`pages`), the sender (`send`) and the receiver (`receive`).

mod accept;

mod receive;
mod send;

use std::path::Path;
use std::sync::Arc;

use device::cuda::PageCopierSize;
use tracing::info;
use types::{Scheme, WireAddress};

use self::accept::GpuAcceptor;
use self::send::CudaIpcSendPath;
use super::gpu::copy_thread::CopyThreads;
use super::link::check_pages;
use super::link::connector::LinkConnector;
use super::shm;
use super::unix;
use crate::connector::{Auto, ConnectorParts, KvConnector, WireKind};
use crate::error::TransferError;
use crate::settings::Taper;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "cuda-ipc";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfOnGpus,
};

/// The factor by which a card's frames are larger than the setting: the notice of a frame costs as much time as a megabyte.
const FRAMES_LARGER: usize = 96;
/// They keep the wire full, and prompts hardly notice that they are gone.
const MULTIPROCESSORS: u32 = 16;
/// From 8 MiB on, which is on its way while the next ones are told of; and shares of what is left, so that all lanes of the
/// card are done at about the same time, and the last digests soon after.
const TAPER: Taper = Taper { first_part: 6, least_part: 6, share: 4 };
/// Frames of a link that are under way at one time: a stream has one.
const STREAMS: u16 = 6;

/// Listens beside `shm`. Refused where the KV is not on a card, or cannot be moved 16 bytes at a time.
pub async fn listen(mut parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    super::gpu::pages::check(&parts.memory)?;
    check_pages(&parts)?;
    parts.settings.frame_bytes = parts.settings.frame_bytes.saturating_mul(FRAMES_LARGER);
    parts.settings.streams = STREAMS;
    parts.settings.tall_frames = true;
    parts.settings.taper = parts.settings.taper.or(Some(TAPER));
    let size = PageCopierSize::of(parts.settings.multiprocessors(MULTIPROCESSORS));
    let copy_threads = CopyThreads::start(&parts.memory, size, &parts.gate)?;
    let folder = Path::new(shm::FOLDER);
    let refused = |source| TransferError::Listen { addr: shm::FOLDER.to_owned(), source: Arc::new(source) };
    let wire_threads = WireThreads::start(parts.memory.n_ranks(), parts.settings.awake(), &parts.gate)?;
    let (listener, socket) = wire_threads.at(|| unix::bind(folder, parts.world.draw())).map_err(refused)?;
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint: socket.endpoint(), within_host: true };
    let (world, memory) = (parts.world.clone(), parts.memory.clone());
    let door = GpuAcceptor { listener, world, memory, copy_threads: copy_threads.clone() };
    info!(endpoint = address.endpoint, "kv transfer between GPUs");
    let send_path = move |parts: &ConnectorParts| CudaIpcSendPath::over(parts, copy_threads.clone());
    Ok(LinkConnector::start(
        parts,
        wire_threads,
        (address, Some(socket)),
        Box::new(door),
        Box::new(send_path),
    ))
}
