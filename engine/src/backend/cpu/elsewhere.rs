//! Hot path.
//! The threads of a stage in another process: one sends steps to it, and one passes on their results.

use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, OnceLock};

use super::rank::Step;
use super::rows::{bytes_of, numbers_of};
use super::stage::Source;
use crate::backend::remote::{RemoteStage, StageInput, StageLost, StageResults, StageRow};

/// Why a stage in another process is lost; empty while none is.
pub(super) type LostReason = Arc<OnceLock<StageLost>>;

/// A stage in another process.
#[derive(Clone, Debug)]
pub(super) struct Elsewhere {
    pub(super) remote: Arc<dyn RemoteStage>,
    /// The numbers of a row that stages pass on.
    pub(super) width: usize,
}

impl Elsewhere {
    /// Sends steps until no more come, or the stage is lost.
    pub(super) fn send_steps(&self, mut source: Source, sent: &SyncSender<Step>, lost: &LostReason) {
        while let Some(mut step) = source.next() {
            let input = input_of(&mut step);
            if let Err(error) = self.remote.begin(input) {
                lost.get_or_init(|| error);
                return;
            }
            if sent.send(step).is_err() {
                return;
            }
        }
    }

    /// Passes steps on as the stage has computed them, until no more were sent, or the stage is lost.
    pub(super) fn receive_steps(&self, sent: &Receiver<Step>, next: &SyncSender<Step>, lost: &LostReason) {
        while let Ok(step) = sent.recv() {
            let results = self.remote.finish(&mut |n| step.written.layers_done_elsewhere(n));
            match results.and_then(|results| self.checked(results, &step)) {
                Ok((hidden, StageResults { outcomes, routing_leads, .. })) => {
                    if next.send(Step { hidden, outcomes, routing_leads, ..step }).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    lost.get_or_init(|| error);
                    return;
                }
            }
        }
    }

    /// Returns the rows. Refuses results of another size than the step's.
    fn checked(&self, results: StageResults, step: &Step) -> Result<(Vec<f32>, StageResults), StageLost> {
        let n_tokens: usize = step.passing().map(|row| row.tokens().len()).sum();
        let hidden = numbers_of(&results.hidden).filter(|hidden| hidden.len() == n_tokens * self.width);
        match hidden.filter(|_| results.outcomes.len() == step.outcomes.len()) {
            Some(hidden) => Ok((hidden, results)),
            None => Err(StageLost::other_step()),
        }
    }
}

/// Takes what a stage needs from a step.
fn input_of(step: &mut Step) -> StageInput {
    let rows = step.passing().zip(&step.outcomes).map(|(row, outcome)| StageRow {
        tokens: row.tokens().to_vec(),
        start: row.start(),
        tables: row.tables().to_vec(),
        outcome: outcome.clone(),
    });
    let rows = rows.collect();
    let hidden = bytes_of(&std::mem::take(&mut step.hidden)).into();
    StageInput { rows, hidden, routing_leads: step.routing_leads.clone() }
}
