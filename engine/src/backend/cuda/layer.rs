//! Hot path.
//! The four products of a layer, and the work after each of them.
//!
//! For few rows, one of our kernels multiplies and also does the work after the product. Otherwise separate
//! kernels do that work. Our kernels split a norm: it starts when rows are added to the residual, and the
//! next product completes it.

use device::cuda::{Bf16, Buffer, CudaError, RowShare, View, ViewMut};
use kernels::cuda::{
    AddedRows, ComputeCard, Ending, Epilogue, ExpertInput, ExpertSpace, ExpertSums, ExpertsForm, FusedKernel,
    FusedProduct, HeadsRows, NormedRows, OutputRows, Peers, PendingNorm, ProductShape, Products, RopeWriteKv,
    SumRows,
};

use super::decoder::{Decoder, LayerPlace, Pass};
use super::rank_links::RankLinks;
use super::weights::{DenseWeights, ExpertWeights, FeedForward, LayerWeights, Linear};
use super::workspace::Workspace;

/// The state of the rows in the workspace's `normed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NormState {
    /// The rows are normed.
    Whole,
    /// The rows are multiplied by the norm's weights, and not yet divided by the norm. Each row has `n_parts`
    /// partial sums of squares.
    Pending { n_parts: usize },
    /// The rows of the product before are in `given`. They have to be added to the residual, and the sums normed.
    Given,
}

/// The two outputs of a layer that are added to the residual.
#[derive(Clone, Copy)]
enum LayerOutput {
    Attended,
    Gated,
}

/// The norm that follows an addition to the residual.
#[derive(Clone, Copy)]
struct NextNorm<'a> {
    norm: &'a Buffer<Bf16>,
    /// Whether the next product can complete the norm.
    can_end: bool,
}

impl Decoder {
    /// Computes the queries, and what their attention reads. Writes it to the pages.
    pub(super) fn project(
        &self,
        pass: &mut Pass<'_>,
        layer: &LayerWeights,
        place: LayerPlace,
        normed: NormState,
    ) -> Result<(), CudaError> {
        match &layer.latent {
            None => self.project_heads(pass, layer, place, normed),
            Some(latent) => self.project_latents(pass, &layer.qkv, latent, place, normed),
        }
    }

    /// Computes the heads of q, k and v, and rotates q and k. Writes k and v to their pages.
    fn project_heads(
        &self,
        pass: &mut Pass<'_>,
        layer: &LayerWeights,
        place: LayerPlace,
        normed: NormState,
    ) -> Result<(), CudaError> {
        let (n, hidden, group) = (pass.dims.n_tokens, self.sizes.hidden, usize::from(place.group.0));
        let form = heads_form(pass, layer);
        let Workspace { normed: x, squares, qkv, words, .. } = &mut *pass.space;
        let mut rope = RopeWriteKv {
            qkv: qkv.view_mut().slice(0..n * self.sizes.qkv_width()),
            n_q_heads: self.n_q_heads(),
            pages: pass.kv.layer_mut(place.group, place.layer_pos),
            kv: self.kv_pages(),
            positions: words.slice(pass.sections.positions.clone()),
            slots: words.slice(pass.sections.slots(group)),
            turns: self.turns.view(),
            norms: layer.head_norms.as_ref().map(|[q, k]| [q.view(), k.view()]),
            epsilon: self.heads.norm_epsilon(self.epsilon),
        };
        let x = x.slice(0..n * hidden);
        if let Some(form) = form {
            let (w, bias) = (layer.qkv.weight.view(), layer.qkv.bias.as_ref().map(Buffer::view));
            let product =
                FusedProduct { w, x, k: hidden, pending_norm: self.pending_norm(squares, n, normed) };
            let ending = Ending::Heads(HeadsRows { rope, bias });
            return pass.products.multiply_own(pass.card, form, product, ending);
        }
        normed.ensure_whole()?;
        linear(pass.card, pass.products, &mut rope.qkv, &layer.qkv, x)?;
        pass.card.rope_write_kv(rope)
    }

