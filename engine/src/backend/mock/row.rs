//! One row of a step in the mock: reads and verifies the KV before it, and writes its own.

use std::collections::HashMap;
use std::ops::Range;

use kv_cache::KvMemory;
use types::{BlockIdx, TokenId};

use super::cost::{MockSettings, Verify};
use super::draw::MockSampleSpec;
use super::kv::{Chain, Link};
use super::layer::Layer;
use crate::error::RowError;
use crate::step::{Row, RowInput, SampledToken, SlotId};

/// A row between launch and collect.
#[derive(Debug)]
pub(super) struct QueuedRow {
    pub(super) slot: SlotId,
    input: Input,
    start: usize,
    tables: Vec<Vec<BlockIdx>>,
    /// The first position whose KV the row verifies.
    verify_from: usize,
    /// The tokens of the verified positions; empty if the caller does not provide them.
    history: Vec<TokenId>,
    spec: Option<MockSampleSpec>,
}

#[derive(Debug)]
enum Input {
    Tokens(Vec<TokenId>),
    Previous,
}

/// A row while its step runs.
#[derive(Debug)]
pub(super) struct RunningRow {
    row: QueuedRow,
    block_tokens: usize,
    /// The tokens and chains of the positions from `verify_from` to the end of the input.
    links: Vec<Link>,
    outcome: Result<(), RowError>,
}

// === impl QueuedRow ===

impl QueuedRow {
    pub(super) fn new(row: &Row<'_>, settings: &MockSettings, block_tokens: usize) -> Self {
        let verify_from = match settings.verify {
            Verify::All => 0,
            Verify::LastBlock => row.start.saturating_sub(1) / block_tokens * block_tokens,
        };
        let history = row.sample.map_or(&[][..], |spec| &spec.history[..row.start.min(spec.history.len())]);
        Self {
            slot: row.slot,
            input: Input::of(row.input),
            start: row.start,
            tables: row.tables.iter().map(|table| table.to_vec()).collect(),
            verify_from,
            history: history.get(verify_from..).unwrap_or_default().to_vec(),
            spec: row.sample.as_ref().map(|spec| MockSampleSpec::of(spec, settings)),
        }
    }

    pub(super) fn n_tokens(&self) -> usize {
        match &self.input {
            Input::Tokens(tokens) => tokens.len(),
            Input::Previous => 1,
        }
    }

    fn tokens(&self, previous: &HashMap<SlotId, TokenId>) -> Result<Vec<TokenId>, RowError> {
        match &self.input {
            Input::Tokens(tokens) => Ok(tokens.clone()),
            Input::Previous => match previous.get(&self.slot) {
                Some(token) => Ok(vec![*token]),
                None => Err(RowError::NoTokenInFlight),
            },
        }
    }
}

impl Input {
    fn of(input: RowInput<'_>) -> Self {
        match input {
            RowInput::Tokens(tokens) => Self::Tokens(tokens.to_vec()),
            RowInput::Previous => Self::Previous,
        }
    }
}

// === impl RunningRow ===

impl RunningRow {
    /// Takes the row's input tokens, and reads the tokens before them out of the mock's KV, which holds them.
    pub(super) fn begin(
        row: QueuedRow,
        previous: &HashMap<SlotId, TokenId>,
        memory: &KvMemory,
        first_layer: &Layer,
    ) -> Self {
        let block_tokens = usize::from(memory.layout().block_tokens);
        let mut running = Self { row, block_tokens, links: Vec::new(), outcome: Ok(()) };
        running.outcome = running.chain_up(previous, memory, first_layer);
        running
    }

    fn chain_up(
        &mut self,
        previous: &HashMap<SlotId, TokenId>,
        memory: &KvMemory,
        layer: &Layer,
    ) -> Result<(), RowError> {
        let tokens = self.row.tokens(previous)?;
        let mut chain = self.chain_before(memory, layer)?;
        for token in self.tokens_held(memory, layer)?.into_iter().chain(tokens) {
            chain = chain.then(token);
            self.links.push(Link { token, chain });
        }
        self.compare_with_history()
    }

    /// Returns the chain before the first verified position. At position 0 it is a constant; otherwise it is
    /// read without verification.
    fn chain_before(&self, memory: &KvMemory, layer: &Layer) -> Result<Chain, RowError> {
        let Some(before) = self.row.verify_from.checked_sub(1) else { return Ok(Chain::START) };
        Ok(self.claims(memory, layer, before..before + 1)?[0].chain)
    }

