//! The places at which a text may be cut, so that its pieces have the tokens of the whole.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, ModelWrapper, Tokenizer as Inner};

/// The cuts of one tokenizer.
///
/// A tokenizer first looks for its added tokens that are not normalized, from left to right, the longest first. The texts
/// between them are normalized, divided and tokenized alone, whatever the tokenizer's kind. So a text may be cut before
/// such a token, if no rule of a token looks across the cut. The piece after the cut begins with the token, so the text
/// behind the token is not at the beginning of its piece, just as it was not at the beginning of the whole text. This
/// keeps the effect of `prepend_scheme: first`.
#[derive(Debug)]
pub(super) struct Cuts {
    added: AhoCorasick,
    /// Whether a text may be cut before each token of `added`.
    may_cut: Vec<bool>,
}

impl Cuts {
    /// Returns the cuts of a tokenizer; `None` if its texts must be tokenized whole.
    pub(super) fn of(tokenizer: &Inner) -> Option<Self> {
        if is_random(tokenizer.get_model()) {
            return None;
        }
        let added = tokenizer.get_added_tokens_decoder();
        let matched: Vec<&AddedToken> = added.values().filter(|token| !token.normalized).collect();
        let may_cut: Vec<bool> = matched.iter().map(|token| may_cut_before(token)).collect();
        let texts = matched.iter().map(|token| &token.content);
        let added = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?;
        may_cut.contains(&true).then_some(Self { added, may_cut })
    }

    /// Cuts a text. The pieces joined are the text. Cutting the rest of the text, from the beginning of any piece,
    /// gives the same pieces.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let tokens = self.added.find_iter(text).filter(|token| self.may_cut[token.pattern().as_usize()]);
        let ends = tokens.map(|token| token.start()).filter(|at| *at > 0).chain([text.len()]);
        let mut begin = 0;
        ends.map(move |end| &text[std::mem::replace(&mut begin, end)..end])
    }
}

/// Returns whether the same text may have different tokens.
fn is_random(model: &ModelWrapper) -> bool {
    match model {
        ModelWrapper::BPE(model) => model.dropout.is_some_and(|share| share > 0.0),
        ModelWrapper::Unigram(model) => model.alpha.is_some(),
        ModelWrapper::WordLevel(_) | ModelWrapper::WordPiece(_) => false,
    }
}

/// Returns whether neither the token nor the tokens before it look across the place before the token: a token with
/// `lstrip` takes the spaces before it, one with `rstrip` those after it, and one with `single_word` looks for letters on
/// both sides.
fn may_cut_before(token: &AddedToken) -> bool {
    let is_sign = |first: char| first.is_ascii_punctuation() && first != '_';
    !token.lstrip && !token.single_word && token.content.starts_with(is_sign)
}
