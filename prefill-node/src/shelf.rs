//! KV that is computed and held until somebody names its landing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_transfer::KvConnector;
use tokio::sync::oneshot;
use types::{Landing, Refusal, RefusalKind, TransferId};

/// Sequences whose KV may be held at one time. Each also holds its blocks, which bound it more tightly.
const HELD_MAX: usize = 1024;

/// Where a held sequence learns its landing.
type Name = oneshot::Sender<(Arc<dyn KvConnector>, Landing)>;

/// Held KV by transfer. Clones share one shelf.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shelf {
    /// Held for one lookup or change, never across an await.
    places: Arc<Mutex<HashMap<TransferId, Name>>>,
}

/// A place on the shelf. Dropping it takes the KV off, delivered or not.
#[derive(Debug)]
pub(crate) struct Place {
    shelf: Shelf,
    transfer: TransferId,
}

impl Shelf {
    /// Takes a place for KV that will be held. The answer ends with an error when the KV is released.
    #[allow(clippy::type_complexity, reason = "a place and the word that will come for it")]
    pub(crate) fn put(
        &self,
        transfer: TransferId,
    ) -> Result<(Place, oneshot::Receiver<(Arc<dyn KvConnector>, Landing)>), Refusal> {
        let mut places = self.places();
        if places.len() >= HELD_MAX {
            return Err(Refusal::new(RefusalKind::Full, format!("{HELD_MAX} sequences are held already")));
        }
        if places.contains_key(&transfer) {
            return Err(Refusal::new(RefusalKind::Invalid, format!("transfer {transfer} is held already")));
        }
        let (name, named) = oneshot::channel();
        places.insert(transfer, name);
        Ok((Place { shelf: self.clone(), transfer }, named))
    }

    /// Names the landing of held KV. It can be named once.
    pub(crate) fn name(
        &self,
        transfer: TransferId,
        connector: Arc<dyn KvConnector>,
        to: Landing,
    ) -> Result<(), Refusal> {
        let unknown = || Refusal::new(RefusalKind::Landing, format!("no kv is held for transfer {transfer}"));
        let name = self.places().remove(&transfer).ok_or_else(unknown)?;
        name.send((connector, to)).map_err(|_| unknown())
    }

    fn places(&self) -> MutexGuard<'_, HashMap<TransferId, Name>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Whether somebody has come for the KV: from then on it goes its way.
    pub(crate) fn is_named(&self) -> bool {
        !self.shelf.places().contains_key(&self.transfer)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shelf.places().remove(&self.transfer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_taken_off_is_released() {
        let shelf = Shelf::default();
        let (place, named) = shelf.put(TransferId(1)).expect("the shelf is empty");
        let again = shelf.put(TransferId(1)).expect_err("the place is taken");
        assert_eq!(again.kind, RefusalKind::Invalid);
        assert!(!place.is_named());
        drop(place);
        named.await.expect_err("nobody will name it");
        shelf.put(TransferId(1)).expect("the place is free again");
    }

    #[test]
    fn the_shelf_has_an_end() {
        let shelf = Shelf::default();
        let places: Vec<_> =
            (0..HELD_MAX as u128).map(|n| shelf.put(TransferId(n)).expect("there is room")).collect();
        assert_eq!(shelf.put(TransferId(u128::MAX)).expect_err("full").kind, RefusalKind::Full);
        drop(places);
        shelf.put(TransferId(u128::MAX)).expect("there is room again");
    }
}
