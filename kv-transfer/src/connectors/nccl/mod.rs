//! KV from one GPU to another by NCCL: wherever it finds a way, on one host or across.
//!
//! A [link](super::link) with one stream, over TCP, tells what comes; the KV itself comes as messages of a queue that the
//! pair of nodes has for itself (`pair_queue`): two communicators used in turns, made with the link and ended with it, so that
//! neither end's next life meets them. NCCL knows no names: the two ends must ask for messages in the same order. So the
//! sender numbers them in its frames, and the receiver asks for them in that order, whatever has become of their transfers:
//! a message that is not wanted any more is received all the same, and forgotten.
//!
//! NCCL never sees a page. A message goes from a slot of the sender's card, into which a kernel has gathered and digested
//! pages, to a slot of the receiver's, from which a kernel scatters and digests them. So a landing is quiet when this node's
//! own kernels are done, as with `cuda-ipc`, and a transfer that is cancelled costs no communicator. Those are given
//! up only where the peer is dead or stands still, and what was under way is tried again with a new one. See
//! `docs/decisions/0023-nccl-between-slots.md`.
//!
//! Suggested reading order: what is needed of the card and of NCCL (`backend`), the queue of a pair (`pair_queue`), who sees to it
//! (`thread`, `round_robin`), how two processes find each other (`accept`), the sender (`send`) and the receiver (`receive`);
//! then NCCL on cards (`card`), and the double over host memory with which tests see to the rest (`double`).

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
use super::link::check_pages;
use super::link::connector::LinkConnector;
use crate::connector::{Auto, ConnectorParts, KvConnector, WireKind};
use crate::error::TransferError;
use crate::settings::Taper;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "nccl";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfOnGpus,
};

/// The factor by which a message is larger than the setting for frames: it takes NCCL some microseconds to begin one.
const MESSAGES_LARGER: usize = 128;

/// Each message costs NCCL some microseconds, so few are small: the last ones, which are scattered when all has come. The
/// first is gathered in the time that NCCL takes to launch it.
const TAPER: Taper = Taper { first_part: 1, least_part: 4, share: 2 };

/// Listens beside `tcp`. Refused where the KV is not on a card, cannot be moved 16 bytes at a time, or there is no NCCL.
pub async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    super::gpu::pages::check(&parts.memory)?;
    let bytes = slot_bytes(&parts)?;
    let backend = Arc::new(GpuBackend::new(&parts, bytes)?);
    listen_over(parts, backend).await
}

/// The same without a GPU and without NCCL: pages, slots and messages of the double, which is host memory.
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
    // The order of frames is the order of messages.
    parts.settings.streams = 1;
    let host = host(&parts.settings.listen).to_owned();
    let wire_threads = WireThreads::start(parts.memory.n_ranks(), parts.settings.awake(), &parts.gate)?;
    let refused = |source| TransferError::Listen { addr: host.clone(), source: Arc::new(source) };
    // The port of the setting is tcp's.
    let (net, addr) = (Arc::clone(parts.world.net()), format!("{host}:0"));
    let listen = async move { Ok(net.listen(&addr).await) };
    let listener = wire_threads.run(&parts.gate, "kv port", listen).await?.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let advertised = if parts.settings.advertise.is_empty() { &host } else { &parts.settings.advertise };
    let address = WireAddress {
        scheme: Scheme::new(SCHEME),
        endpoint: format!("{advertised}:{port}"),
        within_host: false,
    };
    info!(endpoint = address.endpoint, "kv transfer by nccl");
    let door = PairAcceptor::new(listener, Arc::clone(&backend), &parts);
    let send_path =
        move |parts: &ConnectorParts| Ok(Arc::new(NcclSendPath::new(parts, Arc::clone(&backend))) as _);
    Ok(LinkConnector::start(parts, wire_threads, (address, None), Box::new(door), Box::new(send_path)))
}

/// What one slot has to hold: a frame's KV, or the largest page.
fn slot_bytes(parts: &ConnectorParts) -> Result<usize, TransferError> {
    let largest = check_pages(parts)?;
    Ok(parts.settings.frame_bytes.saturating_mul(MESSAGES_LARGER).max(largest).next_multiple_of(SLOT_ALIGN))
}

/// Queues of a pair, if NCCL supports more than one.
fn n_queues(parts: &ConnectorParts) -> usize {
    parts.settings.nccl_queues.clamp(1, QUEUES_MAX)
}

/// Slots begin on edges that any kernel likes.
const SLOT_ALIGN: usize = 256;

/// The host of `host:port`; IPv6 addresses keep their brackets.
fn host(listen: &str) -> &str {
    listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host)
}
