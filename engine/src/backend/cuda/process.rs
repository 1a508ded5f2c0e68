//! Hot path.
//! The stage, or the ranks of one, that one of several processes of a node computes on its GPUs.

use std::num::NonZero;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use device::cuda::nccl::{EndOfSums, Nccl};
use device::cuda::{Bf16, CudaError, Event, HostOutbox, PinnedNumbers, PinnedRows};
use device::polling;
use kv_cache::FenceSignal;
use tokio::time::Instant;
use types::{BlockIdx, Fingerprint, ProcessShare, Sampling, StageLayers, StopRules, TokenId, in_full};

use super::draws::Draws;
use super::elsewhere::hidden_bytes;
use super::launched_step::LostFlags;
use super::links::{StepPlaces, TokenRing};
use super::lockstep::Helpers;
use super::opening::{OpenedRanks, PreparedModel};
use super::plan::{Bounds, Plan};
use super::rank::{LaunchedOnAll, Rank, Step, launch_on_all};
use super::watch::{Watch, WatchedStep};
use super::{CudaBackend, CudaSettings};
use crate::backend::remote::{
    DirectStage, LoadedStage, RemoteProcess, StageInput, StageLost, StageMates, StageProcess, StageRanks,
    StageResults, StageRow, StageWeights,
};
use crate::error::{LoadError, OpenError, RowError};
use crate::kv_room::KvRoom;
use crate::step::{PromptTargets, Row, RowInput, SampleSpec, SlotId};

/// The most ranks whose sum does not depend on the order.
const EXACT_RANKS_MAX: NonZero<u16> = NonZero::new(2).expect("two is not zero");
/// The longest time for which a step waits for the memory of an earlier step's rows.
const SENT_WITHIN: Duration = Duration::from_secs(10);

/// A stage whose model's config is read, and whose weights are not loaded. Its GPUs are opened.
#[derive(Debug)]
pub struct PreparedStage(PreparedModel);

/// A stage that computes what another process sends.
#[derive(Debug)]
pub struct CudaStage {
    // Fields are dropped in this order: rows are copied out of memory that the launcher holds.
    launched: Mutex<Receiver<LaunchedRows>>,
    launcher: Mutex<Launcher>,
    spare: SyncSender<PinnedNumbers<Bf16>>,
    loaded: LoadedStage,
    /// The processes of the stage's other ranks; `None` if this one has all.
    mates: Option<Arc<dyn StageMates>>,
    lost: LostFlags,
}

/// Launches steps. Dropping it waits for its GPUs.
#[derive(Debug)]
struct Launcher {
    watch: Watch,
    helpers: Helpers<Rank>,
    rank: Rank,
    rows_in: Option<HostOutbox<Bf16>>,
    ring: TokenRing,
    n_launched: u64,
    room: StepRoom,
    /// The sampling parameters of rows, if this process has ranks of the last stage.
    wants: Option<Arc<Wants>>,
    first_layer: u16,
    /// The numbers of a row that this process passes on; 0 without the first rank.
    hidden: usize,
    lost: LostFlags,
    spare: Receiver<PinnedNumbers<Bf16>>,
    launched: SyncSender<LaunchedRows>,
}

/// The sampling parameters of the rows of the last stage. The head samples, so the tokens do not matter.
#[derive(Debug)]
struct Wants {
    sampling: Sampling,
    stop: StopRules,
    tokens: Vec<TokenId>,
}

/// The largest step that the GPUs were prepared for.
#[derive(Debug)]
struct StepRoom {
    bounds: Bounds,
    n_tokens: usize,
    n_words: usize,
    /// The number of tokens of the longest sequence.
    sequence_tokens: usize,
    n_blocks: u32,
    /// The numbers of a row of the stage before; `None` for the first stage.
    row_numbers: Option<usize>,
}

/// The rows of a step that was launched, which are being copied.
#[derive(Debug)]
struct LaunchedRows {
    rows: PinnedRows<Bf16>,
    /// The numbers in `rows`: the residual, and the rows normed for the next stage.
    n_numbers: usize,
    outcomes: Vec<Result<(), RowError>>,
    /// The events at which the GPUs have finished.
    ends: Vec<Event>,
    signal: Arc<FenceSignal>,
}

