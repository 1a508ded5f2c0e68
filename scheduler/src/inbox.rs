//! The queue between callers and the worker: submissions that the worker has not taken yet, and the load that
//! callers see.
//!
//! A submission is accepted or refused by the load that the worker last reported, plus the submissions
//! accepted since. So a burst between two turns of the worker counts too.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use chassis::World;
use kv_cache::BlockPool;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;
use tracing::Span;
use types::{Deadline, ModelInfo, PromptWork, Refusal, RefusalKind};

use crate::arrivals::{ExpectedArrival, ExpectedArrivals};
use crate::landing_room::{GrantedRoom, RoomRequest, RoomWaiter, line_is_full};
use crate::load::{StepCosts, WorkerLoad};
use crate::precedence::SequenceId;
use crate::settings::SchedulerSettings;
use crate::sink::SinkGuard;
use crate::submission::{NewSequence, SequenceLimits, Submission};
use crate::worker::{Event, Worker};

/// The state of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    Running,
    /// The worker accepts no new work and finishes its sequences.
    Draining,
    /// The worker has drained: all its sequences have ended, and it has stopped.
    Stopped,
    /// The worker's backend is lost, or the worker panicked. All its sequences were ended with a refusal. The
    /// process should be replaced.
    Dead(Arc<str>),
}

#[derive(Debug)]
pub(crate) struct Inbox {
    world: World,
    model: ModelInfo,
    prompt_top_max: Option<u8>,
    pool: BlockPool,
    n_blocks: u32,
    settings: SchedulerSettings,
    arrivals: ExpectedArrivals,
    /// The queues. A std mutex is enough: sections are short and never await.
    queues: Mutex<Queues>,
    /// Notified when something is added to a queue.
    bell: Notify,
    load: watch::Sender<WorkerLoad>,
    state: watch::Sender<WorkerState>,
}

/// The submissions, requests and cancellations that the worker has not taken yet.
#[derive(Debug, Default)]
struct Queues {
    /// Accepted sequences. `waiting_max` bounds the fresh ones, and their blocks bound the arrived ones.
    submissions: VecDeque<Submission>,
    /// Requests for room that wait. `waiting_max` bounds them.
    waiters: VecDeque<RoomWaiter>,
    /// Cancelled sequences. Each sequence is cancelled once, which bounds them.
    cancelled: Vec<SequenceId>,
    n_made: u64,
    /// The work that was accepted since the worker's last report.
    unreported: UnreportedWork,
    costs: StepCosts,
}

/// The answer to a request for room.
#[derive(Debug)]
pub(crate) enum RoomAnswer {
    Granted(GrantedRoom),
    /// The request waits under this id. The answer comes through the receiver.
    Waits(SequenceId, oneshot::Receiver<Result<GrantedRoom, Refusal>>),
}

#[derive(Clone, Copy, Debug, Default)]
struct UnreportedWork {
    queued: Backlog,
    /// The work that the worker has taken since its last report.
    taken: Backlog,
}

#[derive(Clone, Copy, Debug, Default)]
struct Backlog {
    n_waiting: usize,
    n_tokens: u64,
}

// === impl Inbox: for callers ===

impl Inbox {
    pub(crate) fn new(worker: &Worker, pool: BlockPool, world: World, settings: SchedulerSettings) -> Self {
        Self {
            world,
            model: worker.model().clone(),
            prompt_top_max: worker.prompt_top_max(),
            pool,
            n_blocks: worker.load().node.blocks.total,
            settings,
            arrivals: worker.arrivals(),
            queues: Mutex::default(),
            bell: Notify::new(),
            load: watch::Sender::new(worker.load()),
            state: watch::Sender::new(WorkerState::Running),
        }
    }

