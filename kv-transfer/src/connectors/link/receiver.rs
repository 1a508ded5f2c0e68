//! The receiver's end of links: accepts streams, lets senders open landings, and fills them.
//!
//! Nothing that a peer sends makes this side allocate more than a frame's bounds, or wait longer than the stall time.
//! A peer that breaks the protocol loses its link, costs one line in the log, and disturbs nobody else.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::{Debug, Display};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chassis::{Gate, Stream, spawn_guarded};
use futures::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, trace, warn};
use types::node::PROTOCOL;
use types::{KvSpan, NodeId, TransferId, in_full};

use super::code;
use super::frame::{Body, Frame, FrameError, Hello, Piece, REFETCH_SPANS_MAX};
use super::link_out::{STREAMS_MAX, alive_interval};
use super::medium::Apart;
use super::said::{OWED_MAX, Owed, Said};
use super::span_at::{At, copy_span};
use super::span_in::read_span;
use super::span_written::take_written;
use super::stream::{FrameReader, FrameWriter, within};
use super::words::Words;
use crate::connector::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::home::Home;
use crate::landing::{Credentials, OpenLanding, Opener};
use crate::landings::Landings;
use crate::lanes::LaneSpan;
use crate::reshard::Lane;

/// Streams of all peers at once.
const STREAMS_OF_ALL_MAX: usize = 4096;
/// Answers that wait to be written, per link. A peer that does not read them loses its link.
const ANSWERS_QUEUED_MAX: usize = 4096;

/// A stream that has come in, and what its KV lies in if that is not the stream itself.
#[derive(Debug)]
pub(in crate::connectors) struct Incoming {
    pub(in crate::connectors) stream: Stream,
    pub(in crate::connectors) elsewhere: Option<Apart>,
    /// What few strangers may have at one time: it goes when the stream says whose it is.
    pub(in crate::connectors) at_the_door: Option<OwnedSemaphorePermit>,
}

/// A stream that is about to come in: greetings of the wire's own may be due.
pub(in crate::connectors) type Arriving = BoxFuture<'static, Result<Incoming, TransferError>>;

/// Where streams come in.
#[async_trait]
pub(in crate::connectors) trait Door: Debug + Send {
    /// Who comes, for the log, and the stream. Cancel-safe: nobody is lost.
    async fn accept(&mut self) -> io::Result<(String, Arriving)>;
}

/// Serves streams until it is dropped or `closed` is cancelled.
#[derive(Debug)]
pub(in crate::connectors) struct Receiver {
    parts: ConnectorParts,
    home: Home,
    landings: Landings,
    closed: CancellationToken,
    /// Held for a look-up, never across an await.
    links: Mutex<HashMap<u64, Arc<LinkIn>>>,
    /// Streams so far: they take turns on the threads.
    n_streams: AtomicUsize,
    room: Arc<Semaphore>,
}

/// Frames of one link whose KV a card is fetching, on each lane if it has queues.
const FETCHES_MAX: usize = 8;

/// One peer's link, as long as its stream 0 lives.
#[derive(Debug)]
struct LinkIn {
    gate: Gate,
    home: Home,
    fetches: Arc<Semaphore>,
    /// So far: they take turns on the threads.
    n_fetches: AtomicUsize,
    peer: NodeId,
    elsewhere: Option<Apart>,
    answers: mpsc::Sender<Frame>,
    gone: CancellationToken,
    /// The landings that this link has opened, and that have not ended. Held for a look-up, never across an await.
    landings: Mutex<BTreeMap<TransferId, Arc<OpenLanding>>>,
    /// What the sender has still to say about landings that its device writes into.
    words: Words,
}

