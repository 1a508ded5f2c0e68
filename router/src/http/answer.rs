//! The common parts of both endpoints' answers, and the trait for their differences.

use std::fmt;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::stream::StreamExt;
use serde::{Serialize, Serializer};
use serde_json::Value;
use tracing::info;
use types::{TokenId, Usage};

use super::error::{FieldNames, HttpError};
use super::explanation::explained;
use super::fields::AnswerOptions;
use super::logprobs::PromptLogprobs;
use crate::answers::{AnsweredPrompt, BegunAnswers, Deltas};
use crate::choice::{ChoiceFinish, Delta, WholeChoice};
use crate::text::ServedModel;

/// The form of an endpoint's answers.
pub(crate) trait AnswerShape: fmt::Debug + Send + Sync + Unpin + 'static {
    /// The prefix of an answer's id.
    const ID: &'static str;
    /// The fields that chats name differently, which shared checks use: a chat's name, and the endpoint's.
    const NAMES: FieldNames = &[];
}

/// The format of answers that are lists of choices.
pub(crate) trait AnswerFormat: AnswerShape {
    /// The value of the field `object` in a complete answer.
    const WHOLE: &'static str;
    const CHUNK: &'static str;
    /// The JSON form of one choice in a chunk.
    type Chunk<'a>: Serialize;
    /// The JSON form of one choice in a complete answer.
    type Choice<'a>: Serialize;

    /// Returns the chunk that a stream sends for a choice before its first token.
    fn opening<'a>(&'a self, context: &'a AnswerContext, choice: usize) -> Option<Self::Chunk<'a>>;

    fn chunk<'a>(&'a self, context: &'a AnswerContext, delta: &'a Delta) -> Self::Chunk<'a>;

    fn whole<'a>(
        &'a self,
        context: &'a AnswerContext,
        choice: usize,
        whole: &'a WholeChoice,
    ) -> Self::Choice<'a>;

    /// Returns the prompt, if its tokens and their log-probabilities belong to the answer instead of to each choice.
    fn only_prompt<'a>(&self, context: &'a AnswerContext) -> Option<&'a AnsweredPrompt>;
}

/// The properties of an answer that are known before its first token.
#[derive(Debug)]
pub(crate) struct AnswerContext {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Arc<ServedModel>,
    pub(crate) options: AnswerOptions,
    /// The prompt of each choice, one entry per choice.
    pub(crate) prompts: Vec<Arc<AnsweredPrompt>>,
}

impl AnswerContext {
    /// Returns `ids` if the client wants token ids.
    pub(crate) fn if_ids<'a>(&self, ids: &'a [TokenId]) -> Option<TokenIds<'a>> {
        self.options.token_ids.then_some(TokenIds(ids))
    }

    /// Returns the prompt of a choice.
    pub(crate) fn prompt(&self, choice: usize) -> Option<&AnsweredPrompt> {
        self.prompts.get(choice).map(Arc::as_ref)
    }

    /// Returns the log-probabilities of a prompt if the client wants them.
    pub(crate) fn prompt_logprobs<'a>(&'a self, prompt: &'a AnsweredPrompt) -> Option<PromptLogprobs<'a>> {
        PromptLogprobs::of(&self.model.tokenizer, prompt, self.options.prompt_logprobs)
    }
}

/// An answer with one or several choices, while it is generated.
#[derive(Debug)]
pub(crate) struct Answer<S> {
    pub(crate) context: AnswerContext,
    pub(crate) shape: S,
    pub(crate) answers: BegunAnswers,
}

impl<S: AnswerShape> Answer<S> {
    pub(crate) fn usage(&self) -> Usage {
        self.answers.usage()
    }

    pub(crate) fn into_parts(self) -> (AnswerContext, S, Deltas) {
        (self.context, self.shape, self.answers.into_deltas())
    }
}

impl<S: AnswerFormat> Answer<S> {
    /// Waits for all choices and returns the complete answer.
    pub(crate) async fn whole(self) -> Result<Response, HttpError> {
        let (usage, n_choices) = (self.usage(), self.answers.choices.len());
        let (context, shape, mut deltas) = self.into_parts();
        let mut wholes = vec![WholeChoice::default(); n_choices];
        while let Some(delta) = deltas.next().await {
            let delta = delta?;
            wholes[delta.choice].add(delta);
        }
        let completion_tokens = match context.options.prompt_only {
            true => 0,
            false => wholes.iter().map(|whole| whole.steps.len() as u32).sum(),
        };
        info!(n_choices, completion_tokens, "request answered");
        let choices = wholes.iter().enumerate().map(|(choice, whole)| shape.whole(&context, choice, whole));
        let envelope = Envelope {
            prompt_token_ids: shape.only_prompt(&context).and_then(|prompt| context.if_ids(&prompt.tokens)),
            prompt_logprobs: shape.only_prompt(&context).and_then(|prompt| context.prompt_logprobs(prompt)),
            usage: Some(Some(UsageFields::new(usage, completion_tokens))),
            explanations: explanations(&wholes),
            ..Envelope::new(&context, S::WHOLE, choices.collect::<Vec<_>>())
        };
        Ok(Json(envelope).into_response())
    }
}

/// The JSON object around a complete answer or a chunk. `C` is its list of choices.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a, C> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<TokenIds<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs<'a>>,
    /// The usage; `Some(None)` is written as `null`, which every chunk has if the stream ends with its usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<UsageFields>>,
    /// The explanations of choices that end here, for a request that asks for them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) explanations: Vec<Value>,
}

fn explanations(wholes: &[WholeChoice]) -> Vec<Value> {
    let one = |(choice, whole): (usize, &WholeChoice)| Some(explained(choice, whole.explanation.as_ref()?));
    wholes.iter().enumerate().filter_map(one).collect()
}

impl<'a, C> Envelope<'a, C> {
    pub(crate) fn new(context: &'a AnswerContext, object: &'static str, choices: C) -> Self {
        let AnswerContext { id, created, model, .. } = context;
        Self {
            id,
            object,
            created: *created,
            model: &model.name,
            choices,
            prompt_token_ids: None,
            prompt_logprobs: None,
            usage: None,
            explanations: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct UsageFields {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

impl UsageFields {
    pub(crate) fn new(usage: Usage, completion_tokens: u32) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens,
            total_tokens: usage.prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
        }
    }
}

/// Token ids that are written as a list of numbers in JSON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenIds<'a>(pub(crate) &'a [TokenId]);

impl Serialize for TokenIds<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|token| token.0))
    }
}

/// Returns OpenAI's name for a finish reason.
pub(crate) const fn finish_reason(finish: ChoiceFinish) -> &'static str {
    match finish {
        ChoiceFinish::Stop => "stop",
        ChoiceFinish::Length => "length",
        ChoiceFinish::ToolCalls => "tool_calls",
    }
}
