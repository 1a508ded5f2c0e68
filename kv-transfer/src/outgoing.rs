//! The sender's side of a transfer, shared by all wires: a queue of spans, a task that waits for their fences and
//! cuts them into frames, and one outcome.
//!
//! With a task per transfer, `send` need not wait for a fence, and a prompt whose layers are late does not delay
//! other prompts. Only frames that can be sent at once compete for the wire.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use chassis::{Gate, Task, spawn_guarded};
use kv_cache::{BlockLease, LayerFence};
use tokio::sync::{Notify, mpsc};
use tracing::trace;
use types::{Destination, Handoff, KvLayout, KvSpan, Landing, Scheme, TransferId};

use crate::chunk_queue::{Chunk, ChunkQueue};
use crate::connector::KvSender;
use crate::connector_parts::ConnectorParts;
use crate::digest::PageShape;
use crate::error::TransferError;
use crate::landing::{Opener, bad_request};
use crate::lanes::{LaneSpan, Lanes};
use crate::metrics::TransferMetrics;
use crate::pages::{FRAME_DIGESTS_MAX, FRAME_PAGES_MAX, Pages, PieceMax, cut, cut_tall, wanted_part};
use crate::pending_copies::PendingCopies;
use crate::processes::{OtherProcesses, split};
use crate::reshard::Lane;
use crate::settings::{FrameSizes, TransferSettings};

/// Limit of queued spans per transfer, which wait for their fence or for the wire.
const SPANS_QUEUED_MAX: usize = 16;
/// Limit of queued refetch requests per transfer.
const REFETCHES_QUEUED_MAX: usize = 64;

/// The operations that each wire implements for outgoing transfers.
#[async_trait]
pub(crate) trait Wire: Debug + Send + Sync + 'static {
    /// Sends some computed pages. Waits for room, not for arrival. `from` is held until the pages are sent.
    async fn put(
        &self,
        out: &Arc<Outgoing>,
        piece: LaneSpan,
        from: Arc<BlockLease>,
    ) -> Result<(), TransferError>;
    /// Reports to the receiver that everything was sent.
    async fn hand_off(&self, out: &Arc<Outgoing>, handoff: Handoff) -> Result<(), TransferError>;
    /// Returns the process of the receiver that takes the KV of a layer (number in the model); `None` for its head.
    fn process_of(&self, _layer: u16) -> Option<usize> {
        None
    }
    /// Notifies the peer that the transfer has ended. Never waits; called once per transfer, whatever the outcome.
    fn leave(&self, out: &Outgoing, unfinished: Option<&TransferError>);
}

/// One outgoing transfer: the state that the wire, the pump and the sender share.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) landing: Landing,
    pub(crate) lanes: Lanes,
    outcome: OnceLock<Result<(), TransferError>>,
    /// Notified once, when there is an outcome. It wakes waiters in order, so that a simulation is repeatable.
    settled: Notify,
    refetches: mpsc::Sender<Vec<LaneSpan>>,
    /// KV frames that are queued for the wire or being sent.
    pub(crate) pending_copies: Arc<PendingCopies>,
}

impl Outgoing {
    pub(crate) fn new(landing: Landing, lanes: Lanes) -> (Arc<Self>, Refetches) {
        let (refetches, asked) = mpsc::channel(REFETCHES_QUEUED_MAX);
        (
            Arc::new(Self {
                landing,
                lanes,
                outcome: OnceLock::new(),
                settled: Notify::new(),
                refetches,
                pending_copies: Arc::default(),
            }),
            Refetches(asked),
        )
    }

    pub(crate) fn transfer(&self) -> TransferId {
        self.landing.transfer
    }

    /// Sets the outcome. Only the first one counts.
    pub(crate) fn settle(&self, outcome: Result<(), TransferError>) {
        if self.outcome.set(outcome).is_ok() {
            self.settled.notify_waiters();
        }
    }

