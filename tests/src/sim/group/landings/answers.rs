//! The thread that computes decode steps with KV that has arrived, and compares their results with those of one process.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;

use chassis::Standstill;
use engine::{Backend, Row, RowInput, SampledToken, SlotId, StepBatch};
use kv_cache::BlockLease;
use tokio::sync::oneshot;
use types::BlockIdx;

use super::super::clock::Progress;
use super::super::reference::{DecodeToken, Reference};
use super::super::work::{Outcome, wait_while_stopped};

/// A sequence whose answer the thread computes.
#[derive(Debug)]
pub struct AnswerWork {
    pub slot: SlotId,
    /// The index of the reference's prompt.
    pub prompt: usize,
    /// The blocks of the prompt, and one more.
    pub lease: Arc<BlockLease>,
    pub n_decoded: usize,
    pub outcome: oneshot::Sender<Outcome>,
}

/// The inputs of the thread.
#[derive(Debug)]
pub struct AnswerThread {
    pub backend: Box<dyn Backend>,
    pub reference: &'static Reference,
    pub works: Receiver<AnswerWork>,
    pub progress: Progress,
    /// Stops the thread.
    pub process: Standstill,
}

impl AnswerThread {
    /// Starts the thread. It ends when no more work comes. Then it drops the backend.
    pub fn start(self) -> thread::JoinHandle<()> {
        let thread = thread::Builder::new().name("sim worker".to_owned());
        thread.spawn(move || self.work()).expect("a thread can be started")
    }

    fn work(mut self) {
        while let Ok(work) = self.works.recv() {
            let answer = (0..work.n_decoded).try_for_each(|nth| self.step(&work, nth));
            let AnswerWork { lease, outcome, .. } = work;
            drop(lease);
            self.progress.note(|seen| seen.n_waves -= 1);
            // Nothing waits for the outcome after the end of the run.
            let _ = outcome.send(answer.err().unwrap_or(Outcome::WaveDone));
        }
    }

    fn step(&mut self, work: &AnswerWork, nth: usize) -> Result<(), Outcome> {
        let (layout, prompt) = (&self.reference.model.layout, &self.reference.prompts[work.prompt]);
        let tables: Vec<&[BlockIdx]> = layout.group_indices().map(|group| work.lease.table(group)).collect();
        let token = DecodeToken { slot: work.slot, prompt: &prompt.tokens, nth, tables: &tables };
        let first = [prompt.first.token];
        // The slot's first step has the token of the handoff.
        let row = match nth {
            0 => Row { input: RowInput::Tokens(&first), ..self.reference.decode_row(token) },
            _ => self.reference.decode_row(token),
        };
        let failed = |error: &dyn std::fmt::Display| Outcome::Failed(error.to_string());
        wait_while_stopped(&self.process);
        // Before the launch, so that the clock stands still.
        self.progress.note(|seen| seen.n_launched += 1);
        let launched = self.backend.launch(StepBatch { rows: &[row] });
        let collected = launched
            .map_err(|error| failed(&error))
            .and_then(|step| self.backend.collect(step).map_err(|error| failed(&error)));
        self.progress.note(|seen| seen.n_collected += 1);
        let row = collected?.rows.remove(0).map_err(|error| failed(&error))?;
        match row.as_ref() == Some(&prompt.answer[nth]) {
            true => Ok(()),
            false => Err(Outcome::Wrong(wrong_token(work.prompt, nth, &row))),
        }
    }
}

fn wrong_token(prompt: usize, nth: usize, row: &Option<SampledToken>) -> String {
    format!("token {nth} of the answer to prompt {prompt} is another one: {row:?}")
}
