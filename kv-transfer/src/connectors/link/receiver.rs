//! The receiver's end of links: accepts streams, lets senders open landings, and fills them.
//!
//! The receiver does not depend on the wire: each link has a [`KvPath`], which receives the KV of its frames.
//!
//! No input from a peer makes this side allocate more than a frame's limits, or wait longer than the stall time. A
//! peer that breaks the protocol loses its link and causes one log line. Other links are not affected.

use std::collections::HashMap;
use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chassis::spawn_guarded;
use chassis::telemetry::RareLines;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use types::node::{PROTOCOL, ProtocolRange};
use types::{KvLayout, TransferId, in_full};

use super::accept::{Handshake, Incoming, StreamAcceptor};
use super::answers::{Answers, SenderAnswers};
use super::connect::STREAMS_MAX;
use super::frame::{Body, Frame, FrameError, Hello, ProcessAddress, RANKS_VERSION};
use super::kv_path::KvPath;
use super::link_in::LinkIn;
use super::link_out::alive_interval;
use super::stream::{FrameHalves, FrameReader, FrameWriter, within};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landings::Landings;
use crate::processes::{OtherProcesses, ReportLandings};
use crate::wire_threads::WireThreads;

/// Limit of accepted streams of all peers together.
const STREAMS_OF_ALL_MAX: usize = 4096;
/// The first version whose senders make streams to several processes of a receiver.
const SEVERAL_PROCESSES_VERSION: u16 = 6;
/// Limit of queued answers per link. A peer that does not read them loses its link.
const ANSWERS_QUEUED_MAX: usize = 4096;

/// Serves streams until it is dropped or `closed` is cancelled.
#[derive(Debug)]
pub(in crate::connectors) struct Receiver {
    parts: ConnectorParts,
    wire_threads: WireThreads,
    grants: Grants,
    closed: CancellationToken,
    /// The links of all peers, by the number in their hello. Held for a look-up, never across an await.
    links: Mutex<HashMap<u64, Arc<LinkIn>>>,
    /// The number of streams accepted so far. Each stream gets the next thread.
    n_streams: AtomicUsize,
    room: Arc<Semaphore>,
    /// The log lines about streams that were refused or lost.
    failed: RareLines,
}

/// The process that grants the landings that the links fill.
#[derive(Clone, Debug)]
pub(in crate::connectors) enum Grants {
    /// This process does. Stream 0 makes a link and opens landings.
    Here(Landings),
    /// The head of this node does, and has stream 0. It gets the reports.
    AtHead(Arc<dyn ReportLandings>),
}

impl Receiver {
    pub(in crate::connectors) fn new(
        parts: ConnectorParts,
        wire_threads: WireThreads,
        grants: Grants,
    ) -> Arc<Self> {
        Arc::new(Self {
            parts,
            wire_threads,
            grants,
            closed: CancellationToken::new(),
            links: Mutex::default(),
            n_streams: AtomicUsize::new(0),
            room: Arc::new(Semaphore::new(STREAMS_OF_ALL_MAX)),
            failed: RareLines::new(),
        })
    }

    /// Fails all landings and ends all streams.
    pub(in crate::connectors) fn close(&self) {
        // The landings are closed before the streams, so that their error is `Closed` and not the end of a
        // stream.
        if let Grants::Here(landings) = &self.grants {
            landings.close();
        }
        self.closed.cancel();
    }

    /// Returns a peer's link.
    pub(in crate::connectors) fn link(&self, id: u64) -> Result<Arc<LinkIn>, TransferError> {
        let link = self.links().get(&id).cloned();
        link.ok_or_else(|| TransferError::lost_because("its link has ended or never existed"))
    }

    /// Ends a landing of a link, if it has not ended.
    pub(in crate::connectors) fn end_landing(&self, link: u64, transfer: TransferId) {
        let landing = self.link(link).ok().and_then(|link| link.landing(transfer));
        if let Some(landing) = landing {
            landing.fail(TransferError::Cancelled);
        }
    }

