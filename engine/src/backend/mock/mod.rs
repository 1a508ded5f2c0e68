//! A mock model: its KV is a hash of the tokens, and so is the next token.
//!
//! It detects every wrong block, order, length or bit of KV when it reads the KV, within milliseconds and on
//! any machine. The costs of its steps are configurable, so a cluster of mocks can simulate the load of real
//! models.

mod cost;
mod draw;
mod kv;
mod layer;
mod row;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::time::Duration;

use kv_cache::{FenceSignal, KvMemory};
use tokio::time::Instant;
use types::{Fingerprint, KvLayout, ModelInfo, StageLayers, TokenId};

pub use cost::{Costs, DtypeName, LayoutSettings, MockAnswer, MockSettings, Verify, wire_costs};

use crate::backend::asleep::{self, Asleep, ClosedBackend, SleepFailed};
use crate::backend::{Backend, EngineSettings, STEPS_IN_FLIGHT_MAX};
use crate::error::{BackendError, OpenError};
use crate::kv_room::{n_blocks, not_taken};
use crate::step::{PendingStep, SlotId, StepBatch, StepOutput};
use layer::Layer;
use row::{QueuedRow, RunningRow};

/// How the costs of a step pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// `collect` sleeps layer by layer, like a real device.
    Sleeping,
    /// `collect` does not sleep. The caller first waits for [`PendingStep::modelled_cost`] on its own clock.
    Modelled,
}

/// The mock backend. `collect` runs the step.
#[derive(Debug)]
pub struct Mock {
    model: ModelInfo,
    memory: KvMemory,
    settings: MockSettings,
    layers: Vec<Layer>,
    pace: Pace,
    queue: VecDeque<QueuedStep>,
    n_launched: u64,
    /// The tokens of the last collected step, by slot, for [`RowInput::Previous`](crate::RowInput::Previous).
    previous: HashMap<SlotId, TokenId>,
}

#[derive(Debug)]
struct QueuedStep {
    number: u64,
    rows: Vec<QueuedRow>,
    signal: FenceSignal,
    cost: Duration,
}

/// Returns the mock's constructor in the table of backends.
pub(super) fn open(engine: &EngineSettings, name: Option<&str>) -> Result<Box<dyn Backend>, OpenError> {
    engine.check_one_stage("a mock")?;
    engine.experts.ensure_cut("a mock")?;
    let settings = MockSettings::named(name)?;
    let layout = spread(&settings, engine.ranks)?;
    let n_blocks = n_blocks(&layout, &StageLayers::one(), engine.kv.of_mock())?;
    // The model is named by the settings and not by their file: clients request `mock`, whatever its costs.
    let name = settings.name.clone();
    Ok(Box::new(Mock::over_ranks(&name, settings, engine.ranks, n_blocks, engine.pace)?))
}

fn spread(settings: &MockSettings, ranks: NonZero<u16>) -> Result<KvLayout, OpenError> {
    let layout = settings.layout.layout().over_ranks(ranks.get());
    layout.map_err(|uneven| OpenError::Ranks(uneven.to_string()))
}

impl Mock {
    /// Makes a mock with memory for `n_blocks` blocks.
    pub fn new(name: &str, settings: MockSettings, n_blocks: u32, pace: Pace) -> Result<Self, OpenError> {
        Self::over_ranks(name, settings, NonZero::<u16>::MIN, n_blocks, pace)
    }

    /// Makes a mock whose KV is divided over `n_ranks` ranks, which are computed one after the other.
    pub fn over_ranks(
        name: &str,
        settings: MockSettings,
        ranks: NonZero<u16>,
        n_blocks: u32,
        pace: Pace,
    ) -> Result<Self, OpenError> {
        let layout = spread(&settings, ranks)?;
        let layers = Layer::all(&layout);
        let memory = KvMemory::host(layout, n_blocks).map_err(|error| not_taken(&error))?;
        Ok(Self {
            layers,
            model: model(name, &settings, &memory),
            memory,
            settings,
            pace,
            queue: VecDeque::with_capacity(STEPS_IN_FLIGHT_MAX),
            n_launched: 0,
            previous: HashMap::new(),
        })
    }

    /// Returns the costs of the mock's steps and of the bytes that it sends.
    pub fn costs(&self) -> &Costs {
        &self.settings.cost
    }

    fn run(&mut self, step: QueuedStep) -> StepOutput {
        let begin = |row| RunningRow::begin(row, &self.previous, &self.memory, &self.layers[0]);
        let mut rows: Vec<RunningRow> = step.rows.into_iter().map(begin).collect();
        let started = Instant::now();
        for (nth, layer) in self.layers.iter().enumerate() {
            rows.iter_mut().for_each(|row| row.run_layer(&self.memory, layer));
            self.wait_until(started, step.cost, nth + 1);
            // The layer counts as done only after the last rank has written its share.
            step.signal.layers_done(layer.number + u16::from(layer.rank + 1 == self.memory.n_ranks()));
        }
        self.finish(rows)
    }

