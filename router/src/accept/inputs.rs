//! The prompts of a request, before and after they are tokenized.

use std::sync::Arc;

use types::{Deadline, TokenId};

use super::AcceptContext;
use crate::error::RequestError;
use crate::text::{CacheScope, PromptText, ServedModel, Tokenizing};

/// The bytes of a long text's beginning, for each token of the context. Ordinary tokens have fewer.
const BEGINNING_BYTES_PER_TOKEN: usize = 32;

/// The prompts of a request as its client wrote them, and the name of the field that contained them.
#[derive(Clone, Debug)]
pub struct AskedInputs {
    pub param: &'static str,
    pub prompts: Vec<AskedPrompt>,
}

/// A prompt as its client wrote it.
#[derive(Clone, Debug)]
pub enum AskedPrompt {
    Text(PromptText),
    Tokens(Vec<TokenId>),
}

/// The token sequences to continue, and the name of the request field that contained them.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub param: &'static str,
    pub tokens: Vec<Vec<TokenId>>,
}

impl AskedInputs {
    /// Refuses a text whose beginning alone is much too long, so that megabytes are not tokenized for a refusal. The
    /// beginning may have a few tokens more than as a part of the text, but not twice as many.
    pub(super) async fn check_beginnings(
        &self,
        tokenizing: &Tokenizing,
        model: &ServedModel,
        context: &AcceptContext,
        deadline: Deadline,
    ) -> Result<(), RequestError> {
        let n_bytes = context.tokens as usize * BEGINNING_BYTES_PER_TOKEN;
        for prompt in &self.prompts {
            let AskedPrompt::Text(text) = prompt else { continue };
            let text = text.as_str();
            if text.len() <= n_bytes {
                continue;
            }
            let (beginning, tokenizer) =
                (text[..text.floor_char_boundary(n_bytes)].to_owned(), Arc::clone(&model.tokenizer));
            let count = move || tokenizer.encode(&beginning).map(|tokens| tokens.len());
            let n =
                tokenizing.parse(n_bytes, deadline, count).await?.map_err(|error| error.at(self.param))?;
            if n > 2 * context.tokens as usize {
                let of_all = text.len();
                let reason = format!(
                    "the first {n_bytes} of the prompt's {of_all} bytes have {n} tokens, which leaves no room in {}",
                    context.text
                );
                return Err(context.too_long(self.param, reason).into());
            }
        }
        Ok(())
    }

    pub(super) async fn tokenized(
        self,
        tokenizing: &Tokenizing,
        model: &ServedModel,
        scope: &CacheScope,
        deadline: Deadline,
    ) -> Result<Inputs, RequestError> {
        let Self { param, prompts } = self;
        let mut tokens = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            tokens.push(match prompt {
                AskedPrompt::Tokens(tokens) => tokens,
                AskedPrompt::Text(text) => {
                    let tokens = tokenizing.tokens(model, text, scope.clone(), deadline).await?;
                    tokens.map_err(|error| error.at(param))?
                }
            });
        }
        Ok(Inputs { param, tokens })
    }
}
