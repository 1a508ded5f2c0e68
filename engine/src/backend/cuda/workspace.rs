//! The workspace of a step, allocated once for the largest step.

use std::time::Duration;

use device::cuda::{Bf16, Buffer, CudaError};
use kernels::cuda::ops::{
    FEW_ROWS_MAX, FewRowsForm, FusedKernel, LATENT_RANK, SKINNY_FORMS, SKINNY_ROWS_MAX,
};
use kernels::cuda::{
    CommonParams, ComputeCard, DecodeAttention, DrawRow, EDIT_WORDS, ExpandedAttention, ExpertActivations,
    ExpertSpace, KvNumber, Outcome, PrefillAttention, PrefillSequence, RankMemory, Standing, WidenedPages,
    WidenedSize,
};

use super::draws::EDITS_OF_ROW;
use super::graph_sizes::GraphSizes;
use super::latent::{LatentSizes, LatentSpace};
use super::weights::Sizes;
use crate::backend::StepLimits;

/// The time that a GPU waits for the other GPUs of its model, and for the masks of grammars. All GPUs have equal work,
/// so a GPU that is later has failed, and the device counts as lost. If masks are later, their rows fail.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// The largest size in bytes for which ranks sum rows by the method with the shortest wait. Larger sums use
/// the method that sends the fewest bytes. At this size both are equally fast on two H200s.
const FEW_BYTES_MAX: usize = 1 << 20;
/// Limit of partial attention results of a deterministic backend: 256 MiB, with heads of 128.
const PARTS_ALIKE_MAX: usize = 1 << 19;

/// The sizes of a [`Workspace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkspaceShape {
    sizes: Sizes,
    limits: StepLimits,
    /// The number of numbers in the partial results of decode attention.
    part_numbers: usize,
    n_parts: usize,
    n_keys: usize,
    n_words: usize,
    widened: Option<WidenedSize>,
    /// The numbers of keys and values that are made of latents.
    n_expanded: usize,
    experts: ExpertActivations,
}

/// Limits of all steps, from which the size of the workspace follows.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSizes {
    /// The number of tokens of the longest sequence.
    pub(super) tokens_max: usize,
    /// The number of words of the largest plan.
    pub(super) n_words: usize,
    /// The tokens of a chunk of attention: see [`Decoder`](super::decoder::Decoder).
    pub(super) chunk_tokens: Option<usize>,
    pub(super) kv_number: KvNumber,
    /// The rows that products with experts in FP8 take.
    pub(super) experts: ExpertActivations,
}

/// Activations of a step, one row for each token.
#[derive(Debug)]
pub(super) struct Workspace {
    /// The residual, to which each layer adds: (tokens, hidden).
    pub(super) residual: Buffer<Bf16>,
    /// The normed residual, the input of a product: (tokens, hidden).
    pub(super) normed: Buffer<Bf16>,
    /// Partial sums of squares of pending norms: (tokens of a product of few rows, parts of hidden).
    pub(super) squares: Buffer<f32>,
    /// The heads of q, k and v: (tokens, heads).
    pub(super) qkv: Buffer<Bf16>,
    /// The output of attention: (tokens, heads of q).
    pub(super) attended: Buffer<Bf16>,
    /// The further buffers of latent attention; `None` without it.
    pub(super) latent: Option<LatentSpace>,
    /// The output of a layer's part, to be added to the residual: (tokens, hidden).
    pub(super) given: Buffer<Bf16>,
    /// The first product of the feed-forward part: (tokens, 2 × intermediate).
    pub(super) gate_up: Buffer<Bf16>,
    /// The gated product of the feed-forward part: (tokens, intermediate).
    pub(super) gated: Buffer<Bf16>,
    /// The choices and rows of experts; `None` without experts.
    pub(super) experts: Option<ExpertSpace>,
    /// The normed rows whose logits are needed: (wanted, hidden).
    pub(super) wanted: Buffer<Bf16>,
    /// The logits: (wanted, vocab).
    pub(super) logits: Buffer<f32>,
    /// The rank's part of the logits, if there are several ranks: (wanted, the rank's tokens).
    pub(super) own_logits: Buffer<f32>,
    pub(super) keys: Buffer<u64>,
    pub(super) best: Buffer<u32>,
    /// The tokens that this step samples; with one stage, the next step may read them.
    pub(super) drawn: Buffer<u32>,
    pub(super) tokens: Buffer<u32>,
    /// Sampling of tokens other than the likeliest: rows, edits and outcomes.
    pub(super) draws: Buffer<u32>,
    pub(super) edits: Buffer<u32>,
    pub(super) outcomes: Buffer<u32>,
    /// The results of prompt tokens whose log-probabilities are wanted.
    pub(super) target_outcomes: Buffer<u32>,
    pub(super) standings: Buffer<u32>,
    /// The step's plan, as the host wrote it.
    pub(super) words: Buffer<u32>,
    pub(super) parts: Buffer<f32>,
    pub(super) part_sums: Buffer<[f32; 2]>,
    /// One layer's KV of the longest sequence in bf16, if prompts read KV in FP8 by Hopper's attention.
    pub(super) widened: Option<WidenedPages>,
}

