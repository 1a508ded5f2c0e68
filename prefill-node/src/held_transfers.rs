//! Computed KV that is held until a `Deliver` call names its landing.
//! See `docs/decisions/0002-held-kv-lives-as-long-as-its-call.md`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_transfer::KvConnector;
use node::{Counter, CounterGuard};
use tokio::sync::oneshot;
use types::{Landing, Refusal, RefusalKind, TransferId};

/// The most transfers that may be held. Their blocks are usually the tighter limit.
const HELD_MAX: u32 = 1024;

/// The sender that gives held KV its landing, and the connector to send it with.
type Name = oneshot::Sender<(Arc<dyn KvConnector>, Landing)>;

/// Held transfers by id. Clones share one map.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeldTransfers {
    /// The mutex is held for one lookup or change, never across an await.
    places: Arc<Mutex<HashMap<TransferId, Name>>>,
    held: Counter,
}

/// One held transfer. Dropping it removes the entry, delivered or not.
#[derive(Debug)]
pub(crate) struct HeldTransfer {
    held: HeldTransfers,
    transfer: TransferId,
    _counted: CounterGuard,
}

impl HeldTransfers {
    /// Makes an empty map; the counter `held` counts its transfers.
    pub(crate) fn new(held: Counter) -> Self {
        Self { places: Arc::default(), held }
    }

    /// Adds an entry for KV that will be held. The receiver gets the landing, or an error when the KV is
    /// released.
    #[allow(clippy::type_complexity, reason = "the entry, and the receiver of its landing")]
    pub(crate) fn put(
        &self,
        transfer: TransferId,
    ) -> Result<(HeldTransfer, oneshot::Receiver<(Arc<dyn KvConnector>, Landing)>), Refusal> {
        let mut places = self.places();
        let full = || Refusal::new(RefusalKind::Full, format!("{HELD_MAX} sequences are already held"));
        let counted = self.held.enter(HELD_MAX).ok_or_else(full)?;
        if places.contains_key(&transfer) {
            return Err(Refusal::new(RefusalKind::Invalid, format!("transfer {transfer} is already held")));
        }
        let (name, named) = oneshot::channel();
        places.insert(transfer, name);
        Ok((HeldTransfer { held: self.clone(), transfer, _counted: counted }, named))
    }

    /// Passes the landing to the transfer's receiver and removes the entry, so this is possible once.
    pub(crate) fn name(
        &self,
        transfer: TransferId,
        connector: Arc<dyn KvConnector>,
        to: Landing,
    ) -> Result<(), Refusal> {
        let unknown = || Refusal::new(RefusalKind::Landing, format!("no KV is held for transfer {transfer}"));
        let name = self.places().remove(&transfer).ok_or_else(unknown)?;
        name.send((connector, to)).map_err(|_| unknown())
    }

    fn places(&self) -> MutexGuard<'_, HashMap<TransferId, Name>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldTransfer {
    /// Returns whether a landing was named. Its KV is then being sent.
    pub(crate) fn is_named(&self) -> bool {
        !self.held.places().contains_key(&self.transfer)
    }
}

impl Drop for HeldTransfer {
    fn drop(&mut self) {
        self.held.places().remove(&self.transfer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_taken_off_is_released() {
        let held = HeldTransfers::default();
        let (place, named) = held.put(TransferId(1)).expect("nothing is held");
        let again = held.put(TransferId(1)).expect_err("the place is taken");
        assert_eq!(again.kind, RefusalKind::Invalid);
        assert!(!place.is_named());
        drop(place);
        named.await.expect_err("its landing is never named");
        held.put(TransferId(1)).expect("the place is free again");
    }

    #[test]
    fn the_number_of_held_transfers_is_bounded() {
        let held = HeldTransfers::default();
        let places: Vec<_> =
            (0..u128::from(HELD_MAX)).map(|n| held.put(TransferId(n)).expect("there is room")).collect();
        assert_eq!(held.put(TransferId(u128::MAX)).expect_err("full").kind, RefusalKind::Full);
        drop(places);
        held.put(TransferId(u128::MAX)).expect("there is room again");
    }
}