    /// Requests that pages which arrived wrong are sent again.
    pub(crate) fn refetch(&self, lane: Lane, spans: Vec<KvSpan>) {
        let spans = spans.into_iter().map(|span| LaneSpan { lane, span }).collect();
        if self.refetches.try_send(spans).is_err() {
            self.settle(Err(TransferError::Corrupted { pages: REFETCHES_QUEUED_MAX }));
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.outcome.get().is_some()
    }

    fn outcome(&self) -> Option<Result<(), TransferError>> {
        self.outcome.get().cloned()
    }

    pub(crate) async fn settled(&self) -> Result<(), TransferError> {
        loop {
            let settled = self.settled.notified();
            tokio::pin!(settled);
            settled.as_mut().enable();
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            settled.await;
        }
    }
}

impl Opener for Outgoing {
    fn ended(&self, _transfer: TransferId, outcome: Result<(), &TransferError>) {
        self.settle(outcome.map_err(TransferError::clone));
    }
}

/// The pump's queue of pages to send again.
#[derive(Debug)]
pub(crate) struct Refetches(mpsc::Receiver<Vec<LaneSpan>>);

// === checks of every wire before it opens a landing ===

/// Returns the landing in `to` and the lanes from this node's ranks to the landing's. Refuses a destination of
/// another connector, and one whose layout or model differs from this node's.
pub(crate) fn landing_of(
    to: &Destination,
    scheme: &Scheme,
    parts: &ConnectorParts,
) -> Result<(Landing, Lanes), TransferError> {
    let Destination::Landing(landing) = to else {
        return Err(TransferError::WrongDestination(format!("{to:?}")));
    };
    if landing.wire.scheme != *scheme {
        return Err(TransferError::WrongDestination(format!("a landing on {}", landing.wire.scheme)));
    }
    parts.fingerprint.agree(&landing.fingerprint)?;
    let lanes = agree(parts.memory.layout(), &landing.layout)?;
    Ok((landing.clone(), lanes))
}

/// Checks that two layouts differ in their numbers of ranks only, and returns the lanes between the two.
fn agree(ours: &KvLayout, theirs: &KvLayout) -> Result<Lanes, TransferError> {
    if ours.is_same_but_for_ranks(theirs) {
        let lanes = Lanes::between(ours.shard.tp_size, theirs);
        return lanes.map_err(|error| TransferError::Layout(error.to_string()));
    }
    let parts = |layout: &KvLayout| types::Fingerprint::new(layout.fingerprint_parts());
    let difference = match parts(ours).agree(&parts(theirs)) {
        Err(mismatch) => mismatch.0.join("; "),
        Ok(()) => format!("stage or layer numbers: {:?} here, {:?} there", ours.shard, theirs.shard),
    };
    Err(TransferError::Layout(difference))
}

// === the sender ===

#[derive(Debug)]
enum PumpJob {
    Span(SpanJob),
    Handoff(Handoff),
    /// All further jobs of this transfer come from this queue.
    Feed(Box<Feed>),
}

/// A caller's queue, and the check of its chunks.
#[derive(Debug)]
struct Feed {
    queue: ChunkQueue,
    check: SpanCheck,
}

#[derive(Clone, Debug)]
struct SpanJob {
    span: KvSpan,
    from: Arc<BlockLease>,
    ready: LayerFence,
}

/// Checks that each page of a transfer is sent once, and no other page.
#[derive(Debug)]
struct SpanCheck {
    out: Arc<Outgoing>,
    pages: Pages,
}

impl SpanCheck {
    fn of(out: Arc<Outgoing>) -> Self {
        let pages = Pages::of(&out.landing, Lanes::only());
        Self { out, pages }
    }

    /// Returns the part of a span that the receiver wants; `None` if it holds all of it.
    fn wanted(&self, span: KvSpan, from: &BlockLease) -> Result<Option<LaneSpan>, TransferError> {
        let Some(span) = wanted_part(span, &self.out.landing) else { return Ok(None) };
        // The caller does not know of ranks and sends whole pages, so the check uses one lane.
        let span = LaneSpan { lane: Lane::ONLY, span };
        if !self.pages.contains(&span) {
            return Err(bad_request(&format!("{:?}", span.span)));
        }
        if from.table(span.group).len() < span.blocks.end as usize {
            return Err(bad_request("the lease is shorter than the span"));
        }
        Ok(Some(span))
    }

