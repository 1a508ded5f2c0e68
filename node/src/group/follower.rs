//! A follower: computes one stage of a node for its head, or some ranks of one, and sends and receives the KV that it has.

use std::future::pending;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::identity::link;
use chassis::{Gate, Shutdown, Stream, TaskError, World, spawn_guarded};
use engine::process::PreparedStage;
use engine::remote::{StageMates, StageProcess, StageRanks};
use kv_cache::{FenceSignal, LayerFence};
use kv_transfer::{
    ConnectorParts, Faults, FollowerLandings, FollowerStreams, LandOrder, LandingReport, PutOrder,
    ReportLandings, TransferMetrics,
};
use proto::v1;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};
use types::{Epoch, NodeId, ProcessGrid, in_full};

use super::connection::{MessageReader, NotSent, Outgoing, QUEUED_MAX, SILENT_MAX, outgoing};
use super::connection_thread::{ConnectionThread, spawn_thread};
use super::error::GroupError;
use super::mates::{self, ColumnsIn};
use super::messages::{
    OfFollower, OfHead, from_follower, input, loaded_message, output_message, parts_of, results_from_follower,
};
use super::{Prepared, blocking, prepare};
use crate::config::NodeConfig;

/// The inputs of a follower.
#[derive(Debug)]
pub struct FollowerParts<'a> {
    pub world: World,
    pub gate: Gate,
    pub config: &'a NodeConfig,
    /// `host:port` where the head waits.
    pub head: String,
    /// The number of this process among those of the node: see [`ProcessGrid`].
    pub place: u16,
    pub metrics: TransferMetrics,
    /// Ready when the stage is loaded, until the process is asked to stop.
    pub readiness: Readiness,
}

/// Joins the head, and computes until the head is gone, which is an error.
///
/// On `shutdown` the head is asked to drain, and computes its last prompts with this process. The drain takes at most
/// the head's time for it.
pub async fn follow(parts: FollowerParts<'_>, shutdown: Shutdown) -> Result<(), GroupError> {
    let drain = parts.config.drain + SILENT_MAX;
    let drained_late = async {
        shutdown.wait().await;
        sleep(drain).await;
    };
    tokio::select! {
        biased;
        ended = follow_until_lost(parts, &shutdown) => match ended {
            Err(error) if shutdown.requested() => {
                info!(%error, "process was asked to stop, and its head has ended");
                Ok(())
            }
            ended => ended,
        },
        () = drained_late => {
            warn!(ms = drain.as_millis() as u64, "head has not drained in time, this process ends");
            Ok(())
        }
    }
}

async fn follow_until_lost(parts: FollowerParts<'_>, shutdown: &Shutdown) -> Result<(), GroupError> {
    let FollowerParts { world, gate, config, head, place, .. } = &parts;
    let thread = ConnectionThread::start()?;
    let connecting = async {
        let prepared = prepare(&config.engine, config.group.grid, usize::from(*place)).await?;
        let connect = connect(world.clone(), head.clone(), config.group.join_within);
        let stream = thread.spawn(gate, "connect to the head", connect).await.map_err(task_ended)??;
        Ok((prepared, stream.into_split()))
    };
    let Some(connected) = unless_stopped(shutdown, connecting).await else { return Ok(()) };
    let (Prepared { stage: prepared, common }, (reader, writer)) = connected?;
    let mut reader = MessageReader::new(reader);
    let (out, writing) = outgoing(writer);
    let settings = parts_of(&common);
    let join = v1::Join { place: u32::from(*place), n_blocks: prepared.n_blocks(), settings };
    out.send(from_follower(OfFollower::Join(join))).await.map_err(gone)?;
    let alive = from_follower(OfFollower::Alive(v1::Alive {}));
    let working = async {
        let opening = open(&parts, prepared, &mut reader, &out);
        let Some(work) = unless_stopped(shutdown, opening).await else { return Ok(()) };
        let serving = work?.serve(reader)?;
        parts.readiness.set_ready();
        thread.spawn(gate, "steps of the head", serving).await.map_err(task_ended)?
    };
    let stopping = async {
        shutdown.wait().await;
        info!("process asks its head to drain");
        parts.readiness.set_unready("draining");
        let stopping = from_follower(OfFollower::Stopping(v1::Stopping {}));
        out.send(stopping).await.map_err(gone)?;
        pending().await
    };
    let ended = tokio::select! {
        biased;
        ended = working => ended,
        error = writing.write_all(alive) => Err(error),
        ended = stopping => ended,
    };
    ended.map_err(|error| match error {
        GroupError::Lost(why) => GroupError::Lost(format!("the head at {head} is lost: {why}")),
        error => error,
    })
}

