//! Hot path. The sender's end of a pair: frames that name their KV by its number in the queue.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use chassis::{Stream, World};

use super::cable::{Cable, Slot};
use super::door;
use super::fabric::{End, Fabric, Gathering};
use crate::connector::ConnectorParts;
use crate::connectors::link::frame::{Body, Frame, FrameError};
use crate::connectors::link::medium::{BETWEEN_GPUS_SINCE, Medium};
use crate::connectors::link::span_out::{SpanOut, spoil};
use crate::connectors::link::stream::FrameWriter;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::FaultKind;

/// See the module.
#[derive(Debug)]
pub(super) struct Sending {
    world: World,
    fabric: Arc<dyn Fabric>,
    stall: Duration,
    /// From the first stream on.
    cable: OnceLock<Cable>,
    /// Messages so far.
    n_messages: AtomicU64,
    /// Frames that are gathered, in their order, until they are written; none once the link is closed. Held for a look,
    /// never across an await.
    gathering: Mutex<Option<VecDeque<Gathered>>>,
}

/// A frame whose KV is on its way into a slot, or there.
#[derive(Debug)]
struct Gathered {
    span: SpanOut,
    bytes: usize,
    slot: Slot,
    gathering: Gathering,
}

/// Frames that are gathered at one time, so that NCCL need not wait for any: their slots are this link's.
const GATHERING_MAX: usize = 2;

impl Sending {
    pub(super) fn new(parts: &ConnectorParts, fabric: Arc<dyn Fabric>) -> Self {
        let (world, stall) = (parts.world.clone(), parts.settings.stall());
        Self {
            world,
            fabric,
            stall,
            cable: OnceLock::new(),
            n_messages: AtomicU64::new(0),
            gathering: Mutex::new(Some(VecDeque::new())),
        }
    }

    fn cable(&self) -> Result<&Cable, TransferError> {
        self.cable.get().ok_or(TransferError::Closed)
    }

    /// Begins to gather a span into a slot.
    async fn gather(&self, parts: &ConnectorParts, span: SpanOut) -> Result<Gathered, TransferError> {
        let (cable, bytes) = (self.cable()?, span.bytes(parts));
        let slot = cable.slot().await?;
        let gathering = cable.stage().gather(slot.nth, &span, parts.settings.digests).await?;
        Ok(Gathered { span, bytes, slot, gathering })
    }

    /// Writes frames until so few are left to be gathered.
    async fn write_but(&self, n_left: usize, writer: &mut FrameWriter) -> Result<(), TransferError> {
        while let Some(Gathered { span, bytes, slot, gathering }) = self.first_but(n_left) {
            let digests = gathering.digests().await?;
            if !span.out.is_over() {
                self.put(writer, &span, (slot, bytes), digests).await?;
            }
        }
        Ok(())
    }

    fn first_but(&self, n_left: usize) -> Option<Gathered> {
        let mut gathering = self.gathering();
        gathering.as_mut().filter(|all| all.len() > n_left)?.pop_front()
    }

    fn gathering(&self) -> MutexGuard<'_, Option<VecDeque<Gathered>>> {
        self.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The frame, and then the message that it names. One stream writes, so their orders are the same.
    async fn put(
        &self,
        writer: &mut FrameWriter,
        span: &SpanOut,
        (slot, bytes): (Slot, usize),
        digests: Vec<Digest>,
    ) -> Result<(), TransferError> {
        let number = self.n_messages.fetch_add(1, Ordering::Relaxed);
        let body = Body::Queued { number, bytes: bytes as u32, span: span.piece.span.clone(), digests };
        writer.write(&Frame::new(span.out.transfer(), body)).await?;
        // Nobody waits for it: the receiver says what has become of the transfer.
        self.cable()?.put(Arc::new(slot), bytes).await.map(|_| ())
    }

    async fn write_with(
        &self,
        fault: FaultKind,
        writer: &mut FrameWriter,
        (parts, span): (&ConnectorParts, SpanOut),
    ) -> Result<(), TransferError> {
        let again = span.page(span.piece.span.clone());
        let Gathered { span, bytes, slot, gathering } = self.gather(parts, span).await?;
        let mut digests = gathering.digests().await?;
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::WrongDigest => spoil(&mut digests),
            FaultKind::FlipBit(bit) => {
                let bit = (bit % (bytes as u64 * 8)) as usize;
                self.cable()?.stage().flip(slot.nth, bit)?;
            }
            FaultKind::Duplicate => {
                let again = self.gather(parts, again).await?;
                let digests = again.gathering.digests().await?;
                self.put(writer, &span, (again.slot, bytes), digests).await?;
            }
        }
        self.put(writer, &span, (slot, bytes), digests).await
    }
}

#[async_trait]
impl Medium for Sending {
    /// The pair is joined before the link is there, so that the first transfer does not wait for it.
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        let id = self.fabric.id().map_err(io::Error::other)?;
        let mut stream = self.world.net().connect(endpoint).await?;
        door::greet(&mut stream, &id).await?;
        let stage = self.fabric.stage().map_err(io::Error::other)?;
        let cable = Cable::start(stage, id, End::Sender, self.stall).map_err(io::Error::other)?;
        cable.ready().await.map_err(io::Error::other)?;
        self.cable.set(cable).map_err(|_| io::Error::other("a link has one stream"))?;
        Ok(stream)
    }

    fn since(&self) -> u16 {
        BETWEEN_GPUS_SINCE
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
            self.write_but(0, writer).await?;
            return self.write_with(fault, writer, (parts, span)).await;
        }
        self.write_but(GATHERING_MAX - 1, writer).await?;
        let gathered = self.gather(parts, span).await?;
        self.gathering().as_mut().ok_or(TransferError::Closed)?.push_back(gathered);
        Ok(())
    }

    async fn write_rest(&self, writer: &mut FrameWriter) -> Result<(), TransferError> {
        self.write_but(0, writer).await
    }

    fn taken(&self, _slot: u16) -> Result<(), FrameError> {
        Err(FrameError::Unexpected("a slot of a stage that this wire does not have"))
    }

    /// What is received is scattered by the receiver.
    fn writes(&self) -> bool {
        false
    }

    async fn broken(&self) -> TransferError {
        match self.cable() {
            Ok(cable) => cable.lost().await,
            Err(error) => error,
        }
    }

    /// The cable is dropped with this, and its thread sees to the rest.
    fn close(&self) {
        let left = self.gathering().take();
        drop(left);
    }
}