    /// Ends a link, if there is one.
    pub(in crate::connectors) fn close_link(&self, link: u64) {
        if let Ok(link) = self.link(link) {
            link.gone.cancel();
        }
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
            if let Some(left_out) = self.failed.line("too many streams") {
                warn!(from, left_out, "KV stream from peer refused: too many streams are open");
            }
            return;
        };
        let this = Arc::clone(self);
        let serve = async move {
            let _permit = permit;
            let served =
                async { this.serve(within(this.parts.settings.stall(), "a stream", arriving).await?).await };
            let served = this.closed.run_until_cancelled(served).await;
            log_end(from, served.unwrap_or(Ok(())), &this.failed);
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
        let protocol = ProtocolRange { min: self.version_min(), ..PROTOCOL };
        let version = match protocol.agree(hello.protocol) {
            Ok(version) => version,
            Err(mismatch) => {
                writer.write(&Frame::of_link(Body::Incompatible { protocol })).await?;
                return Err(mismatch.into());
            }
        };
        let (node, epoch) = (self.parts.node.clone(), self.parts.epoch);
        let others = match &self.parts.processes {
            Some(processes) if hello.stream == 0 => addresses(self.parts.memory.layout(), &**processes),
            _ => Vec::new(),
        };
        let welcome = Frame::of_link(Body::Welcome { version, node, epoch, others });
        let halves = FrameHalves { reader, writer };
        match (&self.grants, hello.stream) {
            (Grants::Here(landings), 0) => self.serve_first(&hello, welcome, halves, kv_path, landings).await,
            (Grants::Here(_), _) => {
                // A link can end while the sender still makes its other streams, so this is not reported as a
                // protocol error.
                let link = self.link(hello.link)?;
                self.serve_other(&hello, welcome, halves, link).await
            }
            (Grants::AtHead(_), 0) => {
                Err(FrameError::Unexpected("a first stream to a process that opens no landings").into())
            }
            (Grants::AtHead(reports), _) => {
                let link = self.link_of_follower(&hello, kv_path, reports)?;
                let _entry = LinkEntry { receiver: self, link: Arc::clone(&link), id: hello.link };
                self.serve_other(&hello, welcome, halves, link).await
            }
        }
    }

    /// Returns the first version whose senders can send to this node.
    fn version_min(&self) -> u16 {
        let has_one_process = self.parts.processes.is_none() && matches!(self.grants, Grants::Here(_));
        match self.parts.memory.ranks().len() < usize::from(self.parts.memory.n_ranks()) {
            true => RANKS_VERSION,
            false if has_one_process => PROTOCOL.min,
            false => SEVERAL_PROCESSES_VERSION,
        }
    }

    /// Serves stream 0, which makes the link and carries its answers. When stream 0 ends, the link ends.
    async fn serve_first(
        &self,
        hello: &Hello,
        welcome: Frame,
        halves: FrameHalves,
        kv_path: Option<Arc<dyn KvPath>>,
        landings: &Landings,
    ) -> Result<(), TransferError> {
        let FrameHalves { mut reader, mut writer } = halves;
        let (queue, to_write) = mpsc::channel(ANSWERS_QUEUED_MAX);
        let (gone, processes) = (CancellationToken::new(), self.parts.processes.clone());
        let answers = Answers::Sender { answers: SenderAnswers { queue, gone: gone.clone() }, processes };
        let link = self.new_link(hello, kv_path, gone, answers)?;
        let _entered = self.enter(hello.link, &link)?;
        writer.write(&welcome).await?;
        info!(peer = %hello.node, "KV link from peer accepted");
        tokio::select! {
            biased;
            () = link.gone.cancelled() => Err(TransferError::lost_because("another stream of the link ended")),
            ended = link.read_all(&mut reader, Some(landings)) => ended,
            ended = self.write_answers(&mut writer, to_write) => ended,
        }
    }

