//! The worker: all sequences of one node, and the only code that changes them.
//!
//! The worker is a state machine. `Worker::apply` takes one event at a time, waits only for the backend, and
//! needs no runtime. `Worker::next` returns the event that the worker needs next. The
//! [`driver`](crate::driver) calls both, and chooses thread and clock.
//!
//! `launching` allocates blocks and launches steps, `collecting` applies their results.

mod collecting;
mod launching;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use chassis::World;
use chassis::guards::{Guard, stands};
use engine::Backend;
use kv_cache::BlockPool;
use tokio::time::Instant;
use tracing::{debug, error};
use types::{KvLayout, ModelInfo, NodeLoad, PromptWork, Refusal, RefusalKind};

use crate::arrivals::ExpectedArrivals;
use crate::error::SchedulerError;
use crate::growth::{self, Grower};
use crate::landing_room::RoomWaiter;
use crate::launched_step::{LaunchTiming, LaunchedStep};
use crate::lead::{LaunchLead, LaunchTimes, PromptLaunch};
use crate::load::{StepCosts, StepShape, WorkDone, WorkerLoad};
use crate::metrics::SchedulerMetrics;
use crate::precedence::SequenceId;
use crate::sequence::{self, Sequence};
use crate::settings::SchedulerSettings;
use crate::sink::SequenceEnd;
use crate::submission::Submission;
use launching::ArrivalTimes;

/// The interval at which a worker that can run no sequence checks them again: a sink or the pool may have
/// room.
const BLOCKED_POLL: Duration = Duration::from_millis(20);

/// The inputs of a worker.
#[derive(Debug)]
pub struct WorkerParts {
    pub backend: Box<dyn Backend>,
    pub pool: BlockPool,
    pub world: World,
    pub settings: SchedulerSettings,
    pub metrics: SchedulerMetrics,
}

/// An event that changes a worker.
#[derive(Debug)]
pub(crate) enum Event {
    Submit(Box<Submission>),
    /// A request for room begins to wait.
    Wait(Box<RoomWaiter>),
    /// A caller has cancelled a sequence or a request for room.
    Cancel(SequenceId),
    /// Ends sequences whose deadline has passed, and launches a step if there is work.
    Launch(LaunchTiming),
    /// Collects the oldest launched step, and waits for the device meanwhile.
    Collect,
    /// The worker has been idle for a moment.
    Idle,
}

/// The event that a worker needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextEvent {
    /// `Launch`, at once: one more step fits behind the step that was just launched.
    Launch,
    /// `Collect`. For a step that is only modelled, not before this time.
    Collect(Option<Instant>),
    /// Any event, and `Launch` at this time at the latest; `None`: there are no sequences.
    Wait(Option<Instant>),
}

#[derive(Debug)]
pub(crate) struct Worker {
    backend: Box<dyn Backend>,
    pool: BlockPool,
    world: World,
    settings: SchedulerSettings,
    metrics: SchedulerMetrics,
    model: ModelInfo,
    /// All sequences, in order of arrival.
    sequences: BTreeMap<SequenceId, Sequence>,
    /// The requests for room that wait, in order of arrival. They share one order with the sequences without
    /// blocks.
    waiters: BTreeMap<SequenceId, RoomWaiter>,
    /// The KV that is on its way to this node.
    arrivals: ExpectedArrivals,
    /// Launched steps that are not collected, the oldest first.
    flights: VecDeque<LaunchedStep>,
    steps_in_flight_max: usize,
    has_just_launched: bool,
    costs: StepCosts,
    lead: LaunchLead,
    prompt_launch: PromptLaunch,
    done: WorkDone,
    /// The time at which the last collected step ended.
    last_step: Option<Instant>,
    last_progress: Instant,
    /// Whether the pool's integrity was checked since the last sequence came.
    is_checked: bool,
    /// The time since which there is no work; `None` while there is.
    idle_since: Option<Instant>,
    /// The reason why the backend cannot be used any more; `None` while it works.
    lost: Option<String>,
}

