//! The receiver's end of links: accepts streams, lets senders open landings, and fills them.
//!
//! The receiver does not depend on the wire: each link has a [`KvPath`], which receives the KV of its frames.
//!
//! No input from a peer makes this side allocate more than a frame's limits, or wait longer than the stall time. A
//! peer that breaks the protocol loses its link and causes one log line. Other links are not affected.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Display;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chassis::{Gate, spawn_guarded};
use futures::future::BoxFuture;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, trace, warn};
use types::node::PROTOCOL;
use types::{KvSpan, NodeId, TransferId, in_full};

use super::accept::{Handshake, Incoming, StreamAcceptor};
use super::code;
use super::connect::STREAMS_MAX;
use super::frame::{Body, Frame, FrameError, Hello, KvPlace, REFETCH_SPANS_MAX};
use super::frame_digests::{FrameDigests, PENDING_DIGESTS_MAX, PendingDigests};
use super::kv_path::{KvFrame, KvPath, Receipt};
use super::link_out::alive_interval;
use super::stream::{FrameHalves, FrameReader, FrameWriter, within};
use crate::connector_parts::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Credentials, OpenLanding, Opener};
use crate::landings::Landings;
use crate::lanes::LaneSpan;
use crate::reshard::Lane;
use crate::wire_threads::WireThreads;

/// Limit of accepted streams of all peers together.
const STREAMS_OF_ALL_MAX: usize = 4096;
/// Limit of queued answers per link. A peer that does not read them loses its link.
const ANSWERS_QUEUED_MAX: usize = 4096;

/// Serves streams until it is dropped or `closed` is cancelled.
#[derive(Debug)]
pub(in crate::connectors) struct Receiver {
    parts: ConnectorParts,
    wire_threads: WireThreads,
    landings: Landings,
    closed: CancellationToken,
    /// The links of all peers, by the number in their hello. Held for a look-up, never across an await.
    links: Mutex<HashMap<u64, Arc<LinkIn>>>,
    /// The number of streams accepted so far. Each stream gets the next thread.
    n_streams: AtomicUsize,
    room: Arc<Semaphore>,
}

/// Limit of frames of one link whose KV is on its way, for each lane that moves KV independently.
const FETCHES_MAX: usize = 8;

/// One peer's link. The link exists as long as its stream 0.
#[derive(Debug)]
struct LinkIn {
    gate: Gate,
    wire_threads: WireThreads,
    fetches: Arc<Semaphore>,
    /// The number of fetches started so far. Each fetch gets the next thread.
    n_fetches: AtomicUsize,
    peer: NodeId,
    kv_path: Arc<dyn KvPath>,
    answers: mpsc::Sender<Frame>,
    gone: CancellationToken,
    /// The landings that this link has opened and that have not ended. Held for a look-up, never across an await.
    landings: Mutex<BTreeMap<TransferId, Arc<OpenLanding>>>,
}

impl Receiver {
    pub(in crate::connectors) fn new(
        parts: ConnectorParts,
        wire_threads: WireThreads,
        landings: Landings,
    ) -> Arc<Self> {
        Arc::new(Self {
            parts,
            wire_threads,
            landings,
            closed: CancellationToken::new(),
            links: Mutex::default(),
            n_streams: AtomicUsize::new(0),
            room: Arc::new(Semaphore::new(STREAMS_OF_ALL_MAX)),
        })
    }

    pub(in crate::connectors) fn landings(&self) -> &Landings {
        &self.landings
    }

    /// Fails all landings and ends all streams.
    pub(in crate::connectors) fn close(&self) {
        // The landings are closed before the streams, so that their error is `Closed` and not the end of a
        // stream.
        self.landings.close();
        self.closed.cancel();
    }

    /// Accepts streams until it is [closed](Self::close).
    pub(in crate::connectors) async fn accept_all(self: Arc<Self>, mut door: Box<dyn StreamAcceptor>) {
        let closed = self.closed.clone();
        let all = async {
            loop {
                match door.accept().await {
                    Ok((from, arriving)) => self.start(from, arriving),
                    Err(error) => {
                        // Most likely the process is out of file descriptors. It waits, because other
                        // descriptors are closed in time.
                        warn!(%error, "KV stream from peer cannot be accepted, trying again");
                        tokio::time::sleep(self.parts.settings.stall() / 10).await;
                    }
                }
            }
        };
        closed.run_until_cancelled(all).await;
    }

