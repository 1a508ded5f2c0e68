//! Hot path.
//! The links of a stage, on one of its ranks: rows go to the next stage, and sampled tokens from the last stage to the
//! first one.
//!
//! A ring has as many places as steps may be in flight, so the step that used a place before is collected when the
//! place is written again.

use device::cuda::{
    Bf16, Buffer, CudaError, HostInbox, HostOutbox, Inbox, Outbox, View, hand_over, host_ring, reach,
};
use kernels::cuda::ComputeCard;
use tracing::warn;

use super::lockstep::LAUNCH_WITHIN;
use super::plan::Dims;
use super::workspace::Workspace;
use crate::backend::StepLimits;

/// The links of one rank of a stage; all are absent with one stage.
#[derive(Debug, Default)]
pub(super) struct StageLinks {
    hidden: usize,
    rows_in: Option<RowsIn>,
    rows_out: Option<Outbox<Bf16>>,
    tokens_in: Option<TokensIn>,
    tokens_out: Option<Outbox<u32>>,
    tokens_kept: Option<TokensKept>,
}

/// Where the rows of the stage before come from.
#[derive(Debug)]
enum RowsIn {
    Gpu(Inbox<Bf16>),
    Process(HostInbox<Bf16>),
}

/// The tokens that the last stage has sampled, in its own memory, if another process computes the first stage.
#[derive(Debug)]
struct TokensKept {
    tokens: Buffer<u32>,
    ring: TokenRing,
}

/// The tokens that the last stage has sampled, in the first stage's memory.
#[derive(Debug)]
struct TokensIn {
    inbox: Inbox<u32>,
    earlier: Buffer<u32>,
    ring: TokenRing,
}

/// A step's places in the rings between stages.
#[derive(Debug, Default)]
pub(super) struct StepPlaces {
    pub(super) here: usize,
    /// The step's tokens without padding. Other processes send only their rows.
    pub(super) n_tokens: usize,
    /// The places of the earlier steps whose tokens rows of this step continue.
    pub(super) earlier: Vec<usize>,
}

/// The sizes of all links of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkSizes {
    pub(super) n_ranks: usize,
    /// The number of stages of the model.
    pub(super) n_stages: usize,
    /// The stage that this process computes, if other processes compute the others.
    pub(super) only: Option<usize>,
    pub(super) limits: StepLimits,
    pub(super) hidden: usize,
}

/// The ring of the tokens that the steps in flight sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenRing {
    n_places: usize,
    /// The most tokens that a step samples.
    place_len: usize,
}

// === impl StageLinks ===

impl StageLinks {
    /// Makes the links of all ranks of all stages, if this process computes all of them. `cards` has all ranks of the first
    /// stage, then those of the next.
    pub(super) fn all(cards: &[&ComputeCard], sizes: LinkSizes) -> Result<Vec<Self>, CudaError> {
        let LinkSizes { n_ranks, n_stages, limits, .. } = sizes;
        let mut all: Vec<Self> = cards.iter().map(|_| sizes.no_link()).collect();
        if n_stages == 1 {
            return Ok(all);
        }
        for from in 0..cards.len() - n_ranks {
            let to = from + n_ranks;
            let (outbox, inbox) = hand_over(cards[from], n_stages + 1, 2 * limits.tokens * sizes.hidden)?;
            let_copies_be_direct(cards[to], cards[from])?;
            (all[from].rows_out, all[to].rows_in) = (Some(outbox), Some(RowsIn::Gpu(inbox)));
        }
        let ring = TokenRing::new(n_stages, limits.rows);
        for to in 0..n_ranks {
            let from = cards.len() - n_ranks + to;
            let (outbox, inbox) = hand_over(cards[from], ring.n_places, ring.place_len)?;
            let_copies_be_direct(cards[to], cards[from])?;
            let earlier = cards[to].buffer(ring.n_places * ring.place_len)?;
            all[from].tokens_out = Some(outbox);
            all[to].tokens_in = Some(TokensIn { inbox, earlier, ring });
        }
        Ok(all)
    }

