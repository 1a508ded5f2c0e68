//! A text on its way to tokens, piece by piece.

use std::sync::Arc;

use types::TokenId;

use super::Tokenizer;
use super::seen::CacheScope;
use crate::error::EncodeError;

/// A text to be tokenized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptText {
    /// A rendered chat. The name of a special token is that token, and the template wrote all of them.
    Rendered(String),
    /// A text without a template, to which the tokenizer adds a beginning-of-sequence token if the model expects one.
    Plain(String),
}

impl PromptText {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Rendered(text) | Self::Plain(text) => text,
        }
    }
}

/// How much of a text was found, and how much was tokenized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceCounts {
    pub hits: usize,
    pub misses: usize,
    /// The bytes of the pieces that were tokenized.
    pub tokenized_bytes: usize,
}

/// A text that is being tokenized, piece by piece. Another thread may tokenize the rest.
#[derive(Debug)]
pub struct TextEncoding {
    tokenizer: Arc<Tokenizer>,
    text: PromptText,
    scope: CacheScope,
    /// The end of the tokenized text.
    end: usize,
    tokens: Vec<TokenId>,
    counts: PieceCounts,
}

/// A piece that is found costs as much as this share of tokenizing it. It is hashed and compared, at about a byte per
/// nanosecond; a tokenizer takes 500.
const SHARE_OF_FOUND: usize = 64;

impl TextEncoding {
    pub fn new(tokenizer: Arc<Tokenizer>, text: PromptText, scope: CacheScope) -> Self {
        let tokens = match &*tokenizer {
            Tokenizer::HuggingFace(tokenizer) => tokenizer.beginning_of(&text).into_iter().collect(),
            Tokenizer::Bytes | Tokenizer::Absent => Vec::new(),
        };
        Self { tokenizer, text, scope, end: 0, tokens, counts: PieceCounts::default() }
    }

    /// Tokenizes pieces at the cost of at most `bytes_max` tokenized bytes. Returns whether the text is at its end.
    pub fn advance(&mut self, bytes_max: usize) -> Result<bool, EncodeError> {
        let whole = Arc::clone(&self.tokenizer);
        let Tokenizer::HuggingFace(tokenizer) = &*whole else { return self.tokenize_whole(bytes_max) };
        let Some(cuts) = tokenizer.cuts(&self.text) else { return self.tokenize_whole(bytes_max) };
        let Self { text, scope, end, tokens, counts, .. } = self;
        let mut bytes_left = bytes_max;
        for piece in cuts.pieces(&text.as_str()[*end..]) {
            let seen = tokenizer.seen().get(scope, piece);
            let cost = if seen.is_some() { 1 + piece.len() / SHARE_OF_FOUND } else { piece.len() };
            let Some(left) = bytes_left.checked_sub(cost) else { return Ok(false) };
            bytes_left = left;
            if let Some(seen) = seen {
                tokens.extend_from_slice(&seen.tokens);
                counts.hits += 1;
            } else {
                let of_piece = tokenizer.encode(piece)?;
                tokenizer.seen().keep(scope, piece, &of_piece);
                tokens.extend_from_slice(&of_piece);
                counts.misses += 1;
                counts.tokenized_bytes += piece.len();
            }
            *end += piece.len();
        }
        Ok(true)
    }

    /// Tokenizes a text that must not be cut.
    fn tokenize_whole(&mut self, bytes_max: usize) -> Result<bool, EncodeError> {
        if self.text.as_str().len() > bytes_max {
            return Ok(false);
        }
        self.tokens = match &self.text {
            PromptText::Rendered(text) => self.tokenizer.encode(text)?,
            PromptText::Plain(text) => self.tokenizer.encode_plain(text)?,
        };
        self.counts = PieceCounts { hits: 0, misses: 1, tokenized_bytes: self.text.as_str().len() };
        Ok(true)
    }

    /// Returns the bytes of the rest.
    pub fn bytes_left(&self) -> usize {
        self.text.as_str().len() - self.end
    }

    /// Returns the tokens of the tokenized text, and the counts.
    pub fn into_tokens(self) -> (Vec<TokenId>, PieceCounts) {
        (self.tokens, self.counts)
    }
}

#[cfg(test)]
mod tests;
