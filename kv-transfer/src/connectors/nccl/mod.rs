//! KV from one GPU to another by NCCL, on one host or between hosts.
//!
//! A [link](super::link) with one stream, over TCP, announces the KV. The KV itself comes as messages of a queue that
//! belongs to this pair of nodes (`pair_queue`). A queue is two communicators used in turn, made with the link and
//! ended with it, so a restarted node never meets old ones. NCCL messages have no names: both ends must ask for them
//! in the same order. So the sender numbers them in its frames, and the receiver asks for them in that order, even if
//! their transfer has ended: it receives an unwanted message and drops it.
//!
//! A node with several pipeline stages has slots on the GPUs of its first stage, and the GPUs of the other stages access
//! them directly. So messages are the same for all numbers of stages.
//!
//! NCCL never accesses a page. A kernel on the sender's GPU gathers and digests pages into a slot. The message goes
//! from this slot to a slot of the receiver's GPU, and a kernel there scatters and digests the pages. So a landing is
//! quiet when this node's own kernels are done, as with `cuda-ipc`, and a cancelled transfer costs no communicator.
//! Communicators are aborted only if the peer is dead or stalls; later transfers use new ones. See
//! `docs/decisions/0023-nccl-between-slots.md`.
//!
//! Suggested reading order: the operations of the GPU and of NCCL (`backend`), the queue of a pair (`pair_queue`),
//! its thread (`thread`, `round_robin`), the handshake (`accept`), the sender (`send`) and the receiver (`receive`);
//! then NCCL on GPUs (`card`), and the test double in host memory (`double`).

mod card;
mod accept;
pub mod double;
mod backend;
mod receive;
mod send;
mod thread;
mod round_robin;

pub mod pair_queue;
mod pair_queues;

use std::sync::Arc;

use tracing::info;
use types::{Scheme, WireAddress};

use self::accept::PairAcceptor;
use self::backend::{NcclBackend, QUEUES_MAX};
use self::card::GpuBackend;
use self::double::Double;
use self::send::NcclSendPath;
use super::gpu::slot_set::SLOT_ALIGN;
use super::link::check_pages;
use super::link::connector::{LinkAddress, LinkConnector};
use super::tcp::advertised;
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::settings::FrameSizes;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "nccl";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfOnGpus,
};

/// The factor by which a message is larger than the frame setting. Messages are large because NCCL needs some
/// microseconds to start one.
const MESSAGES_LARGER: usize = 128;

/// The sizes of consecutive messages. Only the last ones are small, because each message costs NCCL some
/// microseconds. They are scattered after everything has arrived. The first one is gathered while NCCL
/// launches it.
const TAPER: FrameSizes = FrameSizes { first_part: 1, least_part: 4, share: 2 };

/// Listens on a port beside that of `tcp`. Fails if the KV is not on a GPU, if it cannot be moved 16 bytes at
/// a time, or if there is no NCCL.
pub async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    super::gpu::pages::check(&parts.memory)?;
    let bytes = slot_bytes(&parts)?;
    let backend = Arc::new(GpuBackend::new(&parts, bytes)?);
    listen_over(parts, backend).await
}

/// Like [`listen`], but without a GPU and NCCL: slots and messages are those of the double, in host memory.
pub async fn listen_double(
    parts: ConnectorParts,
    double: &Double,
) -> Result<Arc<LinkConnector>, TransferError> {
    let bytes = slot_bytes(&parts)?;
    let backend = Arc::new(double.backend(&parts.memory, bytes, n_queues(&parts)));
    listen_over(parts, backend).await
}

async fn listen_over(
    mut parts: ConnectorParts,
    backend: Arc<dyn NcclBackend>,
) -> Result<Arc<LinkConnector>, TransferError> {
    parts.settings.frame_bytes = parts.settings.frame_bytes.saturating_mul(MESSAGES_LARGER);
    parts.settings.tall_frames = true;
    parts.settings.taper = parts.settings.taper.or(Some(TAPER));
    // There is one stream, because the order of frames is the order of messages.
    parts.settings.streams = 1;
    let host = host(&parts.settings.listen).to_owned();
    let wire_threads = WireThreads::start(parts.memory.n_ranks(), parts.settings.awake(), &parts.gate)?;
    let refused = |source| TransferError::Listen { addr: host.clone(), source: Arc::new(source) };
    // The port in the setting belongs to the tcp connector, so this connector takes a free one.
    let (net, addr) = (Arc::clone(parts.world.net()), format!("{host}:0"));
    let listen = async move { Ok(net.listen(&addr).await) };
    let listener = wire_threads.run(&parts.gate, "kv port", listen).await?.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let address = WireAddress {
        scheme: Scheme::new(SCHEME),
        endpoint: advertised(&parts.settings, port),
        within_host: false,
    };
    info!(endpoint = address.endpoint, "nccl connector listens");
    let door = PairAcceptor::new(listener, Arc::clone(&backend), &parts);
    let send_path =
        move |parts: &ConnectorParts| Ok(Arc::new(NcclSendPath::new(parts, Arc::clone(&backend))) as _);
    Ok(LinkConnector::start(
        parts,
        wire_threads,
        LinkAddress { wire: address, socket: None },
        Box::new(door),
        Box::new(send_path),
    ))
}

/// Returns the size of a slot: a frame's KV, or the largest page.
fn slot_bytes(parts: &ConnectorParts) -> Result<usize, TransferError> {
    let largest = check_pages(parts)?;
    Ok(parts.settings.frame_bytes.saturating_mul(MESSAGES_LARGER).max(largest).next_multiple_of(SLOT_ALIGN))
}

/// Returns the limit of queues of a pair, if NCCL supports more than one.
fn n_queues(parts: &ConnectorParts) -> usize {
    parts.settings.nccl_queues.clamp(1, QUEUES_MAX)
}

/// Returns the host of `host:port`; IPv6 addresses keep their brackets.
fn host(listen: &str) -> &str {
    listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host)
}
