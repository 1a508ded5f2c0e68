//! Hot path.
//! A step's forward pass through a decoder.

use device::cuda::CudaError;
use kernels::cuda::{Factors, FeedTokens, OutputRows, WeightMatrix};

use super::decoder::{Decoder, Pass};
use super::layer::NormState;
use super::weights::Sizes;
use super::workspace::Workspace;

impl Decoder {
    /// Runs a step, from its words to its sampled tokens. Calls `written` after each layer's KV writes are
    /// launched.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        mut written: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.embed(pass)?;
        let mut normed = NormState::Whole;
        for (nth, layer) in self.weights.layers.iter().enumerate() {
            let place = self.places[nth];
            self.project(pass, layer, place, normed)?;
            written(nth)?;
            self.attend_decodes(pass, place)?;
            self.attend_chunks(pass, place)?;
            normed = self.add_attention(pass, layer)?;
            self.gate(pass, layer, normed)?;
            normed = self.add_feed_forward(pass, layer, self.weights.layers.get(nth + 1))?;
        }
        self.draw(pass)
    }

    /// Embeds the tokens and applies the first layer's norm.
    fn embed(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n, hidden) = (pass.dims.n_tokens, self.sizes.hidden);
        let Workspace { tokens, words, drawn, residual, normed, .. } = &mut *pass.space;
        pass.card.feed_tokens(FeedTokens {
            tokens: tokens.view_mut().slice(0..n),
            known: words.slice(pass.sections.known.clone()),
            from: words.slice(pass.sections.from.clone()),
            drawn: drawn.view(),
        })?;
        let rows = residual.view_mut().slice(0..n * hidden);
        pass.card.embedding(rows, self.weights.embedding(), tokens.slice(0..n))?;
        let first = self.weights.layers.first().map_or(&self.weights.norm, |layer| &layer.attention_norm);
        let normed = normed.view_mut().slice(0..n * hidden);
        pass.card.rms_norm(normed, residual.slice(0..n * hidden), first.view(), self.epsilon)
    }

    /// Computes the logits of the wanted rows, and the likeliest token of each.
    pub(super) fn draw(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n, Sizes { hidden, vocab, head_rows, .. }) = (pass.dims.n_wanted, self.sizes);
        if n == 0 {
            return Ok(());
        }
        let Workspace { normed, wanted, logits, own_logits, keys, best, drawn, words, .. } = &mut *pass.space;
        let rows = if n == pass.dims.n_tokens {
            normed.slice(0..n * hidden)
        } else {
            // The embedding kernel copies rows by index, so it also gathers the wanted rows.
            let from = normed.slice(0..pass.dims.n_tokens * hidden);
            let indices = words.slice(pass.sections.wanted.clone());
            pass.card.embedding(wanted.view_mut().slice(0..n * hidden), from, indices)?;
            wanted.slice(0..n * hidden)
        };
        // With several ranks each rank computes the logits of some tokens. All ranks then sample from all
        // logits.
        let own = if pass.peers.is_some() { &mut *own_logits } else { &mut *logits };
        let answer = OutputRows::Wide(own.view_mut().slice(0..n * head_rows));
        let factors = Factors { w: WeightMatrix::Bf16(self.weights.head()), x: rows, k: hidden };
        pass.products.multiply(pass.card, answer, factors)?;
        if let Some(peers) = pass.peers.as_deref_mut() {
            let (whole, part) = (logits.view_mut().slice(0..n * vocab), own_logits.slice(0..n * head_rows));
            pass.card.gather_columns(peers, whole, part, n)?;
        }
        let logits = logits.slice(0..n * vocab);
        pass.card.argmax(best.view_mut().slice(0..n), keys.view_mut(), logits)?;
        pass.card.keep_tokens(drawn.view_mut().slice(0..n), best.slice(0..n), logits)
    }
}
