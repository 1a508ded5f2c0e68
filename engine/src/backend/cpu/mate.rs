//! Hot path.
//! A process that computes some ranks of a stage, and the thread that waits for its results.

use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use super::rows::{bytes_of, numbers_of};
use crate::backend::remote::{RemoteProcess, RemoteStage, StageInput, StageLost, StageMates, StageResults};
use crate::model::ranks::{OtherRanks, RankFence};

/// Why another process is lost; empty while none is.
pub(super) type LostReason = Arc<OnceLock<StageLost>>;

/// Another process. Dropping it waits for its results.
#[derive(Debug)]
pub(super) struct Mate {
    stage: Arc<dyn RemoteStage>,
    /// The queue of the steps that the process computes; `None` after the thread was told to end.
    begun: Option<SyncSender<BegunStep>>,
    /// Read by one thread.
    results: Mutex<Receiver<StageResults>>,
    lost: LostReason,
    thread: Option<thread::JoinHandle<()>>,
}

/// A step that was sent to the process.
struct BegunStep {
    written: Arc<RankFence>,
    n_rows: usize,
}

impl Mate {
    /// Starts the thread that waits for a process. The process computes at most `n_steps` steps at one time.
    pub(super) fn start(process: &RemoteProcess, n_steps: usize, lost: &LostReason) -> io::Result<Self> {
        let RemoteProcess { share, stage } = process;
        let (begun, to_finish) = sync_channel(n_steps);
        let (results_out, results) = sync_channel(n_steps);
        let ranks = share.ranks.start.into()..share.ranks.end.into();
        let thread =
            thread::Builder::new().name(format!("stage-{}-rank-{}-results", share.stage, share.ranks.start));
        let (waiting, why) = (Arc::clone(stage), Arc::clone(lost));
        let thread = thread.spawn(move || finish_all(&*waiting, &ranks, &to_finish, &results_out, &why))?;
        let (stage, lost) = (Arc::clone(stage), Arc::clone(lost));
        Ok(Self { stage, begun: Some(begun), results: Mutex::new(results), lost, thread: Some(thread) })
    }

    /// Sends a step to the process. Returns `None` if it is lost.
    pub(super) fn begin(&self, input: StageInput, written: &Arc<RankFence>) -> Option<()> {
        let n_rows = input.rows.len();
        if let Err(error) = self.stage.begin(input) {
            self.lost.get_or_init(|| error);
            return None;
        }
        self.begun.as_ref()?.send(BegunStep { written: Arc::clone(written), n_rows }).ok()
    }

    /// Waits for the results of the oldest step, with an outcome for each of its rows. Returns `None` if the process is lost.
    pub(super) fn finish(&self) -> Option<StageResults> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
    }
}

impl Drop for Mate {
    fn drop(&mut self) {
        self.begun = None;
        if let Some(thread) = self.thread.take() {
            // The reason of its end is in `lost`, so the result is ignored.
            let _ = thread.join();
        }
    }
}

/// Waits for the results of steps until no more were begun, or the process is lost.
fn finish_all(
    stage: &dyn RemoteStage,
    ranks: &Range<usize>,
    begun: &Receiver<BegunStep>,
    results: &SyncSender<StageResults>,
    lost: &LostReason,
) {
    while let Ok(BegunStep { written, n_rows }) = begun.recv() {
        let finished = stage.finish(&mut |n_layers| written.layers_done_by(ranks.clone(), n_layers));
        let finished = finished.and_then(|of_step| match of_step.outcomes.len() == n_rows {
            true => Ok(of_step),
            false => Err(StageLost::other_step()),
        });
        match finished {
            Ok(of_step) => {
                // Dropped before the results are sent, because the last stage promises an open or a broken fence.
                drop(written);
                if results.send(of_step).is_err() {
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

/// The ranks of the processes that compute the same stage.
#[derive(Debug)]
pub(super) struct RanksOfMates(pub(super) Arc<dyn StageMates>);

impl OtherRanks for RanksOfMates {
    fn exchange(&self, mine: &[f32]) -> Result<Vec<f32>, StageLost> {
        let mut all = Vec::new();
        for bytes in self.0.exchange(bytes_of(mine).into())? {
            all.extend(numbers_of(&bytes).ok_or_else(StageLost::other_step)?);
        }
        Ok(all)
    }
}
