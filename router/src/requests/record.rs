//! The record of one request: its places with times, its nodes, and its tries.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use types::{NodeId, Prompt, RequestId, Usage};

use crate::watchdog::WaitStage;

/// The number of events of one request that are kept, the first ones.
const EVENTS_MAX: usize = 32;

/// Where a request is. It is in exactly one place at a time, so the times of all places add up to its
/// duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The request's body is read and its text made into tokens. Further answers wait here for the first one.
    Accept,
    Route,
    Reserve,
    Prefill,
    Deliver,
    Decode,
    /// A token is made into text and written to the client.
    Client,
}

impl Place {
    pub const ALL: [Self; 7] =
        [Self::Accept, Self::Route, Self::Reserve, Self::Prefill, Self::Deliver, Self::Decode, Self::Client];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Route => WaitStage::Route.as_str(),
            Self::Reserve => WaitStage::Reserve.as_str(),
            Self::Prefill => WaitStage::Prefill.as_str(),
            Self::Deliver => WaitStage::Deliver.as_str(),
            Self::Decode => WaitStage::Decode.as_str(),
            Self::Client => "client",
        }
    }

    /// Returns whether no node works on the request.
    pub fn is_waiting(self) -> bool {
        matches!(self, Self::Accept | Self::Route | Self::Reserve | Self::Deliver)
    }
}

impl From<WaitStage> for Place {
    fn from(stage: WaitStage) -> Self {
        match stage {
            WaitStage::Route => Self::Route,
            WaitStage::Reserve => Self::Reserve,
            WaitStage::Prefill => Self::Prefill,
            WaitStage::Deliver => Self::Deliver,
            WaitStage::Decode => Self::Decode,
        }
    }
}

/// Something that happened to a request once, unlike a token.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// A route was chosen. Without a prefill node the decode node computes the prompt; without a decode node
    /// it is chosen later.
    Try {
        prefill: Option<NodeId>,
        decode: Option<NodeId>,
    },
    /// A pool node was asked for room.
    Store {
        pool: NodeId,
    },
    /// A decode node was asked for room for KV that is computed.
    Deliver {
        decode: NodeId,
    },
    /// A try failed at this node.
    Failed {
        node: NodeId,
        code: &'static str,
    },
    FirstToken,
    KvArrived {
        connector: String,
        bytes: u64,
        waited: Duration,
    },
    /// The stream broke and goes on with another try.
    Continue {
        code: &'static str,
    },
}

/// What a record says at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSummary {
    /// `None` while the request is under way.
    pub outcome: Option<&'static str>,
    /// From the request's arrival to its end, or to now.
    pub took: Duration,
    /// The time spent in each place, in the order of [`Place::ALL`].
    pub places: [Duration; Place::ALL.len()],
    pub first_token: Option<Duration>,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// The times that the last prefill node reports: until its first step, and from there to the first token.
    pub prefill_node: Option<(Duration, Duration)>,
    pub tries: u32,
    pub continuations: u32,
    /// Events with their time from the request's arrival.
    pub events: Vec<(Duration, RequestEvent)>,
    pub events_left_out: u32,
}

/// The record of one request. Clones share it.
#[derive(Clone, Debug)]
pub struct RequestRecord(Arc<Record>);

#[derive(Debug)]
struct Record {
    id: RequestId,
    model: Arc<str>,
    prompt_tokens: u32,
    arrived: Instant,
    /// The arrival in Unix time.
    unix_time: Duration,
    /// Locked for one look-up or change.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    place: Place,
    since: Instant,
    summary: RequestSummary,
}

impl RequestRecord {
    pub(super) fn new(prompt: &Prompt, arrived: Instant, unix_time: Duration) -> Self {
        let (id, model) = (prompt.id.clone(), prompt.model.name.clone());
        let state = Mutex::new(State::new(arrived));
        let prompt_tokens = prompt.tokens.len() as u32;
        Self(Arc::new(Record { id, model, prompt_tokens, arrived, unix_time, state }))
    }

    #[cfg(test)]
    pub(crate) fn of_model(name: &str) -> Self {
        let (id, arrived) = (RequestId::new("r"), Instant::now());
        let (model, unix_time, state) = (name.into(), Duration::ZERO, Mutex::new(State::new(arrived)));
        Self(Arc::new(Record { id, model, prompt_tokens: 0, arrived, unix_time, state }))
    }

    pub fn id(&self) -> &RequestId {
        &self.0.id
    }

    pub fn model(&self) -> &str {
        &self.0.model
    }

    pub fn prompt_tokens(&self) -> u32 {
        self.0.prompt_tokens
    }

    /// Returns the arrival in Unix time.
    pub fn arrived(&self) -> Duration {
        self.0.unix_time
    }

    pub fn place(&self) -> Place {
        self.state().place
    }

    pub fn summary(&self) -> RequestSummary {
        let mut state = self.state();
        if state.summary.outcome.is_none() {
            let place = state.place;
            state.enter(place, self.0.arrived);
        }
        state.summary.clone()
    }

    /// Returns whether this is the record of the request, or of one of its answers: `ID-0`, `ID-1`, …
    pub(super) fn belongs_to(&self, id: &str) -> bool {
        let answer = self.0.id.as_str().strip_prefix(id);
        answer.is_some_and(|rest| {
            rest.is_empty() || rest.strip_prefix('-').is_some_and(|nth| nth.parse::<u16>().is_ok())
        })
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn enter(&self, place: Place) {
        self.state().enter(place, self.0.arrived);
    }

    pub(crate) fn note(&self, event: RequestEvent) {
        let at = self.0.arrived.elapsed();
        self.state().summary.note(at, event);
    }

    pub(crate) fn first_token(&self, usage: Usage) {
        let at = self.0.arrived.elapsed();
        let summary = &mut self.state().summary;
        (summary.first_token, summary.cached_tokens) = (Some(at), usage.cached_tokens);
        summary.note(at, RequestEvent::FirstToken);
    }

    pub(crate) fn prefilled(&self, queued: Duration, computed: Duration) {
        self.state().summary.prefill_node = Some((queued, computed));
    }

    pub(crate) fn gave_token(&self) {
        self.state().summary.output_tokens += 1;
    }

    /// Ends the record, and returns the request's duration.
    pub(super) fn end(&self, outcome: &'static str) -> Duration {
        let mut state = self.state();
        let place = state.place;
        state.enter(place, self.0.arrived);
        state.summary.outcome = Some(outcome);
        state.summary.took
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn new(arrived: Instant) -> Self {
        Self { place: Place::Accept, since: arrived, summary: RequestSummary::default() }
    }

    /// Adds the time since the last change to its place.
    fn enter(&mut self, place: Place, arrived: Instant) {
        let now = Instant::now();
        self.summary.places[self.place as usize] += now - self.since;
        self.summary.took = now - arrived;
        (self.place, self.since) = (place, now);
    }
}

impl RequestSummary {
    fn note(&mut self, at: Duration, event: RequestEvent) {
        match event {
            RequestEvent::Try { .. } => self.tries += 1,
            RequestEvent::Continue { .. } => self.continuations += 1,
            _ => {}
        }
        if self.events.len() < EVENTS_MAX {
            self.events.push((at, event));
        } else {
            self.events_left_out += 1;
        }
    }
}