/// The rows of a step, which are being sent. The drop makes their memory spare again.
#[derive(Debug)]
struct RowBytes {
    /// `None` only during the drop.
    buffer: Option<PinnedNumbers<Bf16>>,
    n_numbers: usize,
    spare: SyncSender<PinnedNumbers<Bf16>>,
}

/// Opens a model whose stages compute as in processes of their own, without connections. Each has its own GPUs. For checks.
pub fn open_apart(folder: &Path, kv_bytes: usize, settings: &CudaSettings) -> Result<CudaBackend, OpenError> {
    let n_stages = usize::from(settings.stages.n_stages.get());
    let n_ranks = usize::from(settings.ranks.get());
    let share = |stage| ProcessShare { stage, ranks: 0..settings.ranks.get() };
    let prepare = |nth| {
        let settings = CudaSettings { ordinal: settings.ordinal + nth * n_ranks, ..settings.clone() };
        PreparedStage::prepare(folder, (kv_bytes / n_stages).into(), &settings, share(nth))
    };
    let mut prepared = (0..n_stages).map(prepare).collect::<Result<Vec<_>, _>>()?;
    let n_blocks = prepared.iter().map(PreparedStage::n_blocks).min().unwrap_or(0);
    let head = prepared.pop().expect("there is a stage");
    let direct = |(nth, stage): (usize, PreparedStage)| -> Result<RemoteProcess, OpenError> {
        let stage = Arc::new(DirectStage(Arc::new(stage.open(n_blocks, None)?)));
        Ok(RemoteProcess { share: share(nth), stage })
    };
    let remote = prepared.into_iter().enumerate().map(direct).collect::<Result<Vec<_>, _>>()?;
    head.open_head(n_blocks, &remote, None)
}

// === impl PreparedStage ===

impl PreparedStage {
    /// Opens the GPUs, and reads the config of a model for one of its processes. The settings say how many stages and ranks
    /// there are.
    pub fn prepare(
        folder: &Path,
        kv: KvRoom,
        settings: &CudaSettings,
        share: ProcessShare,
    ) -> Result<Self, OpenError> {
        let settings = CudaSettings { only: Some(share), ..settings.clone() };
        if settings.has_mates() {
            if settings.deterministic && settings.ranks > EXACT_RANKS_MAX {
                let why = format!(
                    "model.deterministic with more than {EXACT_RANKS_MAX} GPUs of one stage in several processes is not \
                     implemented: NCCL adds up their numbers in an order that depends on the batch"
                );
                return Err(OpenError::CudaModel(why));
            }
            Nccl::load()?;
        }
        PreparedModel::of(folder, kv, &settings).map(Self)
    }

    /// Names the kind of the GPUs.
    pub fn hardware(&self) -> String {
        self.0.hardware()
    }

    /// Returns the fingerprint that all processes of a node share.
    pub fn fingerprint(&self) -> Result<Fingerprint, OpenError> {
        self.0.fingerprint()
    }

    /// Returns the number of blocks for which this process has room.
    pub fn n_blocks(&self) -> u32 {
        self.0.described.n_blocks
    }

    /// Returns the layers of each stage of the model.
    pub fn layers_of_stages(&self) -> &StageLayers {
        &self.0.described.all_stages
    }

    /// Makes an id by which the ranks of one stage find each other. Empty if they are in one process.
    pub fn sums_id(&self) -> Result<Bytes, OpenError> {
        match self.0.described.settings().has_mates() {
            true => Ok(Bytes::from_owner(Nccl::load()?.unique_id()?.0)),
            false => Ok(Bytes::new()),
        }
    }

    /// Loads the stage's weights, and takes memory for `n_blocks` blocks. `ranks` joins the stage's ranks, if some are in
    /// other processes.
    pub fn open(self, n_blocks: u32, ranks: Option<StageRanks>) -> Result<CudaStage, OpenError> {
        let mates = ranks.as_ref().map(|ranks| Arc::clone(&ranks.mates));
        CudaStage::of(self.0.with_blocks(n_blocks).open(ranks)?, mates)
    }