    /// Computes the feed-forward part between its two matrices.
    pub(super) fn gate(
        &self,
        pass: &mut Pass<'_>,
        layer: &LayerWeights,
        normed: NormState,
    ) -> Result<(), CudaError> {
        match &layer.feed_forward {
            FeedForward::Dense(dense) => self.gate_dense(pass, dense, normed),
            FeedForward::Experts(experts) => {
                let (n, numbers) = (pass.dims.n_tokens, 0..pass.dims.n_tokens * self.sizes.hidden);
                let Workspace { given, normed: x, residual, experts: space, .. } = &mut *pass.space;
                let space = expert_space(space)?;
                let form = self.experts_form(pass.card, experts, space, n);
                let input = if normed == NormState::Given {
                    let rows = NormedRows {
                        residual: residual.view_mut().slice(numbers.clone()),
                        out: x.view_mut().slice(numbers.clone()),
                        weight: layer.mlp_norm.view(),
                        epsilon: self.epsilon,
                    };
                    ExpertInput::Given { given: given.slice(numbers), rows }
                } else {
                    normed.ensure_whole()?;
                    ExpertInput::Normed(x.slice(numbers))
                };
                pass.products.gate_experts(pass.card, form, experts.layer(), input, space)?;
                match &experts.shared {
                    None => Ok(()),
                    Some(shared) => self.gate_dense(pass, shared, NormState::Whole),
                }
            }
        }
    }

    fn gate_dense(
        &self,
        pass: &mut Pass<'_>,
        layer: &DenseWeights,
        normed: NormState,
    ) -> Result<(), CudaError> {
        let (n, hidden, width) = (pass.dims.n_tokens, self.sizes.hidden, layer.down.columns);
        let form = form_unbiased(pass, &layer.gate_up);
        let Workspace { normed: x, squares, gate_up, gated, .. } = &mut *pass.space;
        let (x, gated) = (x.slice(0..n * hidden), gated.view_mut().slice(0..n * width));
        if let Some(form) = form {
            let w = layer.gate_up.weight.view();
            let product =
                FusedProduct { w, x, k: hidden, pending_norm: self.pending_norm(squares, n, normed) };
            return pass.products.multiply_own(pass.card, form, product, Ending::Gated(gated));
        }
        normed.ensure_whole()?;
        let mut both = gate_up.view_mut().slice(0..n * 2 * width);
        if layer.gate_up.bias.is_none() {
            let factors = layer.gate_up.factors(x);
            return pass.products.multiply_then(pass.card, Epilogue::Gate(gated), both, factors);
        }
        linear(pass.card, pass.products, &mut both, &layer.gate_up, x)?;
        pass.card.silu_mul(gated, both.view(), width)
    }

    /// Adds the output of attention to the residual and norms the sum for the feed-forward part.
    pub(super) fn add_attention(
        &self,
        pass: &mut Pass<'_>,
        layer: &LayerWeights,
    ) -> Result<NormState, CudaError> {
        if let Some(latent) = &layer.latent {
            self.multiply_values(pass, latent)?;
        }
        if self.norms_with_choice(pass, layer) {
            let Workspace { attended, given, .. } = &mut *pass.space;
            let (n, k) = (pass.dims.n_tokens, layer.o.columns);
            let mut y = given.view_mut().slice(0..n * self.sizes.hidden);
            linear(pass.card, pass.products, &mut y, &layer.o, attended.slice(0..n * k))?;
            return Ok(NormState::Given);
        }
        let can_end = layer.dense().is_some_and(|dense| form_unbiased(pass, &dense.gate_up).is_some());
        self.add_output(pass, LayerOutput::Attended, &layer.o, NextNorm { norm: &layer.mlp_norm, can_end })
    }

    /// Adds the output of the feed-forward part to the residual. Applies the next layer's norm to the sum, or
    /// the last norm.
    pub(super) fn add_feed_forward(
        &self,
        pass: &mut Pass<'_>,
        layer: &LayerWeights,
        next: Option<&LayerWeights>,
    ) -> Result<NormState, CudaError> {
        let after = match next {
            Some(next) => NextNorm { norm: &next.attention_norm, can_end: heads_form(pass, next).is_some() },
            None => NextNorm { norm: &self.weights.norm, can_end: false },
        };
        match &layer.feed_forward {
            FeedForward::Dense(dense) => self.add_output(pass, LayerOutput::Gated, &dense.down, after),
            FeedForward::Experts(experts) => {
                let n = pass.dims.n_tokens;
                let numbers = 0..n * self.sizes.hidden;
                let Workspace { given, normed, residual, experts: space, .. } = &mut *pass.space;
                let space = expert_space(space)?;
                let form = self.experts_form(pass.card, experts, space, n);
                // Ranks add up the sums of their experts first.
                let sums = match pass.ranks.is_alone() {
                    false => ExpertSums::Written(given.view_mut().slice(numbers)),
                    true => ExpertSums::Normed(NormedRows {
                        out: normed.view_mut().slice(numbers.clone()),
                        residual: residual.view_mut().slice(numbers),
                        weight: after.norm.view(),
                        epsilon: self.epsilon,
                    }),
                };
                pass.products.sum_experts(pass.card, form, experts.layer(), sums, space)?;
                if !pass.ranks.is_alone() {
                    self.add_given(pass, after.norm)?;
                }
                match &experts.shared {
                    None => Ok(NormState::Whole),
                    // The residual has the sum of the chosen experts. Only the norm after this sum is read.
                    Some(shared) => self.add_output(pass, LayerOutput::Gated, &shared.down, after),
                }
            }
        }
    }

