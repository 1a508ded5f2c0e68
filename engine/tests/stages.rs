//! Every architecture, divided over stages, ranks and processes, gives every bit that one stage of one rank gives.

use std::collections::VecDeque;
use std::num::NonZero;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use baton_engine::cpu::process::PreparedStage;
use baton_engine::remote::{DirectStage, RemoteProcess, StageLost, StageMates};
use baton_engine::{
    Backend, CpuBackend, CpuSettings, LoadFormat, PendingStep, PromptTargets, Row, RowInput, SampleSpec,
    SlotId, StepBatch,
};
use bytes::Bytes;
use serde_json::{Value, json};
use tempfile::TempDir;
use types::step::PromptLogprob;
use types::{BlockIdx, ProcessGrid, Sampling, StageSplit, StopRules, TokenId};

const N_LAYERS: usize = 4;
/// The number of tokens that each sequence generates.
const N_STEPS: usize = 8;
/// The lengths of the prompts, and of the chunks in which they are computed.
const PROMPTS: [(usize, usize); 5] = [(40, 16), (3, 3), (57, 9), (17, 17), (30, 1)];
static STOP: StopRules =
    StopRules { max_tokens: 100, min_tokens: 0, stop_tokens: Vec::new(), ignore_eos: true };

/// The answer of a sequence: its tokens and all of its log-probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<TokenId>,
    top: Vec<Vec<(TokenId, f32)>>,
    prompt: Vec<PromptLogprob>,
}

#[derive(Clone, Debug)]
struct Sequence {
    slot: SlotId,
    tokens: Vec<TokenId>,
    n_prompt: usize,
    chunk: usize,
    n_computed: usize,
    /// The number of tokens that steps in flight sample.
    n_pending: usize,
    tables: Vec<Vec<BlockIdx>>,
    sampling: Sampling,
    answer: Answer,
}

/// A sequence's part of a step.
#[derive(Clone, Copy, Debug)]
struct Part {
    sequence: usize,
    n_tokens: usize,
}

impl Sequence {
    fn all(n_groups: usize, block_tokens: usize) -> Vec<Self> {
        let mut next = 0;
        let mut all = Vec::new();
        for (slot, (n_prompt, chunk)) in (0..).zip(PROMPTS) {
            let n_blocks = (n_prompt + N_STEPS).div_ceil(block_tokens) as u32;
            let mut table = || {
                next += n_blocks;
                (next - n_blocks..next).map(BlockIdx).collect()
            };
            all.push(Self {
                slot: SlotId(slot),
                tokens: (0..n_prompt as u64)
                    .map(|at| TokenId(2 + ((at * 7 + slot * 31) % 60) as u32))
                    .collect(),
                n_prompt,
                chunk,
                n_computed: 0,
                n_pending: 0,
                tables: (0..n_groups).map(|_| table()).collect(),
                sampling: Sampling { temperature: 0.8, seed: slot, logprobs: Some(4), ..Sampling::default() },
                answer: Answer::default(),
            });
        }
        all
    }

    fn n_known(&self) -> usize {
        self.tokens.len() + self.n_pending
    }

    fn is_prompt(&self) -> bool {
        self.n_computed < self.n_prompt
    }

    /// Returns the number of tokens that the sequence's next row computes; `None` if all tokens are sampled.
    fn next_tokens(&self) -> Option<usize> {
        let is_done = self.n_known() == self.n_prompt + N_STEPS;
        (!is_done).then(|| self.chunk.min(self.n_known() - self.n_computed))
    }

    fn row<'a>(&'a self, n_tokens: usize, tables: &'a [&'a [BlockIdx]]) -> Row<'a> {
        let (start, end) = (self.n_computed, self.n_computed + n_tokens);
        let targets = self.tokens[..self.n_prompt].get(start + 1..(end + 1).min(self.n_prompt));
        let targets = targets.filter(|targets| !targets.is_empty());
        let sample = SampleSpec {
            sampling: &self.sampling,
            stop: &STOP,
            history: &self.tokens,
            n_prompt: self.n_prompt,
            index: (self.n_known() - self.n_prompt) as u32,
            constraint: None,
        };
        Row {
            slot: self.slot,
            input: self.tokens.get(start..end).map_or(RowInput::Previous, RowInput::Tokens),
            start,
            tables,
            prompt_logprobs: targets.map(|tokens| PromptTargets { tokens, n_top: 2 }),
            sample: (end == self.n_known()).then_some(sample),
        }
    }
}

