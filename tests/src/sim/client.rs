//! A client: sends a request, reads the answer step by step, and compares it with the reference.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::Standstill;
use futures::StreamExt as _;
use router::requests::{Explanation, RequestRecord};
use router::serve::{Arrival, Detail, Generation, Serve, ServeError};
use tokio::time::{Instant, timeout_at};
use types::prompt::Priority;
use types::{Deadline, Prompt, RequestId, Sampling, Step, StopRules, TenantId, TokenId};

use super::explain::{End, SLACK};
use super::log::EventLog;
use super::plan::{Ask, Patience, Plan};
use super::reference::Reference;

/// How much later than its deadline a request may end.
pub const LATE: Duration = Duration::from_secs(1);
/// The part of a request's time that the delay of two connections may take.
const EARLY: Duration = Duration::from_millis(5);

/// The client of one running request.
#[derive(Debug)]
pub struct Client {
    pub name: String,
    pub ask: Ask,
    pub reference: Reference,
    pub log: EventLog,
    /// The plan of the run: which faults occur, and when.
    pub plan: Arc<Plan>,
    /// The time at which the client sends the request, since the run began.
    pub asked: Duration,
    pub flights: ActiveRequests,
    /// The router's process. While it is stopped, its part of the request is stopped too.
    pub router: Standstill,
    /// How much later than its deadline a request may end.
    pub late: Duration,
}

/// All requests of a run, each with the time at which it began and ended. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ActiveRequests(Arc<Mutex<Vec<ActiveRequest>>>);

#[derive(Clone, Debug)]
struct ActiveRequest {
    ask: Ask,
    asked: Duration,
    ended: Option<Duration>,
}

impl ActiveRequests {
    /// Adds a request that begins, and returns its number.
    fn begin(&self, ask: &Ask, asked: Duration) -> usize {
        let mut flights = self.locked();
        flights.push(ActiveRequest { ask: ask.clone(), asked, ended: None });
        flights.len() - 1
    }

    fn end(&self, nth: usize, at: Duration) {
        self.locked()[nth].ended = Some(at);
    }

    /// Returns the other requests that may have had blocks on a node since request `nth` began.
    fn beside(&self, nth: usize, lingers: Duration) -> Vec<Ask> {
        let flights = self.locked();
        let asked = flights[nth].asked;
        let lasts = |flight: &ActiveRequest| flight.ended.is_none_or(|at| at + lingers >= asked);
        let others = flights.iter().enumerate().filter(|(other, flight)| *other != nth && lasts(flight));
        others.map(|(_, flight)| flight.ask.clone()).collect()
    }

    fn locked(&self) -> MutexGuard<'_, Vec<ActiveRequest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    Whole,
    Refused(ServeError),
    /// The client left before the end.
    Left,
    /// The request ran longer than the longest request may.
    Hanging,
}

/// Returns the prompt of a request that begins now.
pub fn prompt(name: &str, ask: &Ask) -> Prompt {
    Prompt {
        id: RequestId::new(name),
        tenant: TenantId::new(ask.tenant),
        cache_salt: types::CacheSalt::default(),
        model: types::RequestedModel::named(ask.model),
        tokens: ask.tokens.iter().copied().map(TokenId).collect(),
        n_generated: 0,
        sampling: Sampling {
            temperature: if ask.sampling_seed.is_some() { ask.temperature } else { 0.0 },
            seed: ask.sampling_seed.unwrap_or(0),
            ..Sampling::default()
        },
        stop: StopRules { max_tokens: ask.max_tokens, ignore_eos: ask.ignore_eos, ..StopRules::default() },
        priority: Priority(ask.priority),
        deadline: Deadline::at((Instant::now() + ask.within).into_std()),
    }
}

