//! KV over TCP. It works on every network, and reads and writes block memory without an intermediate copy.
//!
//! A [link](super::link) whose streams are sockets, and whose frames carry their KV inline. KV on GPUs goes through slots
//! in host memory, from and to which the GPU copies it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::net::host_port;
use chassis::{Listener, Stream, World};
use tracing::info;
use types::{Scheme, WireAddress};

use super::gpu::double::DoubleStaging;
use super::gpu::slot_pool::{Slot, SlotPool};
use super::gpu::slot_set::SlotSet;
use super::gpu::staging::{HostStaging, PageMover, claim_slot, of_cards, take_slot};
use super::link::accept::{Handshake, Incoming, StreamAcceptor};
use super::link::check_pages;
use super::link::connector::{LinkAddress, LinkConnector};
pub use super::link::frame;
use super::link::frame::{Body, Frame, KvPlace, PAYLOAD_BYTES_MAX};
use super::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use super::link::send_path::KvSendPath;
use super::link::span_in::read_span;
use super::link::span_out::{PagesOut, SpanOut, corrupt_first, write_span};
use super::link::stream::{FrameReader, FrameWriter};
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::{Claim, OpenLanding};
use crate::pending_copies::PendingCopies;
use crate::settings::TransferSettings;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "tcp";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::Needed,
};

/// How many times as many streams a link has over TLS: encryption takes as much processor time as all other work of a
/// stream, and each stream has its own core.
const TLS_STREAMS: u16 = 2;

/// The factor by which frames of KV on GPUs are larger than the setting: each frame costs both GPUs a kernel.
const FRAMES_LARGER: usize = 4;

/// How many times as many streams a link between GPUs has: a stream waits while the GPU gathers its next frame, which
/// takes up to a millisecond beside a prompt.
const STREAMS_ON_GPUS: u16 = 4;

/// Listens on the address in the settings.
pub async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let staging = of_cards(&parts)?;
    listen_with(parts, staging).await
}

/// Like [`listen`], but KV in host memory goes through slots, as on GPUs.
pub async fn listen_double(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let staging: Arc<dyn HostStaging> = Arc::new(DoubleStaging(parts.memory.clone()));
    listen_with(parts, Some(staging)).await
}

pub(super) async fn listen_with(
    mut parts: ConnectorParts,
    staging: Option<Arc<dyn HostStaging>>,
) -> Result<Arc<LinkConnector>, TransferError> {
    let staged = Staged::check(staging, &mut parts).await?;
    if parts.world.identity().tls().is_some() {
        parts.settings.streams = parts.settings.streams.saturating_mul(TLS_STREAMS);
    }
    let Bound { port, address } = bind(&parts, staged.clone()).await?;
    info!(endpoint = address.endpoint, "tcp connector listens");
    let send_path =
        move |parts: &ConnectorParts| Ok(Arc::new(Sockets::new(parts.world.clone(), staged.as_ref())?) as _);
    Ok(LinkConnector::start(
        parts,
        WireThreads::shared(),
        LinkAddress { wire: address, socket: None },
        Box::new(port),
        Box::new(send_path),
    ))
}

/// A port that is open, and its address.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) port: Port,
    pub(super) address: WireAddress,
}

/// Opens the port of the settings. Its links have slots if `staged` is set.
pub(super) async fn bind(parts: &ConnectorParts, staged: Option<Staged>) -> Result<Bound, TransferError> {
    let addr = &parts.settings.listen;
    let refused = |source| TransferError::Listen { addr: addr.clone(), source: Arc::new(source) };
    let listener = parts.world.net().listen(addr).await.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let endpoint = advertised(&parts.settings, port);
    let address = WireAddress { scheme: Scheme::new(SCHEME), endpoint, within_host: false };
    let port = Port { listener, world: parts.world.clone(), staged };
    Ok(Bound { port, address })
}

/// Makes the slots of each end of a link.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    staging: Arc<dyn HostStaging>,
    set: SlotSet,
}