    fn claim(&mut self, span: &LaneSpan) -> Result<(), TransferError> {
        if self.pages.claim(span) { Ok(()) } else { Err(bad_request("a page is sent for the second time")) }
    }

    /// Refuses a handoff before all pages are sent, and a handoff of another sequence.
    fn complete(&self, handoff: &Handoff) -> Result<(), TransferError> {
        let (sent, wanted) = (self.pages.n_claimed(), self.pages.total());
        if sent < wanted {
            return Err(TransferError::Incomplete { sent, wanted });
        }
        let landing = &self.out.landing;
        if (handoff.transfer, handoff.n_tokens) != (landing.transfer, landing.n_tokens) {
            return Err(bad_request("the handoff is of another sequence"));
        }
        Ok(())
    }
}

/// The [`KvSender`] of every wire.
#[derive(Debug)]
pub(crate) struct Sender {
    transfer: SenderEnd,
    jobs: mpsc::Sender<PumpJob>,
    check: SpanCheck,
    /// Dropping the sender ends it, and releases every lease that waits in the queue.
    pump: Task<()>,
}

/// The sender's share in its transfer. The drop aborts a transfer without an outcome, and notifies the peer.
#[derive(Debug)]
struct SenderEnd {
    out: Arc<Outgoing>,
    wire: Arc<dyn Wire>,
    metrics: TransferMetrics,
}

impl Sender {
    pub(crate) fn start(
        out: Arc<Outgoing>,
        refetches: Refetches,
        wire: Arc<dyn Wire>,
        parts: &ConnectorParts,
    ) -> Box<dyn KvSender> {
        let (jobs, queue) = mpsc::channel(SPANS_QUEUED_MAX);
        let check = SpanCheck::of(Arc::clone(&out));
        let TransferSettings { frame_bytes, tall_frames, taper, .. } = parts.settings;
        let (of_pump, sent, processes) = (Arc::clone(&out), Vec::new(), parts.processes.clone());
        let wire_of_pump = Arc::clone(&wire);
        let pump =
            Pump { out: of_pump, wire: wire_of_pump, frame_bytes, tall_frames, taper, processes, sent };
        let pump = pump.start(&parts.gate, queue, refetches);
        let transfer = SenderEnd { out, wire, metrics: parts.metrics.clone() };
        Box::new(Self { transfer, jobs, check, pump })
    }

    /// Waits for room in the queue, or for the end of the transfer.
    async fn room(&self) -> Result<mpsc::OwnedPermit<PumpJob>, TransferError> {
        tokio::select! {
            biased;
            _ = self.transfer.out.settled() => Err(self.why_over()),
            // The pump closes its end of the queue when there is an outcome, so this fails even if the
            // outcome comes between the two checks.
            room = self.jobs.clone().reserve_owned() => room.map_err(|_| self.why_over()),
        }
    }

    fn why_over(&self) -> TransferError {
        self.transfer.out.outcome().and_then(Result::err).unwrap_or(TransferError::Closed)
    }
}

#[async_trait]
impl KvSender for Sender {
    async fn send(
        &mut self,
        span: KvSpan,
        from: Arc<BlockLease>,
        ready: LayerFence,
    ) -> Result<(), TransferError> {
        let Some(span) = self.check.wanted(span, &from)? else { return Ok(()) };
        let room = self.room().await?;
        self.check.claim(&span)?;
        room.send(PumpJob::Span(SpanJob { span: span.span, from, ready }));
        Ok(())
    }

    async fn finish(self: Box<Self>, handoff: Handoff) -> Result<(), TransferError> {
        self.check.complete(&handoff)?;
        self.room().await?.send(PumpJob::Handoff(handoff));
        self.transfer.out.settled().await
    }

