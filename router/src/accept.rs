//! The only maker of prompts: from what a client asks for to what the house has accepted.
//!
//! Everything past this room may rely on it: a prompt is bounded, its tokens exist, its numbers are in range, and it has
//! a deadline, a tenant and an id. A refusal names the field that is to blame.

use std::ops::{Bound, RangeBounds};
use std::time::Duration;

use chassis::World;
use types::prompt::Priority;
use types::{Deadline, Prompt, PromptModel, RequestId, Sampling, StopRules, TenantId, TokenId};

use crate::error::AcceptError;
use crate::text::{RouterModel, StopStrings};

/// The most answers to one prompt.
pub const N_MAX: u32 = 8;
/// The most prompts in one request.
pub const INPUTS_MAX: usize = 32;
/// The most answers to all prompts of one request.
pub const CHOICES_MAX: usize = 64;
pub const LOGIT_BIAS_MAX: usize = 1024;
pub const STOP_TOKENS_MAX: usize = 64;
/// The most alternatives that are reported beside a token.
pub const LOGPROBS_MAX: u32 = 20;
/// No request may hold on to the house for longer.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest request id, and the longest name of a tenant, that a client may choose.
pub const NAME_BYTES_MAX: usize = 128;

/// Makes prompts.
#[derive(Clone, Debug)]
pub struct Acceptor {
    world: World,
    /// The setting `deadline_ms`: for requests that do not say how long they may take.
    deadline: Duration,
}

/// Who asks, and how urgently. Made by [`Acceptor::caller`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub id: RequestId,
    pub tenant: TenantId,
    pub priority: Priority,
    pub deadline: Deadline,
}

/// The token sequences to go on from, and the field that they came in.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub param: &'static str,
    pub tokens: Vec<Vec<TokenId>>,
}

/// What a client wishes for, nothing of it checked. Whatever is `None` is left to the model's defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Wishes {
    /// Answers to each prompt.
    pub n: u32,
    pub max_tokens: MaxTokens,
    pub min_tokens: u32,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// Zero and -1 keep all.
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(TokenId, f32)>,
    /// `None`: another one for each request.
    pub seed: Option<u64>,
    /// Alternatives to report beside each token; `None` reports no logprobs.
    pub logprobs: Option<u32>,
    pub stop: Vec<String>,
    pub stop_tokens: Vec<TokenId>,
    pub ignore_eos: bool,
}

/// How long an answer may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// As long as the model's context has room.
    RestOfContext,
    /// So many, or as many as there is room for: nobody asked for this number.
    AtMost(u32),
    /// So many, as asked for in the field `param`. Refused when they can never fit.
    Asked { tokens: u32, param: &'static str },
}

/// Prompts, ready to be served.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// One for each choice: all answers to the first input, then all to the second, and so on.
    pub prompts: Vec<Prompt>,
    pub stop: StopStrings,
}

impl Default for Wishes {
    fn default() -> Self {
        Self {
            n: 1,
            max_tokens: MaxTokens::RestOfContext,
            min_tokens: 0,
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            presence_penalty: None,
            frequency_penalty: None,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
        }
    }
}

impl Acceptor {
    pub fn new(world: World, deadline: Duration) -> Self {
        Self { world, deadline }
    }

    /// The client's own id where it has a sane one, so that its log and ours can be read together. Otherwise a new one.
    pub fn request_id(&self, asked: Option<&str>) -> RequestId {
        match asked.filter(|id| is_name(id)) {
            Some(id) => RequestId::new(id),
            None => self.world.request_id(),
        }
    }

    /// The deadline counts from now: call it when the request has come in.
    pub fn caller(
        &self,
        id: RequestId,
        tenant: Option<&str>,
        timeout: Option<Duration>,
        priority: Priority,
    ) -> Result<Caller, AcceptError> {
        let deadline = self.world.deadline_in(bounded_timeout(timeout.unwrap_or(self.deadline))?);
        Ok(Caller { id, tenant: checked_tenant(tenant)?, priority, deadline })
    }

    /// Accepts all inputs, or none.
    pub fn accept(
        &self,
        model: &RouterModel,
        inputs: Inputs,
        wishes: &Wishes,
        caller: &Caller,
    ) -> Result<Accepted, AcceptError> {
        check_counts(&inputs, wishes)?;
        let sampling = self.sampling(model, wishes)?;
        let stop = StopStrings::new(wishes.stop.clone())?;
        let mut prompts = Vec::with_capacity(inputs.tokens.len());
        for tokens in inputs.tokens {
            check_tokens(model, inputs.param, &tokens)?;
            let stop = stop_rules(model, tokens.len(), wishes)?;
            prompts.push(prompt(model, tokens, sampling.clone(), stop, caller.clone()));
        }
        Ok(Accepted { prompts: fanned_out(prompts, wishes.n), stop })
    }