impl Staged {
    /// Checks the pages and, if there is a staging, that the machine has room for the slots of one link. With slots, the
    /// frames are larger and the streams more than in the settings.
    pub(super) async fn check(
        staging: Option<Arc<dyn HostStaging>>,
        parts: &mut ConnectorParts,
    ) -> Result<Option<Self>, TransferError> {
        check_pages(parts)?;
        let Some(staging) = staging else { return Ok(None) };
        let frame_bytes = parts.settings.frame_bytes.saturating_mul(FRAMES_LARGER);
        parts.settings.frame_bytes = frame_bytes.min(PAYLOAD_BYTES_MAX);
        parts.settings.streams = parts.settings.streams.saturating_mul(STREAMS_ON_GPUS);
        let set = SlotSet::of(SCHEME, parts)?;
        set.check(&staging, SlotPool::memory(set)?).await?;
        Ok(Some(Self { staging, set }))
    }

    fn slots(&self) -> Result<SlotPool, TransferError> {
        SlotPool::new(Arc::clone(&self.staging), self.set)
    }
}

/// A listening port of this wire.
#[derive(Debug)]
pub(super) struct Port {
    listener: Box<dyn Listener>,
    world: World,
    /// `None` if the processor copies the KV.
    staged: Option<Staged>,
}

#[async_trait]
impl StreamAcceptor for Port {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (stream, from) = self.listener.accept().await?;
        let (world, staged) = (self.world.clone(), self.staged.clone());
        let admitted = async move {
            let stream = link::admit(&world, stream).await.map_err(TransferError::lost)?;
            let slots = staged.as_ref().map(Staged::slots).transpose()?;
            let kv_path = Some(Arc::new(InlineKv { slots }) as Arc<dyn KvPath>);
            Ok(Incoming { stream, kv_path, handshake_permit: None })
        };
        Ok((from.to_string(), Box::pin(admitted)))
    }
}

/// Returns the address that peers connect to. IPv6 addresses have brackets.
pub(super) fn advertised(settings: &TransferSettings, port: u16) -> String {
    let host = match settings.advertise.as_str() {
        "" => settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host),
        host => host,
    };
    host_port(host, port)
}

/// The receiver's end: KV follows its frame on the stream.
#[derive(Debug)]
struct InlineKv {
    slots: Option<SlotPool>,
}

#[async_trait]
impl KvPath for InlineKv {
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place: KvPlace::Inline, payload_bytes } = frame else {
            return Err(wrong_place());
        };
        let Some(landing) = landing else {
            return reader.skip(payload_bytes).await.map(|()| Receipt::dropped());
        };
        let lent = slot_for(payload_bytes, self.slots.as_ref(), reader.stall()).await?;
        let Some((mover, slot)) = lent else {
            let digests = digests.here()?;
            return read_span(reader, &landing, &span, &digests, payload_bytes).await.map(Receipt::Done);
        };
        if claim_slot(&landing, &span, payload_bytes, &digests)? == Claim::Skip {
            return reader.skip(payload_bytes).await.map(|()| Receipt::dropped());
        }
        reader.fill(&mut slot.write()?[..payload_bytes]).await?;
        let fetch =
            async move { take_slot(&*mover, slot.start(), &landing, &span, payload_bytes, digests).await };
        Ok(Receipt::Pending(Box::pin(fetch)))
    }
}

/// The sender's end: the KV follows its frame on the stream.
#[derive(Debug)]
pub(super) struct Sockets {
    world: World,
    /// `None` if the processor copies the KV.
    slots: Option<SlotPool>,
}

impl Sockets {
    pub(super) fn new(world: World, staged: Option<&Staged>) -> Result<Self, TransferError> {
        Ok(Self { world, slots: staged.map(Staged::slots).transpose()? })
    }