/// Computes all sequences, and launches as many steps as the backend allows before it collects one. Consecutive steps
/// compute chunks of the same prompt. A sequence that generates has a row in one of the launched steps.
fn answers(mut backend: CpuBackend) -> Vec<Answer> {
    let layout = &backend.model().layout;
    let mut sequences = Sequence::all(layout.groups.len(), usize::from(layout.block_tokens));
    let n_parts = backend.steps_in_flight_max() - 1;
    let mut flights: VecDeque<(PendingStep, Vec<Part>)> = VecDeque::new();
    let mut step = 0;
    while !flights.is_empty() || step < n_parts {
        let part = |(nth, sequence): (usize, &Sequence)| {
            let takes_part = sequence.is_prompt() || nth % n_parts == step % n_parts;
            let n_tokens = sequence.next_tokens().filter(|_| takes_part)?;
            Some(Part { sequence: nth, n_tokens })
        };
        let parts: Vec<Part> = sequences.iter().enumerate().filter_map(part).collect();
        flights.push_back((launch(&mut backend, &sequences, &parts), parts.clone()));
        for Part { sequence, n_tokens } in parts {
            let sequence = &mut sequences[sequence];
            let samples = sequence.n_computed + n_tokens == sequence.n_known();
            sequence.n_computed += n_tokens;
            sequence.n_pending += usize::from(samples);
        }
        step += 1;
        if flights.len() > n_parts {
            let (launched, parts) = flights.pop_front().expect("several steps are in flight");
            accept(&mut backend, &mut sequences, launched, &parts);
        }
        if sequences.iter().all(|sequence| sequence.next_tokens().is_none()) {
            for (launched, parts) in std::mem::take(&mut flights) {
                accept(&mut backend, &mut sequences, launched, &parts);
            }
        }
    }
    sequences.into_iter().map(|sequence| sequence.answer).collect()
}

fn launch(backend: &mut CpuBackend, sequences: &[Sequence], parts: &[Part]) -> PendingStep {
    let tables_of = |part: &Part| sequences[part.sequence].tables.iter().map(Vec::as_slice).collect();
    let tables: Vec<Vec<&[BlockIdx]>> = parts.iter().map(tables_of).collect();
    let row = |(part, tables)| -> Row<'_> {
        let (part, tables): (&Part, &Vec<&[BlockIdx]>) = (part, tables);
        sequences[part.sequence].row(part.n_tokens, tables)
    };
    let rows: Vec<Row<'_>> = parts.iter().zip(&tables).map(row).collect();
    backend.launch(StepBatch { rows: &rows }).expect("launched")
}

fn accept(backend: &mut CpuBackend, sequences: &mut [Sequence], launched: PendingStep, parts: &[Part]) {
    let output = backend.collect(launched).expect("collected");
    let mut of_prompts = output.prompt_logprobs.into_iter();
    for (part, outcome) in parts.iter().zip(output.rows) {
        let sequence = &mut sequences[part.sequence];
        sequence.answer.prompt.extend(of_prompts.next().unwrap_or_default());
        if let Some(sampled) = outcome.expect("the row succeeds") {
            sequence.n_pending -= 1;
            sequence.tokens.push(sampled.token);
            sequence.answer.tokens.push(sampled.token);
            sequence.answer.top.push(sampled.logprobs.expect("they were asked for").top);
        }
    }
}

fn settings(stages: &[u16], ranks: u16, load_format: LoadFormat) -> CpuSettings {
    let n_stages = NonZero::new(stages.len() as u16).expect("some");
    CpuSettings {
        threads: NonZero::new(1),
        ranks: NonZero::new(ranks).expect("some"),
        stages: StageSplit { n_stages, layers: stages.to_vec() },
        load_format,
        ..CpuSettings::default()
    }
}

fn opened(folder: &Path, stages: &[u16], ranks: u16, load_format: LoadFormat) -> CpuBackend {
    CpuBackend::open(folder, 4 << 20, &settings(stages, ranks, load_format)).expect("the model opens")
}

/// Opens a model as in processes of their own, with the same number for each stage.
fn in_processes(
    folder: &Path,
    stages: &[u16],
    ranks: u16,
    processes_of_stage: u16,
    load_format: LoadFormat,
) -> CpuBackend {
    let settings = settings(stages, ranks, load_format);
    let n_stages = stages.len() as u16;
    let grid = ProcessGrid::new(n_stages * processes_of_stage, n_stages, ranks).expect("they divide");
    let prepare = |process| {
        let share = grid.share(process);
        PreparedStage::prepare(folder, (4 << 20).into(), &settings, share).expect("prepared")
    };
    let mut prepared: Vec<PreparedStage> = (0..grid.n_processes()).map(prepare).collect();
    let n_blocks = prepared.iter().map(PreparedStage::n_blocks).min().expect("a process");
    let mut mates: Vec<Option<Arc<dyn StageMates>>> = vec![None; grid.n_processes()];
    for stage in (0..grid.n_stages()).filter(|_| processes_of_stage > 1) {
        let of_stage: Vec<usize> = grid.of_stage(stage).collect();
        for (process, of_process) in of_stage.iter().zip(DirectMates::all(of_stage.len())) {
            mates[*process] = Some(Arc::new(of_process));
        }
    }
    let head = prepared.pop().expect("the last process");
    let of_head = mates.pop().expect("the last process");
    let remote = prepared.into_iter().zip(mates).enumerate().map(|(process, (prepared, mates))| {
        let stage = prepared.open(n_blocks, mates).expect("the process opens");
        let stage = Arc::new(DirectStage(Arc::new(stage)));
        RemoteProcess { share: grid.share(process), stage }
    });
    let remote: Vec<_> = remote.collect();
    head.open_head(n_blocks, &remote, of_head).expect("the head opens")
}

