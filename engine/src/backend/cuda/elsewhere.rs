//! Hot path.
//! The parts of a model that other processes compute: the stages before the last one, and ranks of the last one. This
//! process computes the first ranks of the last stage.
//!
//! One thread sends steps to the processes of the first stage, as soon as the tokens that their rows continue are known. One
//! thread for each stage waits for its processes, and passes the stage's rows on: to the next stage's processes, and to the
//! ring from which this process's GPUs fetch them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use device::cuda::{Bf16, CudaError, HostOutbox, HostWords, View};
use device::polling;
use kernels::cuda::ComputeCard;
use kv_cache::FenceSignal;
use tokio::time::Instant;
use types::TokenId;

use super::launched_step::LostFlags;
use super::links::{LinkSizes, TokenRing};
use super::plan::{InputToken, Plan};
use crate::backend::remote::{RemoteProcess, RemoteStage, StageInput, StageLost, StageRow};
use crate::error::{LoadError, OpenError};
use crate::step::{Row, RowInput};

/// The longest time for which a thread waits for a token.
const STEP_WITHIN: Duration = Duration::from_secs(600);

/// The threads of the stages in other processes. They end when this value is dropped, or a stage is lost.
#[derive(Debug)]
pub(super) struct Elsewhere {
    /// It has room for all steps that may be in flight.
    steps: SyncSender<StepElsewhere>,
    tokens: Arc<SampledTokens>,
    turns: UseCounts,
    lost: LostFlags,
}

/// The tokens that the steps in flight sample, in host memory. The GPU writes them, and a thread reads them without a call of
/// the driver: such a call may wait for a step that waits for the tokens.
#[derive(Debug)]
struct SampledTokens {
    /// For each place of the ring its turn. Then the tokens of all places.
    words: HostWords,
    ring: TokenRing,
    /// Set at the end of the backend, which computes no token any more.
    is_over: AtomicBool,
}

/// The number of steps that have used each place of the ring. The numbers wrap.
#[derive(Debug)]
struct UseCounts(Vec<u32>);

/// The parts that this process needs for the stages in other processes.
#[derive(Debug)]
pub(super) struct ElsewhereParts<'a> {
    pub(super) remote: &'a [RemoteProcess],
    /// Where the rows of the stage before this process's go; `None` if there is none.
    pub(super) rows: Option<HostOutbox<Bf16>>,
    pub(super) sizes: LinkSizes,
    /// The number of steps that may be in flight.
    pub(super) n_steps: usize,
    pub(super) vocab: usize,
    pub(super) lost: LostFlags,
    pub(super) card: &'a ComputeCard,
}

/// A step that is not sent yet.
#[derive(Debug)]
struct StepElsewhere {
    rows: Vec<RowElsewhere>,
    place: usize,
    signal: Arc<FenceSignal>,
}

/// A row of a step.
#[derive(Debug)]
struct RowElsewhere {
    row: StageRow,
    /// The index in the ring of the token that the row continues; `None` if the row has its tokens.
    drawn: Option<u32>,
}

/// A step that is sent to a stage.
#[derive(Debug)]
struct SentStep {
    rows: Arc<[StageRow]>,
    place: usize,
    signal: Arc<FenceSignal>,
}

/// Sends steps to the first stage.
struct Sender {
    first: Target,
    tokens: Arc<SampledTokens>,
    turns: UseCounts,
    lost: LostFlags,
    vocab: usize,
}

/// Waits for the processes of one stage, and passes its rows on.
struct Passer {
    processes: Vec<Arc<dyn RemoteStage>>,
    /// `None` for the last stage.
    next: Option<Target>,
    hidden: usize,
}

/// The processes that compute a stage. The stage may have none elsewhere.
struct Target {
    processes: Vec<Arc<dyn RemoteStage>>,
    /// The queue of the thread that waits for them; `None` if there are none.
    sent: Option<SyncSender<SentStep>>,
    /// The ring of this process, if it computes ranks of this stage, and a stage is before it.
    here: Option<RowsHere>,
}

type RowsHere = Arc<Mutex<HostOutbox<Bf16>>>;

// === impl Elsewhere ===

