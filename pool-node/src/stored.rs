//! The complete sequences that wait to be delivered, by transfer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use types::{PromptDigest, TransferId};

use crate::store::StoredSequence;

/// A table of complete sequences. Clones share it. The setting `sequences_max` limits its size.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoredSequences {
    /// The sequences by the transfer that brought them. The mutex is held for one look-up or change, never
    /// across an await.
    by_transfer: Arc<Mutex<HashMap<TransferId, SequenceAndDigest>>>,
}

/// A sequence, and its prompt's digest, which decrypts the grants of landings.
type SequenceAndDigest = (Arc<StoredSequence>, PromptDigest);

/// One sequence's entry in the table. Dropping it removes the sequence; running deliveries continue.
#[derive(Debug)]
pub(crate) struct StoredEntry {
    table: StoredSequences,
    transfer: TransferId,
}

impl StoredSequences {
    pub(crate) fn put(
        &self,
        transfer: TransferId,
        sequence: StoredSequence,
        prompt: PromptDigest,
    ) -> StoredEntry {
        self.by_transfer().insert(transfer, (Arc::new(sequence), prompt));
        StoredEntry { table: self.clone(), transfer }
    }

    pub(crate) fn get(&self, transfer: TransferId) -> Option<SequenceAndDigest> {
        self.by_transfer().get(&transfer).cloned()
    }

    fn by_transfer(&self) -> MutexGuard<'_, HashMap<TransferId, SequenceAndDigest>> {
        self.by_transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StoredEntry {
    fn drop(&mut self) {
        let sequence = self.table.by_transfer().remove(&self.transfer);
        // The mutex is released before the sequence is dropped, which returns its blocks.
        drop(sequence);
    }
}