    /// Loads the weights of the last stage, and makes the backend of the whole model. `remote` are the other processes, and
    /// `ranks` joins those of the last stage.
    pub fn open_head(
        self,
        n_blocks: u32,
        remote: &[RemoteProcess],
        ranks: Option<StageRanks>,
    ) -> Result<CudaBackend, OpenError> {
        CudaBackend::of(self.0.with_blocks(n_blocks), remote, ranks)
    }
}

// === impl CudaStage ===

impl CudaStage {
    fn of(opened: OpenedRanks, mates: Option<Arc<dyn StageMates>>) -> Result<Self, OpenError> {
        let OpenedRanks { rank, helpers, described, memory, lost, rows_in, .. } = opened;
        let (sizes, limits) = (rank.tools.decoder.sizes, described.settings().limits);
        let card = &rank.tools.card;
        let arithmetic = described.settings().arithmetic(card.arch());
        let weights = StageWeights { model: described.fingerprint(&arithmetic)?, formats: Vec::new() };
        let n_steps = sizes.stage.steps_in_flight_max();
        let (launched_in, launched) = sync_channel(n_steps);
        let (give_back, spare) = sync_channel(n_steps);
        for _ in 0..n_steps {
            let buffer = card.pinned(2 * limits.tokens * sizes.hidden)?;
            give_back.try_send(buffer).expect("the channel has room for all of them");
        }
        let layers = described.stages.iter().next().expect("there is a stage");
        let launcher = Launcher {
            watch: Watch::start(n_steps).map_err(LoadError::Threads)?,
            room: StepRoom {
                bounds: rank.tools.bounds(limits),
                n_tokens: limits.tokens,
                n_words: rank.tools.space.words.len(),
                sequence_tokens: described.tokens_max,
                n_blocks: described.n_blocks,
                row_numbers: rows_in.is_some().then_some(sizes.hidden),
            },
            ring: TokenRing::new(sizes.stage.n_stages, limits.rows),
            n_launched: 0,
            wants: sizes.stage.is_last().then(|| Arc::new(Wants::new(limits.tokens))),
            first_layer: layers.start,
            hidden: if sizes.share.is_first() { sizes.hidden } else { 0 },
            lost: lost.clone(),
            spare,
            launched: launched_in,
            rank,
            helpers,
            rows_in,
        };
        let (launched, launcher) = (Mutex::new(launched), Mutex::new(launcher));
        let loaded = LoadedStage { weights, memory, layers };
        Ok(Self { launched, launcher, spare: give_back, loaded, mates, lost })
    }

    /// Fails if ranks of other processes are lost, instead of waiting for them. A lost head ends the
    /// connections to them.
    fn check_mates(&self) -> Result<(), CudaError> {
        if self.mates.as_ref().is_some_and(|mates| mates.is_lost()) {
            return Err(CudaError::PeerLost { why: "another process of this node is gone".to_owned() });
        }
        self.lost.sums.iter().try_for_each(EndOfSums::check)
    }

    /// Waits for the copies of a step's rows.
    fn results(&self, launched: LaunchedRows) -> Result<StageResults, CudaError> {
        let LaunchedRows { rows, n_numbers, outcomes, ends, signal } = launched;
        let began = Instant::now();
        for end in &ends {
            while !end.is_reached()? {
                if let Err(error) = self.check_mates() {
                    // The drop of the rows waits for the GPUs, which wait for the other ranks.
                    self.lost.raise();
                    return Err(error);
                }
                polling::sleep(began.elapsed());
            }
        }
        if self.lost.is_raised() {
            return Err(self.lost.error());
        }
        let buffer = Some(rows.into_numbers()?);
        signal.layers_done(self.loaded.layers.end);
        let rows = RowBytes { buffer, n_numbers, spare: self.spare.clone() };
        Ok(StageResults { hidden: Bytes::from_owner(rows), outcomes, routing_leads: Vec::new() })
    }
}

impl StageProcess for CudaStage {
    fn loaded(&self) -> &LoadedStage {
        &self.loaded
    }

    fn begin(&self, input: StageInput, signal: FenceSignal) -> Result<(), StageLost> {
        self.launcher.lock().unwrap_or_else(PoisonError::into_inner).begin(&input, Arc::new(signal))
    }

