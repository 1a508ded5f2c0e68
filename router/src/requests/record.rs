//! The record of one request: its places with times, its nodes, and its tries.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use types::{ComputedPrompt, NodeId, Prompt, RequestId, Usage};

use super::parts::{Part, PartTimes, divide};
use crate::admission::Objective;
use crate::cluster::RunningStream;
use crate::policy::{Arm, Decision};
use crate::predictions::Prediction;
use crate::rpc::StepReport;
use crate::serve::{Arrival, Detail};
use crate::watchdog::WaitStage;

/// The number of events of one request that are kept, the first ones.
const EVENTS_MAX: usize = 32;

/// Where a request is. It is in exactly one place at a time, so the times of all places add up to its
/// duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The request's body is read and its text made into tokens, and it waits in its model's line. Further answers wait
    /// here for the first one.
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
            WaitStage::Admission => Self::Accept,
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
        moved: Duration,
    },
    /// The stream broke and goes on with another try.
    Continue {
        code: &'static str,
    },
}

/// The time between two tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The index of the token that ends the gap, in the answer.
    pub token: u32,
    pub took: Duration,
    pub parts: PartTimes,
    /// The node's work in the gap, if the node has reported it.
    pub report: Option<StepReport>,
}

/// The summary of a record at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSummary {
    /// `None` while the request is under way.
    pub outcome: Option<&'static str>,
    /// From the request's arrival to its end, or to now.
    pub took: Duration,
    /// The time spent in each place, in the order of [`Place::ALL`].
    pub places: [Duration; Place::ALL.len()],
    pub first_token: Option<Duration>,
    /// The time in each part.
    pub parts: PartTimes,
    /// The parts up to the first token. Their sum is `first_token`.
    pub parts_of_first_token: PartTimes,
    pub worst_gap: Option<Gap>,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// The times that the last prefill node reports: until its first step, and from there to the first token.
    pub prefill_node: Option<(Duration, Duration)>,
    pub tries: u32,
    pub continuations: u32,
    /// The decision for the last route that was tried.
    pub decision: Option<Arc<Decision>>,
    /// Events with their time from the request's arrival.
    pub events: Vec<(Duration, RequestEvent)>,
    pub events_left_out: u32,
}

/// The record of one request. Clones share it.
#[derive(Clone, Debug)]
pub struct RequestRecord(Arc<Record>);

/// The facts about a request at the start of its record.
#[derive(Clone, Debug)]
pub struct RecordHead {
    pub id: RequestId,
    pub model: Arc<str>,
    pub prompt_tokens: u32,
}

impl RecordHead {
    pub fn of(prompt: &Prompt) -> Self {
        let (id, model) = (prompt.id.clone(), prompt.model.name.clone());
        Self { id, model, prompt_tokens: prompt.tokens.len() as u32 }
    }
}

#[derive(Debug)]
struct Record {
    head: RecordHead,
    arrived: Instant,
    /// The arrival in Unix time.
    unix_time: Duration,
    detail: Detail,
    objective: Objective,
    /// Locked for one look-up or change.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    place: Place,
    since: Instant,
    part: Part,
    part_since: Instant,
    /// The part that the next step of a decode node waits for: [`Part::PrefillCall`], [`Part::Transfer`],
    /// [`Part::DecodeWait`] or [`Part::Decode`].
    awaited: Part,
    /// The last step that a decode node has timed, until it is given to the client.
    report: Option<StepReport>,
    /// The last token given to the client: its time, and the parts then.
    last_token: Option<(Instant, PartTimes)>,
    /// The prediction for the last try.
    prediction: Option<Prediction>,
    /// The request's stream on a decode node.
    stream: Option<RunningStream>,
    summary: RequestSummary,
}

impl RequestRecord {
    pub(super) fn new(head: RecordHead, arrival: &Arrival, unix_time: Duration) -> Self {
        Self(Arc::new(Record {
            head,
            arrived: arrival.at,
            unix_time,
            detail: arrival.detail,
            objective: arrival.terms.objective,
            state: Mutex::new(State::new(arrival)),
        }))
    }

