//! A step for the compute threads.

use kv_cache::FenceSignal;
use types::{BlockIdx, TokenId};

use crate::backend::remote::StageRow;
use crate::error::RowError;
use crate::sampler::OwnedSampleSpec;
use crate::step::{Row, RowInput, SlotId};

/// A step, as `launch` passes it to the first stage.
#[derive(Debug)]
pub(super) struct StepJob {
    pub(super) rows: Vec<JobRow>,
    pub(super) signal: FenceSignal,
}

/// A [`Row`] without a lifetime.
#[derive(Debug)]
pub(super) struct JobRow {
    pub(super) slot: SlotId,
    input: Input,
    start: usize,
    tables: Vec<Vec<BlockIdx>>,
    /// Whether a token is sampled for the row. The process that samples it has the `spec`.
    is_wanted: bool,
    pub(super) spec: Option<OwnedSampleSpec>,
    pub(super) prompt_logprobs: Option<OwnedPromptTargets>,
}

/// [`PromptTargets`](crate::step::PromptTargets) without a lifetime.
#[derive(Debug)]
pub(super) struct OwnedPromptTargets {
    pub(super) tokens: Vec<TokenId>,
    pub(super) n_top: u8,
}

#[derive(Debug)]
enum Input {
    Tokens(Vec<TokenId>),
    Previous,
}

impl JobRow {
    pub(super) fn of(row: &Row<'_>) -> Self {
        Self {
            slot: row.slot,
            input: match row.input {
                RowInput::Tokens(tokens) => Input::Tokens(tokens.to_vec()),
                RowInput::Previous => Input::Previous,
            },
            start: row.start,
            tables: row.tables.iter().map(|table| table.to_vec()).collect(),
            is_wanted: row.sample.is_some(),
            spec: row.sample.as_ref().map(OwnedSampleSpec::of),
            prompt_logprobs: row
                .prompt_logprobs
                .map(|targets| OwnedPromptTargets { tokens: targets.tokens.to_vec(), n_top: targets.n_top }),
        }
    }

    /// Makes a row that another process has sent. This process samples nothing, and reads no token of the targets.
    pub(super) fn of_process(row: StageRow) -> Self {
        let StageRow { tokens, start, tables, is_wanted, n_targets, .. } = row;
        let targets = || OwnedPromptTargets { tokens: vec![TokenId(0); n_targets], n_top: 0 };
        Self {
            slot: SlotId(0),
            input: Input::Tokens(tokens),
            start,
            tables,
            is_wanted,
            spec: None,
            prompt_logprobs: (n_targets > 0).then(targets),
        }
    }

    /// Makes the row for another process. `outcome` is that of the stages so far.
    pub(super) fn for_process(&self, outcome: &Result<(), RowError>) -> StageRow {
        StageRow {
            tokens: self.tokens().to_vec(),
            start: self.start,
            tables: self.tables.clone(),
            is_wanted: self.is_wanted,
            n_targets: self.prompt_logprobs.as_ref().map_or(0, |targets| targets.tokens.len()),
            outcome: outcome.clone(),
        }
    }

    pub(super) fn needs_previous(&self) -> bool {
        matches!(self.input, Input::Previous)
    }

    /// Replaces [`RowInput::Previous`] by `previous`, the token that the slot has sampled last.
    pub(super) fn resolve(&mut self, previous: Option<TokenId>, vocab: usize) -> Result<(), RowError> {
        if let Input::Previous = self.input {
            let token = previous.ok_or(RowError::NoTokenInFlight)?;
            self.input = Input::Tokens(vec![token]);
            self.spec.iter_mut().for_each(|spec| spec.remember(token));
        }
        let targets = self.prompt_logprobs.iter().flat_map(|targets| &targets.tokens);
        let unknown = self.tokens().iter().chain(targets).find(|token| token.0 as usize >= vocab);
        unknown.map_or(Ok(()), |token| Err(RowError::UnknownToken { token: token.0, vocab }))
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }

    pub(super) fn tables(&self) -> &[Vec<BlockIdx>] {
        &self.tables
    }

    /// Returns whether the row samples a token.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    pub(super) fn tokens(&self) -> &[TokenId] {
        match &self.input {
            Input::Tokens(tokens) => tokens,
            Input::Previous => &[],
        }
    }

    /// Returns the position of the token that this row samples.
    pub(super) fn next_position(&self) -> usize {
        self.start + self.tokens().len()
    }
}