    async fn serve_other(
        &self,
        hello: &Hello,
        welcome: Frame,
        halves: FrameHalves,
        link: Arc<LinkIn>,
    ) -> Result<(), TransferError> {
        let FrameHalves { mut reader, mut writer } = halves;
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

    fn new_link(
        &self,
        hello: &Hello,
        kv_path: Option<Arc<dyn KvPath>>,
        gone: CancellationToken,
        answers: Answers,
    ) -> Result<Arc<LinkIn>, TransferError> {
        let kv_path = kv_path.ok_or(FrameError::Unexpected("a first stream without the link's KV path"))?;
        Ok(LinkIn::new(hello, &self.parts, self.wire_threads.clone(), kv_path, gone, answers))
    }

    /// Returns the link of a stream to a follower. The first stream makes it.
    fn link_of_follower(
        &self,
        hello: &Hello,
        kv_path: Option<Arc<dyn KvPath>>,
        reports: &Arc<dyn ReportLandings>,
    ) -> Result<Arc<LinkIn>, TransferError> {
        let mut links = self.links();
        if let Some(link) = links.get(&hello.link) {
            return Ok(Arc::clone(link));
        }
        let answers = Answers::Head(Arc::clone(reports));
        let link = self.new_link(hello, kv_path, CancellationToken::new(), answers)?;
        info!(peer = %hello.node, "KV link from peer accepted for this process's layers");
        links.insert(hello.link, Arc::clone(&link));
        Ok(link)
    }

    fn enter(&self, id: u64, link: &Arc<LinkIn>) -> Result<LinkEntry<'_>, TransferError> {
        let mut links = self.links();
        if links.contains_key(&id) {
            return Err(FrameError::Unexpected("a second stream 0 of a link").into());
        }
        links.insert(id, Arc::clone(link));
        Ok(LinkEntry { receiver: self, link: Arc::clone(link), id })
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

/// An entry in the table of links. The drop removes the link and fails its landings. All streams of a link to a follower
/// have one, and the first drop counts.
struct LinkEntry<'a> {
    receiver: &'a Receiver,
    link: Arc<LinkIn>,
    id: u64,
}

impl Drop for LinkEntry<'_> {
    fn drop(&mut self) {
        let mut links = self.receiver.links();
        if links.get(&self.id).is_some_and(|link| Arc::ptr_eq(link, &self.link)) {
            links.remove(&self.id);
        }
        drop(links);
        self.link.end();
    }
}

/// Returns the layers, the ranks and the addresses of the other processes of a node.
fn addresses(layout: &KvLayout, processes: &dyn OtherProcesses) -> Vec<ProcessAddress> {
    let n_layers = layout.groups.iter().map(|group| group.layers.len() as u16).sum();
    let n_ranks = layout.shard.tp_size;
    let address = |process| {
        let has = |layer, rank| processes.process_of(layer, rank) == Some(process);
        let layers = neighbours(n_layers, |layer| (0..n_ranks).any(|rank| has(layer, rank)));
        let ranks = neighbours(n_ranks, |rank| has(layers.start, rank));
        ProcessAddress { layers, ranks, endpoint: processes.endpoint(process) }
    };
    (0..processes.n_processes()).map(address).collect()
}

/// Returns the numbers below `n` that a process has, which are neighbours.
fn neighbours(n: u16, has: impl Fn(u16) -> bool) -> Range<u16> {
    let mut numbers = (0..n).filter(|number| has(*number));
    let first = numbers.next().unwrap_or(n);
    first..numbers.next_back().unwrap_or(first) + 1
}

fn log_end(from: impl Display, ended: Result<(), TransferError>, failed: &RareLines) {
    let Err(error) = ended else {
        debug!(%from, "KV stream from peer ended without error");
        return;
    };
    let is_refused = matches!(error, TransferError::Frame(_) | TransferError::Protocol(_));
    let error = in_full(&error);
    match failed.line(&error) {
        None => {}
        Some(left_out) if is_refused => warn!(%from, error, left_out, "KV stream from peer refused"),
        Some(left_out) => info!(%from, error, left_out, "KV stream from peer lost"),
    }
}
