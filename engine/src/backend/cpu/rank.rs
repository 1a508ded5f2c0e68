//! Hot path.
//! One rank of a model on the processor: its share of each step, over its share of the KV.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use kernels::cpu::Processor;
use kv_cache::KvMemory;

use super::compute::JobRow;
use crate::error::RowError;
use crate::model::pass::PassParts;
use crate::model::ranks::{Seat, Written};
use crate::model::{Model, ModelConfig, Pass, PassRow, Scratch, Tensor};

/// How each row fared that took part.
pub(super) type Outcomes = Vec<Result<(), RowError>>;

/// A step that all ranks compute.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) rows: Vec<JobRow>,
    /// Which of the rows take part.
    pub(super) resolved: Outcomes,
    pub(super) written: Written,
}

/// What a rank's thread owns.
#[derive(Debug)]
pub(super) struct Rank {
    processor: Processor,
    model: Arc<dyn Model>,
    memory: KvMemory,
    frequencies: Arc<[f32]>,
    vocab: usize,
    seat: Seat,
}

/// A rank on a thread of its own. Dropped, it waits for the thread, which ends with the step that it is in.
#[derive(Debug)]
pub(super) struct Helper {
    /// `None` once the thread was told to end.
    steps: Option<SyncSender<Arc<Step>>>,
    outcomes: Receiver<Outcomes>,
    thread: Option<thread::JoinHandle<()>>,
}

// === impl Rank ===

impl Rank {
    /// All ranks of a model, one for each processor.
    pub(super) fn all(
        processors: Vec<Processor>,
        model: &Arc<dyn Model>,
        memory: &KvMemory,
        config: &ModelConfig,
    ) -> Vec<Self> {
        let frequencies: Arc<[f32]> = config.rope.frequencies(config.head_dim).into();
        let rank = |(processor, seat)| Self {
            processor,
            model: Arc::clone(model),
            memory: memory.clone(),
            frequencies: Arc::clone(&frequencies),
            vocab: config.vocab,
            seat,
        };
        let seats = Seat::all(memory.n_ranks());
        processors.into_iter().zip(seats).map(rank).collect()
    }

    pub(super) fn processor(&self) -> &Processor {
        &self.processor
    }

    /// Logits (wanted, vocab), and how the rows fared that took part.
    pub(super) fn forward(&self, step: &Step, scratch: &Scratch) -> (Tensor, Outcomes) {
        let parts = PassParts {
            processor: &self.processor,
            scratch,
            memory: &self.memory,
            written: &step.written,
            rank: &self.seat,
            frequencies: &self.frequencies,
        };
        let passing = step.rows.iter().zip(&step.resolved).filter(|(_, ok)| ok.is_ok());
        let mut pass = Pass::new(parts, passing.map(|(row, _)| pass_row(row)).collect());
        let logits = self.model.forward(&mut pass);
        let logits = pass.whole(logits, self.vocab);
        (logits, pass.into_outcomes().collect())
    }

    /// Until no more steps can come.
    fn run(self, steps: &Receiver<Arc<Step>>, outcomes: &SyncSender<Outcomes>) {
        let scratch = Scratch::default();
        while let Ok(step) = steps.recv() {
            let (_, of_rows) = self.forward(&step, &scratch);
            // Before the answer: the step's fence ends with the last who holds it, and that is to be who collects it.
            drop(step);
            if outcomes.send(of_rows).is_err() {
                return;
            }
        }
    }
}

fn pass_row(row: &JobRow) -> PassRow<'_> {
    PassRow {
        tokens: row.tokens(),
        start: row.start(),
        tables: row.tables(),
        is_wanted: row.is_wanted(),
        outcome: Ok(()),
    }
}

// === impl Helper ===

impl Helper {
    pub(super) fn start(rank: Rank) -> io::Result<Self> {
        let (steps, steps_in) = sync_channel(1);
        let (outcomes_out, outcomes) = sync_channel(1);
        let thread = thread::Builder::new().name(format!("rank-{}", rank.seat.nth()));
        let thread = thread.spawn(move || rank.run(&steps_in, &outcomes_out))?;
        Ok(Self { steps: Some(steps), outcomes, thread: Some(thread) })
    }

    /// Has the rank compute its share. `None`: it is gone.
    pub(super) fn begin(&self, step: &Arc<Step>) -> Option<()> {
        self.steps.as_ref()?.send(Arc::clone(step)).ok()
    }

    /// How the rows fared. `None`: the rank is gone.
    pub(super) fn finish(&self) -> Option<Outcomes> {
        self.outcomes.recv().ok()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // If it panicked, its panic was printed, and whoever computed with it knows.
            let _ = thread.join();
        }
    }
}
