//! Text to tokens, and tokens to bytes. One arm per kind of tokenizer.

mod byte;
mod hugging_face;
mod token_bytes;

use std::borrow::Cow;

use types::TokenId;
use types::node::{TOKENIZER_BYTES, TOKENIZER_NONE};

pub use byte::END;
pub use hugging_face::{Bos, HuggingFace, TokenizerError};
pub use token_bytes::{TokenBytes, UnknownDecoder};

use crate::error::EncodeError;

/// A model's vocabulary and the way text is cut into it.
///
/// Tokens become *bytes*, not text: a character may be spread over several tokens, and only the
/// [`Detokenizer`](super::Detokenizer) knows when it is whole.
#[derive(Debug)]
pub enum Tokenizer {
    /// The mock's: a token is a byte, and a few special tokens follow.
    Bytes,
    /// A real model's: `tokenizer.json`.
    HuggingFace(Box<HuggingFace>),
    /// A model that came without one: it is asked with token ids, and its answers have no text.
    Absent,
}

impl Tokenizer {
    /// What a node's fingerprint must say of its tokenizer for the two to mean the same tokens.
    pub fn fingerprint(&self) -> &str {
        match self {
            Self::Bytes => TOKENIZER_BYTES,
            Self::HuggingFace(tokenizer) => tokenizer.digest(),
            Self::Absent => TOKENIZER_NONE,
        }
    }

    /// The tokens that it writes are numbered below this.
    pub fn vocab(&self) -> u32 {
        match self {
            Self::Bytes => byte::VOCAB,
            Self::HuggingFace(tokenizer) => tokenizer.bytes().n_tokens(),
            Self::Absent => 0,
        }
    }

    /// Cuts a chat's text into tokens. The names of special tokens become these tokens: that is how templates write them.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        match self {
            Self::Bytes => Ok(byte::encode(text)),
            Self::HuggingFace(tokenizer) => tokenizer.encode(text),
            Self::Absent => Err(EncodeError::NoTokenizer),
        }
    }

    /// Cuts a text that no template has written: with the token in front that the model expects there, if it does.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.encode_plain(text),
            Self::Bytes | Self::Absent => self.encode(text),
        }
    }

    /// The bytes that a token adds to the text: none for a special token, and none for one that does not exist.
    pub fn bytes_of(&self, token: TokenId) -> &[u8] {
        match self {
            Self::Bytes => byte::bytes_of(token),
            Self::HuggingFace(tokenizer) => tokenizer.bytes().of(token),
            Self::Absent => &[],
        }
    }

    /// How a token is shown by itself, where one is listed: special tokens by their names, and by its number where
    /// there is no tokenizer.
    pub fn shown(&self, token: TokenId) -> Cow<'_, str> {
        let special = match self {
            Self::Bytes => byte::special(token).map(Cow::Borrowed),
            Self::HuggingFace(tokenizer) => tokenizer.special(token).map(Cow::Owned),
            Self::Absent => Some(Cow::Owned(format!("token_id:{}", token.0))),
        };
        special.unwrap_or_else(|| String::from_utf8_lossy(self.bytes_of(token)))
    }

    /// The text of a whole prompt, without what its tokenizer put in front of it.
    pub fn text_of(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.bytes_of(*token)).copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.bytes().without_prefix(&text).to_owned(),
            Self::Bytes | Self::Absent => text.into_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
