//! The tokenizer of a real model, from its `tokenizer.json`.

use std::fmt;

use grammar::token_bytes::{self, TokenBytes, VocabularyError};
use tokenizers::Tokenizer as Inner;
use types::TokenId;
use types::node::tokenizer_digest;

use super::cuts::Cuts;
use super::encoding::PromptText;
use super::seen::SeenPieces;
use crate::error::EncodeError;

/// The largest size of the pieces that are kept: texts of about ten million tokens.
const SEEN_BYTES_MAX: usize = 64 << 20;

/// A tokenizer from a `tokenizer.json`, with the bytes of all its tokens.
pub struct HuggingFace {
    inner: Inner,
    bytes: TokenBytes,
    bos: Bos,
    digest: String,
    /// `None`: texts are tokenized whole.
    cuts: Option<Cuts>,
    seen: SeenPieces,
}

/// How a plain text gets its beginning-of-sequence token. Chat templates write it themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bos {
    /// The post-processor in `tokenizer.json` adds the token.
    #[default]
    PostProcessor,
    /// No token is added: `add_bos_token = false` in `tokenizer_config.json`.
    Nothing,
    /// This token is added: `add_bos_token = true`.
    Token(TokenId),
}

/// Whether the post-processor in `tokenizer.json` adds its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostProcessor {
    On,
    Off,
}

/// The reason why a `tokenizer.json` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error(transparent)]
    Parse(#[from] tokenizers::Error),
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
}

impl fmt::Debug for HuggingFace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HuggingFace").field("digest", &self.digest).finish_non_exhaustive()
    }
}

impl HuggingFace {
    /// Makes a tokenizer from the contents of a `tokenizer.json`.
    pub fn new(json: &[u8]) -> Result<Self, TokenizerError> {
        Self::of(Inner::from_bytes(json)?, tokenizer_digest(json))
    }

    /// Makes a tokenizer. `digest` is that of its `tokenizer.json`.
    pub fn of(mut inner: Inner, digest: String) -> Result<Self, TokenizerError> {
        // Truncation and padding are off: they are for training and batches, and would silently change the
        // length of prompts.
        inner.with_truncation(None)?;
        inner.with_padding(None);
        let bytes = TokenBytes::of_tokenizer(&inner)?;
        let (cuts, seen) = (Cuts::of(&inner), SeenPieces::new(SEEN_BYTES_MAX));
        Ok(Self { inner, bytes, bos: Bos::default(), digest, cuts, seen })
    }

    pub fn with_bos(self, bos: Bos) -> Self {
        Self { bos, ..self }
    }

    pub fn digest(&self) -> &str {
        &self.digest
    }

    pub fn bytes(&self) -> &TokenBytes {
        &self.bytes
    }

    /// Returns the token with this name, special or not.
    pub fn named(&self, name: &str) -> Option<TokenId> {
        self.inner.token_to_id(name).map(TokenId)
    }

    /// Returns the name of a special token; `None` for other tokens.
    pub fn special(&self, token: TokenId) -> Option<String> {
        token_bytes::special(&self.inner, token.0)
    }

    /// Returns the cuts of a text; `None` if it must be tokenized whole.
    pub(super) fn cuts(&self, text: &PromptText) -> Option<&Cuts> {
        let is_whole = matches!(text, PromptText::Plain(_)) && self.bos == Bos::PostProcessor;
        self.cuts.as_ref().filter(|_| !is_whole)
    }

    /// Returns the token before the first piece of a text.
    pub(super) fn beginning_of(&self, text: &PromptText) -> Option<TokenId> {
        match (text, self.bos) {
            (PromptText::Plain(_), Bos::Token(token)) => Some(token),
            _ => None,
        }
    }

    /// Returns the pieces that were tokenized before.
    pub(super) fn seen(&self) -> &SeenPieces {
        &self.seen
    }

    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        self.encode_after(Vec::new(), text, PostProcessor::Off)
    }

    /// Tokenizes a plain text, with the beginning-of-sequence token that the model expects.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        match self.bos {
            Bos::PostProcessor => self.encode_after(Vec::new(), text, PostProcessor::On),
            Bos::Nothing => self.encode(text),
            Bos::Token(token) => self.encode_after(vec![token], text, PostProcessor::Off),
        }
    }

    fn encode_after(
        &self,
        mut tokens: Vec<TokenId>,
        text: &str,
        post_processor: PostProcessor,
    ) -> Result<Vec<TokenId>, EncodeError> {
        let refused = |error: tokenizers::Error| EncodeError::Refused { reason: error.to_string() };
        let encoding = self.inner.encode_fast(text, post_processor == PostProcessor::On).map_err(refused)?;
        tokens.extend(encoding.get_ids().iter().copied().map(TokenId));
        Ok(tokens)
    }
}