impl Client {
    /// Sends the request. Returns how it ended and after how many steps.
    pub async fn run<S: Serve>(self, router: S) -> (Ended, u32) {
        let prompt = prompt(&self.name, &self.ask);
        let flight = self.flights.begin(&self.ask, self.asked);
        let due = Instant::now() + self.ask.within;
        self.log.say(format_args!(
            "{} asks: {} tokens, {} at most, within {:?}",
            self.name,
            self.ask.tokens.len(),
            self.ask.max_tokens,
            self.ask.within
        ));
        let leaves = match self.ask.patience {
            Patience::Until(patience) => Instant::now() + patience,
            Patience::Endless | Patience::Steps(_) => due + self.late,
        };
        let mut n_steps = 0;
        let ended = timeout_at(
            leaves.min(due + self.late),
            self.router.clone().run(self.read(&router, prompt, &mut n_steps)),
        )
        .await;
        let ended = ended.unwrap_or(if leaves < due + self.late { Ended::Left } else { Ended::Hanging });
        self.log.say(format_args!("{} ends after {n_steps} steps: {ended:?}", self.name));
        self.flights.end(flight, self.now(due));
        self.judge(&ended, due, n_steps, flight);
        (ended, n_steps)
    }

    async fn read<S: Serve>(&self, router: &S, prompt: Prompt, n_steps: &mut u32) -> Ended {
        let generating =
            match router.generate(prompt, Arrival { detail: Detail::Explained, ..Arrival::now() }).await {
                Ok(generation) => generation,
                Err(error) => return Ended::Refused(error),
            };
        let Generation { explained, mut steps, .. } = generating;
        while let Some(step) = steps.next().await {
            let step = match step {
                Ok(step) => step,
                Err(error) => return Ended::Refused(error),
            };
            self.compare(&step, *n_steps);
            *n_steps += 1;
            self.log.trace_number("step", u64::from(step.token.0));
            if step.finish.is_some() {
                self.check_explanation(explained.as_ref());
                return Ended::Whole;
            }
            if self.ask.patience == Patience::Steps(*n_steps) {
                return Ended::Left;
            }
        }
        self.log.accuse(format_args!("{}: the steps ended without a last one", self.name));
        Ended::Left
    }

    /// Checks that the parts of the request's time add up, whatever happened to it.
    fn check_explanation(&self, explained: Option<&RequestRecord>) {
        let Some(record) = explained else {
            return self.log.accuse(format_args!("{} has no explanation", self.name));
        };
        let explanation = record.explanation();
        let Explanation { total, first_token, before, after, worst_gap, .. } = &explanation;
        let adds_up = before.sum() + after.sum() == *total
            && Some(before.sum()) == *first_token
            && worst_gap.is_none_or(|gap| gap.parts.sum() == gap.took);
        if !adds_up {
            self.log.accuse(format_args!("{}: the parts do not add up: {explanation:?}", self.name));
        }
    }

    fn compare(&self, step: &Step, nth: u32) {
        let Reference { tokens, finish } = &self.reference;
        let is_last = nth as usize + 1 == tokens.len();
        let wanted = (nth, tokens.get(nth as usize).copied(), is_last.then_some(*finish));
        let found = (step.index, Some(step.token), step.finish);
        if found != wanted {
            self.log.accuse(format_args!("{}: {found:?} came instead of {wanted:?}", self.name));
        }
    }

    fn judge(&self, ended: &Ended, due: Instant, n_steps: u32, flight: usize) {
        match ended {
            Ended::Hanging => self.log.accuse(format_args!("{} hangs", self.name)),
            Ended::Refused(error) if self.ask.must_be_answered => {
                self.log.accuse(format_args!("{} must be answered, and ends with {error:?}", self.name));
            }
            Ended::Refused(ServeError::DeadlinePassed { .. }) if Instant::now() + EARLY < due => {
                self.log.accuse(format_args!("{}: {:?} too early", self.name, due - Instant::now()));
            }
            Ended::Refused(error) if !self.may_end_with(error, due, n_steps, flight) => {
                self.log.accuse(format_args!("{} ends after {n_steps} steps with {error:?}", self.name));
            }
            _ => {}
        }
    }

    /// Returns whether the plan explains an error after `n_steps` steps.
    fn may_end_with(&self, error: &ServeError, due: Instant, n_steps: u32, flight: usize) -> bool {
        // A held message may deliver a cancellation late, so requests that ended within the longest hold
        // count as active.
        let beside = self.flights.beside(flight, SLACK + self.plan.held_for());
        let (asked, at) = (self.asked, self.now(due));
        self.plan.explains(&self.ask, End { asked, at, n_steps, beside: &beside, error })
    }

    /// Returns the current time since the run began, from the time left until `due`.
    fn now(&self, due: Instant) -> Duration {
        (self.asked + self.ask.within + due.elapsed()).saturating_sub(due - Instant::now())
    }
}
