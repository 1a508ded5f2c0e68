//! The head's end of the connection to one follower.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chassis::{Gate, Shutdown, spawn_guarded};
use device::polling;
use engine::remote::{RemoteStage, StageInput, StageLost, StageResults, StageWeights};
use kv_transfer::{LandOrder, LandingEvent, LandingQueues, LandingReport, PutOrder, TransferError};
use proto::v1;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::warn;
use types::TransferId;

use super::connection::{MessageReader, NotSent, Outgoing, WritingTask};
use super::error::GroupError;
use super::mates::{Member, Relay};
use super::messages::{OfFollower, OfHead, from_head, input_message, results, step_from_head, weights};

/// The longest time in which a follower loads its weights.
const LOAD_WITHIN: Duration = Duration::from_secs(1800);
/// The longest time for which one step is computed.
const STEP_WITHIN: Duration = Duration::from_secs(600);
/// Limit of unread events of steps: a step has one for each layer and a last one.
const EVENTS_MAX: usize = 8192;

/// A follower, as the head sees it.
#[derive(Debug)]
pub(super) struct JoinedProcess {
    pub(super) place: usize,
    /// The follower's part of the model, in words for an operator.
    name: String,
    pub(super) from: SocketAddr,
    /// The number of blocks for which the follower has room.
    pub(super) n_blocks: u32,
    /// The number of the first layer after the stage's.
    layers_end: u16,
    /// Where the columns of the follower's ranks go to.
    pub(super) relay: Relay,
    out: Outgoing,
    /// The follower's reports of landings.
    landings: LandingQueues,
    /// `host:port` where the follower receives KV. Set when it has loaded its weights.
    kv_endpoint: OnceLock<String>,
    /// Read by the thread that opens the model.
    loaded: Mutex<Receiver<StageWeights>>,
    /// Read by the pipeline's thread for this stage.
    events: Mutex<Receiver<StageEvent>>,
    n_begun: AtomicU64,
    n_finished: AtomicU64,
    /// The puts that the follower has not answered, by id. Held for a look-up, never across an await.
    puts: Mutex<HashMap<u64, oneshot::Sender<Result<(), TransferError>>>>,
    n_puts: AtomicU64,
    why_lost: OnceLock<String>,
    pub(super) lost: Shutdown,
    /// Triggered when the follower is asked to stop.
    pub(super) stopping: Shutdown,
}

/// A follower's report of a step.
#[derive(Debug)]
enum StageEvent {
    LayersDone { step: u64, layers: u16 },
    Output(v1::StageOutput),
}

/// The queues into which the reader of a connection puts messages. Dropping it ends all waits of the process.
#[derive(Debug)]
struct Inbox {
    loaded: SyncSender<StageWeights>,
    events: SyncSender<StageEvent>,
}

/// A connection whose follower may join.
#[derive(Debug)]
pub(super) struct JoinRequest {
    pub(super) place: usize,
    pub(super) name: String,
    pub(super) n_blocks: u32,
    pub(super) layers_end: u16,
    pub(super) from: SocketAddr,
    pub(super) reader: MessageReader,
    pub(super) out: Outgoing,
    pub(super) writing: WritingTask,
}

impl JoinedProcess {
    /// Starts the tasks of the connection. They end when the process is lost.
    pub(super) fn start(joined: JoinRequest, gate: &Gate) -> Arc<Self> {
        let JoinRequest { place, name, n_blocks, layers_end, from, reader, out, writing } = joined;
        let (loaded_in, loaded) = sync_channel(1);
        let (events_in, events) = sync_channel(EVENTS_MAX);
        let process = Arc::new(Self {
            place,
            name,
            from,
            n_blocks,
            layers_end,
            relay: Relay::default(),
            out,
            landings: LandingQueues::default(),
            kv_endpoint: OnceLock::new(),
            loaded: Mutex::new(loaded),
            events: Mutex::new(events),
            n_begun: AtomicU64::new(0),
            n_finished: AtomicU64::new(0),
            puts: Mutex::default(),
            n_puts: AtomicU64::new(0),
            why_lost: OnceLock::new(),
            lost: Shutdown::new(),
            stopping: Shutdown::new(),
        });
        let inbox = Inbox { loaded: loaded_in, events: events_in };
        let task = Arc::clone(&process).serve(reader, writing, inbox);
        spawn_guarded(gate, "follower", task).detach();
        process
    }

