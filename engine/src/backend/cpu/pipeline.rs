//! The threads of all stages, and the channels between them.
//!
//! Steps go from stage to stage in the order of their launch, so a row finds the KV of earlier steps in place. Each channel
//! has room for all steps that may be in flight, so no stage waits for a later one. If a thread panics, its channels close,
//! and all other threads end. A stage in another process has two threads here, which send and receive its steps.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use types::TokenId;

use super::elsewhere::Elsewhere;
use super::intake::{Intake, IntakeParts};
use super::job::StepJob;
use super::mate::LostReason;
use super::outlet::Outlet;
use super::stage::{Source, Stage, Target};
use crate::error::BackendError;
use crate::step::StepOutput;

/// The running stages. Dropping it waits for their threads, which finish the launched steps.
#[derive(Debug)]
pub(super) struct Pipeline {
    /// The queue to the first stage; `None` after the threads were told to end.
    jobs: Option<SyncSender<StepJob>>,
    results: Receiver<StepOutput>,
    threads: Vec<thread::JoinHandle<()>>,
    lost: LostReason,
}

/// A stage of a pipeline.
#[derive(Debug)]
pub(super) enum PipelineStage {
    Here(Stage),
    /// A stage in other processes. Never the last stage, because that one samples.
    Elsewhere(Elsewhere),
}

/// The inputs of a [`Pipeline`].
#[derive(Debug)]
pub(super) struct PipelineParts {
    /// In order; at least one.
    pub(super) stages: Vec<PipelineStage>,
    pub(super) n_ranks: u16,
    pub(super) vocab: usize,
    pub(super) eos_tokens: Vec<TokenId>,
    pub(super) steps_in_flight_max: usize,
    pub(super) lost: LostReason,
}

impl Pipeline {
    pub(super) fn start(parts: PipelineParts) -> io::Result<Self> {
        let PipelineParts { stages, n_ranks, vocab, eos_tokens, steps_in_flight_max, lost } = parts;
        let (jobs_out, jobs) = sync_channel(steps_in_flight_max);
        let (results_out, results) = sync_channel(steps_in_flight_max);
        let (sampled_out, sampled) = sync_channel(steps_in_flight_max);
        let intake = Intake::new(IntakeParts { jobs, sampled, n_ranks, vocab, steps_in_flight_max });
        let mut source = Source::Launched(intake);
        let mut outlet = Some(Outlet { results: results_out, sampled: sampled_out, eos_tokens });
        let mut threads = Vec::with_capacity(stages.len());
        let n_stages = stages.len();
        for (nth, stage) in stages.into_iter().enumerate() {
            let (steps_out, steps) = sync_channel(steps_in_flight_max);
            let from = std::mem::replace(&mut source, Source::StageBefore(steps));
            let thread = thread::Builder::new().name(format!("stage-{nth}"));
            match stage {
                PipelineStage::Here(stage) => {
                    let outlet = outlet.take_if(|_| nth + 1 == n_stages);
                    let target = outlet.map_or(Target::NextStage(steps_out), Target::Collected);
                    threads.push(thread.spawn(move || stage.run(from, target))?);
                }
                PipelineStage::Elsewhere(stage) => {
                    let (sent_out, sent) = sync_channel(steps_in_flight_max);
                    let sender = stage.clone();
                    threads.push(thread.spawn(move || sender.send_steps(from, &sent_out))?);
                    let thread = thread::Builder::new().name(format!("stage-{nth}-results"));
                    let why = Arc::clone(&lost);
                    threads.push(thread.spawn(move || stage.receive_steps(&sent, &steps_out, &why))?);
                }
            }
        }
        Ok(Self { jobs: Some(jobs_out), results, threads, lost })
    }

    /// Starts a step. The channel has room for all steps that may be in flight, so this does not wait.
    pub(super) fn launch(&self, job: StepJob) -> Result<(), BackendError> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job).is_ok());
        if sent == Some(true) {
            return Ok(());
        }
        Err(self.lost_because("a compute thread has ended"))
    }

    /// Waits for the oldest step.
    pub(super) fn collect(&self) -> Result<StepOutput, BackendError> {
        self.results.recv().map_err(|_| self.lost_because("a compute thread ended during a step"))
    }

    fn lost_because(&self, what: &str) -> BackendError {
        BackendError::DeviceLost(self.lost.get().map_or_else(|| what.to_owned(), ToString::to_string))
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // If the thread panicked, the panic is logged, and `collect` has returned that the device is
            // lost, so the result is ignored.
            let _ = thread.join();
        }
    }
}