/// Returns `None` if the process is asked to stop before `joining` has ended. The head needs it for no request yet.
async fn unless_stopped<T>(shutdown: &Shutdown, joining: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = shutdown.wait() => None,
        joined = joining => Some(joined),
    }
}

fn gone<T>(_: T) -> GroupError {
    GroupError::Lost("the connection to the head has ended".to_owned())
}

fn task_ended(_: TaskError) -> GroupError {
    GroupError::Stage
}

/// Waits until the head accepts this process, and loads the stage.
async fn open(
    parts: &FollowerParts<'_>,
    prepared: PreparedStage,
    reader: &mut MessageReader,
    out: &Outgoing,
) -> Result<Work, GroupError> {
    let FollowerParts { world, gate, config, head, place, .. } = parts;
    let accepted = accepted(reader, head).await?;
    let computes = config.group.grid.name(usize::from(*place));
    info!(head, place, computes, blocks = accepted.n_blocks, "process has joined its head");
    let n_blocks = accepted.n_blocks;
    let (columns, mates) = exchange(config.group.grid, usize::from(*place), out).unzip();
    let ranks = mates.map(|mates| StageRanks { mates, sums_id: accepted.sums_id });
    let stage = blocking(move || prepared.open(n_blocks, ranks).map_err(GroupError::Open)).await?;
    let connector_parts = ConnectorParts {
        node: NodeId::new(accepted.node),
        epoch: Epoch(accepted.epoch),
        memory: stage.loaded().memory.clone(),
        fingerprint: stage.loaded().weights.model.clone(),
        world: world.clone(),
        gate: gate.clone(),
        settings: config.transfer.clone(),
        metrics: parts.metrics.clone(),
        faults: Faults::none(),
        processes: None,
    };
    let ended = Shutdown::new();
    let reports = Arc::new(ReportsToHead { out: out.clone(), ended: ended.clone() });
    let streams = FollowerStreams::start(connector_parts);
    let streams = Arc::new(streams.await.map_err(GroupError::Transfer)?);
    let landings = match accepted.receives_kv {
        true => Some(streams.listen(reports).await.map_err(GroupError::Transfer)?),
        false => None,
    };
    let endpoint = landings.as_ref().map_or("", FollowerLandings::endpoint);
    let loaded = loaded_message(&stage.loaded().weights, endpoint);
    out.send(from_follower(OfFollower::Loaded(loaded))).await.map_err(gone)?;
    let runtime = Handle::current();
    Ok(Work { gate: gate.clone(), runtime, stage, columns, streams, landings, out: out.clone(), ended })
}

/// Makes the exchange with the other processes of the stage; `None` if there are none.
fn exchange(grid: ProcessGrid, place: usize, head: &Outgoing) -> Option<(ColumnsIn, Arc<dyn StageMates>)> {
    let stage = grid.share(place).stage;
    let here = grid.of_stage(stage).position(|process| process == place)?;
    let n_processes = grid.processes_of_stage();
    (n_processes > 1).then(|| mates::of_follower(n_processes, here, head.clone()))
}

/// Takes reports of landings to the head.
#[derive(Debug)]
struct ReportsToHead {
    out: Outgoing,
    ended: Shutdown,
}

