//! Hot path. The sender's end of a pair. Each frame names its KV by the number of a message.
//!
//! A frame and its message are sent while the GPU still fills the slot: the GPU sends the message after that.
//! The digests of the pages follow.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, World};
use tracing::trace;
use types::KvLayout;

use super::accept;
use super::backend::NcclBackend;
use super::pair_queue::PairSettings;
use super::pair_queues::{LaneQueue, PairQueues};
use crate::connector_parts::ConnectorParts;
use crate::connectors::gpu::free_slots::LentSlot;
use crate::connectors::gpu::staging::{Gathering, InSlot};
use crate::connectors::link::frame::{Body, Frame, KvPlace};
use crate::connectors::link::send_path::KvSendPath;
use crate::connectors::link::span_out::{SpanOut, corrupt_first};
use crate::connectors::link::stream::FrameWriter;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::FaultKind;

/// The sender's end of one link.
#[derive(Debug)]
pub(super) struct NcclSendPath {
    world: World,
    layout: KvLayout,
    backend: Arc<dyn NcclBackend>,
    pair_settings: PairSettings,
    /// The queues to the receiver. Set by the first stream.
    pair_queues: OnceLock<PairQueues>,
    /// Frames being gathered whose digests are not yet sent, in order; `None` once the link is closed. Held for one
    /// read or write, never across an await.
    gathering: Mutex<Option<VecDeque<GatheredFrame>>>,
}

/// A frame whose KV is being gathered into a slot, or is gathered.
#[derive(Debug)]
struct GatheredFrame {
    span: SpanOut,
    bytes: usize,
    gathering: Gathering,
}

impl GatheredFrame {
    /// Waits until the KV is gathered, and returns its digests.
    async fn done(self) -> Result<(Self, Vec<Digest>), TransferError> {
        let digests = self.gathering.digests().await?;
        Ok((Self { gathering: Gathering::Done(Vec::new()), ..self }, digests))
    }
}

/// Limit of a lane's messages whose digests are not yet sent.
const GATHERING_MAX: usize = 2;

impl NcclSendPath {
    pub(super) fn new(parts: &ConnectorParts, backend: Arc<dyn NcclBackend>) -> Self {
        Self {
            world: parts.world.clone(),
            layout: parts.memory.layout().clone(),
            backend,
            pair_settings: PairSettings::of(parts),
            pair_queues: OnceLock::new(),
            gathering: Mutex::new(Some(VecDeque::new())),
        }
    }

    fn pair_queues(&self) -> Result<&PairQueues, TransferError> {
        self.pair_queues.get().ok_or(TransferError::Closed)
    }

    fn line(&self, span: &SpanOut) -> Result<&LaneQueue, TransferError> {
        Ok(self.pair_queues()?.of(span.piece.lane)?)
    }

