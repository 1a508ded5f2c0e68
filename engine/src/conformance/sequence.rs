//! One sequence of a backend under test, with its own blocks.

use std::collections::VecDeque;

use grammar::Constraint;
use kv_cache::KvMemory;
use types::{BlockIdx, GroupIdx, ModelInfo, Sampling, StopRules, TokenId};

use crate::backend::Backend;
use crate::step::{PendingStep, Row, RowInput, SampleSpec, SlotId, StepBatch, StepOutput};

/// Assigns blocks in ascending order, and slots.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    next: u32,
    n_slots: u64,
}

impl Blocks {
    pub(super) fn starting_at(next: u32) -> Self {
        Self { next, n_slots: 0 }
    }

    fn take(&mut self, n_blocks: usize) -> Vec<BlockIdx> {
        let first = self.next;
        self.next += n_blocks as u32;
        (first..self.next).map(BlockIdx).collect()
    }

    fn slot(&mut self) -> SlotId {
        self.n_slots += 1;
        SlotId(self.n_slots)
    }
}

#[derive(Debug)]
pub(super) struct Sequence {
    slot: SlotId,
    tokens: Vec<TokenId>,
    n_prompt: usize,
    n_computed: usize,
    tables: Vec<Vec<BlockIdx>>,
    pub(super) sampling: Sampling,
    pub(super) stop: StopRules,
    pub(super) constraint: Option<Constraint>,
}

/// The part of a sequence that a step computes.
#[derive(Clone, Copy, Debug)]
pub(super) enum SequenceInput {
    /// A number of known tokens. If they are the last known ones, the next token is sampled.
    Known(usize),
    /// The token that a step in flight samples.
    InFlight,
}

impl Sequence {
    pub(super) fn new(prompt: &[TokenId], blocks: &mut Blocks, model: &ModelInfo, n_steps: usize) -> Self {
        let n_blocks = model.layout.blocks_for(prompt.len() + n_steps);
        Self {
            slot: blocks.slot(),
            tokens: prompt.to_vec(),
            n_prompt: prompt.len(),
            n_computed: 0,
            tables: model.layout.group_indices().map(|_| blocks.take(n_blocks)).collect(),
            sampling: Sampling::default(),
            stop: StopRules { ignore_eos: true, ..StopRules::default() },
            constraint: None,
        }
    }

    /// Marks the tokens from `n_prompt` on as generated.
    pub(super) fn continuing(mut self, n_prompt: usize) -> Self {
        self.n_prompt = n_prompt;
        self
    }

    /// Continues `sender`, whose KV was copied to this sequence.
    pub(super) fn take_over(&mut self, sender: &Self) {
        self.tokens.clone_from(&sender.tokens);
        self.n_computed = sender.n_computed;
    }

    pub(super) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.n_prompt..]
    }

    /// Returns the sequence's blocks, group by group.
    pub(super) fn tables(&self) -> &[Vec<BlockIdx>] {
        &self.tables
    }

    /// Returns the number of tokens that are known and not computed.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.n_computed
    }

    /// Applies the result of computing `n_tokens` tokens.
    pub(super) fn accept(&mut self, n_tokens: usize, output: &StepOutput, nth_row: usize) {
        self.n_computed += n_tokens;
        let sampled = output.rows[nth_row].clone().expect("the row succeeds");
        let is_due = self.n_computed == self.tokens.len();
        assert_eq!(sampled.is_some(), is_due, "a row has a token exactly if it requests one");
        self.tokens.extend(sampled.map(|sampled| sampled.token));
    }

    fn row<'a>(&'a self, part: SequenceInput, tables: &'a [&'a [BlockIdx]]) -> Row<'a> {
        let (input, start, sample) = match part {
            SequenceInput::InFlight => (RowInput::Previous, self.tokens.len(), Some(self.spec(1))),
            SequenceInput::Known(n_tokens) => {
                let end = self.n_computed + n_tokens;
                let tokens = &self.tokens[self.n_computed..end];
                (RowInput::Tokens(tokens), self.n_computed, (end == self.tokens.len()).then(|| self.spec(0)))
            }
        };
        Row { slot: self.slot, input, start, tables, prompt_logprobs: None, sample }
    }

    fn spec(&self, n_in_flight: usize) -> SampleSpec<'_> {
        SampleSpec {
            sampling: &self.sampling,
            stop: &self.stop,
            history: &self.tokens,
            n_prompt: self.n_prompt,
            index: (self.generated().len() + n_in_flight) as u32,
            constraint: self.constraint.as_ref(),
        }
    }
}

/// Launches one step over parts of some sequences.
pub(super) fn launch(backend: &mut dyn Backend, parts: &[(&Sequence, SequenceInput)]) -> PendingStep {
    let tables: Vec<Vec<&[BlockIdx]>> =
        parts.iter().map(|(sequence, _)| sequence.tables.iter().map(Vec::as_slice).collect()).collect();
    let rows: Vec<Row<'_>> =
        parts.iter().zip(&tables).map(|((sequence, part), tables)| sequence.row(*part, tables)).collect();
    backend.launch(StepBatch { rows: &rows }).expect("a step is launched")
}