    fn finish(&mut self, rows: Vec<RunningRow>) -> StepOutput {
        self.previous.clear();
        let mut outcomes = Vec::with_capacity(rows.len());
        for row in rows {
            let (slot, outcome) = row.finish(&self.settings);
            if let Ok(Some(sampled)) = &outcome {
                self.previous.insert(slot, sampled.token);
            }
            outcomes.push(outcome);
        }
        StepOutput { rows: outcomes, prompt_logprobs: Vec::new(), routing_leads: Vec::new() }
    }

    /// Sleeps until the cost of the step's first `n_layers` layers has passed.
    fn wait_until(&self, started: Instant, cost: Duration, n_layers: usize) {
        if self.pace == Pace::Modelled || cost.is_zero() {
            return;
        }
        let share = cost.mul_f64(n_layers as f64 / self.layers.len() as f64);
        std::thread::sleep(share.saturating_sub(started.elapsed()));
    }
}

impl Backend for Mock {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn memory(&self) -> &KvMemory {
        &self.memory
    }

    fn launch(&mut self, batch: StepBatch<'_>) -> Result<PendingStep, BackendError> {
        if self.queue.len() == STEPS_IN_FLIGHT_MAX {
            return Err(BackendError::Order(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        let block_tokens = usize::from(self.memory.layout().block_tokens);
        let queued = |row| QueuedRow::new(row, &self.settings, block_tokens);
        let rows: Vec<QueuedRow> = batch.rows.iter().map(queued).collect();
        let cost = self.settings.cost.of_step(rows.iter().map(QueuedRow::n_tokens));
        let (signal, fence) = FenceSignal::new();
        let number = self.n_launched;
        self.n_launched += 1;
        self.queue.push_back(QueuedStep { number, rows, signal, cost });
        Ok(PendingStep::new(number, fence, (self.pace == Pace::Modelled).then_some(cost)))
    }

    fn collect(&mut self, step: PendingStep) -> Result<StepOutput, BackendError> {
        match self.queue.pop_front() {
            Some(queued) if queued.number == step.step() => Ok(self.run(queued)),
            Some(queued) => {
                let order = format!("step {} was collected before step {}", step.step(), queued.number);
                self.queue.push_front(queued);
                Err(BackendError::Order(order))
            }
            None => Err(BackendError::Order(format!("step {} is not in flight", step.step()))),
        }
    }

    fn rows_together(&self) -> usize {
        self.settings.cost.rows_together.get()
    }

    /// Returns whether steps run without the host. A modelled step ends at its time; a sleeping one ends in
    /// `collect`.
    fn runs_by_itself(&self) -> bool {
        self.pace == Pace::Modelled
    }

    fn sleep(self: Box<Self>) -> Result<Box<dyn Asleep>, SleepFailed> {
        if let Err(why) = asleep::check_idle(self.queue.len())
            .and_then(|()| asleep::check_not_held(self.memory.n_holders(), 1))
        {
            return Err(SleepFailed { backend: self, why });
        }
        let (name, settings, pace) = (self.model.name.clone(), self.settings.clone(), self.pace);
        let (ranks, n_blocks) = (NonZero::new(self.memory.n_ranks()), self.memory.n_blocks());
        let ranks = ranks.unwrap_or(NonZero::<u16>::MIN);
        let open = move || Self::over_ranks(&name, settings.clone(), ranks, n_blocks, pace);
        Ok(Box::new(ClosedBackend::close(*self, open)))
    }

    fn used_bytes(&self) -> Option<u64> {
        asleep::resident_bytes()
    }
}

/// Describes a mock. Mocks with the same layout can read each other's KV, whatever their costs.
fn model(name: &str, settings: &MockSettings, memory: &KvMemory) -> ModelInfo {
    let layout = memory.layout().clone();
    let mut parts = layout.fingerprint_parts();
    let mut weights = format!("mock {}, eos one in {}", settings.weights, settings.eos_one_in);
    if !settings.answers.is_empty() {
        weights += &format!(", answers {:?}", settings.answers);
    }
    parts.push(("weights".to_owned(), weights));
    parts.push(("tokenizer".to_owned(), "bytes".to_owned()));
    ModelInfo {
        name: name.to_owned(),
        context_tokens: KvMemory::longest(&layout, memory.n_blocks(), settings.context_tokens as usize)
            as u32,
        vocab: draw::VOCAB,
        eos_tokens: vec![draw::END],
        layout,
        fingerprint: Fingerprint::new(parts),
    }
}