    fn start(self: &Arc<Self>, from: String, arriving: Handshake) {
        let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() else {
            warn!(from, "KV stream from peer refused: too many streams are open");
            return;
        };
        let this = Arc::clone(self);
        let serve = async move {
            let _permit = permit;
            let served =
                async { this.serve(within(this.parts.settings.stall(), "a stream", arriving).await?).await };
            let served = this.closed.run_until_cancelled(served).await;
            log_end(from, served.unwrap_or(Ok(())));
        };
        let turn = self.n_streams.fetch_add(1, Ordering::Relaxed);
        let start = || spawn_guarded(&self.parts.gate, "kv stream in", serve);
        self.wire_threads.nth(turn).at(start).detach();
    }

    async fn serve(&self, incoming: Incoming) -> Result<(), TransferError> {
        let Incoming { stream, kv_path, handshake_permit } = incoming;
        let stall = self.parts.settings.stall();
        let (reader, writer) = stream.into_split();
        let (mut reader, mut writer) = (FrameReader::new(reader, stall), FrameWriter::new(writer, stall));
        let hello = match reader.next_in_time().await? {
            Some(Frame { body: Body::Hello(hello), .. }) => hello,
            Some(_) => return Err(FrameError::Unexpected("a first frame that is not a hello").into()),
            None => return Ok(()),
        };
        drop(handshake_permit);
        let version = match PROTOCOL.agree(hello.protocol) {
            Ok(version) => version,
            Err(mismatch) => {
                writer.write(&Frame::of_link(Body::Incompatible { protocol: PROTOCOL })).await?;
                return Err(mismatch.into());
            }
        };
        let (node, epoch) = (self.parts.node.clone(), self.parts.epoch);
        let welcome = Frame::of_link(Body::Welcome { version, node, epoch });
        match hello.stream {
            0 => self.serve_first(&hello, welcome, FrameHalves { reader, writer }, kv_path).await,
            _ => self.serve_other(&hello, welcome, reader, writer).await,
        }
    }

    /// Serves stream 0, which makes the link and carries its answers. When stream 0 ends, the link ends.
    async fn serve_first(
        &self,
        hello: &Hello,
        welcome: Frame,
        halves: FrameHalves,
        kv_path: Option<Arc<dyn KvPath>>,
    ) -> Result<(), TransferError> {
        let FrameHalves { mut reader, mut writer } = halves;
        let kv_path = kv_path.ok_or(FrameError::Unexpected("a first stream without the link's KV path"))?;
        let (answers, to_write) = mpsc::channel(ANSWERS_QUEUED_MAX);
        let link = Arc::new(LinkIn {
            gate: self.parts.gate.clone(),
            wire_threads: self.wire_threads.clone(),
            fetches: Arc::new(Semaphore::new(FETCHES_MAX * kv_path.n_lanes())),
            n_fetches: AtomicUsize::new(0),
            peer: hello.node.clone(),
            kv_path,
            answers,
            gone: CancellationToken::new(),
            landings: Mutex::default(),
        });
        let _entered = self.enter(hello.link, &link)?;
        writer.write(&welcome).await?;
        info!(peer = %hello.node, "KV link from peer accepted");
        tokio::select! {
            biased;
            () = link.gone.cancelled() => Err(TransferError::lost_because("another stream of the link ended")),
            ended = link.read_all(&mut reader, Some(&self.landings)) => ended,
            ended = self.write_answers(&mut writer, to_write) => ended,
        }
    }

    async fn serve_other(
        &self,
        hello: &Hello,
        welcome: Frame,
        mut reader: FrameReader,
        mut writer: FrameWriter,
    ) -> Result<(), TransferError> {
        // A link can end while the sender still makes its other streams, so this is not reported as a
        // protocol error.
        let link = self.links().get(&hello.link).cloned();
        let link = link.ok_or_else(|| TransferError::lost_because("its link has ended or never existed"))?;
        if link.peer != hello.node || hello.stream >= STREAMS_MAX {
            return Err(FrameError::Unexpected("a stream that its link does not have").into());
        }
        // When this stream ends for any reason, the guard ends its link.
        let _gone = link.gone.clone().drop_guard();
        writer.write(&welcome).await?;
        tokio::select! {
            biased;
            () = link.gone.cancelled() => Ok(()),
            ended = link.read_all(&mut reader, None) => ended,
        }
    }

    fn enter(&self, id: u64, link: &Arc<LinkIn>) -> Result<LinkEntry<'_>, TransferError> {
        let mut links = self.links();
        if links.contains_key(&id) {
            return Err(FrameError::Unexpected("a second stream 0 of a link").into());
        }
        links.insert(id, Arc::clone(link));
        Ok(LinkEntry { receiver: self, id })
    }

    async fn write_answers(
        &self,
        writer: &mut FrameWriter,
        mut answers: mpsc::Receiver<Frame>,
    ) -> Result<(), TransferError> {
        let mut alive = alive_interval(self.parts.settings.stall());
        loop {
            let frame = tokio::select! {
                biased;
                Some(answer) = answers.recv() => answer,
                _ = alive.tick() => Frame::of_link(Body::Alive),
            };
            writer.write(&frame).await?;
        }
    }

    fn links(&self) -> MutexGuard<'_, HashMap<u64, Arc<LinkIn>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An entry in the table of links. The drop removes the link and fails its landings.