    /// Returns whether the kernel that chooses experts also adds and norms the rows of this layer. Ranks add up their rows
    /// first.
    pub(super) fn norms_with_choice(&self, pass: &Pass<'_>, layer: &LayerWeights) -> bool {
        match (&layer.feed_forward, &pass.space.experts) {
            (FeedForward::Experts(experts), Some(space)) if pass.ranks.is_alone() => {
                let (card, n) = (pass.card, pass.dims.n_tokens);
                let form = self.experts_form(card, experts, space, n);
                card.norms_with_choice(form, experts.layer(), space, n)
            }
            _ => false,
        }
    }

    fn experts_form(
        &self,
        card: &ComputeCard,
        experts: &ExpertWeights,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> ExpertsForm {
        match self.chunk_tokens {
            Some(_) => ExpertsForm::Units,
            None => card.experts_form(experts.layer(), space, n_rows),
        }
    }

    fn add_output(
        &self,
        pass: &mut Pass<'_>,
        output: LayerOutput,
        matrix: &Linear,
        after: NextNorm<'_>,
    ) -> Result<NormState, CudaError> {
        let (n, hidden, k) = (pass.dims.n_tokens, self.sizes.hidden, matrix.columns);
        let is_joined = match &*pass.ranks {
            RankLinks::Alone => true,
            RankLinks::Peers(peers) => self.throws(peers, n),
            RankLinks::Processes(_) => false,
        };
        let form = form_unbiased(pass, matrix).filter(|_| is_joined && after.can_end);
        let Workspace { attended, gated, given, residual, normed, squares, .. } = &mut *pass.space;
        let x = match output {
            LayerOutput::Attended => attended.slice(0..n * k),
            LayerOutput::Gated => gated.slice(0..n * k),
        };
        if let Some(form) = form {
            let (w, n_parts) = (matrix.weight.view(), form.parts(hidden));
            let added = AddedRows {
                residual: residual.view_mut().slice(0..n * hidden),
                out: normed.view_mut().slice(0..n * hidden),
                weight: after.norm.view(),
                squares: squares.view_mut().slice(0..n * n_parts),
            };
            let ending = match &mut *pass.ranks {
                RankLinks::Peers(peers) => Ending::Joined(added, peers),
                RankLinks::Alone | RankLinks::Processes(_) => Ending::Added(added),
            };
            pass.products.multiply_own(pass.card, form, FusedProduct::plain(w, x, k), ending)?;
            return Ok(NormState::Pending { n_parts });
        }
        let mut given = given.view_mut().slice(0..n * hidden);
        if pass.ranks.is_alone() && matrix.bias.is_none() {
            let next = Epilogue::Norm(NormedRows {
                residual: residual.view_mut().slice(0..n * hidden),
                out: normed.view_mut().slice(0..n * hidden),
                weight: after.norm.view(),
                epsilon: self.epsilon,
            });
            pass.products.multiply_then(pass.card, next, given, matrix.factors(x))?;
            return Ok(NormState::Whole);
        }
        linear(pass.card, pass.products, &mut given, matrix, x)?;
        self.add_given(pass, after.norm)?;
        Ok(NormState::Whole)
    }

    /// Adds the output of a layer's part to the residual and norms the sum. Each rank has a partial sum of
    /// that output.
    fn add_given(&self, pass: &mut Pass<'_>, norm: &Buffer<Bf16>) -> Result<(), CudaError> {
        let numbers = 0..pass.dims.n_tokens * self.sizes.hidden;
        let Workspace { given, normed, residual, .. } = &mut *pass.space;
        let (out, residual) =
            (normed.view_mut().slice(numbers.clone()), residual.view_mut().slice(numbers.clone()));
        let (weight, epsilon) = (norm.view(), self.epsilon);
        if let RankLinks::Processes(sums) = &*pass.ranks {
            sums.add_parts(pass.card, given.view_mut().slice(numbers.clone()))?;
        }
        let part = given.slice(numbers);
        match &mut *pass.ranks {
            RankLinks::Peers(peers) => {
                let sum = SumRows { out, residual, part, weight, epsilon };
                match self.throws(peers, pass.dims.n_tokens) {
                    true => pass.card.sum_few_rows(peers, sum),
                    false => pass.card.sum_many_rows(peers, sum),
                }
            }
            RankLinks::Alone | RankLinks::Processes(_) => {
                pass.card.add_rms_norm(out, residual, part, weight, epsilon)
            }
        }
    }

    /// Returns whether ranks sum these rows by pushing partial sums into each other's memory. The other
    /// method sums a row's squares in another order, so a deterministic backend never pushes.
    fn throws(&self, peers: &Peers, n_rows: usize) -> bool {
        self.chunk_tokens.is_none() && n_rows <= peers.few_rows()
    }

    /// Returns the rows of a pass that this rank copies for the next stage, which another process computes. The ranks copy
    /// each row once. With many rows, each rank of one process copies those whose residual it has. Otherwise all ranks have
    /// all rows, and the first rank copies them.
    pub(super) fn rows_given(&self, ranks: &RankLinks, n_rows: usize) -> Option<RowShare> {
        let width = self.sizes.hidden;
        match ranks {
            RankLinks::Peers(peers) if !self.throws(peers, n_rows) => {
                Some(RowShare { width, first: peers.me(), every: peers.n_ranks() })
            }
            _ => self.sizes.share.is_first().then_some(RowShare::all(width)),
        }
    }

    /// Returns the pending norm that a product has to apply, if any.
    fn pending_norm<'a>(
        &self,
        squares: &'a Buffer<f32>,
        n: usize,
        normed: NormState,
    ) -> Option<PendingNorm<'a>> {
        match normed {
            NormState::Whole | NormState::Given => None,
            NormState::Pending { n_parts } => {
                Some(PendingNorm { squares: squares.slice(0..n * n_parts), epsilon: self.epsilon })
            }
        }
    }
}