    /// Makes the links of all ranks of stage `nth`, if other processes compute the others. Also returns where this process
    /// puts the rows of the stage before; `None` for the first stage.
    pub(super) fn of_process(
        cards: &[&ComputeCard],
        sizes: LinkSizes,
        nth: usize,
    ) -> Result<(Vec<Self>, Option<HostOutbox<Bf16>>), CudaError> {
        let LinkSizes { n_stages, limits, hidden, .. } = sizes;
        let mut all: Vec<Self> = cards.iter().map(|_| sizes.no_link()).collect();
        // With one stage, the next step reads tokens where they were sampled.
        if nth + 1 == n_stages && n_stages > 1 {
            let ring = TokenRing::new(n_stages, limits.rows);
            for (link, card) in all.iter_mut().zip(cards) {
                let tokens = card.buffer(ring.n_places * ring.place_len)?;
                link.tokens_kept = Some(TokensKept { tokens, ring });
            }
        }
        if nth == 0 {
            return Ok((all, None));
        }
        let context = cards.first().expect("a stage has a GPU").context();
        let (outbox, inbox) = host_ring(context, n_stages + 1, 2 * limits.tokens * hidden)?;
        all.iter_mut().for_each(|link| link.rows_in = Some(RowsIn::Process(inbox.clone())));
        Ok((all, Some(outbox)))
    }

    /// Returns the tokens of the steps in flight, for the first and the last of several stages.
    pub(super) fn earlier(&self) -> Option<View<'_, u32>> {
        let kept = self.tokens_kept.as_ref().map(|kept| kept.tokens.view());
        let sampled = kept.or_else(|| self.tokens_out.as_ref().map(Outbox::places));
        sampled.or_else(|| self.tokens_in.as_ref().map(|tokens| tokens.earlier.view()))
    }

    /// Releases the steps that wait for rows of another process, which will not arrive.
    pub(super) fn release(&self) {
        if let Some(RowsIn::Process(rows)) = &self.rows_in {
            rows.release();
        }
    }

    /// Fetches the rows of the stage before, and the tokens that the step's rows continue.
    pub(super) fn fetch(
        &mut self,
        card: &ComputeCard,
        space: &mut Workspace,
        places: &StepPlaces,
        dims: Dims,
    ) -> Result<(), CudaError> {
        let n = dims.n_tokens * self.hidden;
        match &mut self.rows_in {
            None => {}
            Some(RowsIn::Gpu(rows)) => {
                rows.wait_for_next(card, places.here, LAUNCH_WITHIN)?;
                rows.fetch(card, places.here, 0, space.residual.view_mut().slice(0..n))?;
                rows.fetch(card, places.here, n, space.normed.view_mut().slice(0..n))?;
            }
            Some(RowsIn::Process(rows)) => {
                let n_sent = places.n_tokens * self.hidden;
                rows.wait_for_next(card, places.here)?;
                rows.fetch(card, places.here, 0, space.residual.view_mut().slice(0..n_sent))?;
                rows.fetch(card, places.here, n_sent, space.normed.view_mut().slice(0..n_sent))?;
                if n_sent < n {
                    card.fill(space.residual.view_mut().slice(n_sent..n), 0)?;
                    card.fill(space.normed.view_mut().slice(n_sent..n), 0)?;
                }
            }
        }
        if let Some(TokensIn { inbox, earlier, ring }) = &mut self.tokens_in {
            inbox.note();
            for place in &places.earlier {
                inbox.wait_for_last(card, *place)?;
                let here = place * ring.place_len..(place + 1) * ring.place_len;
                inbox.fetch(card, *place, 0, earlier.view_mut().slice(here))?;
            }
        }
        Ok(())
    }

    /// Leaves the step's results for other stages: the residual and the rows normed for the next stage's first layer, and
    /// the last stage's sampled tokens.
    pub(super) fn put(
        &mut self,
        card: &ComputeCard,
        space: &Workspace,
        place: usize,
        dims: Dims,
    ) -> Result<(), CudaError> {
        if let Some(rows) = self.rows_out.as_mut().filter(|_| dims.n_tokens > 0) {
            let n = dims.n_tokens * self.hidden;
            rows.put(card, place, &[space.residual.slice(0..n), space.normed.slice(0..n)])?;
        }
        if let Some(tokens) = self.tokens_out.as_mut().filter(|_| dims.n_wanted > 0) {
            tokens.put(card, place, &[space.drawn.slice(0..dims.n_wanted)])?;
        }
        if let Some(TokensKept { tokens, ring }) = self.tokens_kept.as_mut().filter(|_| dims.n_wanted > 0) {
            let start = ring.start(place);
            let to = tokens.view_mut().slice(start..start + dims.n_wanted);
            card.copy(to, space.drawn.slice(0..dims.n_wanted))?;
        }
        Ok(())
    }
}

