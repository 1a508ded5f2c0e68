//! Between those who submit and the worker: what was handed in and not taken, and what is known at the door.
//!
//! The door refuses by the load that the worker reported last, plus what was let in since: a burst between two turns
//! of the worker is counted, one by one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use chassis::World;
use tokio::sync::{Notify, watch};
use tracing::Span;
use types::{ModelInfo, Refusal, RefusalKind};

use crate::load::{StepCosts, WorkerLoad};
use crate::rank::SequenceId;
use crate::settings::SchedulerSettings;
use crate::sink::Outlet;
use crate::submission::{Extent, NewSequence, Submission};
use crate::worker::{Event, Worker};

/// Whether a worker works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    Running,
    /// Takes nothing new, and finishes what it has.
    Draining,
    /// Drained: everything has ended, and the worker with it.
    Stopped,
    /// Its backend is lost, or it panicked. Everything it had was ended with a refusal. The process should be replaced.
    Dead(Arc<str>),
}

#[derive(Debug)]
pub(crate) struct Inbox {
    world: World,
    model: ModelInfo,
    n_blocks: u32,
    settings: SchedulerSettings,
    /// A std mutex: sections are short and never await.
    desk: Mutex<Desk>,
    /// Rings when there is something new.
    bell: Notify,
    load: watch::Sender<WorkerLoad>,
    state: watch::Sender<WorkerState>,
}

/// What lies on the desk.
#[derive(Debug, Default)]
struct Desk {
    /// Bounded: those without room by `waiting_max`, those with room by the blocks that they hold.
    submissions: VecDeque<Submission>,
    /// Bounded: each sequence is cancelled once.
    cancelled: Vec<SequenceId>,
    n_made: u64,
    /// Let in since the worker last reported.
    unreported: Unreported,
    costs: StepCosts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Unreported {
    on_desk: Backlog,
    /// Taken by the worker, which has not reported since.
    taken: Backlog,
}

#[derive(Clone, Copy, Debug, Default)]
struct Backlog {
    n_waiting: usize,
    n_tokens: u64,
}

// === impl Inbox: for those who submit ===

impl Inbox {
    pub(crate) fn new(worker: &Worker, world: World, settings: SchedulerSettings) -> Self {
        Self {
            world,
            model: worker.model().clone(),
            n_blocks: worker.load().node.blocks.total,
            settings,
            desk: Mutex::default(),
            bell: Notify::new(),
            load: watch::Sender::new(worker.load()),
            state: watch::Sender::new(WorkerState::Running),
        }
    }

    /// Lets a sequence in, or refuses it. A refused one's sink hears nothing.
    pub(crate) fn submit(&self, new: NewSequence) -> Result<SequenceId, Refusal> {
        let extent = Extent::of(&new, &self.model, self.n_blocks)?;
        let submitted = self.world.now();
        if new.prompt.deadline.instant() <= submitted.into_std() {
            return Err(Refusal::new(RefusalKind::Deadline, "the deadline passed before the sequence came"));
        }
        let mut desk = self.desk();
        // Under the desk's lock, so that nothing is let in after the worker looked for the last time.
        self.check_open()?;
        self.check_queue(&new, &desk)?;
        let id = desk.next_id();
        let NewSequence { prompt, source, sink, .. } = new;
        let outlet = Outlet::new(sink);
        desk.put(Submission { id, prompt, source, outlet, extent, span: Span::current(), submitted });
        drop(desk);
        self.bell.notify_one();
        Ok(id)
    }

    fn check_open(&self) -> Result<(), Refusal> {
        match &*self.state.borrow() {
            WorkerState::Running => Ok(()),
            WorkerState::Draining | WorkerState::Stopped => {
                Err(Refusal::new(RefusalKind::Draining, "this node takes no new work"))
            }
            WorkerState::Dead(reason) => {
                Err(Refusal::new(RefusalKind::Failed, format!("the worker died: {reason}")))
            }
        }
    }