impl WorkspaceShape {
    pub(super) fn of(
        card: &ComputeCard,
        sizes: Sizes,
        limits: StepLimits,
        head_dim: usize,
        room: StepSizes,
    ) -> Self {
        let n_parts = match room.chunk_tokens {
            None => most_parts(card, sizes, limits, head_dim, room.tokens_max),
            Some(chunk_tokens) => {
                parts_alike(sizes.q_width / head_dim, limits, room.tokens_max.div_ceil(chunk_tokens))
            }
        };
        let n_kv_heads = sizes.kv_width / head_dim;
        let in_chunks = room.chunk_tokens.is_none();
        let expands = in_chunks && card.expands_latents();
        let widened = match sizes.latent {
            Some(_) => {
                (expands && room.kv_number == KvNumber::Fp8).then(|| WidenedSize::of_latents(room.tokens_max))
            }
            None => (in_chunks && PrefillAttention::widens(card, room.kv_number, head_dim))
                .then_some(WidenedSize { n_tokens: room.tokens_max, n_kv_heads, head_dim }),
        };
        Self {
            n_expanded: sizes
                .latent
                .filter(|_| expands)
                .map_or(0, |latent| latent.n_expanded(room.tokens_max)),
            widened,
            experts: room.experts,
            sizes,
            limits,
            part_numbers: DecodeAttention::parts_numbers(
                n_parts,
                if sizes.latent.is_some() { LATENT_RANK } else { head_dim },
            ),
            n_parts,
            n_keys: match sizes.stage.is_last() {
                false => 0,
                true => card
                    .argmax_keys(limits.rows, sizes.vocab)
                    .max(card.argmax_keys(1, sizes.vocab) * limits.rows),
            },
            n_words: room.n_words,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let Sizes { hidden, vocab, q_width, .. } = self.sizes;
        let intermediate = self.sizes.widest_inner();
        let of_latents = self.sizes.latent.map_or(0, LatentSizes::space_width);
        let of_token = 3 * hidden + self.sizes.qkv_width() + q_width + 3 * intermediate + of_latents;
        let of_row = 2 * hidden + 4 * vocab + 8;
        let parts = 4 * self.part_numbers + 8 * self.n_parts;
        let squares = 4 * n_squares(hidden);
        let indices = 8 * self.n_keys + 4 * (self.n_words + self.limits.tokens);
        let of_draw = DrawRow::WORDS + Outcome::WORDS + EDITS_OF_ROW * EDIT_WORDS;
        let draws = 4 * self.rows_sampled() * of_draw;
        let targets = 4 * self.limits.tokens * (Outcome::WORDS + Standing::WORDS);
        let links = self.sizes.stage.kept_bytes(self.limits, hidden);
        let of_ranks = self
            .together()
            .map_or(0, |together| together.inbox_bytes(self.sizes.share.n_ranks) + 4 * self.n_own_logits());
        let experts =
            self.sizes.experts.map_or(0, |experts| experts.space_bytes(self.limits.tokens, self.experts));
        let widened = self.widened.map_or(0, WidenedSize::bytes);
        2 * of_token * self.limits.tokens
            + experts
            + widened
            + 2 * self.n_expanded
            + of_row * self.rows_sampled()
            + parts
            + squares
            + indices
            + draws
            + targets
            + links
            + of_ranks
    }

    /// Returns the most rows whose tokens a step samples on this stage.
    fn rows_sampled(&self) -> usize {
        if self.sizes.stage.is_last() { self.limits.rows } else { 0 }
    }

    /// Returns the sizes that are equal on all ranks; `None` with one rank.
    pub(super) fn together(&self) -> Option<CommonParams> {
        let width = self.sizes.hidden;
        let few_rows = (FEW_BYTES_MAX / (width * size_of::<Bf16>())).clamp(1, self.limits.rows);
        let together = CommonParams { few_rows, width, patience: PATIENCE };
        (self.sizes.share.n_ranks > 1).then_some(together)
    }

    fn n_own_logits(&self) -> usize {
        if self.sizes.share.n_ranks > 1 { self.rows_sampled() * self.sizes.head_rows } else { 0 }
    }

    pub(super) fn take(&self, card: &ComputeCard) -> Result<Workspace, CudaError> {
        let Sizes { hidden, vocab, q_width, .. } = self.sizes;
        let intermediate = self.sizes.widest_inner();
        let (tokens, rows) = (self.limits.tokens, self.rows_sampled());
        Ok(Workspace {
            residual: card.buffer(tokens * hidden)?,
            normed: card.buffer(tokens * hidden)?,
            squares: card.buffer(n_squares(hidden))?,
            qkv: card.buffer(tokens * self.sizes.qkv_width())?,
            attended: card.buffer(tokens * q_width)?,
            latent: self
                .sizes
                .latent
                .map(|latent| latent.space(card, tokens, self.n_expanded))
                .transpose()?,
            given: card.buffer(tokens * hidden)?,
            gate_up: card.buffer(tokens * 2 * intermediate)?,
            gated: card.buffer(tokens * intermediate)?,
            experts: self
                .sizes
                .experts
                .map(|sizes| ExpertSpace::new(card, sizes, tokens, self.experts))
                .transpose()?,
            wanted: card.buffer(rows * hidden)?,
            logits: card.buffer(rows * vocab)?,
            own_logits: card.buffer(self.n_own_logits())?,
            keys: card.buffer(self.n_keys)?,
            best: card.buffer(rows)?,
            drawn: card.buffer(rows)?,
            tokens: card.buffer(tokens)?,
            draws: card.buffer(rows * DrawRow::WORDS)?,
            edits: card.buffer(rows * EDITS_OF_ROW * EDIT_WORDS)?,
            outcomes: card.buffer(rows * Outcome::WORDS)?,
            target_outcomes: card.buffer(tokens * Outcome::WORDS)?,
            standings: card.buffer(tokens * Standing::WORDS)?,
            words: card.buffer(self.n_words)?,
            parts: card.buffer(self.part_numbers)?,
            part_sums: card.buffer(self.n_parts)?,
            widened: self.widened.map(|size| WidenedPages::new(card, size)).transpose()?,
        })
    }
}

impl Workspace {
    /// Returns whether keys and values are made of latents for these chunks of prompts. Their tables have `chunk_blocks`
    /// pages.
    pub(super) fn expands(&self, sequences: &[PrefillSequence], chunk_blocks: usize) -> bool {
        let fits = |widened: &WidenedPages| widened.n_sequences(chunk_blocks) >= sequences.len();
        self.widened.as_ref().is_none_or(fits)
            && self
                .latent
                .as_ref()
                .is_some_and(|latent| ExpandedAttention::is_faster(sequences, latent.expanded.len()))
    }

