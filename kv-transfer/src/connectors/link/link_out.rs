//! The sender's end of a link: all streams to one receiver, and the transfers that share them.
//!
//! KV frames of all transfers wait in one short queue. Each stream takes the next frame when it can write, so a slow
//! stream delays only its own frame. Control frames have their own queue on stream 0 and overtake KV. The receiver
//! needs no order, because it counts pages.
//!
//! A link fails as a whole: a lost stream or a silent peer fails every transfer on it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use chassis::{Task, spawn_guarded};
use kv_cache::BlockLease;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};
use types::{Handoff, TransferId, in_full};

use super::code;
use super::connect::{Peer, STREAMS_MAX, StreamParams};
use super::endpoints::Endpoints;
use super::frame::{Body, Frame, FrameError, ProcessAddress};
use super::other_processes::{OtherQueues, n_streams};
use super::send_path::KvSendPath;
use super::span_out::SpanOut;
use super::stream::{FrameHalves, FrameReader, FrameWriter, within};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::Credentials;
use crate::lanes::LaneSpan;
use crate::outgoing::{Outgoing, Wire};
use crate::quiet::Quiet as _;
use crate::wire_threads::WireThreads;

/// Limit of queued KV frames per stream: enough that no stream is idle while a pump wakes up.
const FRAMES_QUEUED_PER_STREAM: usize = 2;
/// Limit of queued control frames. Each transfer has at most a few.
const CONTROL_QUEUED_MAX: usize = 1024;
/// The number of heartbeats within the time after which a silent side is considered dead.
const ALIVE_PER_STALL: u32 = 4;
/// The longest time between two heartbeats of this side: short, because a peer may have a shorter stall time.
const SILENT_MAX: Duration = Duration::from_millis(200);

/// All streams to one receiver, and the transfers that share them. Dropping the link closes its streams.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: Peer,
    shared: Arc<Shared>,
    control: mpsc::Sender<Frame>,
    #[expect(dead_code, reason = "held for their Drop")]
    streams: Vec<Task<()>>,
}

/// The streams of a link differ in the receiver's messages on them.
#[derive(Clone, Copy, Debug)]
enum StreamKind {
    /// Stream 0: answers and heartbeats.
    First,
    /// Only the end of the stream.
    Other,
}

/// The state that the link's tasks share.
#[derive(Debug)]
struct Shared {
    parts: ConnectorParts,
    wire_threads: WireThreads,
    send_path: Arc<dyn KvSendPath>,
    endpoints: Arc<Endpoints>,
    /// The queue of KV frames to the receiver's head, shared by all streams to it.
    to_head: SpanQueue,
    /// The queues to the receiver's other processes.
    to_others: Box<[SpanQueue]>,
    /// The queues of frames that other processes send; `None` if the node has one process.
    others: Option<OtherQueues>,
    /// The transfers in progress, by id. Held for a look-up, never across an await.
    transfers: Mutex<BTreeMap<TransferId, Transfer>>,
    /// Sends control frames later, if the link still exists then.
    control: mpsc::WeakSender<Frame>,
    lost: OnceLock<TransferError>,
    closed: CancellationToken,
}

#[derive(Debug)]
struct Transfer {
    out: Arc<Outgoing>,
    /// The channel for the answer to the `Open`; `None` once the receiver has answered.
    answer: Option<oneshot::Sender<Result<(), TransferError>>>,
}

/// Both ends of a queue of frames. It is closed with the link.
#[derive(Debug)]
struct SpanQueue {
    spans: async_channel::Sender<SpanOut>,
    to_send: async_channel::Receiver<SpanOut>,
}

impl SpanQueue {
    fn new(n_streams: usize) -> Self {
        let (spans, to_send) = async_channel::bounded(FRAMES_QUEUED_PER_STREAM * n_streams.max(1));
        Self { spans, to_send }
    }

    /// A closed queue keeps its frames. Their leases must not wait for the next link to this peer, so it is emptied.
    fn close(&self) {
        self.spans.close();
        while self.to_send.try_recv().is_ok() {}
    }
}

/// Makes the streams from 1 to `n_streams` (exclusive) to one process of a peer.
async fn more_streams(
    maker: &StreamParams<'_>,
    n_streams: u16,
    peer: &Peer,
) -> Result<Vec<FrameHalves>, TransferError> {
    let mut made = Vec::new();
    for stream in 1..n_streams {
        let (again, next) = maker.stream(stream).await?;
        if again.peer != *peer {
            return Err(TransferError::WrongEpoch);
        }
        made.push(next);
    }
    Ok(made)
}

// === impl Link ===