    async fn serve(self: Arc<Self>, reader: MessageReader, writing: WritingTask, inbox: Inbox) {
        let alive = from_head(OfHead::Alive(v1::Alive {}));
        let error = tokio::select! {
            biased;
            () = self.lost.wait() => return,
            Err(error) = self.read_all(reader, &inbox) => error,
            error = writing.write_all(alive) => error,
        };
        self.lose(error.to_string());
    }

    async fn read_all(&self, mut reader: MessageReader, inbox: &Inbox) -> Result<Infallible, GroupError> {
        loop {
            let message: v1::FromFollower = reader.next().await?;
            match message.message {
                Some(OfFollower::Alive(_)) => {}
                Some(OfFollower::Loaded(mut loaded)) => {
                    let endpoint = std::mem::take(&mut loaded.kv_endpoint);
                    self.kv_endpoint.set(endpoint).map_err(|_| unexpected("its weights twice"))?;
                    let weights = weights(loaded)?;
                    inbox.loaded.try_send(weights).map_err(|_| unexpected("its weights twice"))?;
                }
                Some(OfFollower::LayersDone(v1::LayersDone { step, layers })) => {
                    let event = StageEvent::LayersDone { step, layers: layers as u16 };
                    inbox.events.try_send(event).map_err(|_| unexpected("too many reports"))?;
                }
                Some(OfFollower::Output(output)) => {
                    let event = StageEvent::Output(output);
                    inbox.events.try_send(event).map_err(|_| unexpected("too many results"))?;
                }
                Some(OfFollower::KvSent(v1::KvSent { id, error })) => {
                    let sent = match error.is_empty() {
                        true => Ok(()),
                        false => Err(TransferError::SeveralProcesses(format!("{self}: {error}"))),
                    };
                    if let Some(waiting) = self.puts().remove(&id) {
                        // The caller may be gone, so a failed send is ignored.
                        let _ = waiting.send(sent);
                    }
                }
                Some(OfFollower::KvReport(v1::KvReport { report })) => {
                    let report = LandingReport::decode(&report);
                    self.landings.take(report.map_err(|_| unexpected("a report that cannot be read"))?);
                }
                Some(OfFollower::Columns(columns)) => self.relay.pass(&columns)?,
                Some(OfFollower::Stopping(_)) => self.stopping.trigger(),
                Some(OfFollower::Join(_)) | None => return Err(unexpected("a message that it may not send")),
            }
        }
    }

    /// Ends the process. Only the first reason counts.
    pub(super) fn lose(&self, why: String) {
        if self.why_lost.set(why).is_ok() {
            warn!(place = self.place, from = %self.from, why = self.why(), "process of this node lost");
        }
        self.end();
    }

    /// Ends the connection.
    pub(super) fn end(&self) {
        self.lost.trigger();
        self.puts().clear();
        self.landings.close();
        self.relay.end();
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.requested()
    }

    /// Returns why the follower is lost.
    pub(super) fn why(&self) -> String {
        format!("{self} is lost: {}", self.why_lost.get().map_or("it has ended", String::as_str))
    }

    /// Sends a message. Waits for room.
    pub(super) async fn say(&self, message: OfHead) -> Result<(), GroupError> {
        self.out.send(from_head(message)).await.map_err(|_| GroupError::Lost(self.why()))
    }

    /// Sends an order about a link or a landing. Never waits.
    fn order(&self, message: OfHead) {
        if self.out.send_now(from_head(message)) == Err(NotSent::Full) {
            self.lose("the queue of messages to it is full".to_owned());
        }
    }

    pub(super) fn close_link(&self, link: u64) {
        self.order(OfHead::CloseLink(v1::CloseLink { link }));
    }