struct LinkEntry<'a> {
    receiver: &'a Receiver,
    id: u64,
}

impl Drop for LinkEntry<'_> {
    fn drop(&mut self) {
        let link = self.receiver.links().remove(&self.id);
        if let Some(link) = link {
            link.gone.cancel();
            link.kv_path.revoke();
            link.fail_all();
        }
    }
}

fn log_end(from: impl Display, ended: Result<(), TransferError>) {
    match ended {
        Ok(()) => debug!(%from, "KV stream from peer ended without error"),
        Err(error @ (TransferError::Frame(_) | TransferError::Protocol(_))) => {
            warn!(%from, error = in_full(&error), "KV stream from peer refused");
        }
        Err(error) => info!(%from, error = in_full(&error), "KV stream from peer lost"),
    }
}

// === impl LinkIn ===

impl LinkIn {
    /// Reads frames until the stream ends. Landings can be opened if `landings` is set.
    async fn read_all(
        self: &Arc<Self>,
        reader: &mut FrameReader,
        landings: Option<&Landings>,
    ) -> Result<(), TransferError> {
        let mut expected = VecDeque::new();
        loop {
            let next = if landings.is_some() { reader.next_in_time().await? } else { reader.next().await? };
            let Some(frame) = next else { return Ok(()) };
            if frame.body != Body::Alive {
                self.wire_threads.keep_awake();
            }
            let Frame { transfer, lane, payload_bytes, body } = frame;
            match (body, landings) {
                (Body::Kv { span, digests, place }, _) => {
                    let span = LaneSpan { lane, span };
                    let digests = digests_of(transfer, &span, digests, &mut expected)?;
                    let frame = KvFrame { span, digests, place, payload_bytes };
                    self.take_kv(reader, transfer, frame).await?;
                }
                (Body::Digests { span, digests }, _) => {
                    let pending = expected
                        .pop_front()
                        .ok_or(FrameError::Unexpected("digests without a waiting KV frame"))?;
                    pending.deliver(transfer, &LaneSpan { lane, span }, digests)?;
                }
                (Body::Quiet, Some(_)) => self.kv_path.sender_is_quiet(transfer),
                (Body::Open(shown), Some(landings)) => self.open(landings, transfer, &shown),
                (Body::Handoff(handoff), _) => self.with(transfer, |landing| {
                    landing.handed_off(handoff).unwrap_or_else(|error| landing.fail(error));
                }),
                (Body::Failed { code, detail }, _) => {
                    self.with(transfer, |landing| landing.fail(code::decode(code, detail)));
                }
                (Body::Alive, _) => {}
                _ => return Err(FrameError::Unexpected("a frame that only receivers send").into()),
            }
        }
    }

    fn open(self: &Arc<Self>, landings: &Landings, transfer: TransferId, shown: &Credentials) {
        match landings.open(transfer, shown, Arc::clone(self) as _) {
            Err(error) => self.answer(transfer, failed(&error)),
            Ok(landing) => {
                self.kv_path.opened(&landing);
                self.answer(transfer, Body::Accepted);
                self.landings().insert(transfer, Arc::clone(&landing));
                // The landing may have ended before the insertion, so it is removed here.
                if landing.is_over() {
                    self.landings().remove(&transfer);
                }
            }
        }
    }

    async fn take_kv(
        self: &Arc<Self>,
        reader: &mut FrameReader,
        transfer: TransferId,
        frame: KvFrame,
    ) -> Result<(), TransferError> {
        trace!(target: "walk", %transfer, blocks = ?frame.span.blocks, "KV frame received from the peer");
        let landing = self.landing(transfer);
        if landing.is_none() {
            debug!(%transfer, "KV dropped: its landing is over or unknown");
        }
        let taken = ReceivedFrame { transfer, lane: frame.span.lane, slot: slot_of(&frame.place) };
        match Arc::clone(&self.kv_path).receive(frame, landing, reader).await? {
            Receipt::Done(wrong) => self.finish(&taken, &wrong),
            Receipt::Pending(fetch) => self.start_fetch(taken, fetch).await,
        }
        Ok(())
    }