    /// Gathers pages into a slot. Returns `None` if the processor copies them.
    ///
    /// `reads` counts the copy jobs that read the pages. They continue after an error and after a drop of the future.
    pub(super) async fn gather(
        &self,
        parts: &ConnectorParts,
        pages: PagesOut<'_>,
        reads: &Arc<PendingCopies>,
    ) -> Result<Option<FilledSlot>, TransferError> {
        let bytes = pages.bytes(parts.memory.layout());
        let lent = slot_for(bytes, self.slots.as_ref(), parts.settings.stall()).await?;
        let Some((mover, slot)) = lent else { return Ok(None) };
        let to = slot.start().counted(reads.begin());
        let gathering = mover.gather(to, pages, parts.settings.wanted_digests()).await?;
        Ok(Some(FilledSlot { slot, bytes, digests: gathering.digests().await? }))
    }
}

/// A slot with the KV of one frame.
#[derive(Debug)]
pub(super) struct FilledSlot {
    slot: Arc<Slot>,
    bytes: usize,
    digests: Vec<Digest>,
}

#[async_trait]
impl KvSendPath for Sockets {
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        link::dial(&self.world, endpoint).await
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        if span.out.is_over() {
            return Ok(());
        }
        let filled = self.gather(parts, span.pages(), &span.out.pending_copies).await?;
        write_frame(writer, parts, span.pages(), filled).await
    }
}

/// Writes one KV frame, from its slot if the pages were gathered. Not cancel-safe.
pub(super) async fn write_frame(
    writer: &mut FrameWriter,
    parts: &ConnectorParts,
    pages: PagesOut<'_>,
    filled: Option<FilledSlot>,
) -> Result<(), TransferError> {
    match filled {
        None => write_span(writer, parts, pages).await,
        Some(filled) => write_slot(writer, parts, pages, filled).await,
    }
}

/// Waits for a slot for `bytes` of KV. Returns `None` if the processor copies them.
async fn slot_for(
    bytes: usize,
    slots: Option<&SlotPool>,
    stall: Duration,
) -> Result<Option<(Arc<dyn PageMover>, Arc<Slot>)>, TransferError> {
    match slots {
        Some(slots) => slots.take(bytes, stall).await,
        None => Ok(None),
    }
}

async fn write_slot(
    writer: &mut FrameWriter,
    parts: &ConnectorParts,
    pages: PagesOut<'_>,
    filled: FilledSlot,
) -> Result<(), TransferError> {
    let FilledSlot { slot, bytes, mut digests } = filled;
    let mut n_times = 1;
    match parts.faults.next(bytes) {
        None => {}
        Some(FaultKind::Lose) => return Err(TransferError::lost_because("a fault was injected")),
        Some(FaultKind::Stall) => return std::future::pending().await,
        Some(FaultKind::Delay(by)) => tokio::time::sleep(by).await,
        Some(FaultKind::Duplicate) => n_times = 2,
        Some(FaultKind::WrongDigest) => corrupt_first(&mut digests),
        Some(FaultKind::FlipBit(bit)) => flip(&mut slot.write()?[..bytes], bit),
    }
    let body = Body::Kv { span: pages.piece.span.clone(), digests: Some(digests), place: KvPlace::Inline };
    let frame = Frame { payload_bytes: bytes, ..Frame::new(pages.transfer, body).on(pages.piece.lane) };
    for _ in 0..n_times {
        writer.write_copy(&frame, &slot.read()?[..bytes]).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_address_is_advertised_in_brackets() {
        for (advertise, listen, expected) in [
            ("fd00::2", "0.0.0.0:0", "[fd00::2]:7"),
            ("10.0.0.5", "0.0.0.0:0", "10.0.0.5:7"),
            ("", "[::1]:0", "[::1]:7"),
            ("", "10.0.0.5:0", "10.0.0.5:7"),
        ] {
            let (advertise, listen) = (advertise.to_owned(), listen.to_owned());
            let settings = TransferSettings { advertise, listen, ..TransferSettings::default() };
            assert_eq!(advertised(&settings, 7), expected);
        }
    }
}