    async fn feed(self: Box<Self>, queue: ChunkQueue) -> Result<(), TransferError> {
        let room = self.room().await?;
        // The pump is dropped after the transfer, as in a drop of the sender.
        let Self { pump: _pump, transfer, check, .. } = *self;
        room.send(PumpJob::Feed(Box::new(Feed { queue, check })));
        transfer.out.settled().await
    }
}

impl Drop for SenderEnd {
    fn drop(&mut self) {
        self.out.settle(Err(TransferError::Cancelled));
        let unfinished = self.out.outcome().and_then(Result::err);
        self.metrics.sent(&self.out.landing, unfinished.as_ref());
        self.wire.leave(&self.out, unfinished.as_ref());
    }
}

// === the pump ===

/// The task that sends one transfer's spans from the queue, in order.
#[derive(Debug)]
struct Pump {
    out: Arc<Outgoing>,
    wire: Arc<dyn Wire>,
    frame_bytes: usize,
    tall_frames: bool,
    taper: Option<FrameSizes>,
    /// A piece has layers of one process only.
    processes: Option<Arc<dyn OtherProcesses>>,
    /// The spans that were sent. They are kept with their leases until the receiver has verified them, to be
    /// sent again if pages arrive wrong.
    sent: Vec<SpanJob>,
}

impl Pump {
    fn start(
        mut self,
        gate: &Gate,
        mut queue: mpsc::Receiver<PumpJob>,
        mut refetches: Refetches,
    ) -> Task<()> {
        spawn_guarded(gate, "outgoing transfer", async move {
            if let Err(error) = self.run(&mut queue, &mut refetches).await {
                self.out.settle(Err(error));
            }
        })
    }

    async fn run(
        &mut self,
        queue: &mut mpsc::Receiver<PumpJob>,
        refetches: &mut Refetches,
    ) -> Result<(), TransferError> {
        let out = Arc::clone(&self.out);
        let mut feed = None;
        loop {
            tokio::select! {
                biased;
                _ = out.settled() => return Ok(()),
                Some(spans) = refetches.0.recv() => self.put_again(spans).await?,
                Some(job) = queue.recv() => match job {
                    PumpJob::Span(job) => self.put_when_ready(job).await?,
                    PumpJob::Handoff(handoff) => self.wire.hand_off(&self.out, handoff).await?,
                    PumpJob::Feed(of_caller) => feed = Some(of_caller),
                },
                chunk = next_chunk(&mut feed) => {
                    let Some(check) = feed.as_mut().map(|feed| &mut feed.check) else { continue };
                    match chunk.ok_or(TransferError::Unfinished)? {
                        Chunk::Kv { span, from, ready } => {
                            let Some(span) = check.wanted(span, &from)? else { continue };
                            check.claim(&span)?;
                            self.put_when_ready(SpanJob { span: span.span, from, ready }).await?;
                        }
                        Chunk::Handoff(handoff) => {
                            check.complete(&handoff)?;
                            feed = None;
                            self.wire.hand_off(&self.out, handoff).await?;
                        }
                    }
                }
            }
        }
    }

    /// Sends layers as they are computed: all consecutive layers that are ready at once, at least one.
    async fn put_when_ready(&mut self, job: SpanJob) -> Result<(), TransferError> {
        self.sent.push(job.clone());
        let mut first = job.span.layers.start;
        while first < job.span.layers.end {
            let end = self.computed_until(&job, first).await?;
            trace!(target: "walk", transfer = %self.out.transfer(), layers = ?(first..end), "KV of layers handed to the connector");
            self.put(KvSpan { layers: first..end, ..job.span.clone() }, &job.from).await?;
            first = end;
        }
        Ok(())
    }

    /// Waits for the layer at `first`, and returns the end of the run of computed layers that begins there.
    async fn computed_until(&self, job: &SpanJob, first: u16) -> Result<u16, TransferError> {
        let layers = &self.out.landing.layout.group(job.span.group).layers;
        let done_when = |pos: u16| layers[usize::from(pos)].layer + 1;
        tokio::select! {
            biased;
            passed = job.ready.wait(done_when(first)) => passed.map_err(|_| TransferError::FenceBroken)?,
            _ = self.out.settled() => return Err(TransferError::Cancelled),
        }
        let mut rest = first + 1..job.span.layers.end;
        Ok(rest.find(|pos| !job.ready.is_open(done_when(*pos))).unwrap_or(job.span.layers.end))
    }

