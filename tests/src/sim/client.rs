//! A client: sends a request, reads the answer step by step, and compares it with the reference.

use std::time::Duration;

use chassis::Standstill;
use futures::StreamExt as _;
use router::dispatch::Dispatch;
use router::serve::{Serve as _, ServeError};
use tokio::time::{Instant, timeout_at};
use types::prompt::Priority;
use types::{Deadline, Prompt, RefusalKind, RequestId, Sampling, Step, StopRules, TenantId, TokenId};

use super::log::EventLog;
use super::plan::{Ask, Patience};
use super::reference::Reference;

/// How much later than its deadline a request may end.
pub const LATE: Duration = Duration::from_secs(1);
/// How much of a deadline the delay of two connections may take.
const EARLY: Duration = Duration::from_millis(5);

/// One running request.
#[derive(Debug)]
pub struct Client {
    pub name: String,
    pub ask: Ask,
    pub reference: Reference,
    pub log: EventLog,
    /// No fault occurs while it may run, so only time and room can be short.
    pub is_calm: bool,
    /// With this much time it must be answered if there are no faults.
    pub enough: Duration,
    /// The longest wait for room in the router.
    pub wait_max: Duration,
    /// The router's process. While it is stopped, its part of the request is stopped too.
    pub router: Standstill,
    /// How much later than its deadline a request may end.
    pub late: Duration,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    Whole,
    Refused(ServeError),
    /// The client went away.
    Left,
    /// Longer than the longest request.
    Hanging,
}

/// The prompt of a request that is made now.
pub fn prompt(name: &str, ask: &Ask) -> Prompt {
    Prompt {
        id: RequestId::new(name),
        tenant: TenantId::new(ask.tenant),
        model: types::PromptModel::named(ask.model),
        tokens: ask.tokens.iter().copied().map(TokenId).collect(),
        n_generated: 0,
        sampling: Sampling {
            temperature: if ask.sampling_seed.is_some() { 1.0 } else { 0.0 },
            seed: ask.sampling_seed.unwrap_or(0),
            ..Sampling::default()
        },
        stop: StopRules { max_tokens: ask.max_tokens, ignore_eos: ask.ignore_eos, ..StopRules::default() },
        priority: Priority(ask.priority),
        deadline: Deadline::at((Instant::now() + ask.within).into_std()),
    }
}

impl Client {
    /// Sends the request. Returns how it ended, and after how many steps.
    pub async fn run(self, dispatch: Dispatch) -> (Ended, u32) {
        let prompt = prompt(&self.name, &self.ask);
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
            self.router.clone().run(self.read(&dispatch, prompt, &mut n_steps)),
        )
        .await;
        let ended = ended.unwrap_or(if leaves < due + self.late { Ended::Left } else { Ended::Hanging });
        self.log.say(format_args!("{} ends after {n_steps} steps: {ended:?}", self.name));
        self.judge(&ended, due, n_steps);
        (ended, n_steps)
    }

    async fn read(&self, dispatch: &Dispatch, prompt: Prompt, n_steps: &mut u32) -> Ended {
        let mut steps = match dispatch.generate(prompt).await {
            Ok(generation) => generation.steps,
            Err(error) => return Ended::Refused(error),
        };
        while let Some(step) = steps.next().await {
            let step = match step {
                Ok(step) => step,
                Err(error) => return Ended::Refused(error),
            };
            self.compare(&step, *n_steps);
            *n_steps += 1;
            self.log.trace_number("step", u64::from(step.token.0));
            if step.finish.is_some() {
                return Ended::Whole;
            }
            if self.ask.patience == Patience::Steps(*n_steps) {
                return Ended::Left;
            }
        }
        self.log.accuse(format_args!("{}: the steps ended without a last one", self.name));
        Ended::Left
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

    fn judge(&self, ended: &Ended, due: Instant, n_steps: u32) {
        match ended {
            Ended::Hanging => self.log.accuse(format_args!("{} hangs", self.name)),
            Ended::Refused(error) if self.ask.must_be_answered => {
                self.log.accuse(format_args!("{} must be answered, and ends with {error:?}", self.name));
            }
            Ended::Refused(ServeError::DeadlinePassed { .. }) if Instant::now() + EARLY < due => {
                self.log.accuse(format_args!("{}: {:?} too early", self.name, due - Instant::now()));
            }
            Ended::Refused(error) if !self.may_end_with(error, due, n_steps) => {
                self.log.accuse(format_args!("{} ends after {n_steps} steps with {error:?}", self.name));
            }
            _ => {}
        }
    }

    /// Whether the plan explains an error after `n_steps` steps.
    fn may_end_with(&self, error: &ServeError, due: Instant, n_steps: u32) -> bool {
        use RefusalKind as Kind;
        let lasted = self.ask.within.saturating_sub(due - Instant::now());
        match error {
            ServeError::DeadlinePassed { .. } => !self.is_calm || self.ask.within < self.enough,
            // It has waited for room for the longest time.
            ServeError::Refused { kind: Kind::Full | Kind::Queue, .. } => lasted >= self.wait_max,
            // A stream that has begun waits longer than any fault lasts.
            ServeError::NoNodes { .. } if n_steps > 0 => false,
            ServeError::Refused {
                kind: Kind::Invalid | Kind::TooLong | Kind::Mismatch | Kind::Protocol,
                ..
            } => false,
            ServeError::Refused { .. } | ServeError::NoNodes { .. } | ServeError::Overloaded { .. } => {
                !self.is_calm
            }
            ServeError::Draining | ServeError::Failed { .. } => false,
        }
    }
}