/// The other processes of a stage, without connections.
#[derive(Debug)]
struct DirectMates {
    to: Vec<mpsc::Sender<Bytes>>,
    from: Mutex<Vec<mpsc::Receiver<Bytes>>>,
}

impl DirectMates {
    fn all(n_processes: usize) -> Vec<Self> {
        let mut all: Vec<(Vec<_>, Vec<_>)> = (0..n_processes).map(|_| Default::default()).collect();
        for (to, from) in (0..n_processes).flat_map(|to| (0..n_processes).map(move |from| (to, from))) {
            if to != from {
                let (sender, receiver) = mpsc::channel();
                all[from].0.push(sender);
                all[to].1.push(receiver);
            }
        }
        all.into_iter().map(|(to, from)| Self { to, from: Mutex::new(from) }).collect()
    }
}

impl StageMates for DirectMates {
    fn exchange(&self, mine: Bytes) -> Result<Vec<Bytes>, StageLost> {
        let gone = |_| StageLost("another process is gone".to_owned());
        for to in &self.to {
            to.send(mine.clone()).map_err(|_| gone(()))?;
        }
        let from = self.from.lock().expect("no test panics with it");
        from.iter().map(|from| from.recv().map_err(|_| gone(()))).collect()
    }

    fn is_lost(&self) -> bool {
        false
    }
}

/// Makes a folder with the config of a test model, but with four layers and no weights.
fn with_four_layers(folder: &Path) -> TempDir {
    let config = std::fs::read(folder.join("config.json")).expect("a file");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["num_hidden_layers"] = json!(N_LAYERS);
    if let Some(types) = config["layer_types"].as_array() {
        config["layer_types"] = types.iter().cycle().take(N_LAYERS).cloned().collect();
    }
    let folder = TempDir::new().expect("a folder");
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("a file");
    folder
}

fn check(model: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
    let made = with_four_layers(&folder);
    let dummy = LoadFormat::Dummy { seed: 7 };
    let expected = answers(opened(made.path(), &[4], 1, dummy));
    for answer in &expected {
        assert_eq!((answer.tokens.len(), answer.top.len()), (N_STEPS, N_STEPS), "{model}");
    }
    let n_prompt: Vec<usize> = expected.iter().map(|answer| answer.prompt.len() + 1).collect();
    assert_eq!(n_prompt, PROMPTS.map(|(n_prompt, _)| n_prompt), "{model}");
    for stages in [&[4][..], &[2, 2], &[1, 3], &[2, 1, 1], &[1, 1, 2]] {
        for ranks in [1, 2] {
            let seen = answers(opened(made.path(), stages, ranks, dummy));
            assert_eq!(seen, expected, "{model}, {ranks} ranks, stages of {stages:?} layers");
            let seen = answers(in_processes(made.path(), stages, ranks, 1, dummy));
            assert_eq!(seen, expected, "{model}, {ranks} ranks, processes of {stages:?} layers");
        }
        if stages.len() < 3 {
            let seen = answers(in_processes(made.path(), stages, 2, 2, dummy));
            assert_eq!(seen, expected, "{model}, a process for each rank of {stages:?} layers");
        }
    }
}

#[test]
fn models_with_heads_give_the_same_bits() {
    for model in ["llama", "llama3", "llama-yarn", "qwen2", "qwen3"] {
        check(model);
    }
}

#[test]
fn models_with_windows_give_the_same_bits() {
    for model in ["mistral", "qwen2-window"] {
        check(model);
    }
}

#[test]
fn models_with_experts_give_the_same_bits() {
    for model in ["mixtral", "qwen3-moe"] {
        check(model);
    }
}

#[test]
fn models_with_latents_give_the_same_bits() {
    for model in ["deepseek-v2", "deepseek-v3"] {
        check(model);
    }
}

/// Trained weights are in files, which each stage reads.
#[test]
fn models_in_files_give_the_same_bits() {
    for (model, stages) in
        [("llama3", &[1, 1][..]), ("qwen2-window", &[1, 1, 1]), ("qwen3-moe-stacked", &[1, 1])]
    {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
        let n_layers = stages.len() as u16;
        let whole = opened(&folder, &[n_layers], 1, LoadFormat::Safetensors);
        let fingerprint = whole.model().fingerprint.clone();
        let expected = answers(whole);
        let seen = answers(opened(&folder, stages, 2, LoadFormat::Safetensors));
        assert_eq!(seen, expected, "{model}");
        let of_processes = in_processes(&folder, stages, 2, 2, LoadFormat::Safetensors);
        assert_eq!(
            of_processes.model().fingerprint,
            fingerprint,
            "{model}: it exchanges KV with whole nodes"
        );
        assert_eq!(answers(of_processes), expected, "{model} in processes");
    }
}
