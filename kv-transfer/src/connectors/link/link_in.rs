//! The receiver's end of one link: reads frames, opens landings for the sender, and fills them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chassis::{Gate, spawn_guarded};
use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, trace, warn};
use types::{KvSpan, NodeId, TransferId, in_full};

use super::answers::Answers;
use super::code;
use super::elsewhere;
use super::frame::{Body, Frame, FrameError, Hello, KvPlace, REFETCH_SPANS_MAX};
use super::frame_digests::{FrameDigests, PENDING_DIGESTS_MAX, PendingDigests};
use super::kv_path::{KvFrame, KvPath, Receipt};
use super::stream::FrameReader;
use crate::connector_parts::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Credentials, OpenLanding, Opener};
use crate::landings::Landings;
use crate::lanes::LaneSpan;
use crate::processes::{LandingEvent, LandingReport};
use crate::reshard::Lane;
use crate::wire_threads::WireThreads;

/// Limit of frames of one link whose KV is on its way, for each lane that moves KV independently.
const FETCHES_MAX: usize = 8;

/// One peer's link. At a head, it exists as long as its stream 0; at a follower, as long as all of its streams there.
#[derive(Debug)]
pub(in crate::connectors) struct LinkIn {
    gate: Gate,
    wire_threads: WireThreads,
    fetches: Arc<Semaphore>,
    /// The number of fetches started so far. Each fetch gets the next thread.
    n_fetches: AtomicUsize,
    id: u64,
    pub(super) peer: NodeId,
    kv_path: Arc<dyn KvPath>,
    answers: Answers,
    pub(super) gone: CancellationToken,
    /// The landings that this link fills and that have not ended. Held for a look-up, never across an await.
    landings: Mutex<BTreeMap<TransferId, Arc<OpenLanding>>>,
}

impl LinkIn {
    pub(super) fn new(
        hello: &Hello,
        parts: &ConnectorParts,
        wire_threads: WireThreads,
        kv_path: Arc<dyn KvPath>,
        gone: CancellationToken,
        answers: Answers,
    ) -> Arc<Self> {
        Arc::new(Self {
            gate: parts.gate.clone(),
            wire_threads,
            fetches: Arc::new(Semaphore::new(FETCHES_MAX * kv_path.n_lanes())),
            n_fetches: AtomicUsize::new(0),
            id: hello.link,
            peer: hello.node.clone(),
            kv_path,
            answers,
            gone,
            landings: Mutex::default(),
        })
    }

    /// Ends the link and fails its landings.
    pub(super) fn end(&self) {
        self.gone.cancel();
        self.kv_path.revoke();
        if let Answers::Sender { processes: Some(processes), .. } = &self.answers {
            processes.close_link(self.id);
        }
        self.fail_all();
    }

    /// Reads frames until the stream ends. Landings can be opened if `landings` is set.
    pub(super) async fn read_all(
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
                self.enter(&landing);
                match &self.answers {
                    Answers::Sender { answers, processes: Some(processes) } => {
                        let (answers, processes) = (answers.clone(), Arc::clone(processes));
                        let served = elsewhere::serve(self.id, answers, landing, processes);
                        spawn_guarded(&self.gate, "landing in several processes", served).detach();
                    }
                    _ => self.answer(transfer, Body::Accepted),
                }
            }
        }
    }

    /// Fills a follower's landing from this link.
    pub(in crate::connectors) fn fill(&self, landing: &Arc<OpenLanding>) {
        self.enter(landing);
        if self.gone.is_cancelled() {
            return landing.fail(TransferError::lost_because("the sender's link has ended"));
        }
        let transfer = landing.landing().transfer;
        if let Answers::Head(reports) = &self.answers {
            reports.report(LandingReport { transfer, event: LandingEvent::Accepted });
        }
        // Perhaps there is nothing to wait for.
        landing.complete();
    }

    fn enter(&self, landing: &Arc<OpenLanding>) {
        let transfer = landing.landing().transfer;
        self.landings().insert(transfer, Arc::clone(landing));
        // The landing may have ended before the insertion, so it is removed here.
        if landing.is_over() {
            self.landings().remove(&transfer);
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
            self.answers.say(Frame::new(transfer, Body::Refetch { spans: spans.to_vec() }).on(lane));
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

    pub(super) fn landing(&self, transfer: TransferId) -> Option<Arc<OpenLanding>> {
        self.landings().get(&transfer).cloned()
    }

    fn with(&self, transfer: TransferId, act: impl FnOnce(&OpenLanding)) {
        match self.landing(transfer) {
            Some(landing) => act(&landing),
            None => debug!(%transfer, "frame of a KV transfer dropped: its landing is over or unknown"),
        }
    }

    fn answer(&self, transfer: TransferId, body: Body) {
        self.answers.say(Frame::new(transfer, body));
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
        let landing = self.landings().remove(&transfer);
        if outcome.is_ok() {
            self.kv_path.sender_is_quiet(transfer);
        }
        match &self.answers {
            Answers::Sender { .. } => {
                self.answer(transfer, outcome.map_or_else(failed, |()| Body::Done));
            }
            Answers::Head(reports) => {
                let landed = landing.map(|landing| landing.landed()).unwrap_or_default();
                let event = match outcome {
                    Ok(()) => LandingEvent::Landed(landed),
                    Err(error) => LandingEvent::Failed(error.clone()),
                };
                reports.report(LandingReport { transfer, event });
            }
        }
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
