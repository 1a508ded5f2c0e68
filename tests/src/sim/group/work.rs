//! The thread that launches steps on the head, and compares their results with those of one process.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;

use chassis::Standstill;
use engine::{Backend, PendingStep, SampledToken, SlotId, StepBatch, StepOutput};
use kv_cache::BlockLease;
use kv_transfer::Chunk;
use tokio::sync::mpsc;
use types::step::Step;
use types::{BlockIdx, Handoff, KvSpan, TransferId};

use super::clock::Progress;
use super::reference::{DecodeToken, PromptChunk, PromptReference, Reference};

/// A prompt that the thread computes.
#[derive(Debug)]
pub struct PromptWork {
    pub slot: SlotId,
    /// The index of the reference's prompt.
    pub prompt: usize,
    /// The sequence's blocks.
    pub lease: Arc<BlockLease>,
    pub transfer: TransferId,
    /// The number of decode steps after the prompt.
    pub n_decoded: usize,
    /// Gets the KV of each step when it is launched, and then the first token.
    pub chunks: mpsc::Sender<Chunk>,
}

/// A report of the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps of a wave have their right results.
    WaveDone,
    /// A step has failed. The thread ends.
    Failed(String),
    /// A step has the results of another one. The thread ends.
    Wrong(String),
}

/// Limit of outcomes that nothing has read yet.
pub const OUTCOMES_MAX: usize = 16;
/// Limit of chunks of one prompt that nothing has read yet. All chunks of a prompt fit.
pub const CHUNKS_MAX: usize = 16;

/// How often a stopped thread looks whether its process goes on.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The inputs of the thread.
#[derive(Debug)]
pub struct Worker {
    pub backend: Box<dyn Backend>,
    pub reference: &'static Reference,
    pub chunk_blocks: Vec<u32>,
    pub n_sets: usize,
    pub waves: Receiver<Vec<PromptWork>>,
    pub outcomes: mpsc::Sender<Outcome>,
    pub progress: Progress,
    /// Stops the thread.
    pub process: Standstill,
}

/// A part of a step.
#[derive(Clone, Debug)]
struct Part {
    /// The index of the prompt in its wave.
    nth: usize,
    of: PartOf,
}

#[derive(Clone, Debug)]
enum PartOf {
    /// Blocks of the prompt.
    Prompt(Range<u32>),
    /// The decode step with this number.
    Answer(usize),
}

impl Worker {
    /// Starts the thread. It ends when no more waves come, or a step fails. Then it drops the backend.
    pub fn start(self) -> thread::JoinHandle<()> {
        let thread = thread::Builder::new().name("sim worker".to_owned());
        thread.spawn(move || self.work()).expect("a thread can be started")
    }

    fn work(mut self) {
        while let Ok(wave) = self.waves.recv() {
            let outcome = self.wave(&wave).err().unwrap_or(Outcome::WaveDone);
            let goes_on = outcome == Outcome::WaveDone;
            // No more chunks come.
            drop(wave);
            self.progress.note(|seen| seen.n_waves = 0);
            if self.outcomes.blocking_send(outcome).is_err() || !goes_on {
                return;
            }
        }
    }

    fn wave(&mut self, wave: &[PromptWork]) -> Result<(), Outcome> {
        let mut in_flight: VecDeque<(PendingStep, Vec<Part>)> = VecDeque::new();
        for parts in self.steps(wave) {
            let computes = |step: &Part| parts.iter().any(|part| part.nth == step.nth);
            // A decode step continues the only step in flight of its prompt.
            while in_flight.len() == self.backend.steps_in_flight_max()
                || in_flight.iter().filter(|(_, step)| step.iter().any(computes)).count() > 1
            {
                self.collect(wave, in_flight.pop_front())?;
            }
            let step = self.launch(wave, &parts)?;
            in_flight.push_back((step, parts));
        }
        while !in_flight.is_empty() {
            self.collect(wave, in_flight.pop_front())?;
        }
        Ok(())
    }

    /// Divides the prompts over steps: each step computes a chunk or a token of every prompt in its set that is not
    /// complete.
    fn steps(&self, wave: &[PromptWork]) -> Vec<Vec<Part>> {
        let mut parts: Vec<VecDeque<Part>> =
            wave.iter().enumerate().map(|(nth, work)| self.parts(nth, work)).collect();
        let mut steps = Vec::new();
        for set in (0..self.n_sets).cycle() {
            let of_set = parts.iter_mut().skip(set).step_by(self.n_sets);
            let step: Vec<Part> = of_set.filter_map(VecDeque::pop_front).collect();
            if !step.is_empty() {
                steps.push(step);
            }
            if parts.iter().all(VecDeque::is_empty) {
                break;
            }
        }
        steps
    }

    /// Divides one prompt and its answer.
    fn parts(&self, nth: usize, work: &PromptWork) -> VecDeque<Part> {
        let block_tokens = usize::from(self.reference.model.layout.block_tokens);
        let n_blocks = (self.reference.prompts[work.prompt].tokens.len() / block_tokens) as u32;
        let mut chunk_blocks = self.chunk_blocks.iter().cycle();
        let (mut parts, mut done) = (VecDeque::new(), 0);
        while done < n_blocks {
            let end = n_blocks.min(done + chunk_blocks.next().expect("there is a size of chunks"));
            parts.push_back(Part { nth, of: PartOf::Prompt(std::mem::replace(&mut done, end)..end) });
        }
        parts.extend((0..work.n_decoded).map(|token| Part { nth, of: PartOf::Answer(token) }));
        parts
    }