/// Lets `to` copy from the memory of `from` directly. If the GPUs do not reach each other, the driver copies through host
/// memory.
fn let_copies_be_direct(to: &ComputeCard, from: &ComputeCard) -> Result<(), CudaError> {
    if to.ordinal() == from.ordinal() {
        return Ok(());
    }
    match reach(to.context(), from.context()) {
        Err(error @ CudaError::NotReachable { .. }) => {
            warn!(%error, "rows of pipeline stages are copied through host memory, which takes longer");
            Ok(())
        }
        reached => reached,
    }
}

impl LinkSizes {
    fn no_link(self) -> StageLinks {
        StageLinks { hidden: self.hidden, ..StageLinks::default() }
    }
}

// === impl TokenRing ===

impl TokenRing {
    /// Describes the ring for steps that sample up to `rows_max` tokens. With one stage, a step reads the tokens of the
    /// step before from where they were sampled, which is one place.
    pub(super) fn new(n_stages: usize, rows_max: usize) -> Self {
        let n_places = if n_stages == 1 { 1 } else { n_stages + 1 };
        Self { n_places, place_len: rows_max }
    }

    /// Returns the place of a step.
    pub(super) fn place(self, step: u64) -> usize {
        (step % self.n_places as u64) as usize
    }

    /// Returns the index in the whole ring of a step's token number `nth`.
    pub(super) fn index(self, step: u64, nth: u32) -> u32 {
        (self.place(step) * self.place_len) as u32 + nth
    }

    /// Returns the place of a token, by its index in the ring.
    pub(super) fn place_of(self, index: u32) -> usize {
        index as usize / self.place_len
    }

    /// Returns the index of a place's first token.
    pub(super) fn start(self, place: usize) -> usize {
        place * self.place_len
    }

    pub(super) fn n_places(self) -> usize {
        self.n_places
    }

    /// Returns the places of tokens, by their indices in the ring, each place once.
    pub(super) fn places_of(self, indices: impl Iterator<Item = u32>) -> Vec<usize> {
        let mut places: Vec<usize> = indices.map(|index| self.place_of(index)).collect();
        places.sort_unstable();
        places.dedup();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stage_reads_tokens_where_they_were_sampled() {
        let ring = TokenRing::new(1, 256);
        for step in [0, 1, 7] {
            assert_eq!((ring.place(step), ring.index(step, 255)), (0, 255));
        }
    }

    #[test]
    fn steps_in_flight_have_places_of_their_own() {
        for n_stages in [2, 3, 4] {
            let ring = TokenRing::new(n_stages, 10);
            for first in 0..12 {
                let in_flight = first..first + n_stages as u64 + 1;
                let mut places: Vec<usize> = in_flight.map(|step| ring.place(step)).collect();
                places.sort_unstable();
                assert_eq!(places, (0..=n_stages).collect::<Vec<_>>());
            }
        }
        let ring = TokenRing::new(2, 10);
        assert_eq!([(4, 9), (5, 0), (6, 3)].map(|(step, nth)| ring.index(step, nth)), [19, 20, 3]);
        assert_eq!((ring.place_of(19), ring.start(2)), (1, 20));
        assert_eq!(ring.places_of([19, 3, 10, 9].into_iter()), [0, 1]);
        assert_eq!(ring.places_of(std::iter::empty()), Vec::<usize>::new());
    }
}