    /// [`accept`](Self::accept) for a door that has one input and wants one answer.
    pub fn accept_one(
        &self,
        model: &RouterModel,
        param: &'static str,
        tokens: Vec<TokenId>,
        wishes: &Wishes,
        caller: &Caller,
    ) -> Result<(Prompt, StopStrings), AcceptError> {
        let wishes = Wishes { n: 1, ..wishes.clone() };
        let mut accepted = self.accept(model, Inputs { param, tokens: vec![tokens] }, &wishes, caller)?;
        Ok((accepted.prompts.pop().expect("one input and one answer make one prompt"), accepted.stop))
    }

    fn sampling(&self, model: &RouterModel, wishes: &Wishes) -> Result<Sampling, AcceptError> {
        let defaults = &model.defaults;
        Ok(Sampling {
            temperature: number("temperature", wishes.temperature, defaults.temperature, 0.0..=2.0)?,
            top_p: number(
                "top_p",
                wishes.top_p,
                defaults.top_p,
                (Bound::Excluded(0.0), Bound::Included(1.0)),
            )?,
            top_k: top_k(wishes.top_k, defaults.top_k)?,
            min_p: number("min_p", wishes.min_p, defaults.min_p, 0.0..=1.0)?,
            repetition_penalty: number(
                "repetition_penalty",
                wishes.repetition_penalty,
                defaults.repetition_penalty,
                (Bound::Excluded(0.0), Bound::Included(10.0)),
            )?,
            presence_penalty: penalty(
                "presence_penalty",
                wishes.presence_penalty,
                defaults.presence_penalty,
            )?,
            frequency_penalty: penalty(
                "frequency_penalty",
                wishes.frequency_penalty,
                defaults.frequency_penalty,
            )?,
            logit_bias: logit_bias(model, &wishes.logit_bias)?,
            seed: wishes.seed.unwrap_or_else(|| self.world.draw()),
            logprobs: wishes.logprobs.map(logprobs).transpose()?,
        })
    }
}

fn prompt(
    model: &RouterModel,
    tokens: Vec<TokenId>,
    sampling: Sampling,
    stop: StopRules,
    caller: Caller,
) -> Prompt {
    let Caller { id, tenant, priority, deadline } = caller;
    let model = PromptModel::named(model.name.as_str());
    Prompt { id, tenant, model, tokens: tokens.into(), n_generated: 0, sampling, stop, priority, deadline }
}

// === who asks ===

/// Names go into logs, headers and gRPC metadata, so they are short and plain.
fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(plain)
}

fn checked_tenant(tenant: Option<&str>) -> Result<TenantId, AcceptError> {
    match tenant {
        None => Ok(TenantId::default()),
        Some(tenant) if is_name(tenant) => Ok(TenantId::new(tenant)),
        Some(_) => {
            let reason =
                format!("a tenant's name has 1 to {NAME_BYTES_MAX} letters, digits, '-', '_', '.' or ':'");
            Err(AcceptError::invalid("x-baton-tenant", reason))
        }
    }
}

fn bounded_timeout(timeout: Duration) -> Result<Duration, AcceptError> {
    if timeout.is_zero() || timeout > TIMEOUT_MAX {
        let reason = format!("from 1 to {} ms, not {}", TIMEOUT_MAX.as_millis(), timeout.as_millis());
        return Err(AcceptError::invalid("x-baton-timeout-ms", reason));
    }
    Ok(timeout)
}

// === how much ===

fn check_counts(inputs: &Inputs, wishes: &Wishes) -> Result<(), AcceptError> {
    if !(1..=N_MAX).contains(&wishes.n) {
        return Err(AcceptError::invalid("n", format!("from 1 to {N_MAX}, not {}", wishes.n)));
    }
    let n_inputs = inputs.tokens.len();
    if !(1..=INPUTS_MAX).contains(&n_inputs) {
        return Err(AcceptError::invalid(
            inputs.param,
            format!("from 1 to {INPUTS_MAX} prompts, not {n_inputs}"),
        ));
    }
    let n_choices = n_inputs * wishes.n as usize;
    if n_choices > CHOICES_MAX {
        let reason = format!("{n_inputs} prompts with {} answers each are more than {CHOICES_MAX}", wishes.n);
        return Err(AcceptError::invalid("n", reason));
    }
    Ok(())
}

fn check_tokens(model: &RouterModel, param: &'static str, tokens: &[TokenId]) -> Result<(), AcceptError> {
    if tokens.is_empty() {
        return Err(AcceptError::invalid(param, "a prompt has at least one token"));
    }
    if tokens.len() >= model.context_tokens as usize {
        let (n, context) = (tokens.len(), model.context());
        let reason = format!("the prompt has {n} tokens, which leaves no room in {context}");
        return Err(AcceptError::TooLong { param: param.into(), reason });
    }
    tokens.iter().try_for_each(|token| check_token(model, param, *token))
}

fn check_token(model: &RouterModel, param: &'static str, token: TokenId) -> Result<(), AcceptError> {
    let vocab = model.vocab;
    if token.0 < vocab {
        return Ok(());
    }
    Err(AcceptError::invalid(param, format!("token {} is not in the vocabulary of {vocab}", token.0)))
}

