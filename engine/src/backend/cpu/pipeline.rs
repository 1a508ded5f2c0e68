//! The threads of all stages, and the channels between them.
//!
//! Steps go from stage to stage in the order of their launch, so a row finds the KV of earlier steps in place. Each channel
//! has room for all steps that may be in flight, so no stage waits for a later one. If a thread panics, its channels close,
//! and all other threads end.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use types::TokenId;

use super::intake::{Intake, IntakeParts};
use super::job::StepJob;
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
}

/// What a [`Pipeline`] is made of.
#[derive(Debug)]
pub(super) struct PipelineParts {
    /// In order; at least one.
    pub(super) stages: Vec<Stage>,
    pub(super) n_ranks: usize,
    pub(super) vocab: usize,
    pub(super) eos_tokens: Vec<TokenId>,
    pub(super) steps_in_flight_max: usize,
}

impl Pipeline {
    pub(super) fn start(parts: PipelineParts) -> io::Result<Self> {
        let PipelineParts { stages, n_ranks, vocab, eos_tokens, steps_in_flight_max } = parts;
        let (jobs_out, jobs) = sync_channel(steps_in_flight_max);
        let (results_out, results) = sync_channel(steps_in_flight_max);
        let (sampled_out, sampled) = sync_channel(steps_in_flight_max);
        let intake = Intake::new(IntakeParts { jobs, sampled, n_ranks, vocab, steps_in_flight_max });
        let mut source = Source::Launched(intake);
        let mut outlet = Some(Outlet { results: results_out, sampled: sampled_out, eos_tokens });
        let mut threads = Vec::with_capacity(stages.len());
        let n_stages = stages.len();
        for (nth, stage) in stages.into_iter().enumerate() {
            let (target, next) = match outlet.take_if(|_| nth + 1 == n_stages) {
                Some(outlet) => (Target::Collected(outlet), None),
                None => {
                    let (steps_out, steps) = sync_channel(steps_in_flight_max);
                    (Target::NextStage(steps_out), Some(Source::StageBefore(steps)))
                }
            };
            let thread = thread::Builder::new().name(format!("stage-{nth}"));
            threads.push(thread.spawn(move || stage.run(source, target))?);
            let Some(next) = next else { break };
            source = next;
        }
        Ok(Self { jobs: Some(jobs_out), results, threads })
    }

    /// Starts a step. The channel has room for all steps that may be in flight, so this does not wait.
    pub(super) fn launch(&self, job: StepJob) -> Result<(), BackendError> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job).is_ok());
        if sent == Some(true) {
            return Ok(());
        }
        Err(BackendError::DeviceLost("a compute thread has ended".to_owned()))
    }

    /// Waits for the oldest step.
    pub(super) fn collect(&self) -> Result<StepOutput, BackendError> {
        let lost = |_| BackendError::DeviceLost("a compute thread ended during a step".to_owned());
        self.results.recv().map_err(lost)
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
