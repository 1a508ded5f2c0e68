//! Shared helpers of this crate's tests: a small mock, a recording sink, and a worker that tests step by hand.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use chassis::World;
use chassis::metrics::Metrics;
use engine::{Backend, Mock, MockSettings, Pace};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use tokio::time::Instant;
use types::{
    BlockIdx, Deadline, GroupIdx, KvSpan, ModelInfo, Prompt, Refusal, RefusalKind, RequestId, Sampling, Step,
    StopRules, TenantId, TokenId,
};

use crate::launched_step::LaunchTiming;
use crate::metrics::SchedulerMetrics;
use crate::precedence::SequenceId;
use crate::settings::SchedulerSettings;
use crate::sink::{SequenceEnd, Sink, SinkGuard, StepTiming};
use crate::submission::{NewSequence, SequenceLimits, Source, Submission};
use crate::worker::{Event, NextEvent, Worker, WorkerParts};

pub(crate) const BLOCK_TOKENS: usize = 4;
/// The number of turns after which a worker that is still busy fails the test.
const TURNS_MAX: usize = 20_000;

// === models, prompts, blocks ===

/// Returns settings of a mock with two layers and four tokens per block. A sequence ends by itself after
/// about thirty tokens.
pub(crate) fn small() -> MockSettings {
    let toml = "
        context_tokens = 256
        eos_one_in = 30
        [layout]
        block_tokens = 4
        n_layers = 2
        n_kv_heads = 1
        head_dim = 4
    ";
    MockSettings::parse("small", toml).expect("right settings")
}

pub(crate) fn mock(n_blocks: u32) -> Mock {
    Mock::new("mock", small(), n_blocks, Pace::Modelled).expect("memory for a few blocks")
}

/// Returns the description of a mock with 16 tokens per block.
pub(crate) fn model(context_tokens: u32) -> ModelInfo {
    let settings = MockSettings { context_tokens, ..MockSettings::default() };
    Mock::new("mock", settings, 4, Pace::Modelled).expect("memory for a few blocks").model().clone()
}

/// Returns a lease of `n_blocks` from a pool without other users.
pub(crate) fn blocks(n_blocks: usize) -> BlockLease {
    let pool = BlockPool::new(&model(64).layout, n_blocks as u32);
    pool.reserve(n_blocks, holder("lease")).expect("the pool is empty")
}

pub(crate) fn holder(request: &str) -> Holder {
    Holder { what: Holding::Landing, request: RequestId::new(request) }
}

/// Returns a greedy prompt of letters; prompts with the same id have a common prefix.
pub(crate) fn prompt(id: &str, n_tokens: usize, max_tokens: u32) -> Prompt {
    let seed = id.bytes().map(usize::from).sum::<usize>();
    let tokens = (0..n_tokens).map(|nth| TokenId(65 + ((nth * 7 + seed) % 26) as u32)).collect();
    Prompt {
        id: RequestId::new(id),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: types::RequestedModel::default(),
        tokens,
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules { max_tokens, ..StopRules::default() },
        priority: Default::default(),
        deadline: deadline_in(Duration::from_secs(3600)),
    }
}

pub(crate) fn deadline_in(within: Duration) -> Deadline {
    Deadline::at((Instant::now() + within).into_std())
}

// === a recording sink ===

#[derive(Debug)]
pub(crate) struct Recorder {
    record: Arc<Mutex<Record>>,
}

#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) steps: Vec<Step>,
    pub(crate) timings: Vec<StepTiming>,
    pub(crate) spans: Vec<(KvSpan, LayerFence)>,
    /// The leases that `kv` brought, as long as the test keeps them.
    pub(crate) leases: Vec<Arc<BlockLease>>,
    pub(crate) end: Option<SequenceEnd>,
    pub(crate) is_full: bool,
    /// Whether every look at the sink's room finds the opposite of the one before, as when its reader reads meanwhile.
    pub(crate) is_read_meanwhile: bool,
    /// Whether the sink drops the leases of `kv` at once.
    pub(crate) is_stream: bool,
}

/// The test's end of a recorder.
#[derive(Clone, Debug)]
pub(crate) struct Recording(Arc<Mutex<Record>>);

impl Recorder {
    pub(crate) fn new() -> (Self, Recording) {
        let record = Arc::new(Mutex::new(Record::default()));
        (Self { record: Arc::clone(&record) }, Recording(record))
    }

    /// Returns a recorder that keeps no leases.
    pub(crate) fn stream() -> (Self, Recording) {
        let (recorder, recorded) = Self::new();
        recorded.get().is_stream = true;
        (recorder, recorded)
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().expect("no test panics with it")
    }
}

