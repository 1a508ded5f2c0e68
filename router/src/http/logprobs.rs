//! Log-probabilities in the formats of OpenAI's two endpoints, and of prompts in vLLM's.

use std::sync::Arc;

use serde::{Serialize, Serializer};
use types::step::{Logprobs, PromptLogprob};
use types::{Step, TokenId};

use crate::answers::AnsweredPrompt;
use crate::text::{Detokenizer, StopStrings, Tokenizer};

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
    /// `None` for the first token of a prompt, as OpenAI has it.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<ByText>>,
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
        lists.add_steps(tokenizer, steps);
        (!lists.tokens.is_empty()).then_some(lists)
    }

    /// Converts the log-probabilities of a prompt with `n_top` alternatives to each token. `echo` is the prompt's text in
    /// the answer. Returns `None` if the prompt has none.
    pub(crate) fn of_prompt(
        tokenizer: &Arc<Tokenizer>,
        prompt: &AnsweredPrompt,
        echo: &str,
        n_top: usize,
    ) -> Option<Self> {
        let logprobs = std::iter::once(None).chain(prompt.logprobs.as_ref()?.iter().map(Some));
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), &StopStrings::default(), 0);
        let (mut lists, mut text, mut offset, mut n_bytes) = (Self::default(), String::new(), 0, 0);
        for (token, of_token) in prompt.tokens.iter().zip(logprobs) {
            let logprobs = of_token.map(|PromptLogprob { logprobs: Logprobs { chosen, top }, .. }| {
                Logprobs { chosen: *chosen, top: top.iter().take(n_top).copied().collect() }
            });
            lists.add(tokenizer, offset, *token, logprobs.as_ref());
            // A special token is in the text where the client wrote its name.
            if let Some(name) = tokenizer.special_name(*token) {
                let is_written = echo.get(n_bytes..).is_some_and(|rest| rest.starts_with(&*name));
                text.push_str(if is_written { &name } else { "" });
            }
            // Without stop strings `push` never returns `Break`.
            let _ = detokenizer.push(*token, &mut text);
            (offset, n_bytes) = (offset + text.chars().count(), n_bytes + text.len());
            text.clear();
        }
        Some(lists)
    }

    /// Adds the log-probabilities of steps, with the positions of their texts.
    pub(crate) fn add_steps<'a>(
        &mut self,
        tokenizer: &Tokenizer,
        steps: impl IntoIterator<Item = (usize, &'a Step)>,
    ) {
        for (offset, step) in steps {
            if let Some(logprobs) = &step.logprobs {
                self.add(tokenizer, offset, step.token, Some(logprobs));
            }
        }
    }

    fn add(&mut self, tokenizer: &Tokenizer, offset: usize, token: TokenId, logprobs: Option<&Logprobs>) {
        self.tokens.push(tokenizer.shown(token).into_owned());
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.chosen)));
        self.text_offset.push(offset);
        self.top_logprobs.push(logprobs.map(|logprobs| ByText::of(tokenizer, token, logprobs)));
    }
}

/// Log-probabilities of a prompt in vLLM's format: for each token `null`, or an object with the token and its alternatives
/// by their ids.
#[derive(Debug)]
pub(crate) struct PromptLogprobs<'a> {
    tokenizer: &'a Tokenizer,
    prompt: &'a AnsweredPrompt,
    logprobs: &'a [PromptLogprob],
    n_top: usize,
}

/// One token in vLLM's format.
#[derive(Debug, Serialize)]
struct RankedToken<'a> {
    logprob: f32,
    rank: u32,
    decoded_token: std::borrow::Cow<'a, str>,
}

impl<'a> PromptLogprobs<'a> {
    /// Returns the log-probabilities of `prompt`; `None` if it has none or the client asks for none.
    pub(crate) fn of(
        tokenizer: &'a Tokenizer,
        prompt: &'a AnsweredPrompt,
        n_top: Option<u32>,
    ) -> Option<Self> {
        let (logprobs, n_top) = (prompt.logprobs.as_deref()?, n_top? as usize);
        Some(Self { tokenizer, prompt, logprobs, n_top })
    }

    fn of_token(&self, token: TokenId, PromptLogprob { logprobs, rank }: &PromptLogprob) -> ById<'a> {
        let ranked = |token: TokenId, logprob, rank| {
            (
                token.0,
                RankedToken { logprob: finite(logprob), rank, decoded_token: self.tokenizer.shown(token) },
            )
        };
        let top = (1..).zip(&logprobs.top).take(self.n_top);
        let others = top.filter(|(_, (other, _))| *other != token);
        let others = others.map(|(rank, (other, logprob))| ranked(*other, *logprob, rank));
        ById(std::iter::once(ranked(token, logprobs.chosen, *rank)).chain(others).collect())
    }
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of_tokens = self.prompt.tokens.iter().skip(1).zip(self.logprobs);
        let of_tokens = of_tokens.map(|(token, logprob)| Some(self.of_token(*token, logprob)));
        serializer.collect_seq(std::iter::once(None).chain(of_tokens))
    }
}

/// Tokens by their ids.
struct ById<'a>(Vec<(u32, RankedToken<'a>)>);

impl Serialize for ById<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, token)| (id, token)))
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