impl Worker {
    pub(crate) fn new(parts: WorkerParts) -> Result<Self, SchedulerError> {
        let WorkerParts { backend, pool, world, settings, metrics } = parts;
        let model = backend.model().clone();
        settings.check(usize::from(model.layout.block_tokens))?;
        let (in_pool, in_memory) = (pool.counts().total, backend.memory().n_blocks());
        if in_pool != in_memory {
            return Err(SchedulerError::PoolSize { pool: in_pool, memory: in_memory });
        }
        let steps_in_flight_max = settings.steps_in_flight_max.min(backend.steps_in_flight_max());
        Ok(Self {
            backend,
            pool,
            last_progress: world.now(),
            world,
            settings,
            metrics,
            model,
            sequences: BTreeMap::new(),
            waiters: BTreeMap::new(),
            arrivals: ExpectedArrivals::default(),
            flights: VecDeque::new(),
            steps_in_flight_max,
            has_just_launched: false,
            costs: StepCosts::default(),
            lead: LaunchLead::default(),
            prompt_launch: PromptLaunch::default(),
            done: WorkDone::default(),
            last_step: None,
            is_checked: true,
            idle_since: None,
            lost: None,
        })
    }

    /// Returns the backend. All sequences must have ended.
    pub(crate) fn into_backend(mut self) -> Box<dyn Backend> {
        self.check_pool();
        self.backend
    }

    /// Applies one event. No other method changes the worker.
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Submit(submission) => self.submit(*submission),
            Event::Wait(waiter) => self.wait(*waiter),
            Event::Cancel(id) => self.cancel(id),
            Event::Launch(timing) => self.launch(timing, self.world.now()),
            Event::Collect => self.collect(),
            Event::Idle => self.idle(self.world.now()),
        }
    }

    pub(crate) fn next(&self) -> NextEvent {
        let may_launch = self.flights.len() < self.steps_in_flight_max;
        match self.flights.front() {
            Some(_) if self.has_just_launched && may_launch => NextEvent::Launch,
            Some(flight) => NextEvent::Collect(flight.due),
            None => NextEvent::Wait(self.next_look()),
        }
    }

    /// Returns the best times to launch a step behind the running one; `None`: as soon as there is room for
    /// it.
    pub(crate) fn launch_times(&self) -> Option<LaunchTimes> {
        let runs_late = self.settings.launch_late && self.backend.runs_by_itself();
        if !runs_late || self.flights.len() != 1 {
            return None;
        }
        let without_prompts = self.lead.before(self.end_of(self.flights.front()?)?)?;
        Some(LaunchTimes { with_prompts: self.prompt_launch.before(without_prompts)?, without_prompts })
    }

    /// Returns whether the next step may have prompts.
    pub(crate) fn has_prompts(&self) -> bool {
        self.sequences.values().any(Sequence::lacks_prompt)
    }

    /// Returns the expected end of a step; `None` if it cannot be predicted. Steps with prompts are predicted if they are
    /// bounded.
    fn end_of(&self, flight: &LaunchedStep) -> Option<Instant> {
        let shape = self.shape_of(flight);
        let running = Duration::from_secs_f64(self.costs.running_ms(shape.n_running) / 1e3);
        let took = match shape.n_prefill_tokens {
            // The shorter of the two times counts, because a single step of one second raises the mean of many
            // short steps.
            0 => running.min(self.done.took),
            _ if self.settings.gap_ms_max > 0.0 => running + self.costs.prompt_takes(shape),
            _ => return None,
        };
        (!running.is_zero()).then(|| flight.due.unwrap_or(self.began(flight) + took))
    }

    /// Returns the shape of a step that takes as long as a launched one. Less than a group of rows may take less time than a
    /// group.
    fn shape_of(&self, flight: &LaunchedStep) -> StepShape {
        let (shape, rows_together) = (StepShape::of(&flight.rows), self.backend.rows_together());
        if shape.n_rows() <= rows_together { shape } else { shape.filled_up(rows_together) }
    }

    /// Returns the time at which the device began the oldest launched step.
    fn began(&self, flight: &LaunchedStep) -> Instant {
        self.last_step.map_or(flight.launched_at, |last| last.max(flight.launched_at))
    }

    /// Returns the time at which the worker must check its sequences again, if no event comes before.
    fn next_look(&self) -> Option<Instant> {
        let of_waiters = self.waiters.values().map(RoomWaiter::deadline);
        let next_deadline = self.sequences.values().map(Sequence::deadline).chain(of_waiters).min();
        next_deadline.map(|deadline| deadline.min(self.world.now() + BLOCKED_POLL))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.waiters.is_empty() && self.flights.is_empty()
    }

    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    pub(crate) fn prompt_top_max(&self) -> Option<u8> {
        self.backend.prompt_top_max()
    }

    pub(crate) fn model(&self) -> &ModelInfo {
        &self.model
    }

    /// Returns the number of parts into which running sequences are divided: as many as the steps that the device computes
    /// at the same time. Each step has one part, so that a stage does not wait for a token of a later one.
    fn n_parts(&self) -> usize {
        (self.steps_in_flight_max - 1).max(1)
    }

    fn layout(&self) -> &KvLayout {
        &self.model.layout
    }
}