impl Elsewhere {
    pub(super) fn start(parts: ElsewhereParts<'_>) -> Result<Self, OpenError> {
        let ElsewhereParts { remote, rows, sizes, n_steps, vocab, lost, card } = parts;
        let ring = TokenRing::new(sizes.n_stages, sizes.limits.rows);
        let (steps, to_send) = sync_channel(n_steps);
        let tokens = Arc::new(SampledTokens::new(card, ring)?);
        let rows = rows.map(|rows| Arc::new(Mutex::new(rows)));
        let turns = || UseCounts(vec![0; ring.n_places()]);
        // No stage has a next stage yet: the loop begins with the last one.
        let mut next = None;
        for nth in (0..sizes.n_stages).rev() {
            let of_stage = remote.iter().filter(|process| process.share.stage == nth);
            let processes: Vec<_> = of_stage.map(|process| Arc::clone(&process.stage)).collect();
            let (here, mut sent) = (rows.clone().filter(|_| next.is_none()), None);
            if !processes.is_empty() {
                let (sent_here, to_wait_for) = sync_channel(n_steps);
                let passer = Passer { processes: processes.clone(), next, hidden: sizes.hidden };
                spawn("stage-rows", &lost, &rows, move || passer.pass_all(&to_wait_for))?;
                sent = Some(sent_here);
            }
            next = Some(Target { processes, sent, here });
        }
        let first = next.expect("there is a first stage");
        let sender = Sender { first, tokens: Arc::clone(&tokens), turns: turns(), lost: lost.clone(), vocab };
        spawn("stage-steps", &lost, &rows, move || sender.send_all(&to_send))?;
        Ok(Self { steps, tokens, turns: turns(), lost })
    }

    /// Sends a step to the first stage. `signal` is raised for the layers of other processes.
    pub(super) fn begin(
        &self,
        plan: &Plan<'_>,
        rows: &[Row<'_>],
        place: usize,
        signal: &Arc<FenceSignal>,
    ) -> Result<(), CudaError> {
        let rows = plan.passing(rows).map(|(row, input)| RowElsewhere::of(row, input)).collect();
        let step = StepElsewhere { rows, place, signal: Arc::clone(signal) };
        self.steps.try_send(step).map_err(|_| {
            self.lost.elsewhere.get_or_init(StageLost::too_many_steps);
            self.lost.error()
        })
    }

    /// Publishes the tokens that a step samples, in stream order. Called once for each step that was begun.
    pub(super) fn sampled(
        &mut self,
        card: &ComputeCard,
        place: usize,
        tokens: View<'_, u32>,
    ) -> Result<(), CudaError> {
        let SampledTokens { words, ring, .. } = &*self.tokens;
        let turn = self.turns.next(place);
        card.publish(tokens, words, ring.n_places() + ring.start(place), place, turn)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.tokens.is_over.store(true, Ordering::Relaxed);
    }
}

// === impl SampledTokens ===

impl SampledTokens {
    fn new(card: &ComputeCard, ring: TokenRing) -> Result<Self, CudaError> {
        let words = HostWords::new(card.context(), ring.n_places() + ring.start(ring.n_places()))?;
        Ok(Self { words, ring, is_over: AtomicBool::new(false) })
    }

    /// Returns a token by its index in the ring. Waits until the GPU has written the place for the last turn.
    fn get(&self, index: u32, turns: &UseCounts, lost: &LostFlags) -> Result<u32, StageLost> {
        let (words, place) = (self.words.words(), self.ring.place_of(index));
        let began = Instant::now();
        while words[place].load(Ordering::Acquire) != turns.0[place] {
            let waited = began.elapsed();
            if self.is_over.load(Ordering::Relaxed) || lost.is_raised() || waited > STEP_WITHIN {
                return Err(StageLost("the token that a row continues did not arrive".to_owned()));
            }
            polling::sleep(waited);
        }
        Ok(words[self.ring.n_places() + index as usize].load(Ordering::Relaxed))
    }
}

impl UseCounts {
    fn next(&mut self, place: usize) -> u32 {
        self.0[place] = self.0[place].wrapping_add(1);
        self.0[place]
    }
}

/// Starts a thread. If `work` fails, the stages are lost, and no GPU waits for their rows any more.
fn spawn(
    name: &str,
    lost: &LostFlags,
    rows: &Option<RowsHere>,
    work: impl FnOnce() -> Result<(), StageLost> + Send + 'static,
) -> Result<(), LoadError> {
    let (lost, rows) = (lost.clone(), rows.clone());
    let run = move || {
        if let Err(error) = work() {
            lost.elsewhere.get_or_init(|| error);
            lost.raise();
            if let Some(rows) = rows {
                rows.lock().unwrap_or_else(PoisonError::into_inner).release();
            }
        }
    };
    let started: io::Result<thread::JoinHandle<()>> = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(LoadError::Threads)
}

// === impl Sender ===

impl Sender {
    /// Sends steps until no more come.
    fn send_all(mut self, steps: &Receiver<StepElsewhere>) -> Result<(), StageLost> {
        while let Ok(StepElsewhere { rows, place, signal }) = steps.recv() {
            let rows = rows.into_iter().map(|row| self.known(row)).collect::<Result<Vec<_>, _>>()?;
            self.turns.next(place);
            self.first.begin(SentStep { rows: rows.into(), place, signal }, &Bytes::new())?;
        }
        Ok(())
    }