fn stop_rules(model: &RouterModel, n_prompt: usize, wishes: &Wishes) -> Result<StopRules, AcceptError> {
    let max_tokens = max_tokens(model, n_prompt, wishes.max_tokens)?;
    if wishes.min_tokens > max_tokens {
        let reason = format!("{} are more than the {max_tokens} at most", wishes.min_tokens);
        return Err(AcceptError::invalid("min_tokens", reason));
    }
    let stop_tokens = wishes.stop_tokens.clone();
    if stop_tokens.len() > STOP_TOKENS_MAX {
        let reason = format!("at most {STOP_TOKENS_MAX} stop tokens, not {}", stop_tokens.len());
        return Err(AcceptError::invalid("stop_token_ids", reason));
    }
    stop_tokens.iter().try_for_each(|token| check_token(model, "stop_token_ids", *token))?;
    Ok(StopRules { max_tokens, min_tokens: wishes.min_tokens, stop_tokens, ignore_eos: wishes.ignore_eos })
}

/// The prompt fits already, with room for at least one more token.
fn max_tokens(model: &RouterModel, n_prompt: usize, asked: MaxTokens) -> Result<u32, AcceptError> {
    let room = model.context_tokens - n_prompt as u32;
    match asked {
        MaxTokens::RestOfContext => Ok(room),
        MaxTokens::AtMost(tokens) => Ok(tokens.min(room)),
        MaxTokens::Asked { tokens: 0, param } => Err(AcceptError::invalid(param, "at least 1 token")),
        MaxTokens::Asked { tokens, .. } if tokens <= room => Ok(tokens),
        MaxTokens::Asked { tokens, param } => {
            let context = model.context();
            let reason =
                format!("the prompt's {n_prompt} tokens and the {tokens} of {param} are more than {context}");
            Err(AcceptError::TooLong { param: param.into(), reason })
        }
    }
}

// === how to sample ===

/// The number that was asked for, or the default. A default is the operator's, and is not checked.
fn number(
    param: &'static str,
    asked: Option<f32>,
    default: f32,
    range: impl RangeBounds<f32>,
) -> Result<f32, AcceptError> {
    match asked {
        None => Ok(default),
        Some(value) if range.contains(&value) => Ok(value),
        Some(value) => Err(AcceptError::invalid(param, format!("{}, not {value}", words(&range)))),
    }
}

fn penalty(param: &'static str, asked: Option<f32>, default: f32) -> Result<f32, AcceptError> {
    number(param, asked, default, -2.0..=2.0)
}

/// A range in words.
fn words(range: &impl RangeBounds<f32>) -> String {
    let start = match range.start_bound() {
        Bound::Included(start) => format!("from {start}"),
        Bound::Excluded(start) => format!("above {start}"),
        Bound::Unbounded => "any".to_owned(),
    };
    match (range.start_bound(), range.end_bound()) {
        (Bound::Included(_), Bound::Included(end)) => format!("{start} to {end}"),
        (_, Bound::Included(end)) => format!("{start} and at most {end}"),
        (_, Bound::Excluded(end)) => format!("{start} and below {end}"),
        (_, Bound::Unbounded) => start,
    }
}

fn top_k(asked: Option<i64>, default: u32) -> Result<u32, AcceptError> {
    match asked {
        None => Ok(default),
        Some(-1) => Ok(0),
        Some(k) => u32::try_from(k)
            .map_err(|_| AcceptError::invalid("top_k", format!("a count, or -1 for all, not {k}"))),
    }
}

fn logprobs(asked: u32) -> Result<u8, AcceptError> {
    match u8::try_from(asked) {
        Ok(n) if asked <= LOGPROBS_MAX => Ok(n),
        _ => Err(AcceptError::invalid("top_logprobs", format!("from 0 to {LOGPROBS_MAX}, not {asked}"))),
    }
}

fn logit_bias(model: &RouterModel, asked: &[(TokenId, f32)]) -> Result<Vec<(TokenId, f32)>, AcceptError> {
    if asked.len() > LOGIT_BIAS_MAX {
        let reason = format!("at most {LOGIT_BIAS_MAX} tokens, not {}", asked.len());
        return Err(AcceptError::invalid("logit_bias", reason));
    }
    for (token, bias) in asked {
        check_token(model, "logit_bias", *token)?;
        number("logit_bias", Some(*bias), 0.0, -100.0..=100.0)?;
    }
    Ok(asked.to_vec())
}

// === several answers ===

/// `n` prompts for each one, alike but for their ids and seeds.
fn fanned_out(prompts: Vec<Prompt>, n: u32) -> Vec<Prompt> {
    if prompts.len() == 1 && n == 1 {
        return prompts;
    }
    let answers = |prompt: Prompt| (0..n).map(move |answer| with_seed(&prompt, answer));
    prompts.into_iter().flat_map(answers).enumerate().map(with_choice).collect()
}

fn with_seed(prompt: &Prompt, answer: u32) -> Prompt {
    let mut prompt = prompt.clone();
    prompt.sampling.seed = prompt.sampling.seed.wrapping_add(u64::from(answer));
    prompt
}

fn with_choice((choice, prompt): (usize, Prompt)) -> Prompt {
    Prompt { id: RequestId::new(format!("{}-{choice}", prompt.id)), ..prompt }
}

#[cfg(test)]
mod tests;