    #[cfg(test)]
    pub(crate) fn of_model(name: &str) -> Self {
        let head = RecordHead { id: RequestId::new("r"), model: name.into(), prompt_tokens: 0 };
        Self::new(head, &Arrival::now(), Duration::ZERO)
    }

    pub fn id(&self) -> &RequestId {
        &self.0.head.id
    }

    pub fn model(&self) -> &str {
        &self.0.head.model
    }

    pub fn prompt_tokens(&self) -> u32 {
        self.0.head.prompt_tokens
    }

    /// Returns the number of tokens that the client got so far.
    pub fn output_tokens(&self) -> u32 {
        self.state().summary.output_tokens
    }

    /// Returns the arrival in Unix time.
    pub fn arrived(&self) -> Duration {
        self.0.unix_time
    }

    /// Returns whether nodes are asked to time each step of the request.
    pub fn detail(&self) -> Detail {
        self.0.detail
    }

    /// Returns the request's objective for a try that begins now: if the first token is outstanding, it must come in
    /// the time that is left.
    pub fn objective(&self) -> Objective {
        let Objective { first_token, token_gap } = self.0.objective;
        let is_to_come = self.state().summary.first_token.is_none();
        let left = first_token
            .filter(|_| is_to_come)
            .map(|longest| longest.saturating_sub(self.0.arrived.elapsed()));
        Objective { first_token: left, token_gap }
    }

    pub fn place(&self) -> Place {
        self.state().place
    }

    pub fn summary(&self) -> RequestSummary {
        let mut state = self.state();
        if state.summary.outcome.is_none() {
            state.settle(Instant::now(), self.0.arrived);
        }
        state.summary.clone()
    }

