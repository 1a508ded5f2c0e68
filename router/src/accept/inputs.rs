//! The prompts of a request, before and after they are tokenized.

use types::{Deadline, TokenId};

use crate::error::RequestError;
use crate::text::{CacheScope, PromptText, ServedModel, Tokenizing};

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
