//! The endpoint `POST /v1/completions`: one prompt or several, as text or token ids.

use serde::{Deserialize, Serialize};

use super::answer::{AnswerContext, AnswerFormat, AnswerShape, TokenIds, finish_reason};
use super::api::{HttpApi, ParsedRequest};
use super::body::JsonBody;
use super::constraints::ConstraintFields;
use super::error::HttpError;
use super::fields::{AnswerOptions, CommonFields};
use super::logprobs::{CompletionLogprobs, PromptLogprobs};
use super::prompt_field::PromptField;
use super::request_fields::{self, Endpoint};
use crate::accept::{AskedInputs, AskedPrompt, MaxTokens, SamplingParams, logprobs};
use crate::answers::{AnsweredPrompt, AskedRequest};
use crate::choice::{ChoiceFinish, Delta, WholeChoice};
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

/// Parses a completion's JSON into prompts and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<CompletionShape>, HttpError> {
    let body = JsonBody::of(json);
    let (mut common, completion): (CommonFields, CompletionFields) = (body.parse()?, body.parse()?);
    let constraints: ConstraintFields = body.parse()?;
    request_fields::check(Endpoint::Completions, &body)?;
    let model = api.serve.model(&api.models, common.model.as_deref())?;
    let echo = completion.echo.unwrap_or(false);
    let prompt_only = echo && common.max_tokens == Some(0);
    if prompt_only {
        common.max_tokens = Some(1);
    }
    let options = AnswerOptions { prompt_only, ..common.options() };
    let params = common.params(constraints, MAX_TOKENS)?;
    completion.logprobs.map(|n| logprobs("logprobs", n)).transpose()?;
    let echoed = completion.logprobs.filter(|_| echo);
    // An absent number is less than any other.
    let prompt_logprobs = params.prompt_logprobs.max(echoed);
    let params = SamplingParams { logprobs: completion.logprobs, prompt_logprobs, ..params };
    let prompt = completion.prompt.ok_or_else(|| AcceptError::missing("prompt"))?;
    let inputs = AskedInputs { param: "prompt", prompts: prompt.into_prompts()? };
    let echo = echo.then(|| inputs.prompts.iter().map(text_of).collect());
    let shape = CompletionShape { echo, echoed_logprobs: echoed };
    let request = AskedRequest { model, inputs, params, parts: None };
    Ok(ParsedRequest { request, options, shape })
}

/// Returns the text of a prompt that is a text.
fn text_of(prompt: &AskedPrompt) -> Option<String> {
    match prompt {
        AskedPrompt::Text(PromptText::Plain(text) | PromptText::Rendered(text)) => Some(text.clone()),
        AskedPrompt::Tokens(_) => None,
    }
}

// === the answer ===

/// The format of a completion's answers.
#[derive(Debug)]
pub(crate) struct CompletionShape {
    /// The prompts whose text is the beginning of each answer, as the client wrote them; `None` for a prompt of token
    /// ids.
    echo: Option<Vec<Option<String>>>,
    /// The number of alternatives to each token of an echoed prompt; `None` echoes no log-probabilities.
    echoed_logprobs: Option<u32>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
}

impl CompletionChoice<'_> {
    fn new(index: usize) -> Self {
        Self {
            index,
            text: "".into(),
            logprobs: None,
            finish_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}

/// The finish reason of an answer without tokens after the prompt.
const NO_TOKENS: &str = finish_reason(ChoiceFinish::Length);

impl CompletionShape {
    /// Returns the prompt's text for an answer that begins with it.
    fn echo<'a>(&'a self, context: &'a AnswerContext, choice: usize) -> Option<&'a str> {
        let texts = self.echo.as_ref()?;
        let n_answers = (context.prompts.len() / texts.len()).max(1);
        match texts.get(choice / n_answers)? {
            Some(text) => Some(text),
            None => Some(context.prompt(choice)?.text(&context.model.tokenizer)),
        }
    }

    /// Returns the log-probabilities of an echoed prompt.
    fn echoed(&self, context: &AnswerContext, choice: usize) -> Option<CompletionLogprobs> {
        let n_top = self.echoed_logprobs? as usize;
        let (prompt, text) = (context.prompt(choice)?, self.echo(context, choice)?);
        CompletionLogprobs::of_prompt(&context.model.tokenizer, prompt, text, n_top)
    }

    /// Returns the number of characters before the answer.
    fn n_echoed(&self, context: &AnswerContext, choice: usize) -> usize {
        self.echo(context, choice).map_or(0, |echo| echo.chars().count())
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

    fn opening<'a>(&'a self, context: &'a AnswerContext, choice: usize) -> Option<CompletionChoice<'a>> {
        let text = self.echo(context, choice)?.into();
        let logprobs = self.echoed(context, choice);
        Some(CompletionChoice { text, logprobs, ..CompletionChoice::new(choice) })
    }

    fn chunk<'a>(&'a self, context: &'a AnswerContext, delta: &'a Delta) -> CompletionChoice<'a> {
        let prompt = context.prompt(delta.choice).filter(|_| delta.step.index == 0);
        let prompt_token_ids = prompt.and_then(|prompt| context.if_ids(&prompt.tokens));
        let empty = CompletionChoice { prompt_token_ids, ..CompletionChoice::new(delta.choice) };
        if context.options.prompt_only {
            return CompletionChoice { finish_reason: Some(NO_TOKENS), ..empty };
        }
        let of_step = |offset| CompletionLogprobs::of(&context.model.tokenizer, [(offset, &delta.step)]);
        let logprobs = delta.step.logprobs.as_ref();
        CompletionChoice {
            text: delta.parts.text.as_str().into(),
            logprobs: logprobs.and_then(|_| of_step(delta.offset + self.n_echoed(context, delta.choice))),
            finish_reason: delta.finish.map(finish_reason),
            token_ids: context.options.token_ids.then(|| vec![delta.step.token.0]),
            ..empty
        }
    }

    fn whole<'a>(
        &'a self,
        context: &'a AnswerContext,
        choice: usize,
        whole: &'a WholeChoice,
    ) -> CompletionChoice<'a> {
        let (tokenizer, prompt) = (&context.model.tokenizer, context.prompt(choice));
        let of_prompt = CompletionChoice {
            text: self.echo(context, choice).unwrap_or_default().into(),
            logprobs: self.echoed(context, choice),
            finish_reason: Some(NO_TOKENS),
            prompt_token_ids: prompt.and_then(|prompt| context.if_ids(&prompt.tokens)),
            prompt_logprobs: prompt.and_then(|prompt| context.prompt_logprobs(prompt)),
            ..CompletionChoice::new(choice)
        };
        if context.options.prompt_only {
            let token_ids = context.options.token_ids.then(Vec::new);
            return CompletionChoice { token_ids, ..of_prompt };
        }
        let n_echoed = self.n_echoed(context, choice);
        let steps = whole.steps.iter().map(|(offset, step)| (n_echoed + offset, step));
        let logprobs = match of_prompt.logprobs {
            Some(mut lists) => {
                lists.add_steps(tokenizer, steps);
                Some(lists)
            }
            None => CompletionLogprobs::of(tokenizer, steps),
        };
        CompletionChoice {
            text: of_prompt.text + whole.parts.text.as_str(),
            logprobs,
            finish_reason: whole.finish.map(finish_reason),
            token_ids: context.options.token_ids.then(|| whole.token_ids()),
            ..of_prompt
        }
    }

    fn only_prompt<'a>(&self, _context: &'a AnswerContext) -> Option<&'a AnsweredPrompt> {
        None
    }
}
