//! Hot path.
//! The threads of a stage in other processes: one sends steps to them, and one passes on their results.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use super::mate::{LostReason, Mate};
use super::rank::Step;
use super::rows::{bytes_of, numbers_of};
use super::stage::{Source, first_errors};
use crate::backend::remote::{StageLost, StageResults};

/// A stage in other processes.
#[derive(Clone, Debug)]
pub(super) struct Elsewhere {
    /// In the order of their ranks; at least one.
    pub(super) processes: Arc<[Mate]>,
    /// The numbers of a row that stages pass on.
    pub(super) width: usize,
}

impl Elsewhere {
    /// Sends steps until no more come, or a process is lost.
    pub(super) fn send_steps(&self, mut source: Source, sent: &SyncSender<Step>) {
        while let Some(mut step) = source.next() {
            let hidden = bytes_of(&std::mem::take(&mut step.hidden)).into();
            let input = step.input(hidden);
            let begun = self.processes.iter().try_for_each(|mate| mate.begin(input.clone(), &step.written));
            if begun.is_none() || sent.send(step).is_err() {
                return;
            }
        }
    }

    /// Passes steps on when the stage has computed them, until no more were sent, or a process is lost.
    pub(super) fn receive_steps(&self, sent: &Receiver<Step>, next: &SyncSender<Step>, lost: &LostReason) {
        while let Ok(step) = sent.recv() {
            let results = self.processes.iter().map(Mate::finish).collect::<Option<Vec<_>>>();
            let Some(results) = results else { return };
            match self.computed(step, results) {
                Ok(step) => {
                    if next.send(step).is_err() {
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

    /// Returns the step with the results of all processes. Refuses rows of another size than the step's.
    fn computed(&self, step: Step, results: Vec<StageResults>) -> Result<Step, StageLost> {
        let n_tokens: usize = step.passing().map(|row| row.tokens().len()).sum();
        let mut results = results.into_iter();
        let StageResults { hidden, mut outcomes, routing_leads } =
            results.next().expect("a stage has a process");
        let hidden = numbers_of(&hidden).filter(|hidden| hidden.len() == n_tokens * self.width);
        let hidden = hidden.ok_or_else(StageLost::other_step)?;
        for of_mate in results {
            outcomes = first_errors(outcomes, of_mate.outcomes);
        }
        Ok(Step { hidden, outcomes, routing_leads, ..step })
    }
}