    fn finish(&self) -> Result<StageResults, StageLost> {
        let launched = self.launched.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = launched.recv().map_err(|_| StageLost("no step was begun".to_owned()))?;
        self.results(launched).map_err(|error| StageLost(in_full(&error)))
    }
}

// === impl Launcher ===

impl Launcher {
    fn begin(&mut self, input: &StageInput, signal: Arc<FenceSignal>) -> Result<(), StageLost> {
        let tables: Vec<Vec<&[BlockIdx]>> = input.rows.iter().map(tables_of).collect();
        let wants = self.wants.clone();
        let rows = input.rows.iter().zip(&tables).map(|(row, of)| row_of(row, of, wants.as_deref()));
        let rows: Vec<Row<'_>> = rows.collect();
        let mut plan = Plan::of(&rows, self.room.bounds, |_| Err(RowError::NoTokenInFlight));
        if !self.room.admits(input, &plan) {
            return Err(StageLost("the head has sent a step that this stage cannot compute".to_owned()));
        }
        // The rows of the oldest step may still be in the writer of the connection.
        let buffer = self.spare.recv_timeout(SENT_WITHIN).map_err(|_| StageLost::too_many_steps())?;
        let launched = self.launch(&mut plan, &rows, &input.hidden, buffer, signal);
        let launched = launched.map_err(|error| self.launch_failed(&error))?;
        self.launched.try_send(launched).map_err(|_| StageLost::too_many_steps())
    }

    fn launch(
        &mut self,
        plan: &mut Plan<'_>,
        rows: &[Row<'_>],
        hidden: &[u8],
        buffer: PinnedNumbers<Bf16>,
        signal: Arc<FenceSignal>,
    ) -> Result<LaunchedRows, CudaError> {
        let n_numbers = plan.dims.n_tokens * self.hidden;
        let places = StepPlaces {
            here: self.ring.place(self.n_launched),
            n_tokens: plan.dims.n_tokens,
            earlier: Vec::new(),
        };
        self.n_launched += 1;
        if let Some(rows) = &mut self.rows_in {
            rows.put(places.here, hidden);
        }
        let graph_size = self.rank.pad(plan, rows);
        let words = if self.helpers.are_there() { plan.words() } else { Vec::new() };
        let (dims, sequences, draws) = (plan.dims, plan.sequences(), Draws::default());
        let rows_out = PinnedRows::over(buffer);
        let of_ranks = Some(rows_out.clone());
        let step =
            Step { dims, graph_size, sequences, draws, masks: None, words, places, rows_out: of_ranks };
        let LaunchedOnAll { written, mut ends } =
            launch_on_all(&mut self.rank, &mut self.helpers, 0, &Arc::new(step), plan)?;
        ends.push(self.rank.tools.card.event()?);
        let (first_layer, lost) = (self.first_layer, self.lost.clone());
        let (written, of_watch) = (vec![written], Arc::clone(&signal));
        self.watch.watch(WatchedStep { began: None, first_layer, written, lost, signal: of_watch });
        let outcomes = rows.iter().map(|_| Ok(())).collect();
        Ok(LaunchedRows { rows: rows_out, n_numbers: 2 * n_numbers, outcomes, ends, signal })
    }

    /// Returns the error of a failed launch. GPUs that have started the step do not wait for the others any more.
    fn launch_failed(&self, error: &CudaError) -> StageLost {
        self.lost.raise();
        StageLost(in_full(error))
    }
}

impl StepRoom {
    /// Returns whether the GPUs can compute a step, and it stays within their memory.
    fn admits(&self, input: &StageInput, plan: &Plan<'_>) -> bool {
        let (n_tokens, n_words) = (plan.dims.n_tokens, plan.dims.n_words());
        let n_hidden = self.row_numbers.map_or(0, |numbers| hidden_bytes(n_tokens, numbers));
        let is_within = |row: &StageRow| {
            let is_block = |block: &BlockIdx| *block == BlockIdx::GONE || block.0 < self.n_blocks;
            row.start.saturating_add(row.tokens.len()) <= self.sequence_tokens
                && !row.tokens.is_empty()
                && row.tables.len() == self.bounds.n_groups
                && row.tables.iter().flatten().all(is_block)
        };
        plan.places.iter().all(Result::is_ok)
            && (1..=self.n_tokens).contains(&n_tokens)
            && plan.dims.n_wanted <= self.bounds.n_wanted_max
            && n_words <= self.n_words
            && input.hidden.len() == n_hidden
            && input.rows.iter().all(is_within)
    }
}

fn tables_of(row: &StageRow) -> Vec<&[BlockIdx]> {
    row.tables.iter().map(Vec::as_slice).collect()
}

/// Makes a row. Only in the last stage it has logits, as many as in the head, which samples from them.
fn row_of<'a>(row: &'a StageRow, tables: &'a [&'a [BlockIdx]], wants: Option<&'a Wants>) -> Row<'a> {
    let input = RowInput::Tokens(&row.tokens);
    let sample = wants.filter(|_| row.is_wanted).map(Wants::sample);
    let prompt_logprobs = wants.filter(|_| row.n_targets > 0).map(|wants| wants.targets(row.n_targets));
    Row { slot: SlotId(0), input, start: row.start, tables, prompt_logprobs, sample }
}

