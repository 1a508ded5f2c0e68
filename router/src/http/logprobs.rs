//! Log-probabilities in the formats of OpenAI's two endpoints.

use serde::{Serialize, Serializer};
use types::step::Logprobs;
use types::{Step, TokenId};

use crate::text::Tokenizer;

/// The number that is written for minus infinity, as OpenAI does, because JSON has no infinity.
const IMPOSSIBLE: f32 = -9999.0;

/// Log-probabilities in the format of chats: one object per token.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: OneToken,
    top_logprobs: Vec<OneToken>,
}

#[derive(Debug, Serialize)]
struct OneToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Log-probabilities in the format of completions: four lists with one element per token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<ByText>,
    /// The position of each token's text in the answer, in characters.
    text_offset: Vec<usize>,
}

impl ChatLogprobs {
    /// Converts the log-probabilities of `steps`. Returns `None` if the steps have none.
    pub(crate) fn of<'a>(tokenizer: &Tokenizer, steps: impl IntoIterator<Item = &'a Step>) -> Option<Self> {
        let content: Vec<ChatToken> =
            steps.into_iter().filter_map(|step| chat_token(tokenizer, step)).collect();
        (!content.is_empty()).then_some(Self { content, refusal: None })
    }
}

fn chat_token(tokenizer: &Tokenizer, step: &Step) -> Option<ChatToken> {
    let logprobs = step.logprobs.as_ref()?;
    let top_logprobs =
        logprobs.top.iter().map(|(token, logprob)| one_token(tokenizer, *token, *logprob)).collect();
    Some(ChatToken { token: one_token(tokenizer, step.token, logprobs.chosen), top_logprobs })
}

fn one_token(tokenizer: &Tokenizer, token: TokenId, logprob: f32) -> OneToken {
    let shown = tokenizer.shown(token);
    let bytes = match tokenizer.bytes_of(token) {
        [] => shown.as_bytes(),
        bytes => bytes,
    };
    OneToken { bytes: bytes.to_vec(), token: shown.into_owned(), logprob: finite(logprob) }
}

impl CompletionLogprobs {
    /// Converts the log-probabilities of steps with the positions of their texts. Returns `None` if the steps
    /// have none.
    pub(crate) fn of<'a>(
        tokenizer: &Tokenizer,
        steps: impl IntoIterator<Item = (usize, &'a Step)>,
    ) -> Option<Self> {
        let mut lists = Self::default();
        for (offset, step) in steps {
            if let Some(logprobs) = &step.logprobs {
                lists.add(tokenizer, offset, step.token, logprobs);
            }
        }
        (!lists.tokens.is_empty()).then_some(lists)
    }

    fn add(&mut self, tokenizer: &Tokenizer, offset: usize, token: TokenId, logprobs: &Logprobs) {
        self.tokens.push(tokenizer.shown(token).into_owned());
        self.token_logprobs.push(finite(logprobs.chosen));
        self.text_offset.push(offset);
        self.top_logprobs.push(ByText::of(tokenizer, token, logprobs));
    }
}

/// Alternatives to a token by their texts, best first.
#[derive(Debug)]
struct ByText(Vec<(String, f32)>);

impl ByText {
    /// Lists the alternatives and the chosen token. If two tokens have the same text, the more likely one is
    /// listed.
    fn of(tokenizer: &Tokenizer, chosen: TokenId, logprobs: &Logprobs) -> Self {
        let mut named: Vec<(String, f32)> = Vec::with_capacity(logprobs.top.len() + 1);
        for (token, logprob) in logprobs.top.iter().copied().chain([(chosen, logprobs.chosen)]) {
            let text = tokenizer.shown(token);
            if named.iter().all(|(seen, _)| *seen != text) {
                named.push((text.into_owned(), finite(logprob)));
            }
        }
        Self(named)
    }
}

impl Serialize for ByText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(IMPOSSIBLE)
}