    /// Sends a span on all lanes, piece by piece, so that all ranks send at the same time.
    async fn put(&self, span: KvSpan, from: &Arc<BlockLease>) -> Result<(), TransferError> {
        self.put_on(self.out.lanes.all(), span, from).await
    }

    async fn put_on(
        &self,
        lanes: &[Lane],
        span: KvSpan,
        from: &Arc<BlockLease>,
    ) -> Result<(), TransferError> {
        for piece in self.cut(&span) {
            for lane in lanes {
                let piece = LaneSpan { lane: *lane, span: piece.clone() };
                tokio::select! {
                    biased;
                    _ = self.out.settled() => return Ok(()),
                    put = self.wire.put(&self.out, piece, Arc::clone(from)) => put?,
                }
            }
        }
        Ok(())
    }

    /// Cuts a span into pieces from one process to one process each. Each lane's part of a piece fits into one frame.
    fn cut(&self, span: &KvSpan) -> Vec<KvSpan> {
        let layers = &self.out.landing.layout.group(span.group).layers;
        let from = |layer| self.processes.as_ref().and_then(|processes| processes.process_of(layer, 0));
        let parts = split(span, layers, |layer| (from(layer), self.wire.process_of(layer)));
        parts.iter().flat_map(|part| self.cut_of_one(part)).collect()
    }

    /// Like [`cut`](Self::cut), for a span between one process of each side.
    fn cut_of_one(&self, span: &KvSpan) -> Vec<KvSpan> {
        let Outgoing { landing, lanes, .. } = &*self.out;
        let layers = &landing.layout.group(span.group).layers;
        let heads = |pos: u16| lanes.widest(layers[usize::from(pos)].n_kv_heads);
        let page_bytes = |pos: u16| {
            let page = PageShape::new(&landing.layout, span.group, pos);
            page.n_parts * heads(pos) * page.head_bytes
        };
        let heads_max = span.layers.clone().map(heads).max().unwrap_or(1);
        let max = PieceMax { bytes: self.frame_bytes, pages: frame_pages(heads_max, lanes.len()) };
        match self.tall_frames {
            true => cut_tall(page_bytes, span, max, self.taper),
            false => cut(page_bytes, span, max),
        }
    }

    async fn put_again(&mut self, parts: Vec<LaneSpan>) -> Result<(), TransferError> {
        for LaneSpan { lane, span } in parts {
            let holds = |job: &&SpanJob| covers(&job.span, &span);
            let Some(job) = self.sent.iter().find(holds) else {
                return Err(TransferError::Mismatch(
                    "the receiver asked again for pages that were never sent".to_owned(),
                ));
            };
            if self.out.lanes.position(lane).is_none() {
                return Err(TransferError::Mismatch(
                    "the receiver asked again for pages on an unknown lane".to_owned(),
                ));
            }
            self.put_on(&[lane], span, &Arc::clone(&job.from)).await?;
        }
        Ok(())
    }
}

/// Returns the next chunk of the feed. Without a feed it waits for ever.
async fn next_chunk(feed: &mut Option<Box<Feed>>) -> Option<Chunk> {
    match feed {
        Some(feed) => feed.queue.next().await,
        None => std::future::pending().await,
    }
}

fn covers(sent: &KvSpan, asked: &KvSpan) -> bool {
    sent.group == asked.group
        && sent.layers.start <= asked.layers.start
        && asked.layers.end <= sent.layers.end
        && sent.blocks.start <= asked.blocks.start
        && asked.blocks.end <= sent.blocks.end
}

/// Returns the number of pages that fit into one frame with their digests, if a lane carries at most
/// `heads_max` heads. With several lanes, a page may be two pieces of memory, K and V.
fn frame_pages(heads_max: usize, n_lanes: usize) -> usize {
    let pages_max = if n_lanes > 1 { FRAME_PAGES_MAX / 2 } else { FRAME_PAGES_MAX };
    (FRAME_DIGESTS_MAX / heads_max.max(1)).clamp(1, pages_max)
}
