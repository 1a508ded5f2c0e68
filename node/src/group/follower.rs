//! A follower: computes one stage of a node for its head, and sends the KV of its layers.

use std::future::pending;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use chassis::admin::Readiness;
use chassis::identity::link;
use chassis::{Gate, Shutdown, Stream, World, spawn_guarded};
use engine::cpu::process::{PreparedStage, StageProcess};
use engine::cpu::remote::StageInput;
use kv_cache::{FenceSignal, LayerFence};
use kv_transfer::{ConnectorParts, Faults, FollowerStreams, PutOrder, TransferMetrics};
use proto::v1;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};
use types::{Epoch, NodeId, in_full};

use super::connection::{MessageReader, MessageWriter, Outgoing, QUEUED_MAX, SILENT_MAX, outgoing};
use super::error::GroupError;
use super::messages::{OfFollower, OfHead, from_follower, input, loaded_message, output_message, parts_of};
use super::{blocking, common_settings, prepare};
use crate::config::NodeConfig;

/// What a follower is made of.
#[derive(Debug)]
pub struct FollowerParts<'a> {
    pub world: World,
    pub gate: Gate,
    pub config: &'a NodeConfig,
    /// `host:port` where the head waits.
    pub head: String,
    /// The stage that this process computes.
    pub place: u16,
    pub metrics: TransferMetrics,
    /// Ready when the stage is loaded, until the process is asked to stop.
    pub readiness: Readiness,
}