impl Receiver {
    pub(in crate::connectors) fn new(parts: ConnectorParts, home: Home, landings: Landings) -> Arc<Self> {
        Arc::new(Self {
            parts,
            home,
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
        // In this order: a stream that ends must not be the first to say why its landings fail.
        self.landings.close();
        self.closed.cancel();
    }

    /// Accepts streams until it is [closed](Self::close).
    pub(in crate::connectors) async fn accept_all(self: Arc<Self>, mut door: Box<dyn Door>) {
        let closed = self.closed.clone();
        let all = async {
            loop {
                match door.accept().await {
                    Ok((from, arriving)) => self.start(from, arriving),
                    Err(error) => {
                        // Out of file descriptors, most likely: others will be closed in time.
                        warn!(%error, "accept kv stream");
                        tokio::time::sleep(self.parts.settings.stall() / 10).await;
                    }
                }
            }
        };
        closed.run_until_cancelled(all).await;
    }

    fn start(self: &Arc<Self>, from: String, arriving: Arriving) {
        let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() else {
            warn!(from, "refused kv stream: too many");
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
        self.home.nth(turn).at(start).detach();
    }

    async fn serve(&self, incoming: Incoming) -> Result<(), TransferError> {
        let Incoming { stream, elsewhere, at_the_door } = incoming;
        let stall = self.parts.settings.stall();
        let (reader, writer) = stream.into_split();
        let (mut reader, mut writer) = (FrameReader::new(reader, stall), FrameWriter::new(writer, stall));
        let hello = match reader.next_in_time().await? {
            Some(Frame { body: Body::Hello(hello), .. }) => hello,
            Some(_) => return Err(FrameError::Unexpected("anything before a hello").into()),
            None => return Ok(()),
        };
        drop(at_the_door);
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
            0 => self.serve_first(&hello, welcome, (reader, writer), elsewhere).await,
            _ => self.serve_other(&hello, welcome, reader, writer).await,
        }
    }

    /// Stream 0 makes the link, carries its answers, and takes it along when it ends.
    async fn serve_first(
        &self,
        hello: &Hello,
        welcome: Frame,
        (mut reader, mut writer): (FrameReader, FrameWriter),
        elsewhere: Option<Apart>,
    ) -> Result<(), TransferError> {
        let (answers, to_write) = mpsc::channel(ANSWERS_QUEUED_MAX);
        let link = Arc::new(LinkIn {
            gate: self.parts.gate.clone(),
            home: self.home.clone(),
            fetches: Arc::new(Semaphore::new(FETCHES_MAX * elsewhere.as_ref().map_or(1, Apart::n_lanes))),
            n_fetches: AtomicUsize::new(0),
            peer: hello.node.clone(),
            elsewhere,
            answers,
            gone: CancellationToken::new(),
            landings: Mutex::default(),
            words: Words::default(),
        });
        let _entered = self.enter(hello.link, &link)?;
        writer.write(&welcome).await?;
        info!(peer = %hello.node, "link accepted");
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
        // A link can end while the sender still makes its other streams: no fault of theirs.
        let link = self.links().get(&hello.link).cloned();
        let link = link.ok_or_else(|| TransferError::lost_because("its link has ended, or never began"))?;
        if link.peer != hello.node || hello.stream >= STREAMS_MAX {
            return Err(FrameError::Unexpected("a stream that its link does not have").into());
        }
        // However this stream ends, its link ends with it.
        let _gone = link.gone.clone().drop_guard();
        writer.write(&welcome).await?;
        tokio::select! {
            biased;
            () = link.gone.cancelled() => Ok(()),
            ended = link.read_all(&mut reader, None) => ended,
        }
    }

    fn enter(&self, id: u64, link: &Arc<LinkIn>) -> Result<Entered<'_>, TransferError> {
        let mut links = self.links();
        if links.contains_key(&id) {
            return Err(FrameError::Unexpected("a second stream 0 of a link").into());
        }
        links.insert(id, Arc::clone(link));
        Ok(Entered { receiver: self, id })
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

/// A link is in the table. Leaving it fails its landings.
struct Entered<'a> {
    receiver: &'a Receiver,
    id: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let link = self.receiver.links().remove(&self.id);
        if let Some(link) = link {
            link.gone.cancel();
            link.revoke();
            link.fail_all();
        }
    }
}

fn log_end(from: impl Display, ended: Result<(), TransferError>) {
    match ended {
        Ok(()) => debug!(%from, "kv stream ended"),
        Err(error @ (TransferError::Frame(_) | TransferError::Protocol(_))) => {
            warn!(%from, error = in_full(&error), "refused kv stream");
        }
        Err(error) => info!(%from, error = in_full(&error), "lost kv stream"),
    }
}

// === impl LinkIn ===

impl LinkIn {
    /// Takes frames until the stream ends. Landings can be opened where `landings` is given.
    async fn read_all(
        self: &Arc<Self>,
        reader: &mut FrameReader,
        landings: Option<&Landings>,
    ) -> Result<(), TransferError> {
        let mut owed = VecDeque::new();
        loop {
            let next = if landings.is_some() { reader.next_in_time().await? } else { reader.next().await? };
            let Some(frame) = next else { return Ok(()) };
            if frame.body != Body::Alive {
                self.home.stir();
            }
            let lane = frame.lane;
            match (frame.body, landings) {
                (Body::Shown { span, pieces }, _) if owed.len() < OWED_MAX => {
                    owed.push_back(self.take_shown(frame.transfer, LaneSpan { lane, span }, pieces).await?);
                }
                (Body::Queued { number, bytes, span, digests }, _) => {
                    let (span, said) = (LaneSpan { lane, span }, Said::Here(digests));
                    self.take_queued(frame.transfer, (number, bytes), span, said).await?;
                }
                (Body::Coming { number, bytes, span }, _) if owed.len() < OWED_MAX => {
                    let span = LaneSpan { lane, span };
                    let (debt, said) = Owed::of(frame.transfer, &span);
                    self.take_queued(frame.transfer, (number, bytes), span, said).await?;
                    owed.push_back(debt);
                }
                (Body::Digests { span, digests }, _) => {
                    let owed: Owed = owed.pop_front().ok_or(FrameError::Unexpected("digests of nothing"))?;
                    owed.pay(frame.transfer, &LaneSpan { lane, span }, digests)?;
                }
                (Body::Span { span, digests }, _) => {
                    let span = LaneSpan { lane, span };
                    self.take_span(reader, frame.transfer, &span, &digests, frame.payload_bytes).await?;
                }
                (Body::SpanAt { span, slot, pieces, digests }, _) => {
                    let span = LaneSpan { lane, span };
                    self.take_span_at(frame.transfer, span, digests, (slot, pieces)).await?;
                }
                (Body::SpanWritten { span, number, digests }, _) => {
                    let span = LaneSpan { lane, span };
                    self.take_span_written(frame.transfer, span, digests, number).await?;
                }
                (Body::Quiet, Some(_)) => self.words.said(frame.transfer),
                (Body::Open(shown), Some(landings)) => self.open(landings, frame.transfer, &shown),
                (Body::Handoff(handoff), _) => self.with(frame.transfer, |landing| {
                    landing.handed_off(handoff).unwrap_or_else(|error| landing.fail(error));
                }),
                (Body::Failed { code, detail }, _) => {
                    self.with(frame.transfer, |landing| landing.fail(code::decode(code, detail)));
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
                if let Some(Apart::Here(_)) = self.elsewhere {
                    landing.needs_proof(self.words.awaited_of(transfer));
                }
                if let Some(Apart::Queue(queue)) = &self.elsewhere {
                    queue.expect();
                }
                self.answer(transfer, Body::Accepted);
                self.landings().insert(transfer, Arc::clone(&landing));
                // It may have ended between the two lines; then nobody else takes it out.
                if landing.is_over() {
                    self.landings().remove(&transfer);
                }
            }
        }
    }

    async fn take_span(
        &self,
        reader: &mut FrameReader,
        transfer: TransferId,
        span: &LaneSpan,
        digests: &[Digest],
        payload_bytes: usize,
    ) -> Result<(), TransferError> {
        let Some(landing) = self.landing(transfer) else {
            debug!(%transfer, "late span");
            return reader.skip(payload_bytes).await;
        };
        let wrong = read_span(reader, &landing, span, digests, payload_bytes).await?;
        self.refetch(transfer, span.lane, &wrong);
        Ok(())
    }

    /// As [`take_span`](Self::take_span), for KV that is not on the stream.
    async fn take_span_at(
        self: &Arc<Self>,
        transfer: TransferId,
        span: LaneSpan,
        digests: Vec<Digest>,
        (slot, pieces): (Option<u16>, Vec<Piece>),
    ) -> Result<(), TransferError> {
        let elsewhere = self
            .elsewhere
            .as_ref()
            .ok_or(FrameError::Unexpected("KV elsewhere on a link that shares nothing"))?;
        match (self.landing(transfer), elsewhere) {
            (None, _) => debug!(%transfer, "late span"),
            (Some(_), Apart::Here(_)) => {
                return Err(FrameError::Unexpected("KV elsewhere, where it is to be written").into());
            }
            (Some(landing), Apart::Card(card)) => {
                let (card, of, lane) = (Arc::clone(card), Arc::clone(&landing), span.lane);
                let fetch = async move { card.fetch(&of, &span, Said::Here(digests), &pieces).await };
                self.start_fetch(transfer, lane, fetch).await;
            }
            (Some(_), Apart::Queue(_)) => {
                return Err(
                    FrameError::Unexpected("KV in pieces, of a link whose KV comes in messages").into()
                );
            }
            (Some(landing), Apart::Host(host)) => {
                let at = At { elsewhere: &**host, rank: span.lane.from, slot, pieces: &pieces };
                let wrong = copy_span(&landing, &span, &digests, at)?;
                self.refetch(transfer, span.lane, &wrong);
            }
        }
        if let Some(slot) = slot {
            self.answer(transfer, Body::Taken { slot });
        }
        Ok(())
    }

    /// As [`take_span_at`](Self::take_span_at), for KV on a card that may be copied before its digests are there.
    async fn take_shown(
        self: &Arc<Self>,
        transfer: TransferId,
        span: LaneSpan,
        pieces: Vec<Piece>,
    ) -> Result<Owed, TransferError> {
        let Some(Apart::Card(card)) = &self.elsewhere else {
            return Err(FrameError::Unexpected("KV on a card, of a link that shares none").into());
        };
        trace!(target: "walk", %transfer, blocks = ?span.blocks, "frame read");
        let (owed, said) = Owed::of(transfer, &span);
        match self.landing(transfer) {
            None => debug!(%transfer, "late span"),
            Some(landing) => {
                let (card, lane) = (Arc::clone(card), span.lane);
                let fetch = async move { card.fetch(&landing, &span, said, &pieces).await };
                self.start_fetch(transfer, lane, fetch).await;
            }
        }
        Ok(owed)
    }

    /// As [`take_span_at`](Self::take_span_at), for KV that comes as a message. It comes whether anyone wants it or not.
    async fn take_queued(
        self: &Arc<Self>,
        transfer: TransferId,
        (number, bytes): (u64, u32),
        span: LaneSpan,
        said: Said,
    ) -> Result<(), TransferError> {
        let Some(Apart::Queue(queue)) = &self.elsewhere else {
            return Err(FrameError::Unexpected("a message, of a link that has no queue").into());
        };
        trace!(target: "walk", %transfer, blocks = ?span.blocks, "frame read");
        let message = queue.post(span.lane, number, bytes).await?;
        match self.landing(transfer) {
            None => debug!(%transfer, "late span"),
            Some(landing) => {
                let lane = span.lane;
                let fetch = async move { message.fetch(&landing, &span, said, &[]).await };
                self.start_fetch(transfer, lane, fetch).await;
            }
        }
        Ok(())
    }

    /// As [`take_span`](Self::take_span), for KV that the sender's device has written where it belongs.
    async fn take_span_written(
        self: &Arc<Self>,
        transfer: TransferId,
        span: LaneSpan,
        digests: Vec<Digest>,
        number: u32,
    ) -> Result<(), TransferError> {
        let Some(Apart::Here(here)) = &self.elsewhere else {
            return Err(FrameError::Unexpected("written KV on a link that gave no right to").into());
        };
        // Late ones, too: their numbers have to be taken.
        let (here, landing, lane) = (Arc::clone(here), self.landing(transfer), span.lane);
        let take = async move { take_written(&*here, landing.as_deref(), &span, &digests, number).await };
        self.start_fetch(transfer, lane, take).await;
        Ok(())
    }

    /// Waits for one frame's KV while the next frames are read. Waits first while enough others are waited for.
    async fn start_fetch(
        self: &Arc<Self>,
        transfer: TransferId,
        lane: Lane,
        fetch: impl Future<Output = Result<Vec<KvSpan>, TransferError>> + Send + 'static,
    ) {
        let room = Arc::clone(&self.fetches).acquire_owned().await;
        let link = Arc::clone(self);
        let fetch = async move {
            let _room = room;
            let fetched = fetch.await;
            link.home.stir();
            match fetched {
                Ok(wrong) => link.refetch(transfer, lane, &wrong),
                Err(error) => link.refuse(&error),
            }
        };
        let home = self.home.nth(self.n_fetches.fetch_add(1, Ordering::Relaxed));
        home.at(|| spawn_guarded(&self.gate, "kv fetch", fetch)).detach();
    }

    /// Ends the link, because of what a frame's KV was.
    fn refuse(&self, error: &TransferError) {
        match error {
            TransferError::ConnectionLost { .. } => {
                info!(peer = %self.peer, error = in_full(error), "lost kv of a link");
            }
            error => warn!(peer = %self.peer, error = in_full(error), "refused kv of a link"),
        }
        self.gone.cancel();
    }

    /// From here on the sender's device writes nothing here.
    fn revoke(&self) {
        if let Some(Apart::Here(here)) = &self.elsewhere {
            here.revoke();
        }
        self.words.all_said();
    }

    fn refetch(&self, transfer: TransferId, lane: Lane, wrong: &[KvSpan]) {
        for spans in wrong.chunks(REFETCH_SPANS_MAX) {
            info!(%transfer, pages = spans.len(), "refetching corrupted pages");
            self.say(Frame::new(transfer, Body::Refetch { spans: spans.to_vec() }).on(lane));
        }
    }

    fn landing(&self, transfer: TransferId) -> Option<Arc<OpenLanding>> {
        self.landings().get(&transfer).cloned()
    }

    fn with(&self, transfer: TransferId, act: impl FnOnce(&OpenLanding)) {
        match self.landing(transfer) {
            Some(landing) => act(&landing),
            None => debug!(%transfer, "late frame"),
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
            info!(peer = %self.peer, landings = landings.len(), "link lost");
        }
        for landing in landings {
            landing.fail(TransferError::lost_because("the sender's link is gone"));
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
            self.words.said(transfer);
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

fn failed(error: &TransferError) -> Body {
    let (code, detail) = code::encode(error);
    Body::Failed { code, detail }
}
