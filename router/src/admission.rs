//! Admission: each model has a line in which its prompts wait for room.
//!
//! `line` is the pure order of a line, `room` decides from nodes' reports whether there is
//! room for the next prompt. This file connects both to requests: a [`Permit`] is the right of one request to be served.
//! A prompt is admitted on arrival if there is room and no prompt waits before it. Otherwise [`Admission::serve`]
//! admits it later: it checks the lines after every report of a node and after every end of a request.

mod arrived;
mod line;
mod rate;
mod refusal;
mod room;
mod shown;
pub(crate) mod terms;
mod tenant_queues;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::World;
use chassis::guards::{Guard, stands};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use types::{BlockHash, Prompt};

pub use self::arrived::Arrived;
pub use self::refusal::RefusalReason;
pub use self::shown::ShownLine;
pub use self::terms::{AdmissionTerms, Objective, Shedding, TenantWeight};
use crate::cluster::Cluster;
use crate::error::ServeError;
use crate::metrics::RouterMetrics;
use crate::policy::{Ask, ClusterView, ComputingNodes, Order};
use crate::requests::RequestRecord;
use line::{Entered, Line, LineBounds, TicketId, WaitingPrompt};
use refusal::LineRefusal;
use room::{RoomQuestion, UnassignedAdmission, UnassignedAdmissions};

/// The shortest time between two checks of the lines, so that many reports cost no more than one.
const LOOK_PACE: Duration = Duration::from_millis(5);

/// The work of a token of an answer, in tokens of a prompt.
const ANSWER_TOKEN_WORK: u64 = 2;

/// The answer's length that is predicted before a request of the model has ended.
const UNKNOWN_ANSWER_TOKENS: f64 = 128.0;

/// The share of the newest answer in the mean length of answers.
const NEWEST_ANSWER: f64 = 1.0 / 32.0;

/// The lines of all models. Cheap to clone; clones share them.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Shared>);

/// The parts that admission needs.
#[derive(Clone, Debug)]
pub struct AdmissionParts {
    pub world: World,
    pub cluster: Cluster,
    pub order: Order,
    pub computing: ComputingNodes,
    /// The largest number of requests of a model, waiting and served.
    pub requests_max: usize,
    /// The longest wait for room.
    pub wait_max: Duration,
    pub metrics: RouterMetrics,
}

#[derive(Debug)]
struct Shared {
    parts: AdmissionParts,
    /// The lines by model. Locked for one look-up or change, never across an await.
    lines: Mutex<BTreeMap<Arc<str>, ModelLine>>,
    /// A signal that a request has ended.
    ended: Notify,
}

/// The line of one model, with the waiting requests.
#[derive(Debug)]
struct ModelLine {
    line: Line,
    requests: HashMap<TicketId, WaitingRequest>,
    admitted: UnassignedAdmissions,
    answer_tokens: f64,
    /// The work that has arrived, admitted or not.
    arrived: Arrived,
}

/// The work of a request, as it is predicted when the request comes.
#[derive(Clone, Copy, Debug)]
struct RequestSize {
    uncached_tokens: u64,
    answer_tokens: u64,
}

#[derive(Debug)]
struct WaitingRequest {
    prompt: Prompt,
    hashes: Arc<[BlockHash]>,
    size: RequestSize,
    verdict: oneshot::Sender<Result<(), LineRefusal>>,
}

/// A prompt that wants to be served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdmissionAsk<'a> {
    pub(crate) prompt: &'a Prompt,
    pub(crate) hashes: &'a Arc<[BlockHash]>,
    pub(crate) terms: AdmissionTerms,
    /// The arrival of the request.
    pub(crate) arrived: Instant,
    pub(crate) record: &'a RequestRecord,
}

/// A place in a line. Its drop leaves the line, whether the prompt waits or is served.
#[derive(Debug)]
struct LinePlace {
    admission: Admission,
    model: Arc<str>,
    id: TicketId,
    record: RequestRecord,
}

/// A prompt in a line.
#[derive(Debug)]
struct Ticket {
    place: LinePlace,
    entered: Instant,
    predicted_wait: Duration,
    state: TicketState,
}

#[derive(Debug)]
enum TicketState {
    /// There was room at once.
    Admitted,
    Waiting {
        leaves_at: Instant,
        verdict: oneshot::Receiver<Result<(), LineRefusal>>,
    },
}

/// The right of one request to be served. Dropping it ends the request's place in the line.
#[derive(Debug)]
pub struct Permit {
    place: LinePlace,
    /// The time at which the request entered the line.
    pub(crate) entered: Instant,
}

impl Permit {
    /// Stops counting the prompt as unassigned: from now on it counts at the nodes that are assigned to it.
    pub(crate) fn assigned(&self) {
        let LinePlace { admission, model, id, .. } = &self.place;
        if let Some(line) = admission.lines().get_mut(model) {
            line.admitted.remove(*id);
        }
    }
}

