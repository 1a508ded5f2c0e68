//! Tokenizers: text to tokens, and tokens to bytes. One variant per kind of tokenizer.

mod byte;
mod cuts;
mod encoding;
mod hugging_face;
mod seen;

use std::borrow::Cow;

use types::TokenId;
use types::node::{TOKENIZER_BYTES, TOKENIZER_NONE};

pub use byte::END;
pub use encoding::{PieceCounts, PromptText, TextEncoding};
pub use hugging_face::{Bos, HuggingFace, TokenizerError};
pub use seen::CacheScope;

use crate::error::EncodeError;

/// A model's vocabulary, with the conversion from text.
///
/// Tokens are converted to *bytes* instead of text, because a character may consist of several tokens. The
/// [`Detokenizer`](super::Detokenizer) assembles characters.
#[derive(Debug)]
pub enum Tokenizer {
    /// The tokenizer of the mock: a token is a byte, followed by a few special tokens.
    Bytes,
    /// The tokenizer of a real model, from `tokenizer.json`.
    HuggingFace(Box<HuggingFace>),
    /// No tokenizer: requests contain token ids, and answers have no text.
    Absent,
}

impl Tokenizer {
    /// Returns the value of the tokenizer's fingerprint part. A node must have the same, so that token ids
    /// mean the same on both sides.
    pub fn fingerprint(&self) -> &str {
        match self {
            Self::Bytes => TOKENIZER_BYTES,
            Self::HuggingFace(tokenizer) => tokenizer.digest(),
            Self::Absent => TOKENIZER_NONE,
        }
    }

    /// Returns the number of token ids of the tokenizer.
    pub fn vocab(&self) -> u32 {
        match self {
            Self::Bytes => byte::VOCAB,
            Self::HuggingFace(tokenizer) => tokenizer.bytes().n_tokens(),
            Self::Absent => 0,
        }
    }

    /// Tokenizes a rendered chat. The name of a special token becomes that token, because templates write
    /// special tokens by name.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        match self {
            Self::Bytes => Ok(byte::encode(text)),
            Self::HuggingFace(tokenizer) => tokenizer.encode(text),
            Self::Absent => Err(EncodeError::NoTokenizer),
        }
    }

    /// Tokenizes a text without a template, with the beginning-of-sequence token if the model expects one.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.encode_plain(text),
            Self::Bytes | Self::Absent => self.encode(text),
        }
    }

    /// Returns the bytes of the pieces of texts that are kept with their tokens.
    pub fn seen_bytes(&self) -> usize {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.seen().bytes(),
            Self::Bytes | Self::Absent => 0,
        }
    }

    /// Returns the bytes that a token adds to the text. Special tokens and unknown ids add none.
    pub fn bytes_of(&self, token: TokenId) -> &[u8] {
        match self {
            Self::Bytes => byte::bytes_of(token),
            Self::HuggingFace(tokenizer) => tokenizer.bytes().of(token),
            Self::Absent => &[],
        }
    }

    /// Returns the special token with this name.
    pub fn special_named(&self, name: &str) -> Option<TokenId> {
        match self {
            Self::HuggingFace(tokenizer) => {
                tokenizer.named(name).filter(|token| tokenizer.special(*token).is_some())
            }
            Self::Bytes | Self::Absent => None,
        }
    }

    /// Returns the text that shows a single token in a list: the name of a special token, or the id if there
    /// is no tokenizer.
    pub fn shown(&self, token: TokenId) -> Cow<'_, str> {
        match self {
            Self::Absent => Cow::Owned(format!("token_id:{}", token.0)),
            _ => self.special_name(token).unwrap_or_else(|| String::from_utf8_lossy(self.bytes_of(token))),
        }
    }

    /// Returns the name of a special token; `None` for others.
    pub fn special_name(&self, token: TokenId) -> Option<Cow<'_, str>> {
        match self {
            Self::Bytes => byte::special(token).map(Cow::Borrowed),
            Self::HuggingFace(tokenizer) => tokenizer.special(token).map(Cow::Owned),
            Self::Absent => None,
        }
    }

    /// Returns the text of a whole prompt, without the prefix that the tokenizer adds to texts.
    pub fn text_of(&self, tokens: &[TokenId]) -> String {
        self.text(tokens.iter().flat_map(|token| self.bytes_of(*token)).copied().collect())
    }

    /// Returns the text of tokens like [`text_of`](Self::text_of), with the names of special tokens.
    pub fn whole_text_of(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::new();
        for token in tokens {
            match self.bytes_of(*token) {
                [] => bytes.extend_from_slice(self.special_name(*token).unwrap_or_default().as_bytes()),
                of_text => bytes.extend_from_slice(of_text),
            }
        }
        self.text(bytes)
    }

    fn text(&self, bytes: Vec<u8>) -> String {
        let text = String::from_utf8_lossy(&bytes);
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.bytes().without_prefix(&text).to_owned(),
            Self::Bytes | Self::Absent => text.into_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