// === impl Worker: comings and goings ===

impl Worker {
    fn submit(&mut self, submission: Submission) {
        (self.is_checked, self.idle_since) = (false, None);
        let key = self.world.identity().block_hash_key();
        let sequence = Sequence::new(submission, &self.model.layout, &key);
        let (id, ended) = (sequence.id, sequence.ended_on_arrival());
        self.sequences.insert(id, sequence);
        if let Some(end) = ended {
            self.end(id, end);
        } else if let Some(reason) = self.lost.clone() {
            self.end(id, failed(reason));
        }
    }

    fn wait(&mut self, waiter: RoomWaiter) {
        match self.lost.clone() {
            Some(reason) => waiter.answer(Err(Refusal::new(RefusalKind::Failed, reason))),
            None => drop(self.waiters.insert(waiter.id, waiter)),
        }
    }

    fn cancel(&mut self, id: SequenceId) {
        if self.waiters.remove(&id).is_some() {
            return;
        }
        self.end(id, SequenceEnd::Failed(Refusal::new(RefusalKind::Cancelled, "cancelled")));
    }

    /// Ends sequences and requests whose deadline has passed.
    fn reap(&mut self, now: Instant) {
        let is_late = |sequence: &&Sequence| sequence.deadline() <= now && stands(Guard::DeadlineReaper);
        let late: Vec<SequenceId> =
            self.sequences.values().filter(is_late).map(|sequence| sequence.id).collect();
        for id in late {
            self.end(id, sequence::deadline_passed());
        }
        for (_, waiter) in self.waiters.extract_if(.., |_, waiter| waiter.deadline() <= now) {
            let reason = "the deadline passed while the prompt waited for KV room";
            waiter.answer(Err(Refusal::new(RefusalKind::Deadline, reason)));
        }
    }