    /// Starts to gather a span into a slot.
    async fn gather(
        &self,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(GatheredFrame, LentSlot), TransferError> {
        let (pair_queue, bytes) = (&self.line(&span)?.pair_queue, span.bytes(parts));
        pair_queue.expect();
        let slot = pair_queue.slot().await?;
        let gathering = pair_queue
            .stage()
            .mover()
            .gather(InSlot::of(slot.nth), span.pages(), parts.settings.wanted_digests())
            .await?;
        trace!(target: "walk", transfer = %span.out.transfer(), blocks = ?span.piece.blocks, "gathering of KV pages begins");
        Ok((GatheredFrame { span, bytes, gathering }, slot))
    }

    /// Sends digests of gathered pages until at most `n_left` per lane are unsent.
    async fn send_digests_but(&self, n_left: usize, writer: &mut FrameWriter) -> Result<(), TransferError> {
        while let Some(GatheredFrame { span, gathering, .. }) = self.pop_gathered_but(n_left) {
            let digests = gathering.digests().await?;
            trace!(target: "walk", transfer = %span.out.transfer(), blocks = ?span.piece.blocks, "KV pages gathered");
            if !digests.is_empty() {
                let body = Body::Digests { span: span.piece.span.clone(), digests };
                writer.write(&Frame::new(span.out.transfer(), body).on(span.piece.lane)).await?;
            }
        }
        Ok(())
    }

    fn pop_gathered_but(&self, n_left: usize) -> Option<GatheredFrame> {
        let mut gathering = self.gathering();
        let all = gathering.as_mut()?;
        let n_of = |lane| all.iter().filter(|one| one.span.piece.lane == lane).count();
        let too_many = all.iter().any(|one| n_of(one.span.piece.lane) > n_left);
        if too_many { all.pop_front() } else { None }
    }

    fn gathering(&self) -> MutexGuard<'_, Option<VecDeque<GatheredFrame>>> {
        self.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the frame, and then queues its message. One stream writes, so both have the same order.
    ///
    /// If `digests` is `None`, they are sent later.
    async fn put(
        &self,
        writer: &mut FrameWriter,
        gathered: &GatheredFrame,
        slot: LentSlot,
        digests: Option<Vec<Digest>>,
    ) -> Result<(), TransferError> {
        let GatheredFrame { span, bytes, gathering } = gathered;
        let line = self.line(span)?;
        let (number, bytes) = (line.number(), *bytes as u32);
        let place = KvPlace::Message { number, bytes };
        let body = Body::Kv { span: span.piece.span.clone(), digests, place };
        writer.write(&Frame::new(span.out.transfer(), body).on(span.piece.lane)).await?;
        trace!(target: "walk", transfer = %span.out.transfer(), blocks = ?span.piece.blocks, "KV frame sent to the peer");
        // The result of the message is not awaited, because the receiver reports the outcome of the transfer.
        let put = line.pair_queue.put(Arc::new(slot), bytes as usize, gathering.before()).await;
        put.map(|_| ())
    }

    async fn write_with(
        &self,
        fault: FaultKind,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        let again = span.page(span.piece.span.clone());
        let (gathered, slot) = self.gather(parts, span).await?;
        let (gathered, mut digests) = gathered.done().await?;
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::WrongDigest => corrupt_first(&mut digests),
            FaultKind::FlipBit(bit) => {
                let bit = (bit % (gathered.bytes as u64 * 8)) as usize;
                self.line(&gathered.span)?.pair_queue.stage().flip(slot.nth, bit)?;
            }
            FaultKind::Duplicate => {
                let (again, slot) = self.gather(parts, again).await?;
                let (again, digests) = again.done().await?;
                self.put(writer, &again, slot, Some(digests)).await?;
            }
        }
        self.put(writer, &gathered, slot, Some(digests)).await
    }
}

#[async_trait]
impl KvSendPath for NcclSendPath {
    /// Connects the link's only stream and joins the pairs, so that the first transfer does not wait for the
    /// joining.
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        let mut stream = link::dial(&self.world, endpoint).await?;
        let (stages, ids) = accept::greet(&mut stream, &self.layout, &*self.backend).await?;
        let pair_queues = PairQueues::start(stages, &ids, &self.pair_settings);
        let pair_queues = pair_queues.map_err(io::Error::other)?;
        pair_queues.ready().await.map_err(io::Error::other)?;
        self.pair_queues.set(pair_queues).map_err(|_| io::Error::other("a link has one stream"))?;
        Ok(stream)
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
        if let Some(fault) = parts.faults.next(span.bytes(parts)) {
            self.send_digests_but(0, writer).await?;
            return self.write_with(fault, writer, parts, span).await;
        }
        let (gathered, slot) = self.gather(parts, span).await?;
        if gathered.span.out.is_over() {
            // Waits for the gathering before the slot is released, so that the slot is not reused earlier.
            return gathered.done().await.map(|_| drop(slot));
        }
        let bare = (!parts.settings.digests).then(Vec::new);
        self.put(writer, &gathered, slot, bare).await?;
        self.gathering().as_mut().ok_or(TransferError::Closed)?.push_back(gathered);
        self.send_digests_but(GATHERING_MAX, writer).await
    }

    async fn write_rest(&self, writer: &mut FrameWriter) -> Result<(), TransferError> {
        self.send_digests_but(0, writer).await
    }

    /// Returns when a queue of the pair is lost.
    async fn broken(&self) -> TransferError {
        match self.pair_queues() {
            Ok(pair_queues) => pair_queues.lost().await,
            Err(error) => error,
        }
    }

    /// Drops the frames in progress. The pair queues are dropped with this value; their threads end the
    /// communicators.
    fn close(&self) {
        let left = self.gathering().take();
        drop(left);
    }
}
