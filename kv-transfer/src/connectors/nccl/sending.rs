//! Hot path. The sender's end of a pair: frames that name their KV by its number in the queue.
//!
//! A frame and its message leave as soon as a slot is being filled: the card sends when that is done. What the pages must
//! be follows.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use chassis::{Stream, World};
use tracing::trace;
use types::KvLayout;

use super::cable::{Slot, Terms};
use super::cables::{Cables, Line};
use super::door;
use super::fabric::{Fabric, Gathering};
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
    layout: KvLayout,
    fabric: Arc<dyn Fabric>,
    terms: Terms,
    /// From the first stream on.
    cables: OnceLock<Cables>,
    /// Frames that are gathered, in their order, until it is said what they must be; none once the link is closed. Held for a look,
    /// never across an await.
    gathering: Mutex<Option<VecDeque<Gathered>>>,
}

/// A frame whose KV is on its way into a slot, or there.
#[derive(Debug)]
struct Gathered {
    span: SpanOut,
    bytes: usize,
    gathering: Gathering,
}

impl Gathered {
    /// Waits until it is there: what it is.
    async fn done(self) -> Result<(Self, Vec<Digest>), TransferError> {
        let digests = self.gathering.digests().await?;
        Ok((Self { gathering: Gathering::Done(Vec::new()), ..self }, digests))
    }
}

/// Messages of a lane that are under way before what they must be is known.
const GATHERING_MAX: usize = 2;

impl Sending {
    pub(super) fn new(parts: &ConnectorParts, fabric: Arc<dyn Fabric>) -> Self {
        Self {
            world: parts.world.clone(),
            layout: parts.memory.layout().clone(),
            fabric,
            terms: Terms::of(parts),
            cables: OnceLock::new(),
            gathering: Mutex::new(Some(VecDeque::new())),
        }
    }

    fn cables(&self) -> Result<&Cables, TransferError> {
        self.cables.get().ok_or(TransferError::Closed)
    }

    fn line(&self, span: &SpanOut) -> Result<&Line, TransferError> {
        Ok(self.cables()?.of(span.piece.lane)?)
    }

    /// Begins to gather a span into a slot.
    async fn gather(&self, parts: &ConnectorParts, span: SpanOut) -> Result<(Gathered, Slot), TransferError> {
        let (cable, bytes) = (&self.line(&span)?.cable, span.bytes(parts));
        cable.expect();
        let slot = cable.slot().await?;
        let gathering = cable.stage().gather(slot.nth, &span, parts.settings.digests).await?;
        trace!(target: "walk", transfer = %span.out.transfer(), blocks = ?span.piece.blocks, "gathering");
        Ok((Gathered { span, bytes, gathering }, slot))
    }

    /// Says what gathered pages must be, until of each lane so few are left of which that is not known.
    async fn say_but(&self, n_left: usize, writer: &mut FrameWriter) -> Result<(), TransferError> {
        while let Some(Gathered { span, gathering, .. }) = self.first_but(n_left) {
            let digests = gathering.digests().await?;
            trace!(target: "walk", transfer = %span.out.transfer(), blocks = ?span.piece.blocks, "gathered");
            if !digests.is_empty() {
                let body = Body::Digests { span: span.piece.span.clone(), digests };
                writer.write(&Frame::new(span.out.transfer(), body).on(span.piece.lane)).await?;
            }
        }
        Ok(())
    }

    fn first_but(&self, n_left: usize) -> Option<Gathered> {
        let mut gathering = self.gathering();
        let all = gathering.as_mut()?;
        let n_of = |lane| all.iter().filter(|one| one.span.piece.lane == lane).count();
        let too_many = all.iter().any(|one| n_of(one.span.piece.lane) > n_left);
        if too_many { all.pop_front() } else { None }
    }

    fn gathering(&self) -> MutexGuard<'_, Option<VecDeque<Gathered>>> {
        self.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The frame, and then the message that it names. One stream writes, so their orders are the same.
    ///
    /// `None`: what the pages must be is said later.
    async fn put(
        &self,
        writer: &mut FrameWriter,
        gathered: &Gathered,
        slot: Slot,
        digests: Option<Vec<Digest>>,
    ) -> Result<(), TransferError> {
        let Gathered { span, bytes, gathering } = gathered;
        let line = self.line(span)?;
        let (number, bytes) = (line.number(), *bytes as u32);
        let of = span.piece.span.clone();
        let body = match digests {
            Some(digests) => Body::Queued { number, bytes, span: of, digests },
            None => Body::Coming { number, bytes, span: of },
        };
        writer.write(&Frame::new(span.out.transfer(), body).on(span.piece.lane)).await?;
        trace!(target: "walk", transfer = %span.out.transfer(), blocks = ?span.piece.blocks, "frame written");
        // Nobody waits for it: the receiver says what has become of the transfer.
        let put = line.cable.put(Arc::new(slot), bytes as usize, gathering.before()).await;
        put.map(|_| ())
    }

    async fn write_with(
        &self,
        fault: FaultKind,
        writer: &mut FrameWriter,
        (parts, span): (&ConnectorParts, SpanOut),
    ) -> Result<(), TransferError> {
        let again = span.page(span.piece.span.clone());
        let (gathered, slot) = self.gather(parts, span).await?;
        let (gathered, mut digests) = gathered.done().await?;
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::WrongDigest => spoil(&mut digests),
            FaultKind::FlipBit(bit) => {
                let bit = (bit % (gathered.bytes as u64 * 8)) as usize;
                self.line(&gathered.span)?.cable.stage().flip(slot.nth, bit)?;
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
impl Medium for Sending {
    /// The pairs are joined before the link is there, so that the first transfer does not wait for it.
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        let mut stream = self.world.net().connect(endpoint).await?;
        let (stages, ids) = door::greet(&mut stream, &self.layout, &*self.fabric).await?;
        let cables = Cables::start(stages, &ids, &self.terms);
        let cables = cables.map_err(io::Error::other)?;
        cables.ready().await.map_err(io::Error::other)?;
        self.cables.set(cables).map_err(|_| io::Error::other("a link has one stream"))?;
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
            self.say_but(0, writer).await?;
            return self.write_with(fault, writer, (parts, span)).await;
        }
        let (gathered, slot) = self.gather(parts, span).await?;
        if gathered.span.out.is_over() {
            // The slot is nobody else's before that.
            return gathered.done().await.map(|_| drop(slot));
        }
        let bare = (!parts.settings.digests).then(Vec::new);
        self.put(writer, &gathered, slot, bare).await?;
        self.gathering().as_mut().ok_or(TransferError::Closed)?.push_back(gathered);
        self.say_but(GATHERING_MAX, writer).await
    }

    async fn write_rest(&self, writer: &mut FrameWriter) -> Result<(), TransferError> {
        self.say_but(0, writer).await
    }

    fn taken(&self, _slot: u16) -> Result<(), FrameError> {
        Err(FrameError::Unexpected("a slot of a stage that this wire does not have"))
    }

    /// What is received is scattered by the receiver.
    fn writes(&self) -> bool {
        false
    }

    async fn broken(&self) -> TransferError {
        match self.cables() {
            Ok(cables) => cables.lost().await,
            Err(error) => error,
        }
    }

    /// The cables are dropped with this, and their threads see to the rest.
    fn close(&self) {
        let left = self.gathering().take();
        drop(left);
    }
}