    /// Accepts or refuses a sequence. The sink of a refused sequence gets no call.
    pub(crate) fn submit(&self, new: NewSequence) -> Result<SequenceId, Refusal> {
        let sequence_limits = SequenceLimits::of(&new, &self.model, self.n_blocks)?;
        self.check_prompt_logprobs(&new)?;
        let submitted = self.world.now();
        check_deadline(new.prompt.deadline, submitted)?;
        let mut queues = self.queues();
        // The state is checked while the queues are locked, so that nothing is accepted after the worker's
        // last check.
        self.check_open()?;
        self.check_queue(&new, &queues)?;
        let id = queues.next_id();
        let NewSequence { prompt, constraint, source, sink, .. } = new;
        let sink_guard = SinkGuard::new(sink);
        queues.put(Submission {
            id,
            prompt,
            constraint,
            source,
            sink_guard,
            sequence_limits,
            span: Span::current(),
            submitted,
        });
        drop(queues);
        self.bell.notify_one();
        Ok(id)
    }

    /// Grants room at once if no request waits and all of it is available. Otherwise the request waits, or is
    /// refused if too many wait.
    pub(crate) fn ask_room(&self, request: RoomRequest) -> Result<RoomAnswer, Refusal> {
        let submitted = self.world.now();
        check_deadline(request.deadline, submitted)?;
        let mut queues = self.queues();
        self.check_open()?;
        let WorkerLoad { node, growth_reserve_blocks, .. } = *self.load.borrow();
        let n_waiting = node.waiting as usize + queues.unreported.sum().n_waiting;
        if n_waiting == 0
            && let Some(room) =
                request.grant(&self.pool, self.model.layout.groups.len(), growth_reserve_blocks as usize)
        {
            return Ok(RoomAnswer::Granted(room));
        }
        if n_waiting >= self.settings.waiting_max {
            return Err(line_is_full(n_waiting));
        }
        let id = queues.next_id();
        let (answer, answered) = oneshot::channel();
        queues.put_waiter(RoomWaiter { id, request, submitted, answer });
        drop(queues);
        self.bell.notify_one();
        Ok(RoomAnswer::Waits(id, answered))
    }

    pub(crate) fn expect_arrival(&self) -> Option<ExpectedArrival> {
        (self.settings.gap_ms_max > 0.0).then(|| self.arrivals.begin())
    }

    /// Checks that the worker accepts new work.
    pub(crate) fn check_open(&self) -> Result<(), Refusal> {
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

    /// Refuses log-probabilities of a prompt that the backend cannot compute.
    fn check_prompt_logprobs(&self, new: &NewSequence) -> Result<(), Refusal> {
        let wanted = new.prompt.sampling.prompt_logprobs.filter(|_| new.source.is_fresh());
        let reason = match (wanted, self.prompt_top_max) {
            (None, _) => return Ok(()),
            (Some(wanted), Some(most)) if wanted <= most => return Ok(()),
            (Some(wanted), Some(most)) => {
                format!("`prompt_logprobs` is {wanted}, and the backend of this node has at most {most}")
            }
            (Some(_), None) => {
                "the backend of this node has no log-probabilities of prompts (`prompt_logprobs`, or \
                                `echo` with `logprobs`)"
                    .to_owned()
            }
        };
        Err(Refusal::new(RefusalKind::Invalid, reason))
    }

    /// Refuses a fresh prompt if too many wait or the predicted queueing time is too long. A sequence whose
    /// KV has arrived is always accepted, because a refusal would waste the transfer.
    fn check_queue(&self, new: &NewSequence, queues: &Queues) -> Result<(), Refusal> {
        if !new.source.is_fresh() {
            return Ok(());
        }
        let load = self.load.borrow().node;
        let unreported = queues.unreported.sum();
        let n_waiting = load.waiting as usize + unreported.n_waiting;
        if n_waiting >= self.settings.waiting_max {
            return Err(Refusal::new(RefusalKind::Queue, format!("{n_waiting} prompts wait already")));
        }
        let n_tokens = load.queued_tokens + unreported.n_tokens;
        let work = PromptWork { n_tokens, n_before: 0 };
        let queue_ms = queues.costs.queue_ms(work, load.running as usize, &load.costs);
        if queue_ms > self.settings.queue_ms_max {
            let reason = format!("{n_tokens} tokens are queued, predicted to take {queue_ms:.0} ms");
            return Err(Refusal::new(RefusalKind::Queue, reason));
        }
        Ok(())
    }

    pub(crate) fn cancel(&self, id: SequenceId) {
        self.queues().cancelled.push(id);
        self.bell.notify_one();
    }

    pub(crate) fn drain(&self) {
        let queues = self.queues();
        self.state.send_if_modified(|state| {
            let was_running = *state == WorkerState::Running;
            if was_running {
                *state = WorkerState::Draining;
            }
            was_running
        });
        drop(queues);
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

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().expect("nothing panics while it holds the queues")
    }
}

// === impl Inbox: for the worker ===

impl Inbox {
    /// Returns all new events, in order. Cancellations come last, because they may cancel sequences that were
    /// just submitted.
    pub(crate) fn take(&self) -> Vec<Event> {
        let mut queues = self.queues();
        let submissions = std::mem::take(&mut queues.submissions);
        let waiters = std::mem::take(&mut queues.waiters);
        let cancelled = std::mem::take(&mut queues.cancelled);
        queues.unreported.take();
        drop(queues);
        let submissions = submissions.into_iter().map(|submission| Event::Submit(Box::new(submission)));
        let waiters = waiters.into_iter().map(|waiter| Event::Wait(Box::new(waiter)));
        submissions.chain(waiters).chain(cancelled.into_iter().map(Event::Cancel)).collect()
    }