impl ReportLandings for ReportsToHead {
    fn report(&self, report: LandingReport) {
        let message = OfFollower::KvReport(v1::KvReport { report: report.encode().into() });
        if self.out.send_now(from_follower(message)) == Err(NotSent::Full) {
            warn!("too many reports of landings wait for the head");
            self.ended.trigger();
        }
    }
}

/// Connects to the head, which may start later than this process. A head that does not admit this process would not do so
/// later.
async fn connect(world: World, head: String, within: Duration) -> Result<Stream, GroupError> {
    let until = Instant::now() + within;
    let stream = loop {
        let error = match timeout(SILENT_MAX, world.net().connect(&head)).await {
            Ok(Ok(stream)) => break stream,
            Ok(Err(error)) => error,
            Err(_) => ErrorKind::TimedOut.into(),
        };
        if Instant::now() >= until {
            return Err(GroupError::NoHead { addr: head, within, source: error });
        }
        sleep(SILENT_MAX / 20).await;
    };
    let why = match timeout(SILENT_MAX, link::prove_to_head(&world, stream)).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(error)) => in_full(&error),
        Err(_) => format!("it was silent for {} s", SILENT_MAX.as_secs()),
    };
    Err(GroupError::NotAdmitted { addr: head, why })
}

/// Waits until all processes of the node have joined. The head sends heartbeats meanwhile.
async fn accepted(reader: &mut MessageReader, head: &str) -> Result<v1::Accepted, GroupError> {
    let unanswered =
        |why: GroupError| GroupError::NotAdmitted { addr: head.to_owned(), why: why.to_string() };
    let mut message: v1::FromHead = reader.next().await.map_err(unanswered)?;
    loop {
        match message.message {
            Some(OfHead::Accepted(accepted)) => return Ok(accepted),
            Some(OfHead::Refused(why)) => return Err(GroupError::Refused { addr: head.to_owned(), why }),
            Some(OfHead::Alive(_)) => {}
            _ => return Err(unanswered(GroupError::Lost("it has sent a message too early".to_owned()))),
        }
        message = reader.next().await?;
    }
}

/// The work for the head.
struct Work {
    gate: Gate,
    /// Where the tasks of this work run.
    runtime: Handle,
    stage: Arc<dyn StageProcess>,
    /// Where the columns of other processes go to; `None` if this process computes the stage alone.
    columns: Option<ColumnsIn>,
    streams: Arc<FollowerStreams>,
    /// `None` if no KV is sent to the node.
    landings: Option<FollowerLandings>,
    out: Outgoing,
    /// Triggered when this process cannot go on.
    ended: Shutdown,
}

