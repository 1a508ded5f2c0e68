//! The two GPUs of a machine between which KV is moved.

use std::sync::OnceLock;

use device::cuda::{Cache, Card, PageCopier, PageCopierSize, RemoteMemory};
use kv_cache::KvMemory;
use types::KvLayout;

use crate::bench_transfer::ends::{failed, not_moved};
use crate::exit::CommandError;

static CARDS: OnceLock<[Card; 2]> = OnceLock::new();

/// One of the two GPUs: the sender's or the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Near,
    Far,
}

/// Allocates KV memory on one of the GPUs. The first call opens both GPUs, which takes as long as compiling
/// their kernels.
pub(super) fn memory(side: Side, layout: KvLayout, n_blocks: u32) -> Result<KvMemory, CommandError> {
    let cards = match CARDS.get() {
        Some(cards) => cards,
        None => {
            let opened = [open(0)?, open(1)?];
            CARDS.get_or_init(|| opened)
        }
    };
    KvMemory::device(layout, n_blocks, &[&cards[usize::from(side == Side::Far)]]).map_err(failed)
}

fn open(ordinal: usize) -> Result<Card, CommandError> {
    Card::open(ordinal, None, &Cache::none()).map_err(failed)
}

/// A plain copy from one GPU to the other: by the copy engines, in one piece.
#[derive(Debug)]
pub struct PlainCopy {
    copier: PageCopier,
    remote: RemoteMemory,
}

impl PlainCopy {
    pub(super) fn between(near: &KvMemory, far: &KvMemory) -> Result<Self, CommandError> {
        let no_card = || not_moved("KV is not on a GPU");
        let (near, far) = (near.on_card().ok_or_else(no_card)?, far.on_card().ok_or_else(no_card)?);
        let (fd, bytes) = near.memory().export().map_err(failed)?;
        let remote = far.memory().import(&fd, bytes).map_err(failed)?;
        Ok(Self { copier: PageCopier::new(far.memory(), PageCopierSize::default()).map_err(failed)?, remote })
    }

    /// Copies the first `bytes` bytes to the memory `far`.
    pub(super) fn copy(&self, far: &KvMemory, bytes: usize) -> Result<(), CommandError> {
        let far = far.on_card().ok_or_else(|| not_moved("KV is not on a GPU"))?;
        self.copier.copy_plainly(&self.remote, far.memory(), bytes).map_err(failed)
    }
}