    /// Returns the row with its tokens. Waits until the step that samples its token has ended.
    fn known(&self, row: RowElsewhere) -> Result<StageRow, StageLost> {
        let RowElsewhere { mut row, drawn } = row;
        if let Some(index) = drawn {
            let token = self.tokens.get(index, &self.turns, &self.lost)?;
            // A row that has failed has no token. Its next row fails too, so any token does.
            row.tokens = vec![TokenId(if (token as usize) < self.vocab { token } else { 0 })];
        }
        Ok(row)
    }
}

impl RowElsewhere {
    fn of(row: &Row<'_>, input: Option<InputToken>) -> Self {
        let (tokens, drawn) = match (input, row.input) {
            (Some(InputToken::Drawn(index)), _) => (Vec::new(), Some(index)),
            (Some(InputToken::Token(token)), _) => (vec![TokenId(token)], None),
            (None, RowInput::Tokens(tokens)) => (tokens.to_vec(), None),
            (None, RowInput::Previous) => (Vec::new(), None),
        };
        let tables = row.tables.iter().map(|table| table.to_vec()).collect();
        let targets = row.prompt_logprobs.map_or(&[][..], |targets| targets.tokens);
        let n_targets = targets.len().min(row.input.n_tokens());
        let is_wanted = row.sample.is_some();
        Self {
            row: StageRow { tokens, start: row.start, tables, is_wanted, n_targets, outcome: Ok(()) },
            drawn,
        }
    }
}

// === impl Passer ===

impl Passer {
    /// Passes rows on until no more steps were sent. The process with the first rank has them. A process that reports a layer
    /// has the sum of all ranks, so all of them have written it.
    fn pass_all(self, sent: &Receiver<SentStep>) -> Result<(), StageLost> {
        while let Ok(step) = sent.recv() {
            let mut layers_done = |n_layers| step.signal.layers_done(n_layers);
            let finish = |process: &Arc<dyn RemoteStage>| process.finish(&mut layers_done);
            let results = self.processes.iter().map(finish).collect::<Result<Vec<_>, _>>()?;
            let Some(next) = &self.next else { continue };
            let hidden = results.into_iter().next().map(|results| results.hidden).unwrap_or_default();
            let n_tokens: usize = step.rows.iter().map(|row| row.tokens.len()).sum();
            if hidden.len() != hidden_bytes(n_tokens, self.hidden) {
                return Err(StageLost::other_step());
            }
            next.begin(step, &hidden)?;
        }
        Ok(())
    }
}

// === impl Target ===

impl Target {
    /// Sends a step to all processes of the stage, with the rows of the stage before.
    fn begin(&self, step: SentStep, hidden: &Bytes) -> Result<(), StageLost> {
        if let Some(rows) = &self.here {
            rows.lock().unwrap_or_else(PoisonError::into_inner).put(step.place, hidden);
        }
        for process in &self.processes {
            let (rows, hidden) = (step.rows.to_vec(), hidden.clone());
            process.begin(StageInput { rows, hidden, ..StageInput::default() })?;
        }
        if let Some(sent) = &self.sent {
            // The step is on its way before the thread that waits for it wakes. If that thread has ended, it has
            // recorded the reason.
            let _ = sent.send(step);
        }
        Ok(())
    }
}

/// Returns the bytes of the rows that stages pass on: the residual, and the rows normed for the next layer.
pub(super) fn hidden_bytes(n_tokens: usize, hidden: usize) -> usize {
    2 * n_tokens * hidden * size_of::<Bf16>()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use kv_cache::FenceSignal;
    use types::BlockIdx;

    use super::*;
    use crate::backend::remote::{StageResults, StageWeights};
    use crate::step::{PromptTargets, SlotId};

    /// A stage that keeps what it gets, and answers with prepared rows.
    #[derive(Debug, Default)]
    struct KeepingStage {
        begun: Mutex<Vec<StageInput>>,
        answers: Mutex<VecDeque<Vec<u8>>>,
    }

    impl RemoteStage for KeepingStage {
        fn loaded(&self) -> Result<StageWeights, StageLost> {
            Err(StageLost("it loads nothing".to_owned()))
        }

        fn begin(&self, input: StageInput) -> Result<(), StageLost> {
            self.begun.lock().expect("no panic").push(input);
            Ok(())
        }

        fn finish(&self, layers_done: &mut dyn FnMut(u16)) -> Result<StageResults, StageLost> {
            layers_done(3);
            let hidden = self.answers.lock().expect("no panic").pop_front();
            let hidden = hidden.ok_or_else(|| StageLost("the test has no more rows".to_owned()))?;
            Ok(StageResults { hidden: hidden.into(), outcomes: Vec::new(), routing_leads: Vec::new() })
        }
    }

    fn row(n_tokens: usize) -> StageRow {
        let tables = vec![vec![BlockIdx(3)]];
        StageRow {
            tokens: vec![TokenId(5); n_tokens],
            start: 2,
            tables,
            is_wanted: false,
            n_targets: 0,
            outcome: Ok(()),
        }
    }

    #[test]
    fn rows_of_one_stage_are_the_next_ones_input() {
        let (first, second) = (Arc::new(KeepingStage::default()), Arc::new(KeepingStage::default()));
        let hidden: Vec<u8> = (0..hidden_bytes(4, 2) as u8).collect();
        *first.answers.lock().expect("no panic") = [hidden.clone(), vec![0; 7]].into();
        let (sent_on, to_second) = sync_channel(2);
        let mate = Arc::new(KeepingStage::default());
        *mate.answers.lock().expect("no panic") = [Vec::new(), Vec::new()].into();
        let next = Target { processes: vec![Arc::clone(&second) as _], sent: Some(sent_on), here: None };
        let passer = Passer { processes: vec![first, mate], next: Some(next), hidden: 2 };
        let (sent, to_first) = sync_channel(2);
        let (signal, fence) = FenceSignal::new();
        let signal = Arc::new(signal);
        for place in [0, 1] {
            let rows = Arc::new([row(1), row(3)]);
            sent.send(SentStep { rows, place, signal: Arc::clone(&signal) }).expect("there is room");
        }
        drop(sent);
        let error = passer.pass_all(&to_first).expect_err("the second step has rows of another size");
        assert_eq!(error, StageLost::other_step());
        assert!(fence.is_open(3) && !fence.is_open(4), "layers of the stage are reported");
        let passed: Vec<usize> = to_second.try_iter().map(|step| step.place).collect();
        assert_eq!(passed, [0]);
        let begun = std::mem::take(&mut *second.begun.lock().expect("no panic"));
        assert_eq!(
            begun,
            [StageInput { rows: vec![row(1), row(3)], hidden: hidden.into(), ..StageInput::default() }]
        );
    }

    #[test]
    fn a_row_has_its_tokens_or_names_the_one_that_it_continues() {
        let tokens = [TokenId(5), TokenId(6)];
        let tables: &[&[BlockIdx]] = &[&[BlockIdx(1)]];
        let of = |input, known| {
            let targets = PromptTargets { tokens: &tokens, n_top: 0 };
            let prompt_logprobs = Some(targets);
            let row = Row { slot: SlotId(1), input, start: 9, tables, prompt_logprobs, sample: None };
            let RowElsewhere { row, drawn } = RowElsewhere::of(&row, known);
            assert_eq!((row.start, row.tables), (9, vec![vec![BlockIdx(1)]]));
            assert_eq!((row.is_wanted, row.n_targets), (false, input.n_tokens()));
            (row.tokens, drawn)
        };
        assert_eq!(of(RowInput::Tokens(&tokens), None), (tokens.to_vec(), None));
        let one = Some(InputToken::Token(5));
        assert_eq!(of(RowInput::Tokens(&tokens[..1]), one), (vec![TokenId(5)], None));
        assert_eq!(of(RowInput::Previous, one), (vec![TokenId(5)], None));
        assert_eq!(of(RowInput::Previous, Some(InputToken::Drawn(70))), (Vec::new(), Some(70)));
    }

    #[test]
    fn turns_wrap() {
        let mut turns = UseCounts(vec![0, u32::MAX]);
        assert_eq!([turns.next(0), turns.next(0), turns.next(1)], [1, 2, 0]);
    }
}