    /// Returns this follower as a member of the exchange of columns: see
    /// [`mates::connect`](super::mates::connect).
    pub(super) fn member(&self) -> Member<'_> {
        Some((&self.out, &self.relay))
    }

    /// Returns where the follower receives KV; nothing before it has loaded its weights.
    pub(super) fn kv_endpoint(&self) -> String {
        self.kv_endpoint.get().cloned().unwrap_or_default()
    }

    /// Makes the follower receive its pages of a landing, and returns its reports.
    pub(super) fn land(&self, order: &LandOrder) -> mpsc::Receiver<LandingEvent> {
        let reports = self.landings.begin(order.transfer());
        self.order(OfHead::LandKv(v1::LandKv { order: order.encode().into() }));
        reports
    }

    pub(super) fn end_landing(&self, link: u64, transfer: TransferId) {
        let transfer = proto::transfer_to_wire(transfer);
        self.order(OfHead::EndKv(v1::EndKv { link, transfer }));
    }

    /// Makes the follower send some pages, and waits until they are sent.
    pub(super) async fn put(&self, order: &PutOrder) -> Result<(), TransferError> {
        let id = self.n_puts.fetch_add(1, Ordering::Relaxed);
        let (waiting, sent) = oneshot::channel();
        self.puts().insert(id, waiting);
        let lost = || TransferError::SeveralProcesses(self.why());
        // The check comes after the insertion: either `lose` sees the put, or this call sees the loss.
        if self.is_lost() {
            self.puts().remove(&id);
            return Err(lost());
        }
        let order = order.encode().into();
        self.say(OfHead::SendKv(v1::SendKv { id, order })).await.map_err(|_| lost())?;
        sent.await.unwrap_or_else(|_| Err(lost()))
    }

    fn puts(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<Result<(), TransferError>>>> {
        self.puts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next report of a step. It looks again and again, because a step that continues this one waits for it.
    fn next_event(&self, events: &Receiver<StageEvent>) -> Result<StageEvent, StageLost> {
        let began = Instant::now();
        loop {
            match events.try_recv() {
                Ok(event) => return Ok(event),
                Err(TryRecvError::Disconnected) => return Err(self.stage_lost()),
                Err(TryRecvError::Empty) => {}
            }
            let waited = began.elapsed();
            if waited > STEP_WITHIN {
                let limit = STEP_WITHIN.as_secs();
                return Err(StageLost(format!("{self} has not computed a step within {limit} s")));
            }
            polling::sleep(waited);
        }
    }

    fn stage_lost(&self) -> StageLost {
        StageLost(self.why())
    }
}

impl RemoteStage for JoinedProcess {
    fn loaded(&self) -> Result<StageWeights, StageLost> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.recv_timeout(LOAD_WITHIN).map_err(|error| match error {
            RecvTimeoutError::Disconnected => self.stage_lost(),
            RecvTimeoutError::Timeout => {
                StageLost(format!("{self} has not loaded its weights within {} s", LOAD_WITHIN.as_secs()))
            }
        })
    }

    fn begin(&self, input: StageInput) -> Result<(), StageLost> {
        let step = self.n_begun.fetch_add(1, Ordering::Relaxed);
        let message = step_from_head(input_message(step, input));
        self.out.blocking_send(message).map_err(|_| self.stage_lost())
    }

    fn finish(&self, layers_done: &mut dyn FnMut(u16)) -> Result<StageResults, StageLost> {
        let expected = self.n_finished.fetch_add(1, Ordering::Relaxed);
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let event = self.next_event(&events)?;
            match event {
                StageEvent::LayersDone { step, layers } if step == expected => layers_done(layers),
                // A report that the results have overtaken.
                StageEvent::LayersDone { .. } => {}
                StageEvent::Output(output) if output.step == expected => {
                    layers_done(self.layers_end);
                    return Ok(results(output));
                }
                StageEvent::Output(_) => {
                    self.lose("it has answered another step".to_owned());
                    return Err(self.stage_lost());
                }
            }
        }
    }
}

impl std::fmt::Display for JoinedProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the process of {} at {}", self.name, self.from)
    }
}

fn unexpected(what: &str) -> GroupError {
    GroupError::Lost(format!("it has sent {what}"))
}