    /// Stops the worker if it is draining and no submission is left. Returns whether it has stopped.
    pub(crate) fn stop(&self) -> bool {
        let queues = self.queues();
        let may_stop = *self.state.borrow() == WorkerState::Draining
            && queues.submissions.is_empty()
            && queues.waiters.is_empty();
        if may_stop {
            self.state.send_replace(WorkerState::Stopped);
        }
        may_stop
    }

    /// Marks the worker as dead, and ends all submissions that it has not taken.
    pub(crate) fn die(&self, reason: &str) {
        let mut queues = self.queues();
        self.state.send_replace(WorkerState::Dead(reason.into()));
        let orphans = (std::mem::take(&mut queues.submissions), std::mem::take(&mut queues.waiters));
        drop(queues);
        drop(orphans);
    }

    pub(crate) fn report(&self, load: WorkerLoad, costs: StepCosts) {
        let mut queues = self.queues();
        queues.unreported.taken = Backlog::default();
        queues.costs = costs;
        self.load.send_replace(load);
    }

    /// Waits until a queue has changed since the last call. Cancel-safe.
    pub(crate) async fn rings(&self) {
        self.bell.notified().await;
    }
}

fn check_deadline(deadline: Deadline, now: Instant) -> Result<(), Refusal> {
    match deadline.instant() <= now.into_std() {
        true => {
            Err(Refusal::new(RefusalKind::Deadline, "the deadline passed before the sequence was submitted"))
        }
        false => Ok(()),
    }
}

// === impl Queues ===

impl Queues {
    fn next_id(&mut self) -> SequenceId {
        self.n_made += 1;
        SequenceId(self.n_made)
    }

    fn put(&mut self, submission: Submission) {
        if submission.source.is_fresh() {
            self.unreported.queued.n_waiting += 1;
            self.unreported.queued.n_tokens += submission.prompt.tokens.len() as u64;
        }
        self.submissions.push_back(submission);
    }

    fn put_waiter(&mut self, waiter: RoomWaiter) {
        self.unreported.queued.n_waiting += 1;
        self.waiters.push_back(waiter);
    }
}

impl UnreportedWork {
    fn take(&mut self) {
        let queued = std::mem::take(&mut self.queued);
        self.taken = self.taken.plus(queued);
    }

    fn sum(&self) -> Backlog {
        self.queued.plus(self.taken)
    }
}

impl Backlog {
    fn plus(self, other: Self) -> Self {
        Self { n_waiting: self.n_waiting + other.n_waiting, n_tokens: self.n_tokens + other.n_tokens }
    }
}
