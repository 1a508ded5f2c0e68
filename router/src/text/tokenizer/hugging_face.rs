//! The tokenizer of a real model, from its `tokenizer.json`.

use std::fmt;

use grammar::token_bytes::{self, TokenBytes, VocabularyError};
use tokenizers::Tokenizer as Inner;
use types::TokenId;
use types::node::tokenizer_digest;

use crate::error::EncodeError;

/// A tokenizer from a `tokenizer.json`, with the bytes of all its tokens.
pub struct HuggingFace {
    inner: Inner,
    bytes: TokenBytes,
    bos: Bos,
    digest: String,
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
        let mut inner = Inner::from_bytes(json)?;
        // Truncation and padding are off: they are for training and batches, and would silently change the
        // length of prompts.
        inner.with_truncation(None)?;
        inner.with_padding(None);
        let bytes = TokenBytes::of_tokenizer(&inner)?;
        Ok(Self { inner, bytes, bos: Bos::default(), digest: tokenizer_digest(json) })
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