impl Link {
    /// Makes all streams of a link. Takes at most the stall time for each.
    pub(super) async fn connect(
        endpoint: &str,
        parts: &ConnectorParts,
        wire_threads: WireThreads,
        send_path: Arc<dyn KvSendPath>,
    ) -> Result<Self, TransferError> {
        let maker = StreamParams { endpoint, parts, send_path: &*send_path, link: parts.world.draw() };
        let n_streams = n_streams(parts);
        let (met, first) = maker.stream(0).await?;
        let mut made = vec![first];
        made.extend(more_streams(&maker, n_streams, &met.peer).await?);
        let mut to_others = Vec::new();
        for ProcessAddress { endpoint, .. } in &met.others {
            let maker = StreamParams { endpoint, ..maker };
            to_others.push(more_streams(&maker, (n_streams + 1).min(STREAMS_MAX), &met.peer).await?);
        }
        info!(peer = %met.peer.node, endpoint, streams = n_streams, processes = 1 + to_others.len(), "KV link to peer opened");
        let endpoints = Endpoints { head: endpoint.to_owned(), others: met.others };
        let (control, frames) = mpsc::channel(CONTROL_QUEUED_MAX);
        let endpoints = Arc::new(endpoints);
        let shared = Arc::new(Shared {
            parts: parts.clone(),
            to_head: SpanQueue::new(made.len()),
            to_others: to_others.iter().map(|streams| SpanQueue::new(streams.len())).collect(),
            others: OtherQueues::of(parts, &endpoints, maker.link),
            endpoints,
            wire_threads,
            send_path: Arc::clone(&send_path),
            transfers: Mutex::default(),
            control: control.downgrade(),
            lost: OnceLock::new(),
            closed: CancellationToken::new(),
        });
        let streams = shared.start_all(made, to_others, frames);
        Ok(Self { peer: met.peer, shared, control, streams })
    }

    pub(super) fn is_lost(&self) -> bool {
        self.shared.closed.is_cancelled()
    }

    /// Asks the receiver to open a landing, and waits for its answer.
    pub(super) async fn open(&self, out: &Arc<Outgoing>) -> Result<(), TransferError> {
        let (answer, answered) = oneshot::channel();
        self.shared.enter(Transfer { out: Arc::clone(out), answer: Some(answer) })?;
        let parts = &self.shared.parts;
        let open = Credentials::new(&out.landing, parts.memory.layout(), &parts.fingerprint);
        within(self.shared.parts.settings.stall(), "opening a landing", async {
            self.say(Frame::new(out.transfer(), Body::Open(open))).await?;
            answered.await.unwrap_or_else(|_| Err(self.shared.why_lost()))
        })
        .await
    }

    async fn say(&self, frame: Frame) -> Result<(), TransferError> {
        self.control.send(frame).await.map_err(|_| self.shared.why_lost())
    }
}

#[async_trait]
impl Wire for Link {
    async fn put(
        &self,
        out: &Arc<Outgoing>,
        piece: LaneSpan,
        from: Arc<BlockLease>,
    ) -> Result<(), TransferError> {
        let span = SpanOut { out: Arc::clone(out), piece, from, pending_copy: out.pending_copies.begin() };
        let shared = &self.shared;
        let of_other = shared.others.as_ref().and_then(|others| others.queue_of(&span));
        let ours = || match shared.endpoints.process_of(span.first_layer(), span.piece.lane.to) {
            None => &shared.to_head.spans,
            Some(process) => &shared.to_others[process].spans,
        };
        of_other.unwrap_or_else(ours).send(span).await.map_err(|_| shared.why_lost())
    }

    fn process_of(&self, layer: u16) -> Option<usize> {
        self.shared.endpoints.process_of(layer, 0)
    }

    async fn hand_off(&self, out: &Arc<Outgoing>, handoff: Handoff) -> Result<(), TransferError> {
        if self.shared.send_path.writes() {
            // The handoff also reports that this side's device no longer writes the receiver's pages, so it
            // waits for that.
            out.pending_copies.proven().await;
        }
        self.say(Frame::new(out.transfer(), Body::Handoff(handoff))).await
    }

    fn leave(&self, out: &Outgoing, unfinished: Option<&TransferError>) {
        let known = self.shared.remove(out);
        let Some(error) = unfinished.filter(|_| known && !self.is_lost()) else { return };
        let (code, detail) = code::encode(error);
        let failed = Frame::new(out.transfer(), Body::Failed { code, detail });
        if let Err(mpsc::error::TrySendError::Full(_)) = self.control.try_send(failed) {
            self.shared.lose(TransferError::lost_because("the queue of control frames is full"));
        }
        self.shared.say_when_quiet(out);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.lose(TransferError::Closed);
    }
}

