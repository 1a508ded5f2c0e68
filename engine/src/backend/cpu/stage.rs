//! Hot path.
//! The thread of one stage, which is that of its first rank here. It computes the stage's layers of each step, one step after
//! the other, and starts the other ranks for each step: threads, and other processes.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use super::intake::Intake;
use super::mate::Mate;
use super::outlet::Outlet;
use super::rank::{Forwarded, Helper, Outcomes, Rank, Step};
use super::rows::bytes_of;
use crate::backend::remote::StageResults;
use crate::model::Scratch;

/// The state of a stage's thread, with the helper threads of the other ranks.
#[derive(Debug)]
pub(super) struct Stage {
    // Fields are dropped in this order, so that helpers that wait for this rank see that it has ended before
    // they are waited for.
    rank: Rank,
    helpers: Vec<Helper>,
    /// The processes of the stage's other ranks. Only the head has them.
    mates: Vec<Mate>,
}

/// Where a stage's steps come from.
#[derive(Debug)]
pub(super) enum Source {
    Launched(Intake),
    StageBefore(Receiver<Step>),
}

/// Where a stage's steps go to.
#[derive(Debug)]
pub(super) enum Target {
    /// The channel has room for all steps that may be in flight.
    NextStage(SyncSender<Step>),
    Collected(Outlet),
}

/// A step after this stage's layers.
struct ComputedStep {
    step: Step,
    forwarded: Forwarded,
}

impl Stage {
    /// Makes a stage's state. `ranks` are the ranks of the stage in this process; all except the first get their own threads.
    pub(super) fn new(ranks: Vec<Rank>, mates: Vec<Mate>) -> io::Result<Self> {
        let mut ranks = ranks.into_iter();
        let rank = ranks.next().expect("a stage has a rank");
        let helpers = ranks.map(Helper::start).collect::<Result<_, _>>()?;
        Ok(Self { rank, helpers, mates })
    }

    /// Runs until no more steps come, or a thread that this one needs has ended. Waits for steps and for the other ranks.
    pub(super) fn run(self, mut source: Source, mut target: Target) {
        let scratch = Scratch::default();
        while let Some(step) = source.next() {
            let passed = self.computed(step, &scratch).and_then(|done| target.put(&self.rank, done));
            if passed.is_none() {
                return;
            }
        }
    }

    /// Computes this process's share of one step for another process. Returns `None` if a rank has ended.
    pub(super) fn results(&self, step: Step, scratch: &Scratch) -> Option<StageResults> {
        let ComputedStep { forwarded: Forwarded { x, outcomes, routing_leads, .. }, .. } =
            self.computed(step, scratch)?;
        let hidden = if self.rank.gives_rows() { bytes_of(&x) } else { Vec::new() };
        Some(StageResults { hidden: hidden.into(), outcomes, routing_leads })
    }

    /// Runs a step on all ranks. Returns `None` if a rank has ended.
    fn computed(&self, step: Step, scratch: &Scratch) -> Option<ComputedStep> {
        if !self.mates.is_empty() {
            let input = step.input(bytes_of(&step.hidden).into());
            self.mates.iter().try_for_each(|mate| mate.begin(input.clone(), &step.written))?;
        }
        let step = Arc::new(step);
        self.helpers.iter().try_for_each(|helper| helper.begin(&step))?;
        let mut forwarded = self.rank.forward(&step, scratch);
        for helper in &self.helpers {
            forwarded.outcomes = first_errors(forwarded.outcomes, helper.finish()?);
        }
        for mate in &self.mates {
            forwarded.outcomes = first_errors(forwarded.outcomes, mate.finish()?.outcomes);
        }
        let step = Arc::into_inner(step).expect("a helper that has answered holds no step");
        Some(ComputedStep { step, forwarded })
    }
}

/// Merges the outcomes of two ranks: a row fails if it fails on any rank.
pub(super) fn first_errors(ours: Outcomes, theirs: Outcomes) -> Outcomes {
    ours.into_iter().zip(theirs).map(|(ours, theirs)| ours.and(theirs)).collect()
}

impl Source {
    /// Waits for the next step. Returns `None` if no more come.
    pub(super) fn next(&mut self) -> Option<Step> {
        match self {
            Self::Launched(intake) => intake.next(),
            Self::StageBefore(steps) => steps.recv().ok(),
        }
    }
}

impl Target {
    /// Passes a step on. Returns `None` if nothing takes it any more.
    fn put(&mut self, rank: &Rank, done: ComputedStep) -> Option<()> {
        let ComputedStep { step, forwarded } = done;
        match self {
            Self::Collected(outlet) => outlet.put(rank, step, forwarded),
            Self::NextStage(steps) => {
                let Forwarded { x, outcomes, routing_leads, .. } = forwarded;
                steps.send(Step { outcomes, routing_leads, hidden: x.to_vec(), ..step }).ok()
            }
        }
    }
}