impl Wants {
    /// Makes the sampling parameters for rows of up to `n_tokens` tokens.
    fn new(n_tokens: usize) -> Self {
        let (sampling, stop) = (Sampling::default(), StopRules::default());
        Self { sampling, stop, tokens: vec![TokenId(0); n_tokens] }
    }

    fn sample(&self) -> SampleSpec<'_> {
        let Self { sampling, stop, .. } = self;
        SampleSpec { sampling, stop, history: &[], n_prompt: 0, index: 0, constraint: None }
    }

    fn targets(&self, n_targets: usize) -> PromptTargets<'_> {
        let n_targets = n_targets.min(self.tokens.len());
        PromptTargets { tokens: &self.tokens[..n_targets], n_top: 0 }
    }
}

// === impl RowBytes ===

impl AsRef<[u8]> for RowBytes {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| buffer.bytes(self.n_numbers))
    }
}

impl Drop for RowBytes {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            // The channel has room for all buffers. After the stage's end nothing takes it.
            let _ = self.spare.try_send(buffer);
        }
    }
}

impl Drop for CudaStage {
    fn drop(&mut self) {
        // Before the rows of a step are dropped, which waits for the GPUs.
        self.lost.end_sums();
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.rank.tools.links.release();
        // Waits for all GPUs before any of them returns its memory, because they write into each other's memory.
        let others = self.helpers.end();
        for rank in others.iter().chain([&self.rank]) {
            let _ = rank.tools.card.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use types::TokenId;

    use super::*;

    #[test]
    fn each_process_may_have_several_gpus() {
        let ranks = NonZero::new(2).expect("two");
        let settings = CudaSettings { ordinal: 4096, ranks, cache: None, ..CudaSettings::default() };
        let share = ProcessShare { stage: 0, ranks: 0..2 };
        let error = PreparedStage::prepare(Path::new("/nowhere"), (1 << 20).into(), &settings, share);
        let error = error.expect_err("there are no such GPUs");
        assert!(error.is_no_gpu(), "{error}");
    }

    #[test]
    fn sums_whose_order_depends_on_the_batch_are_refused_if_results_must_not() {
        let ranks = NonZero::new(4).expect("four");
        let settings = CudaSettings { ranks, deterministic: true, cache: None, ..CudaSettings::default() };
        let share = ProcessShare { stage: 0, ranks: 2..4 };
        let error = PreparedStage::prepare(Path::new("/nowhere"), (1 << 20).into(), &settings, share);
        let error = error.expect_err("NCCL has no fixed order").to_string();
        assert!(error.starts_with("model.deterministic with more than 2 GPUs of one stage in "), "{error}");
    }

    #[test]
    fn a_process_has_its_ranks_of_the_stage() {
        let ranks = NonZero::new(4).expect("four");
        let settings = |only| CudaSettings { ordinal: 1, ranks, only, ..CudaSettings::default() };
        let of = |only| {
            let settings = settings(only);
            (settings.gpus(), settings.ranks_here(), settings.has_mates())
        };
        assert_eq!(of(None), (1..5, 0..4, false));
        assert_eq!(of(Some(ProcessShare { stage: 1, ranks: 0..4 })), (1..5, 0..4, false));
        assert_eq!(of(Some(ProcessShare { stage: 0, ranks: 2..4 })), (1..3, 2..4, true));
    }

    /// The ranks of all processes of the last stage sum logits of the same rows.
    #[test]
    fn a_row_of_the_last_stage_asks_for_as_many_logits_as_the_heads() {
        let row = |is_wanted, n_targets| StageRow {
            tokens: vec![TokenId(7); 3],
            start: 0,
            tables: vec![vec![BlockIdx(0)]],
            is_wanted,
            n_targets,
            outcome: Ok(()),
        };
        let bounds = Bounds { vocab: 100, n_groups: 1, n_wanted_max: 4 };
        let wants = Wants::new(8);
        for (wants, rows, expected) in [
            (Some(&wants), [row(true, 0), row(false, 3)], (1, 3)),
            (Some(&wants), [row(true, 2), row(true, 1)], (2, 3)),
            (None, [row(true, 2), row(true, 1)], (0, 0)),
        ] {
            let tables: Vec<Vec<&[BlockIdx]>> = rows.iter().map(tables_of).collect();
            let rows: Vec<_> = rows.iter().zip(&tables).map(|(row, of)| row_of(row, of, wants)).collect();
            let plan = Plan::of(&rows, bounds, |_| Err(RowError::NoTokenInFlight));
            assert_eq!((plan.dims.n_wanted, plan.dims.n_targets), expected);
        }
    }

    #[test]
    fn a_step_outside_a_stages_memory_is_not_launched() {
        let bounds = Bounds { vocab: 100, n_groups: 2, n_wanted_max: 4 };
        let first = StepRoom {
            bounds,
            n_tokens: 8,
            n_words: 1000,
            sequence_tokens: 64,
            n_blocks: 5,
            row_numbers: None,
        };
        let later = StepRoom { bounds, row_numbers: Some(16), ..first };
        let row = |n_tokens, start| StageRow {
            tokens: vec![TokenId(7); n_tokens],
            start,
            tables: vec![vec![BlockIdx(4), BlockIdx::GONE], vec![BlockIdx(0)]],
            is_wanted: false,
            n_targets: 0,
            outcome: Ok(()),
        };
        let good = StageInput { rows: vec![row(5, 0), row(1, 20)], ..StageInput::default() };
        let admits = |room: &StepRoom, input: &StageInput| {
            let tables: Vec<Vec<&[BlockIdx]>> = input.rows.iter().map(tables_of).collect();
            let rows: Vec<Row<'_>> =
                input.rows.iter().zip(&tables).map(|(row, of)| row_of(row, of, None)).collect();
            let plan = Plan::of(&rows, room.bounds, |_| Err(RowError::NoTokenInFlight));
            room.admits(input, &plan)
        };
        assert!(admits(&first, &good));
        assert!(!admits(&later, &good), "the rows of the stage before are missing");
        let with_rows = StageInput { hidden: vec![0; 2 * 6 * 16 * 2].into(), ..good.clone() };
        assert!(admits(&later, &with_rows));
        assert!(!admits(&first, &with_rows), "no stage is before the first");
        type Spoil = fn(&mut StageInput);
        let spoils: [(&str, Spoil); 7] = [
            ("no row", |input| input.rows.clear()),
            ("a row without tokens", |input| input.rows[0].tokens.clear()),
            ("too many tokens", |input| input.rows[0].tokens = vec![TokenId(7); 8]),
            ("an unknown token", |input| input.rows[1].tokens[0] = TokenId(100)),
            ("a sequence that is too long", |input| input.rows[1].start = 64),
            ("a block that does not exist", |input| input.rows[0].tables[1][0] = BlockIdx(5)),
            ("a table too few", |input| drop(input.rows[1].tables.pop())),
        ];
        for (name, spoil) in spoils {
            let mut wrong = good.clone();
            spoil(&mut wrong);
            assert!(!admits(&first, &wrong), "{name}");
        }
        let small = StepRoom { n_words: 10, ..first };
        assert!(!admits(&small, &good), "more words than the GPU has room for");
    }
}