impl Recording {
    pub(crate) fn get(&self) -> MutexGuard<'_, Record> {
        self.0.lock().expect("no test panics with it")
    }

    pub(crate) fn tokens(&self) -> Vec<TokenId> {
        self.get().steps.iter().map(|step| step.token).collect()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.get().end.is_some()
    }

    /// Returns the refusal that ended the sequence.
    pub(crate) fn refusal(&self) -> Option<RefusalKind> {
        match &self.get().end {
            Some(SequenceEnd::Failed(refusal)) => Some(refusal.kind),
            _ => None,
        }
    }

    /// Returns whether the sequence ended with success.
    pub(crate) fn is_finished(&self) -> bool {
        matches!(self.get().end, Some(SequenceEnd::Finished { .. }))
    }
}

impl Sink for Recorder {
    fn prompt_logprobs(&mut self, _logprobs: Vec<types::step::PromptLogprob>) {}

    fn has_room(&self) -> bool {
        let mut record = self.record();
        record.is_full ^= record.is_read_meanwhile;
        !record.is_full
    }

    fn kv(&mut self, span: KvSpan, lease: Arc<BlockLease>, ready: LayerFence) {
        let mut record = self.record();
        if !record.is_stream {
            record.leases.push(lease);
        }
        record.spans.push((span, ready));
    }

    fn step(&mut self, step: Step, timing: StepTiming) {
        let mut record = self.record();
        assert!(record.end.is_none(), "a step after the end");
        record.steps.push(step);
        record.timings.push(timing);
    }

    fn end(self: Box<Self>, end: SequenceEnd) {
        let before = self.record().end.replace(end);
        assert_eq!(before, None, "a sink is ended once");
    }
}

// === a worker that tests step by hand ===

#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) worker: Worker,
    pub(crate) pool: BlockPool,
    pub(crate) memory: KvMemory,
    pub(crate) metrics: Metrics,
    model: ModelInfo,
    n_submitted: u64,
}

impl Rig {
    pub(crate) fn new(n_blocks: u32, settings: SchedulerSettings) -> Self {
        Self::with_backend(Box::new(mock(n_blocks)), settings)
    }

    pub(crate) fn with_backend(backend: Box<dyn Backend>, settings: SchedulerSettings) -> Self {
        let (memory, model) = (backend.memory().clone(), backend.model().clone());
        let pool = BlockPool::new(&model.layout, memory.n_blocks());
        let metrics = Metrics::new("test");
        let worker = Worker::new(WorkerParts {
            backend,
            pool: pool.clone(),
            world: World::seeded(1),
            settings,
            metrics: SchedulerMetrics::new(&metrics),
        });
        Self { worker: worker.expect("right settings"), pool, memory, metrics, model, n_submitted: 0 }
    }

    /// Submits a sequence to the worker directly, without its inbox, which has its own tests.
    pub(crate) fn submit(&mut self, new: NewSequence) -> Result<SequenceId, Refusal> {
        let sequence_limits = SequenceLimits::of(&new, &self.model, self.memory.n_blocks())?;
        let id = self.next_id();
        let NewSequence { prompt, constraint, source, sink, .. } = new;
        let (sink_guard, span, submitted) = (SinkGuard::new(sink), tracing::Span::none(), Instant::now());
        let submission =
            Submission { id, prompt, constraint, source, sink_guard, sequence_limits, span, submitted };
        self.worker.apply(Event::Submit(Box::new(submission)));
        Ok(id)
    }

    pub(crate) fn next_id(&mut self) -> SequenceId {
        self.n_submitted += 1;
        SequenceId(self.n_submitted)
    }

    /// Submits a fresh prompt with a sink that wants all steps.
    pub(crate) fn stream(&mut self, prompt: Prompt) -> (SequenceId, Recording) {
        let (sink, recorded) = Recorder::stream();
        let source = Source::Fresh;
        let new =
            NewSequence { prompt, source, sink: Box::new(sink), steps_wanted: u32::MAX, constraint: None };
        (self.submit(new).expect("it fits"), recorded)
    }

    /// Submits a fresh prompt with a sink that wants its KV and the first step.
    pub(crate) fn outbox(&mut self, prompt: Prompt) -> (SequenceId, Recording) {
        let (sink, recorded) = Recorder::new();
        let source = Source::Fresh;
        let new = NewSequence { prompt, source, sink: Box::new(sink), steps_wanted: 1, constraint: None };
        (self.submit(new).expect("it fits"), recorded)
    }

    pub(crate) fn cancel(&mut self, id: SequenceId) {
        self.worker.apply(Event::Cancel(id));
    }

    /// Runs one turn of the worker, including the next collect. Returns false if there is nothing to run.
    pub(crate) fn turn(&mut self) -> bool {
        let has_launched = self.launch();
        if has_launched {
            self.worker.apply(Event::Collect);
        }
        has_launched
    }