    /// Waits for one frame's KV on a task of its own, while the next frames are read. If too many fetches run, waits
    /// for one of them first.
    async fn start_fetch(
        self: &Arc<Self>,
        taken: ReceivedFrame,
        fetch: BoxFuture<'static, Result<Vec<KvSpan>, TransferError>>,
    ) {
        let room = Arc::clone(&self.fetches).acquire_owned().await;
        let link = Arc::clone(self);
        let fetch = async move {
            let _room = room;
            let fetched = fetch.await;
            link.wire_threads.keep_awake();
            match fetched {
                Ok(wrong) => link.finish(&taken, &wrong),
                Err(error) => link.refuse(&error),
            }
        };
        let wire_threads = self.wire_threads.nth(self.n_fetches.fetch_add(1, Ordering::Relaxed));
        wire_threads.at(|| spawn_guarded(&self.gate, "kv fetch", fetch)).detach();
    }

    /// Requests the pages that failed verification, and frees the slot of the frame.
    fn finish(&self, taken: &ReceivedFrame, wrong: &[KvSpan]) {
        let ReceivedFrame { transfer, lane, slot } = *taken;
        for spans in wrong.chunks(REFETCH_SPANS_MAX) {
            info!(%transfer, pages = spans.len(), "corrupted KV pages are requested again from the sender");
            self.say(Frame::new(transfer, Body::Refetch { spans: spans.to_vec() }).on(lane));
        }
        if let Some(slot) = slot {
            self.answer(transfer, Body::Taken { slot });
        }
    }

    /// Ends the link, because a frame's KV is lost or invalid.
    fn refuse(&self, error: &TransferError) {
        match error {
            TransferError::ConnectionLost { .. } => {
                info!(peer = %self.peer, error = in_full(error), "KV link from peer lost");
            }
            error => {
                warn!(peer = %self.peer, error = in_full(error), "KV link from peer closed after an error")
            }
        }
        self.gone.cancel();
    }

    fn landing(&self, transfer: TransferId) -> Option<Arc<OpenLanding>> {
        self.landings().get(&transfer).cloned()
    }

    fn with(&self, transfer: TransferId, act: impl FnOnce(&OpenLanding)) {
        match self.landing(transfer) {
            Some(landing) => act(&landing),
            None => debug!(%transfer, "frame of a KV transfer dropped: its landing is over or unknown"),
        }
    }

    fn answer(&self, transfer: TransferId, body: Body) {
        self.say(Frame::new(transfer, body));
    }

    fn say(&self, frame: Frame) {
        if self.answers.try_send(frame).is_err() {
            self.gone.cancel();
        }
    }

    fn fail_all(&self) {
        let landings: Vec<_> = std::mem::take(&mut *self.landings()).into_values().collect();
        if !landings.is_empty() {
            info!(peer = %self.peer, landings = landings.len(), "KV link from peer ended, its landings fail");
        }
        for landing in landings {
            landing.fail(TransferError::lost_because("the sender's link has ended"));
        }
    }

    fn landings(&self) -> MutexGuard<'_, BTreeMap<TransferId, Arc<OpenLanding>>> {
        self.landings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Opener for LinkIn {
    fn ended(&self, transfer: TransferId, outcome: Result<(), &TransferError>) {
        self.landings().remove(&transfer);
        if outcome.is_ok() {
            self.kv_path.sender_is_quiet(transfer);
        }
        self.answer(
            transfer,
            match outcome {
                Ok(()) => Body::Done,
                Err(error) => failed(error),
            },
        );
    }
}

/// The fields of a received KV frame that its answers need.
#[derive(Clone, Copy, Debug)]
struct ReceivedFrame {
    transfer: TransferId,
    lane: Lane,
    /// The slot of the sender's stage that held the KV; `None` if the KV was elsewhere.
    slot: Option<u16>,
}

fn slot_of(place: &KvPlace) -> Option<u16> {
    match place {
        KvPlace::Slot { slot, .. } => Some(*slot),
        _ => None,
    }
}

/// Returns the digests of a frame. If they come later, adds an entry to the stream's queue.
fn digests_of(
    transfer: TransferId,
    span: &LaneSpan,
    digests: Option<Vec<Digest>>,
    expected: &mut VecDeque<PendingDigests>,
) -> Result<FrameDigests, FrameError> {
    match digests {
        Some(digests) => Ok(FrameDigests::Here(digests)),
        None if expected.len() >= PENDING_DIGESTS_MAX => {
            Err(FrameError::Unexpected("KV before the digests of the frames ahead of it"))
        }
        None => {
            let (pending, promised) = PendingDigests::of(transfer, span);
            expected.push_back(pending);
            Ok(promised)
        }
    }
}

fn failed(error: &TransferError) -> Body {
    let (code, detail) = code::encode(error);
    Body::Failed { code, detail }
}
