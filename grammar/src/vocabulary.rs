//! A model's vocabulary: the bytes of its tokens, and the tokens that end an answer.

use std::fmt;
use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use types::TokenId;

use crate::added_tokens::AddedTokens;
use crate::token_bytes::{TokenBytes, VocabularyError};

/// The bytes of all tokens of a model, as a tree.
#[derive(Clone)]
pub struct Vocabulary {
    env: TokEnv,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("n_tokens", &self.n_tokens()).finish()
    }
}

impl Vocabulary {
    /// Makes the vocabulary of a model with `n_tokens` tokens from its `tokenizer.json` and the tokens beside it. Tokens
    /// without bytes, such as special ones, are never allowed, except `ends`, which end an answer.
    pub fn new(
        tokenizer_json: &[u8],
        added: &AddedTokens,
        n_tokens: u32,
        ends: &[TokenId],
    ) -> Result<Self, VocabularyError> {
        let bytes = TokenBytes::of_tokenizer(&added.tokenizer(tokenizer_json)?.0)?;
        Self::of_words((0..n_tokens).map(|id| bytes.of(TokenId(id)).to_vec()).collect(), ends)
    }

    /// Makes a vocabulary from the bytes of its tokens.
    pub fn of_words(mut words: Vec<Vec<u8>>, ends: &[TokenId]) -> Result<Self, VocabularyError> {
        let known = |end: &&TokenId| (end.0 as usize) < words.len();
        let ends: Vec<u32> = ends.iter().filter(known).map(|end| end.0).collect();
        let first = *ends.first().ok_or(VocabularyError::NoEnd)?;
        ends.iter().for_each(|end| words[*end as usize].clear());
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words).with_eos_tokens(&ends);
        Ok(Self { env: Arc::new(ApproximateTokEnv::new(trie)) })
    }

    pub fn n_tokens(&self) -> usize {
        self.env.tok_trie().vocab_size()
    }

    pub(crate) fn env(&self) -> &TokEnv {
        &self.env
    }
}