pub(super) fn collect(backend: &mut dyn Backend, step: PendingStep) -> StepOutput {
    backend.collect(step).expect("a step is collected")
}

/// Runs one step in which every sequence computes all its remaining tokens.
pub(super) fn step_together(backend: &mut dyn Backend, sequences: &mut [Sequence]) {
    let parts: Vec<(&Sequence, SequenceInput)> =
        sequences.iter().map(|sequence| (sequence, SequenceInput::Known(sequence.remaining()))).collect();
    let launched = launch(backend, &parts);
    let output = collect(backend, launched);
    for (nth, sequence) in sequences.iter_mut().enumerate() {
        sequence.accept(sequence.remaining(), &output, nth);
    }
}

/// Generates `n_steps` tokens for each sequence. Each step is launched before the one before it is collected.
pub(super) fn generate_in_flight(backend: &mut dyn Backend, sequences: &mut [Sequence], n_steps: usize) {
    let known: Vec<_> =
        sequences.iter().map(|sequence| (sequence, SequenceInput::Known(sequence.remaining()))).collect();
    let mut launched = Some(launch(backend, &known));
    for nth in 1..=n_steps {
        let in_flight: Vec<_> =
            sequences.iter().map(|sequence| (sequence, SequenceInput::InFlight)).collect();
        let next = (nth < n_steps).then(|| launch(backend, &in_flight));
        let step =
            std::mem::replace(&mut launched, next).expect("each step but the last launches the next one");
        let output = collect(backend, step);
        for (nth, sequence) in sequences.iter_mut().enumerate() {
            sequence.accept(sequence.remaining(), &output, nth);
        }
    }
}

/// Generates `n_steps` tokens for each sequence. Each step has one of `n_parts` parts of the sequences, in turn. A part's
/// next step is launched before the part's step before it is collected.
pub(super) fn generate_in_parts(
    backend: &mut dyn Backend,
    sequences: &mut [Sequence],
    n_parts: usize,
    n_steps: usize,
) {
    let part_len = sequences.len().div_ceil(n_parts);
    let mut in_flight: VecDeque<(usize, PendingStep)> = VecDeque::new();
    let accept = |backend: &mut dyn Backend, sequences: &mut [Sequence], (part, step)| {
        let output = collect(backend, step);
        for (nth, sequence) in sequences.chunks_mut(part_len).nth(part).into_iter().flatten().enumerate() {
            sequence.accept(sequence.remaining(), &output, nth);
        }
    };
    for nth in 0..n_steps * n_parts {
        if in_flight.len() > n_parts {
            let oldest = in_flight.pop_front().expect("several steps are in flight");
            accept(backend, sequences, oldest);
        }
        let part = nth % n_parts;
        let input = |sequence: &Sequence| match nth / n_parts {
            0 => SequenceInput::Known(sequence.remaining()),
            _ => SequenceInput::InFlight,
        };
        let of_part = sequences.chunks(part_len).nth(part).into_iter().flatten();
        let rows: Vec<_> = of_part.map(|sequence| (sequence, input(sequence))).collect();
        in_flight.push_back((part, launch(backend, &rows)));
    }
    for step in in_flight {
        accept(backend, sequences, step);
    }
}

/// A sequence, and the memory that has its KV.
#[derive(Clone, Copy)]
pub(super) struct SequenceKv<'a> {
    pub(super) memory: &'a KvMemory,
    pub(super) sequence: &'a Sequence,
}

/// Copies all blocks of one sequence to the blocks of another, layer by layer.
pub(super) fn copy_kv(sender: SequenceKv<'_>, receiver: SequenceKv<'_>) {
    let (from, to) = (sender.memory, receiver.memory);
    let (from_tables, to_tables) = (&sender.sequence.tables, &receiver.sequence.tables);
    for (group, rank) in from.layout().group_indices().flat_map(|group| of_ranks(from, group)) {
        let tables = from_tables[usize::from(group.0)].iter().zip(&to_tables[usize::from(group.0)]);
        let (near, far) = (from.rank(rank), to.rank(rank));
        for layer_pos in 0..from.layout().group(group).layers.len() as u16 {
            for (source, target) in tables.clone() {
                let page =
                    near.read(group, layer_pos, source.0..source.0 + 1).expect("the page has no writer");
                let mut place =
                    far.write(group, layer_pos, target.0..target.0 + 1).expect("the page has no reader");
                place.copy_from_slice(&page);
            }
        }
    }
}

fn of_ranks(memory: &KvMemory, group: GroupIdx) -> impl Iterator<Item = (GroupIdx, u16)> + use<> {
    (0..memory.n_ranks()).map(move |rank| (group, rank))
}