impl Admission {
    pub fn new(parts: AdmissionParts) -> Self {
        Self(Arc::new(Shared { parts, lines: Mutex::default(), ended: Notify::new() }))
    }

    /// Waits in the model's line until there is room for the prompt. Dropping the future leaves the line.
    pub(crate) async fn admit(&self, ask: AdmissionAsk<'_>) -> Result<Permit, ServeError> {
        let admitted = self.wait(ask).await;
        admitted.map_err(|refusal| {
            self.0.parts.metrics.line.refused(refusal.reason);
            refusal.into_error()
        })
    }

    async fn wait(&self, ask: AdmissionAsk<'_>) -> Result<Permit, LineRefusal> {
        let Ticket { place, entered, predicted_wait, state } = self.enter(ask)?;
        if let TicketState::Waiting { leaves_at, mut verdict } = state {
            let answered = match tokio::time::timeout_at(leaves_at, &mut verdict).await {
                Ok(answered) => answered,
                Err(_) => {
                    self.time_out(&place);
                    verdict.await
                }
            };
            answered.expect("a verdict is sent before the place is dropped, which is held here")?;
        }
        self.0.parts.metrics.line.admitted(predicted_wait, entered.elapsed());
        Ok(Permit { place, entered })
    }

    /// Checks the lines whenever there may be room, until the future is dropped.
    pub async fn serve(self) {
        let reported = self.0.parts.cluster.reported();
        loop {
            tokio::select! {
                () = reported.notified() => {}
                () = self.0.ended.notified() => {}
            }
            self.lines().values_mut().for_each(|line| line.admit_all(&self.0.parts));
            tokio::time::sleep(LOOK_PACE).await;
        }
    }

    /// Returns the number of requests in all lines, waiting and served.
    pub fn n_inside(&self) -> usize {
        self.lines().values().map(|line| line.line.n_waiting() + line.line.n_served()).sum()
    }

    /// Returns the work that has arrived for a model, and the work that waits.
    pub(crate) fn arrived(&self, model: &str) -> Arrived {
        self.lines().get(model).map(ModelLine::arrived).unwrap_or_default()
    }

    /// Returns the lines of all models that were ever asked for.
    pub fn shown(&self) -> Vec<ShownLine> {
        let lines = self.lines();
        let shown = |(model, of_model): (&Arc<str>, &ModelLine)| {
            let line = &of_model.line;
            let count = |(priority, tenant, n): (types::prompt::Priority, &types::TenantId, usize)| {
                ((priority.0, tenant.as_str().to_owned()), n)
            };
            ShownLine {
                model: model.to_string(),
                waiting: line.counts().map(count).collect(),
                n_waiting: line.n_waiting(),
                n_served: line.n_served(),
                n_admitted: of_model.admitted.len(),
                work_per_second: line.work_per_second(),
                answer_tokens: of_model.answer_tokens,
            }
        };
        lines.iter().map(shown).collect()
    }

    /// Checks that each ticket of each line is in one state.
    pub fn integrity(&self) -> Result<(), String> {
        self.lines().values().try_for_each(|line| line.line.integrity())
    }

    fn enter(&self, ask: AdmissionAsk<'_>) -> Result<Ticket, LineRefusal> {
        let parts = &self.0.parts;
        let now = parts.world.now();
        let model = ask.prompt.model.name.clone();
        let of_nodes = Ask::new(ask.prompt, ask.hashes);
        let view = parts.cluster.view(&of_nodes, &[]);
        let mut lines = self.lines();
        let line = lines.entry(model.clone()).or_insert_with(|| ModelLine::new(parts));
        let question = line.question(of_nodes, &view, parts);
        let size = line.size(ask.prompt, question.cached_tokens());
        let prompt = waiting_prompt(&ask, size);
        let predicted = question.predicted();
        line.count_arrival(size);
        let Entered { id, predicted_wait, leaves_at, displaced } = line.line.enter(prompt, predicted, now)?;
        if let Some((displaced, refusal)) = displaced {
            line.answer(displaced, Err(refusal));
        }
        let is_next = line.line.next(now) == Some(id);
        let room = is_next.then(|| line.question(of_nodes, &view, parts).room()).flatten();
        let state = match room {
            Some(room) => {
                line.admit(id, room, now);
                TicketState::Admitted
            }
            None => {
                let (verdict, receiver) = oneshot::channel();
                let (prompt, hashes) = (ask.prompt.clone(), Arc::clone(ask.hashes));
                line.requests.insert(id, WaitingRequest { prompt, hashes, size, verdict });
                TicketState::Waiting { leaves_at, verdict: receiver }
            }
        };
        drop(lines);
        let place = LinePlace { admission: self.clone(), model, id, record: ask.record.clone() };
        Ok(Ticket { place, entered: now, predicted_wait, state })
    }

