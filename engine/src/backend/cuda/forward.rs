//! Hot path.
//! A step's forward pass through a decoder.

use std::ops::Range;

use device::cuda::CudaError;
use kernels::cuda::{
    CountBetter, DrawRow, Factors, FeedTokens, Outcome, OutputRows, SampleTokens, Standing, WeightMatrix,
};

use super::decoder::{Decoder, Pass};
use super::layer::NormState;
use super::rank_links::RankLinks;
use super::weights::Sizes;
use super::workspace::Workspace;

impl Decoder {
    /// Runs a step on one stage: from its words, or the rows of the stage before, to its rows or sampled tokens. Calls
    /// `written` after each layer's KV writes are launched, also those of ranks in other processes.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        mut written: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let stage = self.sizes.stage;
        if stage.is_first() || stage.is_last() {
            self.feed(pass)?;
        }
        if stage.is_first() {
            self.embed(pass)?;
        }
        let (mut normed, are_elsewhere) = (NormState::Whole, pass.ranks.are_in_processes());
        for (nth, layer) in self.weights.layers.iter().enumerate() {
            let place = self.places[nth];
            self.project(pass, layer, place, normed)?;
            if !are_elsewhere {
                written(nth)?;
            }
            self.attend_decodes(pass, place)?;
            self.attend_chunks(pass, layer, place)?;
            normed = self.add_attention(pass, layer)?;
            if are_elsewhere {
                // After a sum, the ranks of all processes have written the layer.
                written(nth)?;
            }
            self.gate(pass, layer, normed)?;
            normed = self.add_feed_forward(pass, layer, self.weights.layers.get(nth + 1))?;
        }
        if !stage.is_last() {
            return Ok(());
        }
        self.tell_targets(pass)?;
        self.draw(pass)
    }

    /// Finds the step's input tokens. The first stage embeds them, and the last one samples with them.
    fn feed(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let Workspace { tokens, words, drawn, .. } = &mut *pass.space;
        pass.card.feed_tokens(FeedTokens {
            tokens: tokens.view_mut().slice(0..pass.dims.n_tokens),
            known: words.slice(pass.sections.known.clone()),
            from: words.slice(pass.sections.from.clone()),
            drawn: pass.earlier.unwrap_or_else(|| drawn.view()),
        })
    }

    /// Embeds the tokens and applies the first layer's norm.
    fn embed(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n, hidden) = (pass.dims.n_tokens, self.sizes.hidden);
        let Workspace { tokens, residual, normed, .. } = &mut *pass.space;
        let rows = residual.view_mut().slice(0..n * hidden);
        pass.card.embedding(rows, self.weights.embedding(), tokens.slice(0..n))?;
        let first = self.weights.layers.first().map_or(&self.weights.norm, |layer| &layer.attention_norm);
        let normed = normed.view_mut().slice(0..n * hidden);
        pass.card.rms_norm(normed, residual.slice(0..n * hidden), first.view(), self.epsilon)
    }

    /// Computes the log-probabilities of prompt tokens, in groups of as many rows as there is room for. Uses the memory in
    /// which the step's own tokens are sampled afterwards.
    fn tell_targets(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n_targets, vocab) = (pass.dims.n_targets, self.sizes.vocab);
        let group_max = pass.space.best.len();
        for first in (0..n_targets).step_by(group_max) {
            let end = (first + group_max).min(n_targets);
            let n = end - first;
            let part = |section: &Range<usize>, each: usize| {
                section.start + each * first..section.start + each * end
            };
            let targets = part(&pass.sections.targets, 1);
            let draws = part(&pass.sections.target_draws, DrawRow::WORDS);
            self.logits(pass, n, Some(part(&pass.sections.target_rows, 1)))?;
            let Workspace {
                logits, keys, best, drawn, words, tokens, edits, target_outcomes, standings, ..
            } = &mut *pass.space;
            pass.card.argmax(best.view_mut().slice(0..n), keys.view_mut(), logits.slice(0..n * vocab))?;
            pass.card.count_better(CountBetter {
                standings: standings.view_mut().slice(first * Standing::WORDS..end * Standing::WORDS),
                logits: logits.slice(0..n * vocab),
                tokens: words.slice(targets),
            })?;
            pass.card.sample_tokens(SampleTokens {
                drawn: drawn.view_mut().slice(0..n),
                outcomes: target_outcomes.view_mut().slice(first * Outcome::WORDS..end * Outcome::WORDS),
                logits: logits.view_mut().slice(0..n * vocab),
                best: best.slice(0..n),
                tokens: tokens.slice(0..pass.dims.n_tokens),
                draws: words.slice(draws),
                edits: edits.view_mut().slice(0..0),
                masks: None,
            })?;
        }
        Ok(())
    }

    /// Computes the logits of the wanted rows, and the likeliest token of each.
    pub(super) fn draw(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n, vocab) = (pass.dims.n_wanted, self.sizes.vocab);
        if n == 0 {
            return Ok(());
        }
        // If every row is wanted, each one samples at its own index.
        let indices = (n != pass.dims.n_tokens).then(|| pass.sections.wanted.clone());
        self.logits(pass, n, indices)?;
        let Workspace { logits, keys, best, drawn, .. } = &mut *pass.space;
        let logits = logits.slice(0..n * vocab);
        pass.card.argmax(best.view_mut().slice(0..n), keys.view_mut(), logits)?;
        pass.card.keep_tokens(drawn.view_mut().slice(0..n), best.slice(0..n), logits)
    }

    /// Computes the logits of `n` rows: of the rows whose indices are these words of the plan, or of the first rows.
    fn logits(&self, pass: &mut Pass<'_>, n: usize, indices: Option<Range<usize>>) -> Result<(), CudaError> {
        let Sizes { hidden, vocab, head_rows, .. } = self.sizes;
        let Workspace { normed, wanted, logits, own_logits, words, .. } = &mut *pass.space;
        let rows = match indices {
            None => normed.slice(0..n * hidden),
            Some(indices) => {
                // The embedding kernel copies rows by index, so it also gathers rows.
                let from = normed.slice(0..pass.dims.n_tokens * hidden);
                pass.card.embedding(wanted.view_mut().slice(0..n * hidden), from, words.slice(indices))?;
                wanted.slice(0..n * hidden)
            }
        };
        // With several ranks each rank computes the logits of some tokens. All ranks then sample from all
        // logits.
        let own = if pass.ranks.is_alone() { &mut *logits } else { &mut *own_logits };
        let answer = OutputRows::Wide(own.view_mut().slice(0..n * head_rows));
        let factors = Factors { w: WeightMatrix::Bf16(self.weights.head()), x: rows, k: hidden };
        pass.products.multiply(pass.card, answer, factors)?;
        let (whole, part) = (logits.view_mut().slice(0..n * vocab), 0..n * head_rows);
        match &mut *pass.ranks {
            RankLinks::Alone => Ok(()),
            RankLinks::Peers(peers) => pass.card.gather_columns(peers, whole, own_logits.slice(part), n),
            RankLinks::Processes(sums) => sums.join_logits(pass.card, whole, own_logits.slice(part), vocab),
        }
    }
}