    /// Returns the memory that the other ranks' GPUs write to.
    pub(super) fn shown(&self) -> RankMemory<'_> {
        RankMemory { part: self.given.view(), out: self.normed.view(), whole: self.logits.view() }
    }
}

/// Returns the number of partial sums of squares: kernels for many rows have few parts in a row, kernels for
/// few rows have many.
fn n_squares(hidden: usize) -> usize {
    let few = FusedKernel::Few(FewRowsForm::of(hidden, hidden)).parts(hidden) * FEW_ROWS_MAX;
    few.max(FusedKernel::Skinny(SKINNY_FORMS[0]).parts(hidden) * SKINNY_ROWS_MAX)
}

/// Returns the number of partial results for the most tokens with the longest sequences, bounded by the
/// number that keeps a GPU busy; further tokens are computed afterwards. It is always enough for one token.
fn parts_alike(n_q_heads: usize, limits: StepLimits, n_chunks: usize) -> usize {
    let of_token = n_q_heads * n_chunks;
    (of_token * limits.tokens).min(PARTS_ALIKE_MAX).max(of_token)
}

/// Returns the maximum number of parts of decode attention, over all numbers of rows and all lengths.
fn most_parts(
    card: &ComputeCard,
    sizes: Sizes,
    limits: StepLimits,
    head_dim: usize,
    n_tokens_max: usize,
) -> usize {
    let (n_q_heads, n_tiles) = (sizes.q_width / head_dim, sizes.attention_tiles(card, head_dim));
    let parts = |rows: usize, length: usize| {
        let chunk = DecodeAttention::chunk_tokens_for(card, rows, n_tiles, length);
        DecodeAttention::n_parts(rows, n_q_heads, length, chunk)
    };
    let lengths = GraphSizes::lengths(n_tokens_max);
    let of_rows = |rows: usize| lengths.iter().map(|length| parts(rows, *length)).max().unwrap_or(0);
    (1..=limits.rows).map(of_rows).max().unwrap_or(0)
}