    /// Returns whether this is the record of the request, or of one of its answers: `ID-0`, `ID-1`, …
    pub(super) fn belongs_to(&self, id: &str) -> bool {
        let answer = self.0.head.id.as_str().strip_prefix(id);
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

    /// Notes the decision for a try, and its prediction.
    pub(crate) fn decided(&self, decision: &Decision, prediction: Prediction) {
        let mut state = self.state();
        state.summary.decision = Some(Arc::new(decision.clone()));
        state.prediction = Some(prediction);
    }

    /// Keeps the request's stream on a decode node until another one replaces it, or the request ends.
    pub(crate) fn streams_on(&self, stream: Option<RunningStream>) {
        self.state().stream = stream;
    }

    /// Counts the time from now on as a part of the present place.
    pub(crate) fn enter_part(&self, part: Part) {
        let mut state = self.state();
        state.settle(Instant::now(), self.0.arrived);
        state.part = part;
    }

    /// Counts the first token. Returns the time from the request's arrival to it.
    pub(crate) fn first_token(&self, usage: Usage) -> Duration {
        let mut state = self.state();
        state.settle(Instant::now(), self.0.arrived);
        let summary = &mut state.summary;
        let at = summary.took;
        (summary.first_token, summary.cached_tokens) = (Some(at), usage.cached_tokens);
        summary.parts_of_first_token = summary.parts;
        summary.note(at, RequestEvent::FirstToken);
        at
    }

    /// Notes the answer of a prefill node. The next step waits for KV.
    pub(crate) fn prefilled(&self, prefilled: &ComputedPrompt) {
        let ComputedPrompt { room, queued, computed, .. } = *prefilled;
        let mut state = self.state();
        state.divide(&of_prefill(room, queued, computed));
        state.compare(Arm::Remote, queued, computed);
        state.awaited = Part::Transfer;
        state.summary.prefill_node = Some((queued, computed));
    }

    /// Notes that the decode node computes the prompt itself.
    pub(crate) fn computed_locally(&self) {
        let mut state = self.state();
        state.settle(Instant::now(), self.0.arrived);
        (state.part, state.awaited) = (Part::PrefillCall, Part::PrefillCall);
    }

    pub(crate) fn kv_arrived(&self, connector: String, bytes: u64, waited: Duration, moved: Duration) {
        let mut state = self.state();
        state.settle(Instant::now(), self.0.arrived);
        (state.part, state.awaited) = (Part::DecodeWait, Part::DecodeWait);
        let at = state.summary.took;
        if let Some(prediction) = state.prediction.take() {
            prediction.kv_arrived(&connector, bytes, moved, Instant::now());
        }
        state.summary.note(at, RequestEvent::KvArrived { connector, bytes, waited, moved });
    }

    /// Notes a step of a decode node, with the node's timing if it has sent one.
    pub(crate) fn stepped(&self, report: Option<StepReport>) {
        let mut state = self.state();
        if let Some(StepReport { room, queued, computed, .. }) = report {
            match state.awaited {
                Part::PrefillCall => {
                    state.divide(&of_prefill(room, queued, computed));
                    state.compare(Arm::Local, queued, computed);
                }
                Part::Transfer | Part::DecodeWait => {
                    state.divide(&[(Part::DecodeWait, queued), (Part::FirstStep, computed)]);
                }
                _ => {}
            }
        }
        (state.awaited, state.report) = (Part::Decode, report);
    }

    /// Counts a token that is given to the client.
    pub(crate) fn gave_token(&self) {
        let now = Instant::now();
        let mut state = self.state();
        state.settle(now, self.0.arrived);
        let report = state.report.take();
        let (parts, nth) = (state.summary.parts, state.summary.output_tokens);
        if let Some((last, before)) = state.last_token.replace((now, parts)) {
            let gap = Gap { token: nth, took: now - last, parts: parts.since(&before), report };
            let worst = state.summary.worst_gap.as_ref().map_or(Duration::ZERO, |worst| worst.took);
            if gap.took > worst {
                state.summary.worst_gap = Some(gap);
            }
        }
        state.summary.output_tokens += 1;
    }

    /// Ends the record, and returns the request's duration.
    pub(super) fn end(&self, outcome: &'static str) -> Duration {
        let mut state = self.state();
        state.settle(Instant::now(), self.0.arrived);
        state.summary.outcome = Some(outcome);
        (state.prediction, state.stream) = (None, None);
        state.summary.took
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the parts of a node's time for a prompt: `queued` includes the wait for room.
fn of_prefill(room: Duration, queued: Duration, computed: Duration) -> [(Part, Duration); 3] {
    [(Part::Room, room), (Part::PrefillQueue, queued.saturating_sub(room)), (Part::PrefillCompute, computed)]
}

impl State {
    fn new(arrival: &Arrival) -> Self {
        let Arrival { at, read, accepted, .. } = *arrival;
        let mut summary = RequestSummary::default();
        summary.parts.add(Part::Read, read - at);
        summary.parts.add(Part::Tokenize, accepted - read);
        Self {
            place: Place::Accept,
            since: at,
            part: Part::FirstAnswer,
            part_since: accepted,
            awaited: Part::Decode,
            report: None,
            last_token: None,
            prediction: None,
            stream: None,
            summary,
        }
    }

    /// Adds the time since the last change to its place and to its part.
    fn settle(&mut self, now: Instant, arrived: Instant) {
        self.summary.places[self.place as usize] += now - self.since;
        self.summary.parts.add(self.part, now - self.part_since);
        self.summary.took = now - arrived;
        (self.since, self.part_since) = (now, now);
    }

    fn enter(&mut self, place: Place, arrived: Instant) {
        self.settle(Instant::now(), arrived);
        self.place = place;
        self.part = match place {
            Place::Accept => self.part,
            Place::Route => Part::Route,
            Place::Reserve => Part::Reserve,
            Place::Prefill => Part::PrefillCall,
            Place::Deliver => Part::Store,
            Place::Decode => self.awaited,
            Place::Client => Part::Client,
        };
    }

    /// Compares the prediction with the first token of a prompt that was computed by this arm.
    fn compare(&mut self, arm: Arm, queued: Duration, computed: Duration) {
        if let Some(prediction) = self.prediction.as_mut().filter(|one| one.arm() == arm) {
            prediction.first_token(queued, computed, Instant::now());
        }
    }

    /// Divides the time in the present part by a node's report.
    fn divide(&mut self, reported: &[(Part, Duration)]) {
        let now = Instant::now();
        let (pieces, rest) = divide(now - self.part_since, reported);
        pieces.into_iter().for_each(|(part, took)| self.summary.parts.add(part, took));
        self.summary.parts.add(self.part, rest);
        self.part_since = now;
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