// === impl Shared ===

impl Shared {
    fn enter(&self, transfer: Transfer) -> Result<(), TransferError> {
        match self.transfers().entry(transfer.out.transfer()) {
            Entry::Occupied(_) => return Err(TransferError::AlreadyOpened),
            Entry::Vacant(free) => free.insert(transfer),
        };
        // This check comes after the insertion, so that no transfer is missed: either this call sees the
        // loss, or `lose` sees the transfer.
        if self.closed.is_cancelled() { Err(self.why_lost()) } else { Ok(()) }
    }

    /// Removes the transfer and returns whether it was present. A second opening of a transfer does not remove the
    /// first.
    fn remove(&self, out: &Outgoing) -> bool {
        let mut transfers = self.transfers();
        let known = transfers.get(&out.transfer()).is_some_and(|known| std::ptr::eq(&*known.out, out));
        known && transfers.remove(&out.transfer()).is_some()
    }

    /// Ends the link and every transfer on it. The first error is kept.
    fn lose(&self, error: TransferError) {
        let error = self.lost.get_or_init(|| error).clone();
        self.closed.cancel();
        self.to_head.close();
        self.to_others.iter().for_each(SpanQueue::close);
        if let Some(others) = &self.others {
            others.close();
        }
        self.send_path.close();
        let transfers: Vec<_> =
            std::mem::take(&mut *self.transfers()).into_values().map(|transfer| transfer.out).collect();
        if !transfers.is_empty() {
            info!(
                endpoint = self.endpoints.head,
                transfers = transfers.len(),
                error = in_full(&error),
                "KV link to peer lost, its transfers fail"
            );
        }
        for out in transfers {
            out.settle(Err(error.clone()));
        }
    }

    /// Notifies the receiver when no write of a failed transfer is left. The receiver keeps the pages back until
    /// then.
    fn say_when_quiet(&self, out: &Outgoing) {
        if !self.send_path.writes() {
            return;
        }
        let (pending_copies, control, transfer) =
            (Arc::clone(&out.pending_copies), self.control.clone(), out.transfer());
        let say = async move {
            pending_copies.proven().await;
            if let Some(control) = control.upgrade() {
                // On a lost link this fails, so the error is ignored: there the end of the link is the
                // notification.
                let _ = control.send(Frame::new(transfer, Body::Quiet)).await;
            }
        };
        self.wire_threads.at(|| spawn_guarded(&self.parts.gate, "quiet report", say)).detach();
    }

    fn why_lost(&self) -> TransferError {
        self.lost.get().cloned().unwrap_or(TransferError::Closed)
    }

    fn transfers(&self) -> MutexGuard<'_, BTreeMap<TransferId, Transfer>> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts all streams. `frames` leave on the first one.
    fn start_all(
        self: &Arc<Self>,
        to_head: Vec<FrameHalves>,
        to_others: Vec<Vec<FrameHalves>>,
        frames: mpsc::Receiver<Frame>,
    ) -> Vec<Task<()>> {
        let to_head = to_head.into_iter().map(|halves| (halves, &self.to_head));
        let with_queue =
            |(streams, queue): (Vec<FrameHalves>, _)| streams.into_iter().map(move |halves| (halves, queue));
        let to_others = to_others.into_iter().zip(&self.to_others).flat_map(with_queue);
        let mut frames = Some(frames);
        let start = |(nth, (halves, queue)): (usize, (FrameHalves, &SpanQueue))| {
            let spans = queue.to_send.clone();
            self.wire_threads.nth(nth).at(|| self.start_stream(halves, spans, frames.take()))
        };
        let streams = to_head.chain(to_others).enumerate().map(start).collect();
        self.start_others();
        streams
    }

    fn start_stream(
        self: &Arc<Self>,
        halves: FrameHalves,
        spans: async_channel::Receiver<SpanOut>,
        control: Option<mpsc::Receiver<Frame>>,
    ) -> Task<()> {
        let shared = Arc::clone(self);
        spawn_guarded(&self.parts.gate, "kv stream out", async move {
            let FrameHalves { reader, writer } = halves;
            let kind = if control.is_some() { StreamKind::First } else { StreamKind::Other };
            // The futures `writing` and `reading` live until the reason of the loss is set, because a task
            // that finds its queue closed reads the reason.
            let (writing, reading) =
                (shared.write_all(writer, spans, control), shared.read_all(reader, kind));
            tokio::pin!(writing, reading);
            let ended = tokio::select! {
                biased;
                () = shared.closed.cancelled() => return,
                error = shared.send_path.broken() => Err(error),
                ended = &mut writing => ended,
                ended = &mut reading => ended,
            };
            shared.lose(
                ended.err().unwrap_or_else(|| TransferError::lost_because("the peer closed the stream")),
            );
        })
    }

