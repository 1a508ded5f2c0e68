//! Hot path.
//! The masks of a step's rows that follow a grammar. They are computed after the step is launched, while the GPUs compute
//! it, because they depend on the tokens of the previous step.

use std::sync::Arc;

use kernels::cpu::Processor;
use kernels::cuda::{StepMasks, TokenMasks};
use tokio::time::Instant;

use super::draws::SampledBy;
use super::previous::PreviousTokens;
use crate::error::RowError;
use crate::sampler::Constrained;
use crate::step::{Row, RowInput, SlotId};

/// A step's rows whose masks are not written yet.
#[derive(Debug)]
pub(super) struct PendingMasks {
    masks: StepMasks,
    rows: Vec<MaskedRow>,
    launched: Instant,
}

#[derive(Debug)]
struct MaskedRow {
    /// The index of the row in the step.
    row: usize,
    slot: SlotId,
    constrained: Constrained,
    follows_previous: bool,
    outcome: Result<(), RowError>,
}

impl PendingMasks {
    /// Collects the rows with masks, in the order of the masks; `None` if there are none.
    pub(super) fn of(
        rows: &[Row<'_>],
        sampled_by: &[SampledBy],
        masks: &Arc<TokenMasks>,
        step: u64,
    ) -> Option<Self> {
        let mut masked = Vec::new();
        for (nth, (row, sampled_by)) in rows.iter().zip(sampled_by).enumerate() {
            let (SampledBy::Card { .. }, Some(spec)) = (sampled_by, &row.sample) else { continue };
            let Some(constrained) = Constrained::of(spec) else { continue };
            masked.push(MaskedRow {
                row: nth,
                slot: row.slot,
                constrained,
                follows_previous: row.input == RowInput::Previous,
                outcome: Ok(()),
            });
        }
        (!masked.is_empty()).then(|| Self {
            masks: masks.of_step(step, masked.len()),
            rows: masked,
            launched: Instant::now(),
        })
    }

    pub(super) fn masks(&self) -> &StepMasks {
        &self.masks
    }

    /// Returns whether a mask depends on a token of the previous step.
    pub(super) fn need_previous(&self) -> bool {
        self.rows.iter().any(|row| row.follows_previous)
    }

    /// Computes the masks on the threads of `processor`, writes them, and lets the GPUs sample. `previous` holds the
    /// tokens of the previous step. Returns the rows that failed.
    pub(super) fn write(
        mut self,
        processor: &Processor,
        previous: &PreviousTokens,
    ) -> Vec<(usize, RowError)> {
        let Self { masks, rows, launched } = &mut self;
        processor.pool().run_on(rows, 1, |nth, rows| {
            for row in rows {
                row.outcome = row.write(masks, nth, previous);
            }
        });
        // After a pause of the process, some GPUs may have stopped waiting and others not. All of them must do the same,
        // so masks that are this late are released to none of them.
        if launched.elapsed() < masks.patience() / 2 {
            masks.release();
        }
        self.rows.into_iter().filter_map(|row| Some((row.row, row.outcome.err()?))).collect()
    }
}

impl MaskedRow {
    fn write(&mut self, masks: &StepMasks, nth: usize, previous: &PreviousTokens) -> Result<(), RowError> {
        if self.follows_previous {
            self.constrained.remember(*previous.get(&self.slot).ok_or(RowError::NoTokenInFlight)?);
        }
        masks.write(nth, self.constrained.mask()?.words());
        Ok(())
    }
}