    /// Refuses a request that still waits. Does nothing if the request has received its verdict.
    fn time_out(&self, place: &LinePlace) {
        let now = self.0.parts.world.now();
        let mut lines = self.lines();
        let Some(line) = lines.get_mut(&place.model) else { return };
        if let Some(refusal) = line.line.timed_out(place.id, now) {
            line.line.remove(place.id, now);
            line.answer(place.id, Err(refusal));
        }
    }

    fn lines(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, ModelLine>> {
        self.0.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ModelLine {
    fn new(parts: &AdmissionParts) -> Self {
        let bounds = LineBounds { requests_max: parts.requests_max, wait_max: parts.wait_max };
        Self {
            line: Line::new(bounds),
            requests: HashMap::new(),
            admitted: UnassignedAdmissions::default(),
            answer_tokens: UNKNOWN_ANSWER_TOKENS,
            arrived: Arrived::default(),
        }
    }

    fn question<'a>(
        &'a self,
        ask: Ask<'a>,
        view: &'a ClusterView,
        parts: &AdmissionParts,
    ) -> RoomQuestion<'a> {
        let AdmissionParts { order, computing, .. } = *parts;
        RoomQuestion { ask, view, admitted: &self.admitted, order, computing }
    }

    fn size(&self, prompt: &Prompt, cached_tokens: u32) -> RequestSize {
        RequestSize {
            uncached_tokens: (prompt.tokens.len() as u64).saturating_sub(u64::from(cached_tokens)),
            answer_tokens: (self.answer_tokens as u64).min(prompt.tokens_left() as u64),
        }
    }

    fn count_arrival(&mut self, size: RequestSize) {
        self.arrived.prompt_tokens += size.uncached_tokens;
        self.arrived.answer_tokens += size.answer_tokens;
    }

    /// Returns the work that has arrived, with the work that waits now.
    fn arrived(&self) -> Arrived {
        let sum = |of: fn(&RequestSize) -> u64| self.requests.values().map(|request| of(&request.size)).sum();
        Arrived {
            waiting_tokens: sum(|size| size.uncached_tokens),
            waiting_answer_tokens: sum(|size| size.answer_tokens),
            ..self.arrived
        }
    }

    fn admit(&mut self, id: TicketId, room: UnassignedAdmission, now: Instant) {
        self.line.admit(id, now);
        self.admitted.insert(id, room);
        self.answer(id, Ok(()));
    }

    /// Admits the next prompts, in order, until one must wait.
    fn admit_all(&mut self, parts: &AdmissionParts) {
        let now = parts.world.now();
        while let Some(id) = self.line.next(now) {
            let Some(request) = self.requests.get(&id) else { return };
            let ask = Ask::new(&request.prompt, &request.hashes);
            let view = parts.cluster.view(&ask, &[]);
            let question = self.question(ask, &view, parts);
            let Some(room) = question.room() else { return };
            if let Err(refusal) = self.line.check_again(id, question.predicted(), now) {
                self.line.remove(id, now);
                self.answer(id, Err(refusal));
                continue;
            }
            self.admit(id, room, now);
        }
    }

    /// Gives a waiting request its verdict. A request that has just left does not receive it, and its place is dropped.
    fn answer(&mut self, id: TicketId, verdict: Result<(), LineRefusal>) {
        if let Some(request) = self.requests.remove(&id) {
            let _ = request.verdict.send(verdict);
        }
    }

    fn remove(&mut self, id: TicketId, now: Instant) {
        self.requests.remove(&id);
        self.admitted.remove(id);
        self.line.remove(id, now);
    }
}

fn waiting_prompt(ask: &AdmissionAsk<'_>, size: RequestSize) -> WaitingPrompt {
    let Prompt { tenant, priority, .. } = ask.prompt;
    WaitingPrompt {
        tenant: tenant.clone(),
        priority: *priority,
        terms: ask.terms,
        work: size.uncached_tokens + size.answer_tokens * ANSWER_TOKEN_WORK,
        arrived: ask.arrived,
    }
}

impl Drop for LinePlace {
    fn drop(&mut self) {
        if !stands(Guard::LineTicket) {
            return;
        }
        let now = self.admission.0.parts.world.now();
        let n_tokens = self.record.output_tokens();
        let mut lines = self.admission.lines();
        if let Some(line) = lines.get_mut(&self.model) {
            line.remove(self.id, now);
            if n_tokens > 0 {
                line.answer_tokens += (f64::from(n_tokens) - line.answer_tokens) * NEWEST_ANSWER;
            }
        }
        drop(lines);
        self.admission.0.ended.notify_one();
    }
}
