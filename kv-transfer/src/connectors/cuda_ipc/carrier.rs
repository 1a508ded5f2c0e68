//! Who waits for a card, so that no task has to: a thread behind a courier.

use std::sync::Arc;

use chassis::Gate;
use kernels::cuda::{Courier, CourierSize, CudaError, Errand, RemoteMemory};
use kv_cache::KvMemory;
use tokio::sync::{mpsc, oneshot};
use tracing::trace;

use super::pages::card_of;
use crate::error::TransferError;
use crate::flights::Flight;

/// Errands that one connector has under way.
const ERRANDS_MAX: usize = 64;

/// A courier, and the thread that waits for its errands. The thread ends when this is dropped and all are done.
#[derive(Debug)]
pub(in crate::connectors) struct Carrier {
    courier: Arc<Courier>,
    waiting: mpsc::Sender<Job>,
}

/// One for each of a node's cards. Cheap to clone.
#[derive(Clone, Debug)]
pub(in crate::connectors) struct Carriers(Arc<[Carrier]>);

impl Carriers {
    pub(in crate::connectors) fn start(
        memory: &KvMemory,
        size: CourierSize,
        gate: &Gate,
    ) -> Result<Self, TransferError> {
        let all = (0..memory.n_ranks()).map(|rank| Carrier::start(memory, rank, size, gate));
        Ok(Self(all.collect::<Result<_, _>>()?))
    }

    /// # Panics
    /// If there is no such rank.
    pub(in crate::connectors) fn of(&self, rank: u16) -> &Carrier {
        &self.0[usize::from(rank)]
    }
}

/// What is done on the thread, because it waits for the card.
#[derive(Debug)]
enum Job {
    Take {
        errand: Errand,
        answer: oneshot::Sender<Result<Vec<u64>, CudaError>>,
        /// Lands when the errand is done, also where nobody waits for the answer any more.
        flight: Option<Flight>,
    },
    Unmap(Arc<RemoteMemory>),
}

/// An errand that the card does, and that somebody waits for.
#[derive(Debug)]
pub(in crate::connectors) struct UnderWay(oneshot::Receiver<Result<Vec<u64>, CudaError>>);

/// Room for one errand.
#[derive(Debug)]
pub(in crate::connectors) struct Room<'a>(mpsc::Permit<'a, Job>);

impl Carrier {
    /// For the card of one rank. Its thread is in the gate.
    pub(in crate::connectors) fn start(
        memory: &KvMemory,
        rank: u16,
        size: CourierSize,
        gate: &Gate,
    ) -> Result<Self, TransferError> {
        let inside = gate.enter("gpu wire thread").map_err(|_| TransferError::Closed)?;
        let courier = Courier::new(card_of(memory, rank)?.memory(), size);
        let courier = Arc::new(courier.map_err(TransferError::device)?);
        let (waiting, jobs) = mpsc::channel(ERRANDS_MAX);
        let waits = Arc::clone(&courier);
        std::thread::Builder::new()
            .name("gpu-wire".to_owned())
            .spawn(move || {
                wait_for_all(&waits, jobs);
                drop((waits, inside));
            })
            .map_err(TransferError::lost)?;
        Ok(Self { courier, waiting })
    }

    pub(in crate::connectors) fn courier(&self) -> &Courier {
        &self.courier
    }

    /// Waits until an errand more may be under way.
    pub(in crate::connectors) async fn room(&self) -> Result<Room<'_>, TransferError> {
        self.waiting.reserve().await.map(Room).map_err(|_| TransferError::Closed)
    }

    /// Gives a peer's memory back, which waits until the card does not use it.
    pub(in crate::connectors) fn unmap(&self, remote: Arc<RemoteMemory>) {
        // Where there is no room it happens when this drops it, here and now.
        let _ = self.waiting.try_send(Job::Unmap(remote));
    }
}

impl Room<'_> {
    /// Waits for an errand: its digests. Dropped early, the errand and its flight go on.
    pub(in crate::connectors) async fn take(
        self,
        errand: Errand,
        flight: Option<Flight>,
    ) -> Result<Vec<u64>, TransferError> {
        self.fill(errand, flight).digests().await
    }

    /// The same, to be waited for later.
    pub(in crate::connectors) fn fill(self, errand: Errand, flight: Option<Flight>) -> UnderWay {
        let (answer, answered) = oneshot::channel();
        self.0.send(Job::Take { errand, answer, flight });
        UnderWay(answered)
    }
}

impl UnderWay {
    pub(in crate::connectors) async fn digests(self) -> Result<Vec<u64>, TransferError> {
        self.0.await.map_err(|_| TransferError::Closed)?.map_err(TransferError::device)
    }
}

fn wait_for_all(courier: &Courier, mut jobs: mpsc::Receiver<Job>) {
    while let Some(job) = jobs.blocking_recv() {
        match job {
            Job::Unmap(remote) => drop(remote),
            Job::Take { errand, answer, flight } => {
                let digests = courier.take(errand);
                trace!(target: "walk", writes = flight.is_some(), "errand done");
                drop(flight);
                // Whoever asked may have gone away.
                let _ = answer.send(digests);
            }
        }
    }
}
