//! KV between two GPUs of the same machine: the receiver's GPU copies it from the sender's memory.
//!
//! A [link](super::link) over Unix sockets, as in [`shm`]. The sender passes a file descriptor of each GPU's memory
//! to the receiver, once for each link. Frames name the place of their KV in it. A GPU of the receiver copies it over
//! NVLink: with its copy engines if the pieces are large, otherwise with a kernel. The digests follow a moment later,
//! because the sender's GPU computes them while the receiver's GPU copies. So no process writes into another's
//! memory, this side can prove by itself that a landing is quiet, and a sender that stops or dies during a copy does
//! no harm. Its memory exists as long as the receiver has it mapped. See `docs/decisions/0010-gpus-pull.md`.
//!
//! Suggested reading order: connecting two processes (`accept`, `shared`), the thread that waits for a GPU (`copy_thread`),
//! pages in the form for a GPU (`pages`), the sender (`send`) and the receiver (`receive`).

mod accept;
mod shared;

mod receive;
mod send;

use std::path::Path;
use std::sync::Arc;

use device::cuda::PageCopierSize;
use kv_cache::KvMemory;
use tracing::info;
use types::{Scheme, WireAddress};

use self::accept::GpuAcceptor;
use self::send::CudaIpcSendPath;
use super::gpu::copy_thread::CopyThreads;
use super::link::check_pages;
use super::link::connector::{LinkAddress, LinkConnector};
use super::shm;
use super::unix;
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::bad_request;
use crate::settings::FrameSizes;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "cuda-ipc";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfOnGpus,
};

/// The factor by which frames are larger than the setting. Frames are large because the message for one frame
/// takes as long as the copy of a megabyte.
const FRAMES_LARGER: usize = 96;
/// The multiprocessors that copy KV: enough to saturate the wire, while prompts are hardly slowed down.
const MULTIPROCESSORS: u32 = 16;
/// The sizes of consecutive frames. The first frame has 8 MiB, and is copied while the next ones are
/// announced. The last frames are shares of the rest, so that all lanes end at about the same time, and the
/// last digests soon after.
const TAPER: FrameSizes = FrameSizes { first_part: 6, least_part: 6, share: 4 };
/// The number of a link's streams. Each has one frame in progress at a time.
const STREAMS: u16 = 6;

/// Listens on a Unix socket beside that of `shm`. Fails if the KV is not on a GPU, or cannot be moved 16
/// bytes at a time.
pub async fn listen(mut parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    super::gpu::pages::check(&parts.memory)?;
    check_number_of_cards(&parts.memory)?;
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
    info!(endpoint = address.endpoint, "cuda-ipc connector listens");
    let send_path = move |parts: &ConnectorParts| CudaIpcSendPath::over(parts, copy_threads.clone());
    Ok(LinkConnector::start(
        parts,
        wire_threads,
        LinkAddress { wire: address, socket: Some(socket) },
        Box::new(door),
        Box::new(send_path),
    ))
}

/// Checks that a greeting has room for the files of all GPUs.
fn check_number_of_cards(memory: &KvMemory) -> Result<(), TransferError> {
    if memory.on_cards().count() > unix::FILES_MAX {
        return Err(bad_request("KV on more GPUs than a handshake of cuda-ipc has room for"));
    }
    Ok(())
}