    /// A sequence that brings its room, and perhaps its KV, is let in always: refused, that would have been in vain.
    fn check_queue(&self, new: &NewSequence, desk: &Desk) -> Result<(), Refusal> {
        if !new.source.is_without_room() {
            return Ok(());
        }
        let load = self.load.borrow().node;
        let unreported = desk.unreported.sum();
        let n_waiting = load.waiting as usize + unreported.n_waiting;
        if n_waiting >= self.settings.waiting_max {
            return Err(Refusal::new(RefusalKind::Queue, format!("{n_waiting} prompts wait already")));
        }
        let n_tokens = load.queued_tokens + unreported.n_tokens;
        let queue_ms = desk.costs.queue_ms(n_tokens, load.running as usize, self.settings.step_tokens_max);
        if queue_ms > self.settings.queue_ms_max {
            let reason = format!("{n_tokens} tokens are queued, predicted to take {queue_ms:.0} ms");
            return Err(Refusal::new(RefusalKind::Queue, reason));
        }
        Ok(())
    }

    pub(crate) fn cancel(&self, id: SequenceId) {
        self.desk().cancelled.push(id);
        self.bell.notify_one();
    }

    pub(crate) fn drain(&self) {
        let desk = self.desk();
        self.state.send_if_modified(|state| {
            let was_running = *state == WorkerState::Running;
            if was_running {
                *state = WorkerState::Draining;
            }
            was_running
        });
        drop(desk);
        self.bell.notify_one();
    }

    pub(crate) fn nudge(&self) {
        self.bell.notify_one();
    }

    pub(crate) fn load(&self) -> watch::Receiver<WorkerLoad> {
        self.load.subscribe()
    }

    pub(crate) fn state(&self) -> watch::Receiver<WorkerState> {
        self.state.subscribe()
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().expect("nothing panics while it holds the desk")
    }
}

// === impl Inbox: for the worker ===

impl Inbox {
    /// Everything new, in order: cancellations last, for they may be of what was just submitted.
    pub(crate) fn take(&self) -> Vec<Event> {
        let mut desk = self.desk();
        let submissions = std::mem::take(&mut desk.submissions);
        let cancelled = std::mem::take(&mut desk.cancelled);
        desk.unreported.take();
        drop(desk);
        let submissions = submissions.into_iter().map(|submission| Event::Submit(Box::new(submission)));
        submissions.chain(cancelled.into_iter().map(Event::Cancel)).collect()
    }

    /// Whether the worker may stop, which it then has: it was drained, and nothing came in before that.
    pub(crate) fn stop(&self) -> bool {
        let desk = self.desk();
        let may_stop = *self.state.borrow() == WorkerState::Draining && desk.submissions.is_empty();
        if may_stop {
            self.state.send_replace(WorkerState::Stopped);
        }
        may_stop
    }

    /// The worker is dead. What was handed in and not taken is ended.
    pub(crate) fn die(&self, reason: &str) {
        let mut desk = self.desk();
        self.state.send_replace(WorkerState::Dead(reason.into()));
        let orphans = std::mem::take(&mut desk.submissions);
        drop(desk);
        drop(orphans);
    }

    pub(crate) fn report(&self, load: WorkerLoad, costs: StepCosts) {
        let mut desk = self.desk();
        desk.unreported.taken = Backlog::default();
        desk.costs = costs;
        self.load.send_replace(load);
    }

    /// Returns when there is something new, or was since the last call. Cancel-safe.
    pub(crate) async fn rings(&self) {
        self.bell.notified().await;
    }
}

// === impl Desk ===

impl Desk {
    fn next_id(&mut self) -> SequenceId {
        self.n_made += 1;
        SequenceId(self.n_made)
    }

    fn put(&mut self, submission: Submission) {
        if submission.source.is_without_room() {
            self.unreported.on_desk.n_waiting += 1;
            self.unreported.on_desk.n_tokens += submission.prompt.tokens.len() as u64;
        }
        self.submissions.push_back(submission);
    }
}

impl Unreported {
    fn take(&mut self) {
        let on_desk = std::mem::take(&mut self.on_desk);
        self.taken = self.taken.plus(on_desk);
    }

    fn sum(&self) -> Backlog {
        self.on_desk.plus(self.taken)
    }
}

impl Backlog {
    fn plus(self, other: Self) -> Self {
        Self { n_waiting: self.n_waiting + other.n_waiting, n_tokens: self.n_tokens + other.n_tokens }
    }
}
