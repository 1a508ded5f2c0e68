//! Hot path.
//! The sums over the ranks of a stage: of parts of the residual, and of the logits of parts of the vocabulary.

use std::sync::Arc;

use device::cuda::nccl::{EndOfSums, RankPlace, RankSums, UniqueId};
use device::cuda::{Bf16, Card, Columns, CudaError, View, ViewMut};
use kernels::cuda::{ComputeCard, Peers};

use super::share::Share;
use crate::backend::remote::{StageLost, StageMates, StageRanks};
use crate::error::OpenError;

/// How a rank adds up numbers with the other ranks of its stage.
#[derive(Debug)]
pub(super) enum RankLinks {
    /// There is one rank.
    Alone,
    /// The ranks are in one process, and their GPUs reach each other's memory.
    Peers(Box<Peers>),
    /// The ranks are in several processes.
    Processes(ProcessSums),
}

/// The sums over ranks in several processes, by NCCL.
#[derive(Debug)]
pub(super) struct ProcessSums {
    sums: RankSums,
    share: Share,
    /// Before the first step there is no sum: each process prepares by itself.
    has_begun: bool,
}

/// The parts that a rank needs to join those of other processes.
#[derive(Debug)]
pub(super) struct JoinSums {
    id: UniqueId,
    mates: Arc<dyn StageMates>,
    /// Ends the sums of this rank.
    pub(super) end: EndOfSums,
}

impl RankLinks {
    /// Returns whether this rank computes the whole stage.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self, Self::Alone)
    }

    /// Returns whether some ranks are in other processes. They have written a layer's KV before the layer's first sum.
    pub(super) fn are_in_processes(&self) -> bool {
        matches!(self, Self::Processes(_))
    }

    /// Adds up from now on.
    pub(super) fn begin(&mut self) {
        if let Self::Processes(sums) = self {
            sums.has_begun = true;
        }
    }
}

impl JoinSums {
    /// Makes the parts with which one rank joins.
    pub(super) fn of(ranks: &StageRanks) -> Result<Self, OpenError> {
        let StageRanks { mates, sums_id } = ranks;
        let unreadable = |_| OpenError::StageLost(StageLost("the head has sent no id of NCCL".to_owned()));
        let id = sums_id[..].try_into().map(UniqueId).map_err(unreadable)?;
        Ok(Self { id, mates: Arc::clone(mates), end: EndOfSums::default() })
    }
}

impl ProcessSums {
    /// Waits for the ranks of the other processes.
    pub(super) fn join(card: &Card, share: Share, by: JoinSums) -> Result<Self, CudaError> {
        let JoinSums { id, mates, end } = by;
        let place = RankPlace { id, nth: share.nth, n_ranks: share.n_ranks };
        Ok(Self { sums: RankSums::join(card, place, end, || mates.is_lost())?, share, has_begun: false })
    }

    /// Adds up the parts of all ranks.
    pub(super) fn add_parts(&self, card: &ComputeCard, parts: ViewMut<'_, Bf16>) -> Result<(), CudaError> {
        if self.has_begun { self.sums.sum(card, parts) } else { Ok(()) }
    }

    /// Makes the logits of the whole vocabulary. `own` are those of this rank's part, with padding.
    pub(super) fn join_logits(
        &self,
        card: &ComputeCard,
        mut logits: ViewMut<'_, f32>,
        own: View<'_, f32>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        let part = self.share.range(vocab);
        let (first, n_columns, from_width) = (part.start, part.len(), self.share.width(vocab));
        // A sum with zeroes is exact.
        card.fill(logits.reborrow(), 0)?;
        card.copy_columns(logits.reborrow(), own, Columns { width: vocab, first, n_columns, from_width })?;
        if self.has_begun { self.sums.sum(card, logits) } else { Ok(()) }
    }
}