/// Joins the head, and computes until the head is gone, which is an error.
///
/// With `shutdown` the head is told to drain, and computes its last prompts with this process. The drain takes at most
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
    let FollowerParts { config, head, place, .. } = &parts;
    let connecting = async {
        let prepared = prepare(&config.engine, usize::from(*place)).await?;
        Ok((prepared, connect(&parts).await?.into_split()))
    };
    let Some(connected) = unless_stopped(shutdown, connecting).await else { return Ok(()) };
    let (prepared, (reader, writer)) = connected?;
    let mut reader = MessageReader::new(reader);
    let (out, queue) = outgoing();
    let settings = parts_of(&common_settings(&config.engine));
    let join = v1::Join { place: u32::from(*place), n_blocks: prepared.n_blocks(), settings };
    out.send(from_follower(OfFollower::Join(join))).await.map_err(gone)?;
    let alive = from_follower(OfFollower::Alive(v1::Alive {}));
    let writing = MessageWriter::new(writer).write_all(queue, alive);
    let working = async {
        let opening = open(&parts, prepared, &mut reader, &out);
        let Some(work) = unless_stopped(shutdown, opening).await else { return Ok(()) };
        let work = work?;
        parts.readiness.set_ready();
        work.serve(&mut reader).await
    };
    let stopping = async {
        shutdown.wait().await;
        info!("process tells its head to drain");
        parts.readiness.set_unready("draining");
        let stopping = from_follower(OfFollower::Stopping(v1::Stopping {}));
        out.send(stopping).await.map_err(gone)?;
        pending().await
    };
    let ended = tokio::select! {
        biased;
        ended = working => ended,
        ended = writing => ended,
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

/// Waits until the head accepts this process, and loads the stage.
async fn open(
    parts: &FollowerParts<'_>,
    prepared: PreparedStage,
    reader: &mut MessageReader,
    out: &Outgoing,
) -> Result<Work, GroupError> {
    let FollowerParts { world, gate, config, head, place, .. } = parts;
    let accepted = accepted(reader, head).await?;
    info!(head, place, blocks = accepted.n_blocks, "process has joined its head");
    let n_blocks = accepted.n_blocks;
    let stage = Arc::new(blocking(move || prepared.open(n_blocks)).await?);
    let loaded = loaded_message(stage.weights());
    out.send(from_follower(OfFollower::Loaded(loaded))).await.map_err(gone)?;
    let streams = FollowerStreams::new(ConnectorParts {
        node: NodeId::new(accepted.node),
        epoch: Epoch(accepted.epoch),
        memory: stage.memory().clone(),
        fingerprint: stage.weights().model.clone(),
        world: world.clone(),
        gate: gate.clone(),
        settings: config.transfer.clone(),
        metrics: parts.metrics.clone(),
        faults: Faults::none(),
        processes: None,
    });
    let streams = Arc::new(streams.map_err(GroupError::Transfer)?);
    Ok(Work { gate: gate.clone(), stage, streams, out: out.clone() })
}

/// Connects to the head, which may start later than this process.
async fn connect(parts: &FollowerParts<'_>) -> Result<Stream, GroupError> {
    let FollowerParts { world, config, head, .. } = parts;
    let within = config.group.join_within;
    let until = Instant::now() + within;
    loop {
        let dialed = timeout(SILENT_MAX, link::dial(world, head)).await;
        let error = match dialed {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => error,
            Err(_) => std::io::ErrorKind::TimedOut.into(),
        };
        if Instant::now() >= until {
            return Err(GroupError::NoHead { addr: head.clone(), within, source: error });
        }
        sleep(SILENT_MAX / 20).await;
    }
}

/// Waits until all processes of the node have joined. The head sends heartbeats meanwhile.
async fn accepted(reader: &mut MessageReader, head: &str) -> Result<v1::Accepted, GroupError> {
    loop {
        let message: v1::FromHead = reader.next().await?;
        match message.message {
            Some(OfHead::Accepted(accepted)) => return Ok(accepted),
            Some(OfHead::Refused(why)) => return Err(GroupError::Refused { addr: head.to_owned(), why }),
            Some(OfHead::Alive(_)) => {}
            _ => return Err(GroupError::Lost("it has sent a message too early".to_owned())),
        }
    }
}

/// The work for the head.
struct Work {
    gate: Gate,
    stage: Arc<StageProcess>,
    streams: Arc<FollowerStreams>,
    out: Outgoing,
}

impl Work {
    async fn serve(self, reader: &mut MessageReader) -> Result<(), GroupError> {
        let (steps, to_compute) = sync_channel(QUEUED_MAX);
        let (stage, out, gate) = (Arc::clone(&self.stage), self.out.clone(), self.gate.clone());
        let (runtime, ended) = (Handle::current(), Shutdown::new());
        let progress = Progress { runtime, gate, ended: ended.clone() };
        thread::Builder::new()
            .name("steps".to_owned())
            .spawn(move || compute_all(&stage, &to_compute, &out, &progress))
            .map_err(GroupError::Thread)?;
        loop {
            let message: v1::FromHead = tokio::select! {
                biased;
                () = ended.wait() => return Err(GroupError::Stage),
                message = reader.next() => message?,
            };
            match message.message {
                Some(OfHead::Alive(_)) => {}
                Some(OfHead::Input(step)) => {
                    let (number, input) = (step.step, input(step)?);
                    let late =
                        |_| GroupError::Lost("a compute thread has ended, or too many steps wait".to_owned());
                    steps.try_send((number, input)).map_err(late)?;
                }
                Some(OfHead::SendKv(v1::SendKv { id, order })) => self.send_kv(id, &order),
                Some(OfHead::CloseLink(v1::CloseLink { link })) => self.streams.close_link(link),
                _ => return Err(GroupError::Lost("it has sent a message that it may not send".to_owned())),
            }
        }
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

/// Where the reports of layers are made. The drop, also by a panic, ends this process.
struct Progress {
    runtime: Handle,
    gate: Gate,
    ended: Shutdown,
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.ended.trigger();
    }
}

/// Computes steps until no more come, or one fails.
fn compute_all(
    stage: &StageProcess,
    steps: &Receiver<(u64, StageInput)>,
    out: &Outgoing,
    progress: &Progress,
) {
    while let Ok((step, input)) = steps.recv() {
        let (signal, fence) = FenceSignal::new();
        let _entered = progress.runtime.enter();
        let report = report_layers(step, stage.layers(), fence, out.clone());
        spawn_guarded(&progress.gate, "layers done", report).detach();
        let results = match stage.compute(input, signal) {
            Ok(results) => results,
            Err(error) => {
                warn!(step, %error, "step of the head cannot be computed");
                return;
            }
        };
        let output = output_message(step, results);
        if out.blocking_send(from_follower(OfFollower::Output(output))).is_err() {
            return;
        }
    }
}

/// Reports each layer when its KV is written.
async fn report_layers(step: u64, layers: std::ops::Range<u16>, fence: LayerFence, out: Outgoing) {
    for layer in layers {
        if fence.wait(layer + 1).await.is_err() {
            return;
        }
        let done = v1::LayersDone { step, layers: u32::from(layer) + 1 };
        if out.send(from_follower(OfFollower::LayersDone(done))).await.is_err() {
            return;
        }
    }
}