    /// Returns the tokens that the KV names, for the positions to be verified.
    fn tokens_held(&self, memory: &KvMemory, layer: &Layer) -> Result<Vec<TokenId>, RowError> {
        let claims = self.claims(memory, layer, self.row.verify_from..self.row.start)?;
        Ok(claims.into_iter().map(|link| link.token).collect())
    }

    fn claims(
        &self,
        memory: &KvMemory,
        layer: &Layer,
        positions: Range<usize>,
    ) -> Result<Vec<Link>, RowError> {
        let mut links = Vec::with_capacity(positions.len());
        for in_block in self.by_block(positions) {
            let block = self.block(layer, in_block.start);
            let page = memory
                .rank(layer.rank)
                .read(layer.group, layer.pos, block..block + 1)
                .map_err(|busy| page_error(layer, in_block.start, &busy))?;
            links.extend(in_block.map(|position| {
                let (key, bytes) = layer.first_cell(position % self.block_tokens);
                Link::claimed_by(&page[bytes], key)
            }));
        }
        Ok(links)
    }

    /// Rejects KV that is intact but belongs to another sequence.
    fn compare_with_history(&self) -> Result<(), RowError> {
        let wrong = self.links.iter().zip(&self.row.history).position(|(link, token)| link.token != *token);
        match wrong {
            None => Ok(()),
            Some(nth) => Err(RowError::KvMismatch {
                layer: 0,
                position: self.row.verify_from + nth,
                what: "not this sequence's token",
            }),
        }
    }

    /// Verifies this layer's KV before the input, and writes the input's KV.
    pub(super) fn run_layer(&mut self, memory: &KvMemory, layer: &Layer) {
        if self.outcome.is_ok() {
            self.outcome = self.verify(memory, layer).and_then(|()| self.write(memory, layer));
        }
    }

    fn verify(&self, memory: &KvMemory, layer: &Layer) -> Result<(), RowError> {
        for in_block in self.by_block(self.row.verify_from..self.row.start) {
            let block = self.block(layer, in_block.start);
            let page = memory
                .rank(layer.rank)
                .read(layer.group, layer.pos, block..block + 1)
                .map_err(|busy| page_error(layer, in_block.start, &busy))?;
            let wrong = in_block.into_iter().find(|position| !self.is_in(&page, layer, *position));
            if let Some(position) = wrong {
                return Err(RowError::KvMismatch { layer: layer.number, position, what: "wrong bytes" });
            }
        }
        Ok(())
    }

    fn is_in(&self, page: &[u8], layer: &Layer, position: usize) -> bool {
        let link = self.link(position);
        layer.cells(position % self.block_tokens).all(|(key, bytes)| link.is_in(&page[bytes], key))
    }

    fn write(&self, memory: &KvMemory, layer: &Layer) -> Result<(), RowError> {
        for in_block in self.by_block(self.row.start..self.end()) {
            let block = self.block(layer, in_block.start);
            let mut page = memory
                .rank(layer.rank)
                .write(layer.group, layer.pos, block..block + 1)
                .map_err(|busy| page_error(layer, in_block.start, &busy))?;
            for position in in_block {
                let link = self.link(position);
                layer
                    .cells(position % self.block_tokens)
                    .for_each(|(key, bytes)| link.write(&mut page[bytes], key));
            }
        }
        Ok(())
    }

    /// Returns the row's slot and its result.
    pub(super) fn finish(self, settings: &MockSettings) -> (SlotId, Result<Option<SampledToken>, RowError>) {
        let sampled = self.outcome.clone().and_then(|()| match &self.row.spec {
            None => Ok(None),
            Some(spec) => {
                let last = self.link(self.end() - 1);
                spec.draw(last.chain, self.end(), settings).map(Some)
            }
        });
        (self.row.slot, sampled)
    }

    fn link(&self, position: usize) -> Link {
        self.links[position - self.row.verify_from]
    }

    /// Returns the position after the end of the input.
    fn end(&self) -> usize {
        self.row.verify_from + self.links.len()
    }

    fn block(&self, layer: &Layer, position: usize) -> u32 {
        self.row.tables[usize::from(layer.group.0)][position / self.block_tokens].0
    }

    /// Splits positions at block boundaries.
    fn by_block(&self, positions: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let block_tokens = self.block_tokens;
        let blocks = positions.start / block_tokens..positions.end.div_ceil(block_tokens);
        let blocks = if positions.is_empty() { 0..0 } else { blocks };
        blocks.map(move |ordinal| {
            let block = ordinal * block_tokens..(ordinal + 1) * block_tokens;
            block.start.max(positions.start)..block.end.min(positions.end)
        })
    }
}

fn page_error(layer: &Layer, position: usize, busy: &impl ToString) -> RowError {
    RowError::Page { layer: layer.number, position, reason: busy.to_string() }
}