impl NormState {
    /// Rejects rows that are not normed. It never fails, because the caller knows which kernel computes the
    /// product.
    pub(super) fn ensure_whole(self) -> Result<(), CudaError> {
        match self {
            Self::Whole => Ok(()),
            Self::Pending { .. } | Self::Given => {
                Err(CudaError::Argument { kernel: "product", wrong: "rows that are not normed" })
            }
        }
    }
}

/// Returns the memory of experts. It never fails, because a model with experts has it.
fn expert_space(space: &mut Option<ExpertSpace>) -> Result<&mut ExpertSpace, CudaError> {
    space.as_mut().ok_or(CudaError::Argument { kernel: "experts", wrong: "no room for experts" })
}

pub(super) fn linear(
    card: &ComputeCard,
    products: &mut Products,
    y: &mut ViewMut<'_, Bf16>,
    linear: &Linear,
    x: View<'_, Bf16>,
) -> Result<(), CudaError> {
    products.multiply(card, OutputRows::Narrow(y.reborrow()), linear.factors(x))?;
    match &linear.bias {
        Some(bias) => card.add_bias(y.reborrow(), bias.view()),
        None => Ok(()),
    }
}

/// Returns the form in which our kernel computes this product; `None` if another method does in this pass.
pub(super) fn form(pass: &Pass<'_>, linear: &Linear) -> Option<FusedKernel> {
    let (w, k) = (linear.weight.view(), linear.columns);
    let (n, n_rows) = (w.n_rows(k), pass.dims.n_tokens);
    let shape = ProductShape { n, k, n_rows, is_wide: false, fp8: w.fp8_scales() };
    pass.products.own_form(pass.card, shape)
}

/// Like [`form`], but `None` for a matrix with a bias, which our kernels do not add.
fn form_unbiased(pass: &Pass<'_>, linear: &Linear) -> Option<FusedKernel> {
    form(pass, linear).filter(|_| linear.bias.is_none())
}

/// Like [`form`] for a layer's heads, but `None` if the kernel cannot apply head norms, or if the layer has latents.
pub(super) fn heads_form(pass: &Pass<'_>, layer: &LayerWeights) -> Option<FusedKernel> {
    form(pass, &layer.qkv)
        .filter(|form| layer.latent.is_none() && (layer.head_norms.is_none() || form.norms_heads()))
}

/// Returns whether both concurrent products load into registers. Such loads need the L1 cache of a
/// multiprocessor, and kernels that use the copy engine leave almost no memory for it.
pub(super) fn reads_by_registers(pass: &Pass<'_>, layer: &LayerWeights) -> bool {
    [&layer.qkv, &layer.o].iter().all(|linear| matches!(form(pass, linear), Some(FusedKernel::Skinny(_))))
}