    /// Starts the tasks that order the frames of other processes. They end when the link is lost and no put is left, so
    /// that a lease outlasts the put that reads its pages.
    fn start_others(self: &Arc<Self>) {
        let n_processes = self.others.as_ref().map_or(0, OtherQueues::n_processes);
        for process in 0..n_processes {
            let shared = Arc::clone(self);
            let order = async move {
                if let Some(others) = &shared.others {
                    others.order_all(process, |error| shared.lose(error)).await;
                }
            };
            spawn_guarded(&self.parts.gate, "kv of another process", order).detach();
        }
    }

    async fn write_all(
        &self,
        mut writer: FrameWriter,
        spans: async_channel::Receiver<SpanOut>,
        control: Option<mpsc::Receiver<Frame>>,
    ) -> Result<(), TransferError> {
        match control {
            Some(control) => self.write_first(&mut writer, &spans, control).await,
            None => loop {
                let Ok(span) = spans.recv().await else { return Ok(()) };
                self.write_span(&mut writer, &spans, span).await?;
            },
        }
    }

    /// Writes stream 0: control frames go before KV, and heartbeats are sent.
    async fn write_first(
        &self,
        writer: &mut FrameWriter,
        spans: &async_channel::Receiver<SpanOut>,
        mut control: mpsc::Receiver<Frame>,
    ) -> Result<(), TransferError> {
        let mut alive = alive_interval(self.parts.settings.stall());
        loop {
            tokio::select! {
                biased;
                Some(frame) = control.recv() => writer.write(&frame).await?,
                _ = alive.tick() => writer.write(&Frame::of_link(Body::Alive)).await?,
                Ok(span) = spans.recv() => self.write_span(writer, spans, span).await?,
                else => return Ok(()),
            }
        }
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        spans: &async_channel::Receiver<SpanOut>,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        self.send_path.write_span(writer, &self.parts, span).await?;
        self.wire_threads.keep_awake();
        if spans.is_empty() { self.send_path.write_rest(writer).await } else { Ok(()) }
    }

    /// Reads a stream until it ends.
    async fn read_all(&self, mut reader: FrameReader, kind: StreamKind) -> Result<(), TransferError> {
        loop {
            let next = match kind {
                StreamKind::First => reader.next_in_time().await?,
                StreamKind::Other => reader.next().await?,
            };
            let Some(frame) = next else { return Ok(()) };
            self.take_answer(frame)?;
        }
    }

    fn take_answer(&self, frame: Frame) -> Result<(), TransferError> {
        match frame.body {
            Body::Alive => return Ok(()),
            Body::Accepted => self.answer(frame.transfer, Ok(())),
            Body::Done => self.with(frame.transfer, |transfer| transfer.out.settle(Ok(()))),
            Body::Failed { code, detail } => self.answer(frame.transfer, Err(code::decode(code, detail))),
            Body::Refetch { spans } => {
                self.with(frame.transfer, |transfer| transfer.out.refetch(frame.lane, spans));
            }
            Body::Taken { slot } => self.send_path.taken(slot)?,
            _ => return Err(FrameError::Unexpected("a frame that only senders send").into()),
        }
        self.wire_threads.keep_awake();
        Ok(())
    }

    /// Handles an answer to the `Open`, or a later failure of the transfer.
    fn answer(&self, id: TransferId, answer: Result<(), TransferError>) {
        self.with(id, |transfer| match (transfer.answer.take(), answer) {
            (Some(waiting), answer) => {
                // The caller of `open` may have been cancelled, so a failed send is ignored.
                let _ = waiting.send(answer);
            }
            (None, Err(error)) => {
                transfer.out.settle(Err(error));
                self.say_when_quiet(&transfer.out);
            }
            (None, Ok(())) => {}
        });
    }

    /// Calls `act` for a transfer of this link. Does nothing for a transfer that is over, because its answer
    /// is late, not wrong.
    fn with(&self, id: TransferId, act: impl FnOnce(&mut Transfer)) {
        match self.transfers().get_mut(&id) {
            Some(transfer) => act(transfer),
            None => debug!(transfer = %id, "answer from the receiver dropped: its transfer is over"),
        }
    }
}

pub(super) fn alive_interval(stall: Duration) -> tokio::time::Interval {
    let every = (stall / ALIVE_PER_STALL).clamp(Duration::from_millis(1), SILENT_MAX);
    let mut interval = tokio::time::interval(every);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    interval
}