impl Work {
    /// Starts the thread of results. The returned future begins steps, and obeys the head's orders about KV. It may block
    /// for the time of a launch.
    fn serve(
        self,
        mut reader: MessageReader,
    ) -> Result<impl Future<Output = Result<(), GroupError>> + Send + 'static, GroupError> {
        let (begun, to_finish) = sync_channel(QUEUED_MAX);
        let (stage, out, end) = (Arc::clone(&self.stage), self.out.clone(), EndGuard(self.ended.clone()));
        let inside = self.gate.enter("results").map_err(gone)?;
        spawn_thread("results", move || {
            finish_all(&*stage, &to_finish, &out, &end);
            // A GPU's libraries crash if the process ends first.
            drop(stage);
            drop(inside);
        })?;
        Ok(async move {
            loop {
                let message: v1::FromHead = tokio::select! {
                    biased;
                    () = self.ended.wait() => return Err(GroupError::Stage),
                    message = reader.next() => message?,
                };
                self.obey(message.message.ok_or_else(unexpected)?, &begun)?;
            }
        })
    }

    /// Obeys a message. Its tasks do not run on the thread of the connection.
    fn obey(&self, message: OfHead, begun: &SyncSender<u64>) -> Result<(), GroupError> {
        let _entered = self.runtime.enter();
        match message {
            OfHead::Alive(_) => Ok(()),
            OfHead::Input(step) => self.begin(step, begun),
            OfHead::Columns(v1::Columns { from, columns }) => match &self.columns {
                Some(to) => to.take(from as usize, columns),
                None => Err(unexpected()),
            },
            about_kv => self.about_kv(about_kv),
        }
    }

    fn begin(&self, step: v1::StageInput, begun: &SyncSender<u64>) -> Result<(), GroupError> {
        let (step, input) = (step.step, input(step));
        let (signal, fence) = FenceSignal::new();
        if let Err(error) = self.stage.begin(input, signal) {
            warn!(step, %error, "step of the head cannot be computed");
            return Err(GroupError::Stage);
        }
        begun.try_send(step).map_err(|_| GroupError::Stage)?;
        let report = report_layers(step, self.stage.loaded().layers.clone(), fence, self.out.clone());
        spawn_guarded(&self.gate, "layers done", report).detach();
        Ok(())
    }

    /// Obeys an order about KV.
    fn about_kv(&self, order: OfHead) -> Result<(), GroupError> {
        match (order, &self.landings) {
            (OfHead::SendKv(v1::SendKv { id, order }), _) => self.send_kv(id, &order),
            (OfHead::CloseLink(v1::CloseLink { link }), landings) => {
                self.streams.close_link(link);
                if let Some(landings) = landings {
                    landings.close_link(link);
                }
            }
            (OfHead::LandKv(v1::LandKv { order }), Some(landings)) => {
                landings.land(&LandOrder::decode(&order).map_err(|_| unexpected())?);
            }
            (OfHead::EndKv(v1::EndKv { link, transfer }), Some(landings)) => {
                let transfer = proto::transfer_from_wire(&transfer, "end_kv.transfer");
                landings.end(link, transfer.map_err(|_| unexpected())?);
            }
            _ => return Err(unexpected()),
        }
        Ok(())
    }

    /// Sends pages on a task of its own, and reports the end.
    fn send_kv(&self, id: u64, order: &[u8]) {
        let order = PutOrder::decode(order);
        let (streams, out) = (Arc::clone(&self.streams), self.out.clone());
        let put = async move {
            let sent = match order {
                Ok(order) => streams.put(order).await,
                Err(error) => Err(error),
            };
            let error = sent.err().map(|error| in_full(&error)).unwrap_or_default();
            // If the head is gone, nothing waits for the report.
            let _ = out.send(from_follower(OfFollower::KvSent(v1::KvSent { id, error }))).await;
        };
        spawn_guarded(&self.gate, "kv order", put).detach();
    }
}

fn unexpected() -> GroupError {
    GroupError::Lost("it has sent a message that it may not send".to_owned())
}

/// Ends this process when it is dropped, also by a panic.
struct EndGuard(Shutdown);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.trigger();
    }
}

/// Sends the results of steps until no more were begun, or one fails.
fn finish_all(stage: &dyn StageProcess, begun: &Receiver<u64>, out: &Outgoing, _end: &EndGuard) {
    while let Ok(step) = begun.recv() {
        let results = match stage.finish() {
            Ok(results) => results,
            Err(error) => return warn!(step, %error, "step of the head was not computed"),
        };
        let output = output_message(step, results);
        if out.blocking_send(results_from_follower(output)).is_err() {
            return;
        }
    }
}

/// Reports layers when their KV is written. Layers that are written together are one report. The step's results report the
/// last ones.
async fn report_layers(step: u64, layers: Range<u16>, fence: LayerFence, out: Outgoing) {
    let mut n_reported = layers.start;
    while n_reported + 1 < layers.end {
        if fence.wait(n_reported + 1).await.is_err() {
            return;
        }
        n_reported = fence.n_written().unwrap_or(layers.end).min(layers.end);
        if n_reported == layers.end {
            return;
        }
        let done = v1::LayersDone { step, layers: n_reported.into() };
        if out.send(from_follower(OfFollower::LayersDone(done))).await.is_err() {
            return;
        }
    }
}