    fn launch(&mut self, wave: &[PromptWork], parts: &[Part]) -> Result<PendingStep, Outcome> {
        let layout = &self.reference.model.layout;
        let tables = |part: &Part| {
            let lease = &wave[part.nth].lease;
            layout.group_indices().map(|group| lease.table(group)).collect()
        };
        let tables: Vec<Vec<&[BlockIdx]>> = parts.iter().map(tables).collect();
        let row = |(part, tables)| {
            let (part, tables): (&Part, &Vec<&[BlockIdx]>) = (part, tables);
            let PromptWork { slot, prompt, .. } = wave[part.nth];
            let prompt = &self.reference.prompts[prompt].tokens;
            match &part.of {
                PartOf::Prompt(blocks) => {
                    let tokens = self.tokens(blocks);
                    self.reference.row(PromptChunk { slot, prompt, tokens, tables })
                }
                PartOf::Answer(nth) => {
                    self.reference.decode_row(DecodeToken { slot, prompt, nth: *nth, tables })
                }
            }
        };
        let rows: Vec<_> = parts.iter().zip(&tables).map(row).collect();
        wait_while_stopped(&self.process);
        // Before the launch, so that the clock stands still.
        self.progress.note(|seen| seen.n_launched += 1);
        let launched = self.backend.launch(StepBatch { rows: &rows });
        let step = launched.map_err(|error| Outcome::Failed(error.to_string()))?;
        for part in parts {
            let PartOf::Prompt(blocks) = &part.of else { continue };
            for group in layout.group_indices() {
                let layers = 0..layout.group(group).layers.len() as u16;
                let span = KvSpan { group, blocks: blocks.clone(), layers };
                let from = Arc::clone(&wave[part.nth].lease);
                wave[part.nth].give(Chunk::Kv { span, from, ready: step.fence().clone() });
            }
        }
        Ok(step)
    }

    fn tokens(&self, blocks: &Range<u32>) -> Range<usize> {
        let block_tokens = usize::from(self.reference.model.layout.block_tokens);
        blocks.start as usize * block_tokens..blocks.end as usize * block_tokens
    }

    fn collect(
        &mut self,
        wave: &[PromptWork],
        launched: Option<(PendingStep, Vec<Part>)>,
    ) -> Result<(), Outcome> {
        let Some((step, parts)) = launched else { return Ok(()) };
        let collected = self.backend.collect(step);
        self.progress.note(|seen| seen.n_collected += 1);
        let output = collected.map_err(|error| Outcome::Failed(error.to_string()))?;
        self.check(wave, &parts, output).map_err(Outcome::Wrong)
    }

    /// Compares every bit of a step's results with those of one process. Then the KV of complete prompts may leave.
    fn check(&self, wave: &[PromptWork], parts: &[Part], output: StepOutput) -> Result<(), String> {
        if output.rows.len() != parts.len() {
            return Err(format!("{} rows instead of {}", output.rows.len(), parts.len()));
        }
        let mut logprobs = output.prompt_logprobs.into_iter();
        for (part, row) in parts.iter().zip(output.rows) {
            let work = &wave[part.nth];
            let prompt = &self.reference.prompts[work.prompt];
            let whose = format!("{:?} of prompt {}", part.of, work.prompt);
            let (expected, expected_logprobs) = match &part.of {
                PartOf::Prompt(blocks) => {
                    let tokens = self.tokens(blocks);
                    let is_last = tokens.end == prompt.tokens.len();
                    (is_last.then_some(&prompt.first), prompt.logprobs_of(&tokens))
                }
                PartOf::Answer(nth) => (Some(&prompt.answer[*nth]), &[][..]),
            };
            if logprobs.next().unwrap_or_default() != expected_logprobs {
                return Err(format!("{whose} has other log-probabilities"));
            }
            let sampled = row.map_err(|error| format!("{whose}: {error}"))?;
            if sampled.as_ref() != expected {
                return Err(format!("{whose} has another token: {sampled:?}"));
            }
            if let (PartOf::Prompt(_), Some(first)) = (&part.of, sampled) {
                work.hand_off(prompt, first);
            }
        }
        Ok(())
    }
}

/// Makes a thread stand still with its process.
pub fn wait_while_stopped(process: &Standstill) {
    while process.is_stopped() {
        thread::sleep(LOOK_EVERY);
    }
}

impl PromptWork {
    fn hand_off(&self, prompt: &PromptReference, first: SampledToken) {
        let first = Step { token: first.token, index: 0, logprobs: None, finish: None };
        let n_tokens = prompt.tokens.len() as u32;
        self.give(Chunk::Handoff(Handoff { transfer: self.transfer, n_tokens, first }));
    }

    fn give(&self, chunk: Chunk) {
        // If the transfer has failed, nothing takes chunks.
        let _ = self.chunks.try_send(chunk);
    }
}
