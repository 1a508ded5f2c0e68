//! Hot path.
//! A rank's objects on its GPU, and forward passes with them.

use device::MemoryError;
use device::cuda::{CudaError, DeviceMemory};
use kernels::cuda::{ComputeCard, PrefillSequence, Products};
use kv_cache::{KvMemory, OnCard};
use tracing::warn;
use types::in_full;

use super::decoder::{Decoder, Pass};
use super::description::ModelDescription;
use super::graph_sizes::GraphSizes;
use super::launched_step::{LostFlags, Source};
use super::links::StageLinks;
use super::plan::{BLOCK_TOKENS, Bounds, Dims};
use super::rank_links::RankLinks;
use super::workspace::Workspace;
use crate::backend::StepLimits;
use crate::error::OpenError;

/// The objects of a rank that a forward pass needs.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) products: Products,
    pub(super) ranks: RankLinks,
    pub(super) links: StageLinks,
    pub(super) space: Workspace,
    pub(super) decoder: Decoder,
    pub(super) memory: KvMemory,
    pub(super) card: ComputeCard,
}

// === impl Tools ===

impl Tools {
    /// Runs a step. Calls `written` after each layer's KV writes are launched.
    pub(super) fn forward(
        &mut self,
        dims: Dims,
        sequences: &[PrefillSequence],
        mut written: impl FnMut(&ComputeCard, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.pass(dims, sequences, |decoder, pass| {
            let card = pass.card;
            decoder.forward(pass, |nth| written(card, nth))
        })
    }

    /// Runs `work` with the decoder and a pass of this size.
    pub(super) fn pass<T>(
        &mut self,
        dims: Dims,
        sequences: &[PrefillSequence],
        work: impl FnOnce(&Decoder, &mut Pass<'_>) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let Self { products, ranks, links, space, decoder, memory, card } = self;
        let (kv, sections) = (kv_of(memory, decoder), dims.sections());
        let earlier = links.earlier();
        let expands = space.expands(sequences, dims.chunk_blocks);
        let latent_rows = if expands { dims.n_decodes } else { dims.n_tokens };
        let mut pass =
            Pass { card, products, ranks, space, earlier, kv, dims, sections, sequences, latent_rows };
        work(decoder, &mut pass)
    }

    /// Returns the limits that rows of a step are checked against.
    pub(super) fn bounds(&self, limits: StepLimits) -> Bounds {
        let n_groups = self.memory.layout().groups.len();
        Bounds { vocab: self.decoder.sizes.vocab, n_groups, n_wanted_max: limits.rows }
    }

    /// Returns the step's logits, for sampling by the host.
    pub(super) fn source<'a>(&'a self, lost: &'a LostFlags) -> Source<'a> {
        Source { card: &self.card, logits: self.space.logits.view(), lost }
    }

    /// Writes a step's words to the GPU.
    pub(super) fn write_words(&mut self, words: &[u32]) -> Result<(), CudaError> {
        self.card.write(self.space.words.view_mut().slice(0..words.len()), words)
    }

    /// Runs each number of rows once, because the first run loads code, which cannot be recorded.
    pub(super) fn warm_up(&mut self, graph_sizes: &GraphSizes) -> Result<(), CudaError> {
        let n_groups = self.memory.layout().groups.len();
        // All words are invalid, so nothing is written: tokens and slots that do not exist, and sequences
        // without tokens.
        self.card.fill(self.space.words.view_mut(), 0xff)?;
        for rows in graph_sizes.rows() {
            let dims = Dims::of_decodes(n_groups, *rows, BLOCK_TOKENS);
            let lengths = dims.sections().lengths;
            self.card.fill(self.space.words.view_mut().slice(lengths), 0)?;
            self.forward(dims, &[], |_, _| Ok(()))?;
            self.card.fill(self.space.words.view_mut(), 0xff)?;
        }
        self.card.synchronize()
    }

    // === sleep ===

    /// Waits for the GPU, then returns memory. Does nothing if the memory is already returned.
    pub(super) fn give_back(&mut self) -> Result<(), OpenError> {
        self.card.synchronize()?;
        self.kv().give_back().map_err(kv_memory)?;
        Ok(self.decoder.arena.give_back()?)
    }

    /// Allocates the memory again and loads the weights. If one fails, nothing stays allocated.
    pub(super) fn refill(&mut self, described: &ModelDescription) -> Result<(), OpenError> {
        self.check_room()?;
        let filled = self.fill(described);
        if filled.is_err()
            && let Err(error) = self.give_back()
        {
            warn!(error = in_full(&error), "GPU memory was not released after a failed wake");
        }
        filled
    }

    fn fill(&mut self, described: &ModelDescription) -> Result<(), OpenError> {
        self.decoder.arena.refill()?;
        self.kv().take_again().map_err(kv_memory)?;
        let decoder = &mut self.decoder;
        decoder.weights = described.weights_on(&self.card, decoder.sizes, &mut decoder.arena)?;
        Ok(())
    }

    /// Checks that the free memory is large enough, before any of it is allocated. The error lists the bytes
    /// by purpose.
    fn check_room(&self) -> Result<(), OpenError> {
        let (weights, kv) = (self.decoder.arena.bytes(), self.kv().mapped_bytes());
        let free = self.card.memory()?.free;
        if weights + kv <= free {
            return Ok(());
        }
        let [weights, kv, both, free] = [weights, kv, weights + kv, free].map(|bytes| bytes >> 20);
        Err(OpenError::CudaMemory(format!(
            "{weights} MiB of weights + {kv} MiB of KV = {both} MiB to wake with, and the GPU has {free} MiB free: \
             another process uses it now"
        )))
    }

    fn kv(&self) -> &DeviceMemory {
        kv_of(&self.memory, &self.decoder).memory()
    }
}

fn kv_of<'a>(memory: &'a KvMemory, decoder: &Decoder) -> OnCard<'a> {
    let rank = memory.rank(decoder.sizes.share.nth as u16);
    rank.on_card(decoder.sizes.stage.nth_here()).expect("the backend's memory was taken on its cards")
}

fn kv_memory(error: MemoryError) -> OpenError {
    OpenError::KvMemory(in_full(&error))
}

impl Drop for Tools {
    fn drop(&mut self) {
        // Waits, because steps that were not collected may still run. If waiting fails, the GPU writes
        // nothing more.
        let _ = self.card.synchronize();
    }
}
