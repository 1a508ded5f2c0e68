//! The endpoint `POST /v1/completions`: one prompt or several, as text or token ids.

use serde::{Deserialize, Serialize};
use types::TokenId;

use super::answer::{AnswerContext, AnswerFormat, AnswerShape, TokenIds, finish_reason};
use super::api::{HttpApi, ParsedRequest};
use super::body::JsonBody;
use super::constraints::ConstraintFields;
use super::error::HttpError;
use super::fields::CommonFields;
use super::logprobs::CompletionLogprobs;
use super::request_fields::{self, Endpoint};
use crate::accept::{AskedInputs, AskedPrompt, INPUTS_MAX, MaxTokens, SamplingParams};
use crate::answers::AskedRequest;
use crate::choice::{Delta, WholeChoice};
use crate::error::AcceptError;
use crate::text::PromptText;

/// OpenAI's default for requests without `max_tokens`.
const MAX_TOKENS: MaxTokens = MaxTokens::AtMost(16);

/// The fields that only completion requests have.
#[derive(Debug, Deserialize)]
struct CompletionFields {
    prompt: Option<PromptField>,
    logprobs: Option<u32>,
    echo: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids, or a list of such lists"
)]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// Parses a completion's JSON into prompts and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<CompletionShape>, HttpError> {
    let body = JsonBody::of(json);
    let (common, completion): (CommonFields, CompletionFields) = (body.parse()?, body.parse()?);
    let constraints: ConstraintFields = body.parse()?;
    request_fields::check(Endpoint::Completions, &body)?;
    let model = api.serve.model(&api.models, common.model.as_deref())?;
    completion.refuse_unsupported()?;
    let options = common.options();
    let params = SamplingParams { logprobs: completion.logprobs, ..common.params(constraints, MAX_TOKENS)? };
    let prompt = completion.prompt.ok_or_else(|| AcceptError::missing("prompt"))?;
    let inputs = AskedInputs { param: "prompt", prompts: prompt.into_prompts()? };
    let shape = CompletionShape { echo: completion.echo.unwrap_or(false) };
    let request = AskedRequest { model, inputs, params, parts: None };
    Ok(ParsedRequest { request, options, shape })
}

impl CompletionFields {
    fn refuse_unsupported(&self) -> Result<(), AcceptError> {
        match (self.echo, self.logprobs) {
            (Some(true), Some(_)) => {
                Err(AcceptError::unsupported("echo", "not with logprobs: only the answer's tokens have them"))
            }
            _ => Ok(()),
        }
    }
}

impl PromptField {
    /// Returns the prompts. Their number is checked here, before they are tokenized, which is costly.
    fn into_prompts(self) -> Result<Vec<AskedPrompt>, AcceptError> {
        let text = |text: String| AskedPrompt::Text(PromptText::Plain(text));
        let ids = |ids: Vec<u32>| AskedPrompt::Tokens(ids.into_iter().map(TokenId).collect());
        match self {
            Self::Text(prompt) => Ok(vec![text(prompt)]),
            Self::Tokens(tokens) => Ok(vec![ids(tokens)]),
            Self::Texts(texts) => Ok(bounded(texts)?.into_iter().map(text).collect()),
            Self::TokenLists(lists) => Ok(bounded(lists)?.into_iter().map(ids).collect()),
        }
    }
}

fn bounded<T>(prompts: Vec<T>) -> Result<Vec<T>, AcceptError> {
    if prompts.len() > INPUTS_MAX {
        return Err(AcceptError::invalid(
            "prompt",
            format!("at most {INPUTS_MAX} prompts, not {}", prompts.len()),
        ));
    }
    Ok(prompts)
}

// === the answer ===

/// The format of a completion's answers.
#[derive(Debug)]
pub(crate) struct CompletionShape {
    /// Whether each answer begins with its prompt's text.
    echo: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice<'a> {
    index: usize,
    text: std::borrow::Cow<'a, str>,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<TokenIds<'a>>,
}

impl CompletionShape {
    fn echo(&self, context: &AnswerContext, choice: usize) -> Option<String> {
        let prompt = context.prompts.get(choice).filter(|_| self.echo);
        prompt.map(|tokens| context.model.tokenizer.text_of(tokens))
    }
}

impl AnswerShape for CompletionShape {
    const ID: &'static str = "cmpl-";
}

impl AnswerFormat for CompletionShape {
    const WHOLE: &'static str = "text_completion";
    const CHUNK: &'static str = "text_completion";
    type Chunk<'a> = CompletionChoice<'a>;
    type Choice<'a> = CompletionChoice<'a>;

    fn opening(&self, context: &AnswerContext, choice: usize) -> Option<CompletionChoice<'_>> {
        let text = self.echo(context, choice)?.into();
        let (logprobs, finish_reason, token_ids, prompt_token_ids) = (None, None, None, None);
        Some(CompletionChoice { index: choice, text, logprobs, finish_reason, token_ids, prompt_token_ids })
    }

    fn chunk<'a>(&'a self, context: &'a AnswerContext, delta: &'a Delta) -> CompletionChoice<'a> {
        let is_first = delta.step.index == 0;
        CompletionChoice {
            index: delta.choice,
            text: delta.parts.text.as_str().into(),
            logprobs: CompletionLogprobs::of(&context.model.tokenizer, [(delta.offset, &delta.step)]),
            finish_reason: delta.finish.map(finish_reason),
            token_ids: context.options.token_ids.then(|| vec![delta.step.token.0]),
            prompt_token_ids: context
                .prompts
                .get(delta.choice)
                .filter(|_| is_first)
                .and_then(|ids| context.if_ids(ids)),
        }
    }

    fn whole<'a>(
        &'a self,
        context: &'a AnswerContext,
        choice: usize,
        whole: &'a WholeChoice,
    ) -> CompletionChoice<'a> {
        let text = match self.echo(context, choice) {
            Some(echo) => (echo + &whole.parts.text).into(),
            None => whole.parts.text.as_str().into(),
        };
        let steps = whole.steps.iter().map(|(offset, step)| (*offset, step));
        CompletionChoice {
            index: choice,
            text,
            logprobs: CompletionLogprobs::of(&context.model.tokenizer, steps),
            finish_reason: whole.finish.map(finish_reason),
            token_ids: context.options.token_ids.then(|| whole.token_ids()),
            prompt_token_ids: context.prompts.get(choice).and_then(|ids| context.if_ids(ids)),
        }
    }

    fn prompt_tokens<'a>(&self, _about: &'a AnswerContext) -> Option<TokenIds<'a>> {
        None
    }
}
