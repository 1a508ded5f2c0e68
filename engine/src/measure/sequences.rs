//! Sequences for measurements, each with its own blocks.

use grammar::{Compiler, Constraint, Vocabulary, sources};
use types::{BlockIdx, Sampling, StopRules, TokenId};

use super::{MeasureError, SamplingMode};
use crate::backend::Backend;
use crate::step::{PendingStep, Row, RowInput, SampleSpec, SlotId, StepBatch, StepOutput};

/// Sequences with the same largest length.
#[derive(Debug)]
pub(super) struct Sequences {
    sequences: Vec<Sequence>,
    sampling: Sampling,
    stop: StopRules,
}

#[derive(Debug)]
struct Sequence {
    /// The prompt and the generated tokens.
    tokens: Vec<TokenId>,
    n_prompt: usize,
    constraint: Option<Constraint>,
    tables: Vec<Vec<BlockIdx>>,
}

/// The part of a sequence that a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SequenceInput {
    /// A range of the prompt's tokens. The last range also samples a token.
    Prompt { start: usize, end: usize },
    /// The token in flight, or any token if none is in flight.
    Next { position: usize, is_in_flight: bool },
}

/// Rejects a workload whose sequences need more blocks than there are.
pub(super) fn ensure_room(
    backend: &dyn Backend,
    n_sequences: usize,
    n_tokens: usize,
) -> Result<(), MeasureError> {
    let layout = &backend.model().layout;
    let needed = n_sequences * layout.groups.len() * layout.blocks_for(n_tokens);
    let found = backend.memory().n_blocks() as usize;
    if needed > found { Err(MeasureError::Blocks { needed, found }) } else { Ok(()) }
}

impl Sequences {
    /// Makes sequences that end with `n_tokens` tokens. Each has a different prompt of `prompt_tokens`.
    pub(super) fn new(
        backend: &dyn Backend,
        n_sequences: usize,
        prompt_tokens: usize,
        n_tokens: usize,
    ) -> Result<Self, MeasureError> {
        ensure_room(backend, n_sequences, n_tokens)?;
        let layout = &backend.model().layout;
        let (n_groups, of_sequence) = (layout.groups.len(), layout.blocks_for(n_tokens));
        let vocab = backend.model().vocab;
        let sequence = |nth: usize| Sequence {
            tokens: (0..prompt_tokens).map(|at| token(vocab, nth, at)).collect(),
            n_prompt: prompt_tokens,
            constraint: None,
            tables: (0..n_groups)
                .map(|group| {
                    let first = (nth * n_groups + group) * of_sequence;
                    (first..first + of_sequence).map(|block| BlockIdx(block as u32)).collect()
                })
                .collect(),
        };
        let stop = StopRules { ignore_eos: true, ..StopRules::default() };
        Ok(Self { sequences: (0..n_sequences).map(sequence).collect(), sampling: Sampling::default(), stop })
    }

    /// Begins a measurement of decode steps with this sampling mode; the default is greedy. Each sequence has its prompt and
    /// the token of its first step.
    pub(super) fn begin(&mut self, drawn_by: SamplingMode, vocab: u32) -> Result<(), MeasureError> {
        self.sampling = drawn_by.sampling();
        let compiler = (drawn_by == SamplingMode::Grammar).then(|| json_compiler(vocab)).transpose()?;
        for sequence in &mut self.sequences {
            sequence.tokens.truncate(sequence.n_prompt);
            sequence.tokens.push(sequence.tokens[0]);
            let constraint = compiler.as_ref().map(|compiler| compiler.constraint(&sources::json_object()));
            sequence.constraint =
                constraint.transpose().map_err(|error| MeasureError::Grammar(error.to_string()))?;
        }
        Ok(())
    }

    /// Adds the tokens of neighbouring sequences, one for each row of a step.
    pub(super) fn accept(&mut self, first: usize, output: &StepOutput) {
        for (sequence, row) in self.sequences[first..].iter_mut().zip(&output.rows) {
            sequence.tokens.extend(row.iter().flatten().map(|sampled| sampled.token));
        }
    }

