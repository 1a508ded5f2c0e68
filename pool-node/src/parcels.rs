//! Sequences that are whole, and wait to be fetched.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_pool::Parcel;
use types::TransferId;

/// Parcels by the transfer that brought them. Clones share one table, which is as bounded as the sequences are that the
/// node lets in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parcels {
    /// Held for one look or change, never across an await.
    by_transfer: Arc<Mutex<HashMap<TransferId, Arc<Parcel>>>>,
}

/// A parcel's place in the table. Dropping it takes the parcel away; deliveries that have begun go on.
#[derive(Debug)]
pub(crate) struct Place {
    parcels: Parcels,
    transfer: TransferId,
}

impl Parcels {
    pub(crate) fn put(&self, transfer: TransferId, parcel: Parcel) -> Place {
        self.by_transfer().insert(transfer, Arc::new(parcel));
        Place { parcels: self.clone(), transfer }
    }

    pub(crate) fn get(&self, transfer: TransferId) -> Option<Arc<Parcel>> {
        self.by_transfer().get(&transfer).cloned()
    }

    fn by_transfer(&self) -> MutexGuard<'_, HashMap<TransferId, Arc<Parcel>>> {
        self.by_transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let parcel = self.parcels.by_transfer().remove(&self.transfer);
        // Its blocks go back outside of the lock.
        drop(parcel);
    }
}