    /// Launches steps up to the limit. Returns false if no step is in flight.
    pub(crate) fn launch(&mut self) -> bool {
        loop {
            self.worker.apply(Event::Launch(LaunchTiming::Usual));
            match self.worker.next() {
                NextEvent::Launch => {}
                NextEvent::Collect(_) => return true,
                NextEvent::Wait(_) => return false,
            }
        }
    }

    /// Runs a turn while another holder takes all free blocks and writes into them. Checks that they stay
    /// unchanged.
    pub(crate) fn turn_with_intruder(&mut self) {
        let has_launched = self.launch();
        let n_free = self.pool.counts().free as usize / self.model.layout.groups.len();
        let taken = self.pool.reserve(n_free, holder("intruder")).expect("they are free");
        self.fill(&taken, 0xa5);
        if has_launched {
            self.worker.apply(Event::Collect);
        }
        self.assert_filled(&taken, 0xa5);
    }

    fn fill(&self, lease: &BlockLease, byte: u8) {
        for (group, block) in self.blocks_of(lease) {
            self.memory.write(group, 0, block.0..block.0 + 1).expect("they are ours").fill(byte);
        }
    }

    fn assert_filled(&self, lease: &BlockLease, byte: u8) {
        for (group, block) in self.blocks_of(lease) {
            let page = self.memory.read(group, 0, block.0..block.0 + 1).expect("they are ours");
            assert!(page.iter().all(|found| *found == byte), "{block:?} was written after it was given back");
        }
    }

    fn blocks_of(&self, lease: &BlockLease) -> Vec<(GroupIdx, BlockIdx)> {
        let groups = self.model.layout.group_indices();
        groups.flat_map(|group| lease.table(group).iter().map(move |block| (group, *block))).collect()
    }

    /// Runs turns until there is nothing to run.
    pub(crate) fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            if !self.turn() {
                return;
            }
        }
        panic!("the worker does not come to rest");
    }

    /// Checks that all sequences have ended and all blocks are free.
    pub(crate) fn assert_at_baseline(&mut self) {
        assert!(self.worker.is_idle(), "sequences are left: {:?}", self.worker.load().node);
        self.worker.apply(Event::Idle);
        let counts = self.pool.counts();
        assert_eq!((counts.leased, counts.quarantined), (0, 0), "{counts:?}");
        assert_eq!(self.pool.integrity(), Ok(()));
    }

    pub(crate) fn metric(&self, name: &str) -> u64 {
        let page = self.metrics.page();
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("baton_test_{name} ")));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no metric {name} in {page}"))
    }
}

/// Returns settings whose limits no test reaches.
pub(crate) fn roomy() -> SchedulerSettings {
    SchedulerSettings { step_tokens_max: 512, sequences_max: 64, ..SchedulerSettings::default() }
}

/// Returns all tokens of a prompt that runs alone, one step at a time, in a pool that is large enough.
pub(crate) fn alone(prompt: &Prompt) -> Vec<TokenId> {
    let mut rig = Rig::new(128, SchedulerSettings { steps_in_flight_max: 1, ..roomy() });
    let (_, recorded) = rig.stream(prompt.clone());
    rig.settle();
    assert!(recorded.is_finished(), "{:?}", recorded.get().end);
    recorded.tokens()
}

/// Computes a prompt's KV and first step on another worker, and puts them into blocks of this pool.
///
/// Returns `None` if the pool has no room for the KV.
pub(crate) fn arrived(rig: &Rig, prompt: &Prompt) -> Option<Source> {
    let n_blocks = prompt.tokens.len().div_ceil(BLOCK_TOKENS);
    let lease = rig.pool.reserve(n_blocks, holder("landing")).ok()?;
    let mut prefill = Rig::new(128, roomy());
    let (_, recorded) = prefill.outbox(prompt.clone());
    prefill.settle();
    let sent = Arc::clone(recorded.get().leases.first().expect("a prompt has a block"));
    copy(&prefill.memory, &sent, &rig.memory, &lease, n_blocks);
    let first = recorded.get().steps[0].clone();
    Some(Source::Arrived { lease, first })
}

fn copy(from: &KvMemory, sent: &BlockLease, to: &KvMemory, landed: &BlockLease, n_blocks: usize) {
    let group = GroupIdx(0);
    let pairs: VecDeque<_> = sent.table(group).iter().zip(landed.table(group)).take(n_blocks).collect();
    for layer in 0..2 {
        for (source, target) in &pairs {
            let page = from.read(group, layer, source.0..source.0 + 1).expect("no writer");
            to.write(group, layer, target.0..target.0 + 1).expect("no reader").copy_from_slice(&page);
        }
    }
}