    pub(super) fn launch(
        &self,
        backend: &mut dyn Backend,
        parts: &[(usize, SequenceInput)],
    ) -> Result<PendingStep, MeasureError> {
        let tables: Vec<Vec<&[BlockIdx]>> =
            parts.iter().map(|(nth, part)| self.tables(*nth, part.end())).collect();
        let rows: Vec<Row<'_>> =
            parts.iter().zip(&tables).map(|((nth, part), tables)| self.row(*nth, *part, tables)).collect();
        Ok(backend.launch(StepBatch { rows: &rows })?)
    }

    /// Returns the blocks of the sequence's tokens, as a scheduler passes them.
    fn tables(&self, nth: usize, end: usize) -> Vec<&[BlockIdx]> {
        let n_blocks = end.div_ceil(BLOCK_TOKENS);
        self.sequences[nth].tables.iter().map(|table| &table[..n_blocks.min(table.len())]).collect()
    }

    fn row<'a>(&'a self, nth: usize, part: SequenceInput, tables: &'a [&'a [BlockIdx]]) -> Row<'a> {
        let sequence = &self.sequences[nth];
        let (input, start, is_drawn) = match part {
            SequenceInput::Prompt { start, end } => {
                (RowInput::Tokens(&sequence.tokens[start..end]), start, end == sequence.n_prompt)
            }
            SequenceInput::Next { position, is_in_flight: true } => (RowInput::Previous, position, true),
            SequenceInput::Next { position, .. } => (RowInput::Tokens(&sequence.tokens[..1]), position, true),
        };
        let spec = SampleSpec {
            sampling: &self.sampling,
            stop: &self.stop,
            history: &sequence.tokens,
            // The token of a first decode step was not generated.
            n_prompt: sequence.tokens.len().min(sequence.n_prompt + 1),
            index: 0,
            constraint: sequence.constraint.as_ref(),
        };
        Row {
            slot: SlotId(nth as u64),
            input,
            start,
            tables,
            prompt_logprobs: None,
            sample: is_drawn.then_some(spec),
        }
    }
}

/// The number of tokens in a block, in all layouts of this module.
const BLOCK_TOKENS: usize = 16;

impl SequenceInput {
    fn end(self) -> usize {
        match self {
            Self::Prompt { end, .. } => end,
            Self::Next { position, .. } => position + 1,
        }
    }

    pub(super) fn n_tokens(self) -> usize {
        match self {
            Self::Prompt { start, end } => end - start,
            Self::Next { .. } => 1,
        }
    }
}

/// Returns the number of parts into which decoding sequences are divided: each part is in one of the steps that a backend
/// computes at the same time.
pub(super) fn n_parts(backend: &dyn Backend) -> usize {
    (backend.steps_in_flight_max() - 1).max(1)
}

/// Returns a token of a sequence's made-up text.
fn token(vocab: u32, sequence: usize, at: usize) -> TokenId {
    let mixed = (sequence as u64 * 0x9e37_79b9 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    TokenId((mixed >> 33) as u32 % vocab)
}

/// Waits for a step. Any failed row is an error.
pub(super) fn collect(backend: &mut dyn Backend, step: PendingStep) -> Result<StepOutput, MeasureError> {
    let output = backend.collect(step)?;
    let failed = output.rows.iter().find_map(|row| row.as_ref().err());
    failed.cloned().map_or(Ok(output), |error| Err(MeasureError::Row(error)))
}

/// Makes a compiler for a made-up vocabulary: all bytes, then words of up to six letters, half of them after a space.
/// The last token ends an answer.
fn json_compiler(vocab: u32) -> Result<Compiler, MeasureError> {
    let word = |id: u32| -> Vec<u8> {
        if let Ok(byte) = u8::try_from(id) {
            return vec![byte];
        }
        let mixed = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8;
        let letters = (0..2 + mixed % 5).map(|nth| b'a' + (mixed >> (3 + 5 * nth) & 0x1f) as u8 % 26);
        let space = id.is_multiple_of(2).then_some(b' ');
        space.into_iter().chain(letters).collect()
    };
    let words = (0..vocab).map(word).collect();
    let vocabulary = Vocabulary::of_words(words, &[TokenId(vocab.saturating_sub(1))]);
    let compiler = vocabulary.and_then(|vocabulary| Compiler::new(&vocabulary));
    compiler.map_err(|error| MeasureError::Grammar(error.to_string()))
}