    /// Ends a sequence, if it still exists. Its blocks are released when no launched step uses them.
    fn end(&mut self, id: SequenceId, end: SequenceEnd) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        self.metrics.ended(&end);
        debug!(parent: &sequence.span, ?end, "sequence ended");
        let is_in_flight = sequence.is_in_flight();
        let room = sequence.end(end);
        if let (true, Some(flight)) = (is_in_flight, self.flights.back_mut()) {
            flight.held.extend(room);
        }
    }

    /// Ends all sequences, because the backend is lost.
    fn lose(&mut self, reason: &str) {
        if self.lost.is_none() {
            error!(reason, "engine backend lost, all sequences fail");
            self.lost = Some(reason.to_owned());
        }
        let all: Vec<SequenceId> = self.sequences.keys().copied().collect();
        for id in all {
            self.end(id, failed(reason));
        }
        for waiter in std::mem::take(&mut self.waiters).into_values() {
            waiter.answer(Err(Refusal::new(RefusalKind::Failed, reason)));
        }
    }

    /// Checks the pool's integrity once after work, but not soon: the check holds the pool for about a microsecond per
    /// block, and prompts and KV that come then have to wait.
    fn idle(&mut self, now: Instant) {
        self.last_progress = now;
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.duration_since(idle_since) >= BlockPool::CHECK_AFTER {
            self.check_pool();
        }
    }

    /// Checks the pool's integrity, if a sequence has come since the last time.
    fn check_pool(&mut self) {
        if std::mem::replace(&mut self.is_checked, true) {
            return;
        }
        if let Err(broken) = self.pool.integrity() {
            self.metrics.integrity_failures.inc();
            error!(%broken, "block pool integrity check failed");
            debug_assert!(false, "block pool integrity check failed: {broken}");
        }
    }
}

// === impl Worker: what it reports ===

impl Worker {
    pub(crate) fn load(&self) -> WorkerLoad {
        let running = self.sequences.values().filter(|sequence| sequence.is_placed()).count();
        let queued: PromptWork = self.sequences.values().map(Sequence::queued).sum();
        let n_parts = self.n_parts();
        let step_tokens = self.step_tokens(running.div_ceil(n_parts), ArrivalTimes::default(), 0);
        let costs = self.costs.learned(step_tokens, self.settings.gap_ms_max);
        let node = NodeLoad {
            running: running as u32,
            waiting: (self.sequences.len() - running + self.waiters.len()) as u32,
            arriving: 0,
            queued_tokens: queued.n_tokens,
            queue_ms: (self.launched_prompts_ms() + self.costs.queue_ms(queued, running, &costs)) as f32,
            step_ms: (n_parts as f64 * self.costs.running_ms((running + 1).div_ceil(n_parts))) as f32,
            steps_total: self.done.steps,
            blocks: self.pool.counts(),
            costs,
            age_ms: 0.0,
        };
        self.metrics.report(&node);
        let reserve = growth::lasting_reserve(&self.growers(self.world.now()), self.settings.growth_blocks);
        let growth_reserve_blocks = (reserve * self.layout().groups.len()) as u32;
        WorkerLoad {
            node,
            growth_reserve_blocks,
            last_progress: self.last_progress,
            last_turn: self.world.now(),
        }
    }

    /// Returns the predicted time until the launched steps with prompts end, in milliseconds. Their tokens are not queued
    /// any more, but a new prompt waits for them.
    fn launched_prompts_ms(&self) -> f64 {
        let shapes = self.flights.iter().map(|flight| self.shape_of(flight));
        let with_prompts = shapes.filter(|shape| shape.n_prefill_tokens > 0);
        let ran = self
            .flights
            .front()
            .map_or(Duration::ZERO, |flight| self.world.now().saturating_duration_since(self.began(flight)));
        (with_prompts.map(|shape| self.costs.step_ms(shape)).sum::<f64>() - ran.as_secs_f64() * 1e3).max(0.0)
    }

    pub(crate) fn arrivals(&self) -> ExpectedArrivals {
        self.arrivals.clone()
    }

    pub(crate) fn costs(&self) -> StepCosts {
        self.costs
    }

    /// Returns the facts that growth decisions need, for all sequences that hold blocks.
    fn growers(&self, now: Instant) -> Vec<Grower> {
        let grower = |sequence: &Sequence| {
            sequence.grower(sequence.precedence(now, self.settings.age_bound), &self.model.layout)
        };
        self.sequences.values().filter_map(grower).collect()
    }
}

fn failed(reason: impl Into<String>) -> SequenceEnd {
    SequenceEnd::Failed(Refusal::new(RefusalKind::Failed, reason))
}
