//! Hot path. The receiver's end of a link's queue pairs: receives the numbers of the written frames.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chassis::{Task, spawn_guarded};
use device::verbs::{Completion, Done, QueuePair, Room, VerbsError};
use tokio::sync::Notify;
use types::TransferId;

use super::adapter::Adapter;
use super::greeting::End;
use super::pairs::Pairs;
use super::quiet_proofs::QuietProofs;
use super::verify::take_written;
use super::watch::watch;
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::frame::{FrameError, KvPlace};
use crate::connectors::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use crate::connectors::link::stream::FrameReader;
use crate::error::TransferError;
use crate::landing::OpenLanding;

/// Limit of numbers that one queue pair receives before this side polls it.
const RECEIVES: u32 = 256;
/// Limit of numbers whose frames have not come. A sender is never that far ahead of its own frames.
const NUMBERS_MAX: usize = 64 << 10;

/// The receiver's end of one link: the memory that the sender may write into, and the numbers that it has
/// written.
#[derive(Debug)]
pub(super) struct RdmaKvPath {
    adapter: Arc<Adapter>,
    numbers: Arc<Numbers>,
    /// The queue pairs; empty once they are destroyed. Held for a look-up, never across an await.
    pairs: Arc<Mutex<Vec<QueuePair>>>,
    /// The outstanding reports of landings that the sender's device writes into.
    reports: QuietProofs,
    #[expect(dead_code, reason = "held for its Drop")]
    watching: Task<()>,
}

/// The numbers that came before their frames.
#[derive(Debug, Default)]
struct Numbers {
    /// The numbers and the failure. The lock is held for one read or write, never across an await.
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    come: HashSet<u32>,
    lost: Option<TransferError>,
}

impl RdmaKvPath {
    /// Creates queue pairs, connects them to the sender's, and returns their description for the sender.
    pub(super) fn of(
        adapter: &Arc<Adapter>,
        parts: &ConnectorParts,
        sender: &End,
    ) -> Result<(Self, End), TransferError> {
        let room = Room { writes: 1, receives: RECEIVES };
        let made = Pairs::new(adapter, sender.pairs.len() as u16, room, || parts.world.draw())?;
        made.connect(adapter, sender)?;
        let end = made.end(adapter, adapter.ranks());
        for (nth, pair) in made.pairs.iter().enumerate() {
            (0..RECEIVES).try_for_each(|_| pair.receive(nth as u64)).map_err(TransferError::rdma)?;
        }
        let (numbers, pairs) = (Arc::<Numbers>::default(), Arc::new(Mutex::new(made.pairs)));
        let taking = Taking { numbers: Arc::clone(&numbers), pairs: Arc::clone(&pairs) };
        let completions = made.completions;
        let watching = spawn_guarded(&parts.gate, "rdma receiver", async move {
            let Err(error) = watch(completions, |completion| taking.take(completion)).await;
            taking.numbers.lose(error);
        });
        let reports = QuietProofs::default();
        Ok((Self { adapter: Arc::clone(adapter), numbers, pairs, reports, watching }, end))
    }
}

#[async_trait]
impl KvPath for RdmaKvPath {
    /// Waits for the number even if its landing is over, because the device delivers each number once.
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        _reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place: KvPlace::Written { number }, .. } = frame else {
            return Err(wrong_place());
        };
        let digests = digests.here()?;
        let take = async move {
            self.numbers.wait(number).await?;
            let Some(landing) = landing else { return Ok(Vec::new()) };
            take_written(&landing, &span, &digests, self.adapter.card.as_ref()).await
        };
        Ok(Receipt::Pending(Box::pin(take)))
    }

    fn opened(&self, landing: &OpenLanding) {
        landing.needs_proof(self.reports.expect(landing.landing().transfer));
    }

    fn sender_is_quiet(&self, transfer: TransferId) {
        self.reports.received(transfer);
    }

    fn revoke(&self) {
        self.numbers.lose(TransferError::lost_because("the link's queue pairs are destroyed"));
        locked(&self.pairs).clear();
        self.reports.close();
    }
}

/// Handles completions for the watching task.
#[derive(Debug)]
struct Taking {
    numbers: Arc<Numbers>,
    pairs: Arc<Mutex<Vec<QueuePair>>>,
}

impl Taking {
    fn take(&self, completion: Completion) -> Result<(), TransferError> {
        match completion.outcome {
            Err(failure) => return Err(TransferError::rdma(VerbsError::Failed(failure))),
            Ok(Done::Written) => return Ok(()),
            Ok(Done::Received { number }) => self.numbers.come(number)?,
        }
        // The completed request made room for the next number, so another receive is posted. Without queue
        // pairs there will be none.
        match locked(&self.pairs).get(completion.id as usize) {
            Some(pair) => pair.receive(completion.id).map_err(TransferError::rdma),
            None => Ok(()),
        }
    }
}

impl Numbers {
    fn come(&self, number: u32) -> Result<(), TransferError> {
        let mut state = self.state();
        if state.come.len() >= NUMBERS_MAX || !state.come.insert(number) {
            return Err(FrameError::Unexpected("numbers without frames").into());
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Waits until the sender's device has delivered this number: everything that it wrote before is then in place.
    /// Cancel-safe.
    async fn wait(&self, number: u32) -> Result<(), TransferError> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(known) = self.look(number) {
                return known;
            }
            changed.await;
        }
    }

    fn look(&self, number: u32) -> Option<Result<(), TransferError>> {
        let mut state = self.state();
        match state.come.remove(&number) {
            true => Some(Ok(())),
            false => state.lost.clone().map(Err),
        }
    }

    /// Sets the error that all waiting calls get. Only the first one is kept.
    fn lose(&self, error: TransferError) {
        self.state().lost.get_or_insert(error);
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn locked(pairs: &Mutex<Vec<QueuePair>>) -> MutexGuard<'_, Vec<QueuePair>> {
    pairs.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn a_number_is_taken_once_whichever_comes_first() {
        let numbers = Numbers::default();
        numbers.come(7).expect("it is the first");
        numbers.wait(7).await.expect("it came before");
        let mut later = Box::pin(numbers.wait(7));
        assert!(poll!(&mut later).is_pending(), "it was taken");
        numbers.come(8).expect("another one");
        assert!(poll!(&mut later).is_pending(), "it is another one");
        numbers.come(7).expect("it was taken");
        later.await.expect("it has come");
        numbers.come(8).expect_err("the same number twice means nothing");
    }

    #[tokio::test]
    async fn whoever_waits_learns_of_the_loss_and_what_came_before_counts() {
        let numbers = Numbers::default();
        numbers.come(1).expect("it is the first");
        let mut waiting = Box::pin(numbers.wait(2));
        assert!(poll!(&mut waiting).is_pending());
        numbers.lose(TransferError::lost_because("gone"));
        waiting.await.expect_err("it will never come");
        numbers.wait(1).await.expect("it is in place");
    }
}
