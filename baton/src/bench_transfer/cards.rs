//! The two GPUs of a machine between which KV is moved.

use std::sync::OnceLock;

use device::HostMemory;
use device::cuda::{Cache, Card, HostPath, PageCopier, PageCopierSize, RemoteMemory};
use kv_cache::{KvMemory, OnCard};
use types::{KvLayout, StageLayers};

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
    KvMemory::device(layout, &StageLayers::one(), n_blocks, &[&cards[usize::from(side == Side::Far)]])
        .map_err(failed)
}

fn open(ordinal: usize) -> Result<Card, CommandError> {
    Card::open(ordinal, None, &Cache::none()).map_err(failed)
}

/// A plain copy from one GPU to the other by the copy engines: directly, in one piece, or through the host.
#[derive(Debug)]
pub enum PlainCopy {
    Direct { copier: PageCopier, remote: RemoteMemory },
    ThroughHost(HostPath),
}

impl PlainCopy {
    pub(super) fn between(near: &KvMemory, far: &KvMemory) -> Result<Self, CommandError> {
        let (near, far) = on_cards(near, far)?;
        let (fd, bytes) = near.memory().export().map_err(failed)?;
        let remote = far.memory().import(&fd, bytes).map_err(failed)?;
        let copier = PageCopier::new(far.memory(), PageCopierSize::default()).map_err(failed)?;
        Ok(Self::Direct { copier, remote })
    }

    pub(super) fn through_host(near: &KvMemory, far: &KvMemory) -> Result<Self, CommandError> {
        let (near, far) = on_cards(near, far)?;
        let host = HostMemory::new(&[HostPath::HOST]).map_err(failed)?;
        Ok(Self::ThroughHost(HostPath::over(&host, near.memory(), far.memory()).map_err(failed)?))
    }

    /// Copies the first `bytes` bytes of the memory `near` to the memory `far`.
    pub(super) fn copy(&self, near: &KvMemory, far: &KvMemory, bytes: usize) -> Result<(), CommandError> {
        let (near, far) = on_cards(near, far)?;
        match self {
            Self::Direct { copier, remote } => copier.copy_plainly(remote, far.memory(), bytes),
            Self::ThroughHost(path) => path.copy(near.memory(), far.memory(), bytes),
        }
        .map_err(failed)
    }
}

fn on_cards<'a>(near: &'a KvMemory, far: &'a KvMemory) -> Result<(OnCard<'a>, OnCard<'a>), CommandError> {
    let no_card = || not_moved("KV is not on a GPU");
    Ok((near.on_card().ok_or_else(no_card)?, far.on_card().ok_or_else(no_card)?))
}
