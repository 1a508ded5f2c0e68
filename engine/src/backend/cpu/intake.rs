//! Hot path.
//! The entrance of the first stage: launched steps, and the tokens that their rows continue.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use types::TokenId;

use super::job::StepJob;
use super::rank::Step;
use crate::model::ranks::RankFence;
use crate::step::SlotId;

/// The tokens that one step has sampled. The last stage sends them for each step, in order.
pub(super) type SampledTokens = Vec<(SlotId, TokenId)>;

/// Reads launched steps, and replaces [`RowInput::Previous`](crate::step::RowInput::Previous).
#[derive(Debug)]
pub(super) struct Intake {
    jobs: Receiver<StepJob>,
    sampled: Receiver<SampledTokens>,
    n_ranks: u16,
    vocab: usize,
    steps_in_flight_max: u64,
    n_taken: u64,
    /// The number of steps whose tokens have arrived.
    n_sampled: u64,
    /// The latest step in which a slot has a sampling row. Slots whose step cannot be in flight any more are forgotten.
    latest: HashMap<SlotId, LatestRow>,
}

#[derive(Clone, Copy, Debug)]
struct LatestRow {
    step: u64,
    /// The row's token, if it has arrived and the row has not failed.
    token: Option<TokenId>,
}

/// The inputs of an [`Intake`].
#[derive(Debug)]
pub(super) struct IntakeParts {
    pub(super) jobs: Receiver<StepJob>,
    pub(super) sampled: Receiver<SampledTokens>,
    pub(super) n_ranks: u16,
    pub(super) vocab: usize,
    pub(super) steps_in_flight_max: usize,
}

impl Intake {
    pub(super) fn new(parts: IntakeParts) -> Self {
        let IntakeParts { jobs, sampled, n_ranks, vocab, steps_in_flight_max } = parts;
        Self {
            jobs,
            sampled,
            n_ranks,
            vocab,
            steps_in_flight_max: steps_in_flight_max as u64,
            n_taken: 0,
            n_sampled: 0,
            latest: HashMap::new(),
        }
    }

    /// Waits for the next step, and for the tokens that its rows continue. Returns `None` if no more steps come, or if the
    /// last stage has ended.
    pub(super) fn next(&mut self) -> Option<Step> {
        let StepJob { mut rows, signal } = self.jobs.recv().ok()?;
        // The channel has room for the tokens of all steps in flight, so the last stage never waits for this thread.
        while let Ok(tokens) = self.sampled.try_recv() {
            self.note(tokens);
        }
        let (mut resolved, number) = (Vec::with_capacity(rows.len()), self.n_taken);
        self.n_taken += 1;
        for row in &mut rows {
            let previous = if row.needs_previous() { self.wait_for(row.slot)? } else { None };
            resolved.push(row.resolve(previous, self.vocab));
        }
        for row in rows.iter().filter(|row| row.is_wanted()) {
            self.latest.insert(row.slot, LatestRow { step: number, token: None });
        }
        self.latest.retain(|_, row| row.step + self.steps_in_flight_max > number + 1);
        let outcomes = resolved.iter().flatten().map(|()| Ok(())).collect();
        let written = Arc::new(RankFence::new(signal, 0..self.n_ranks));
        Some(Step { rows, resolved, written, outcomes, hidden: Vec::new(), routing_leads: Vec::new() })
    }

    /// Waits until the last stage has sampled the slot's latest token. The token is `None` if the slot has none in flight,
    /// or if its row has failed. Returns `None` if the last stage has ended.
    fn wait_for(&mut self, slot: SlotId) -> Option<Option<TokenId>> {
        let Some(LatestRow { step, .. }) = self.latest.get(&slot).copied() else { return Some(None) };
        while self.n_sampled <= step {
            let tokens = self.sampled.recv().ok()?;
            self.note(tokens);
        }
        Some(self.latest.get(&slot).and_then(|row| row.token))
    }

    fn note(&mut self, tokens: SampledTokens) {
        for (slot, token) in tokens {
            if let Some(row) = self.latest.get_mut(&slot).filter(|row| row.step == self.n_sampled) {
                row.token = Some(token);
            }
        }
        self.n_sampled += 1;
    }
}
