//! Makes prompts from clients' requests. No other file does.
//!
//! The rest of the router relies on four properties of a prompt: it is bounded, its tokens exist, its numbers
//! are in range, and it has a deadline, a tenant and an id. A refusal names the field at fault.

mod inputs;
mod numbers;

use std::num::NonZeroU32;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use chassis::World;
use tokio::time::Instant;
use types::prompt::{CACHE_SALT_BYTES_MAX, PROMPT_LOGPROBS_MAX};
use types::{CacheSalt, Deadline, Prompt, RequestId, RequestedModel, Sampling, StopRules, TenantId, TokenId};

use crate::admission::AdmissionTerms;
use crate::error::{AcceptError, RequestError};
use crate::grammars::{AskedGrammar, GrammarChecks};
use crate::metrics::RouterMetrics;
use crate::serve::{Arrival, Detail};
use crate::tenants::{Claims, Client, TenantPermit, Tenants};
use crate::text::{CacheScope, ServedModel, StopStrings, Tokenizing};
pub use inputs::{AskedInputs, AskedPrompt, Inputs};
pub use numbers::LOGPROBS_MAX;
pub(crate) use numbers::logprobs;
use numbers::{number, penalty, top_k};

/// The largest number of answers to one prompt.
pub const N_MAX: u32 = 128;
/// The largest number of inputs, such as prompts in a list, in one request.
pub const INPUTS_MAX: usize = 32;
/// The largest number of answers to all inputs of one request.
pub const CHOICES_MAX: usize = 128;
pub const LOGIT_BIAS_MAX: usize = 1024;
pub const STOP_TOKENS_MAX: usize = 64;
/// The longest request id and the longest tenant name that a client may choose, in bytes.
pub const NAME_BYTES_MAX: usize = 128;

/// Checks requests and makes prompts from them.
#[derive(Clone, Debug)]
pub struct Acceptor {
    world: World,
    limits: Deadlines,
    tenants: Tenants,
    requests_max: usize,
    grammars: GrammarChecks,
    tokenizing: Tokenizing,
}

/// The limits of request deadlines, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// The setting `deadline_ms`, for requests without a timeout.
    pub unsaid: Duration,
    /// The setting `deadline_max_ms`. Longer timeouts are shortened to it.
    pub longest: Duration,
}

/// The client of one request, with the request's id and deadline. [`Acceptor::caller`] makes it.
#[derive(Clone, Debug)]
pub struct Caller {
    pub id: RequestId,
    pub client: Client,
    pub arrived: Instant,
    /// The time at which the request's body was read.
    pub read: Instant,
    pub deadline: Deadline,
    pub detail: Detail,
    pub terms: AdmissionTerms,
}

/// A request's sampling fields and its cache salt, unchecked. `None` means the model's default.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// The number of answers to each prompt.
    pub n: u32,
    pub max_tokens: MaxTokens,
    pub min_tokens: u32,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// The number of most likely tokens to sample from. Zero and -1 keep all tokens.
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The seed of the random draws; `None` gives each request a random one.
    pub seed: Option<u64>,
    /// The number of alternatives to report beside each token; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<u32>,
    pub stop: Vec<String>,
    pub stop_tokens: Vec<TokenId>,
    pub ignore_eos: bool,
    /// Without a salt, cached KV is shared with the tenant's other prompts without one.
    pub cache_salt: CacheSalt,
    /// The grammar of the answer; `None`: any text.
    pub grammar: Option<AskedGrammar>,
}

/// The limit of an answer's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// The answer may fill the rest of the model's context.
    RestOfContext,
    /// A default limit, reduced to the rest of the context.
    AtMost(u32),
    /// The limit that the client set in the field `param`. It is refused if it does not fit into the context.
    Asked { tokens: u32, param: &'static str },
}

/// The accepted prompts of one request.
#[derive(Clone, Debug)]
pub struct AcceptedRequest {
    /// One prompt per choice: first all answers to the first input, then all to the second, and so on.
    pub prompts: Vec<Prompt>,
    pub stop: StopStrings,
    pub origin: RequestOrigin,
}

/// The request that answers belong to.
#[derive(Clone, Debug)]
pub struct RequestOrigin {
    pub arrival: Arrival,
    /// The permit that counts the request against its tenant's limits until it is dropped; `None` without
    /// limits.
    pub permit: Option<Arc<TenantPermit>>,
}

impl Default for SamplingParams {
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
            prompt_logprobs: None,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            cache_salt: CacheSalt::default(),
            grammar: None,
        }
    }
}

impl Acceptor {
    pub fn new(world: World, limits: Deadlines, metrics: RouterMetrics) -> Self {
        let (tenants, grammars, tokenizing) =
            (Tenants::default(), GrammarChecks::default(), Tokenizing::new(metrics));
        Self { world, limits, tenants, requests_max: usize::MAX, grammars, tokenizing }
    }

    /// Sets the number of answers that the router serves together, `router.requests_max`.
    #[must_use]
    pub fn with_requests_max(self, requests_max: usize) -> Self {
        Self { requests_max, ..self }
    }

    #[must_use]
    pub fn with_tenants(self, tenants: Tenants) -> Self {
        Self { tenants, ..self }
    }

    /// Checks the API key or the headers of a request. Returns its client.
    pub fn client(&self, claims: &Claims<'_>) -> Result<Client, AcceptError> {
        self.tenants.client(claims)
    }

    /// Returns the client's own id if it is valid, so that the client's log and the router's can be compared,
    /// or else a new id.
    pub fn request_id(&self, asked: Option<&str>) -> RequestId {
        match asked.filter(|id| is_name(id)) {
            Some(id) => RequestId::new(id),
            None => self.world.request_id(),
        }
    }

    /// Makes a caller. Its deadline counts from the time of the call, so call it as soon as the request has
    /// arrived.
    pub fn caller(
        &self,
        id: RequestId,
        client: Client,
        timeout: Option<Duration>,
    ) -> Result<Caller, AcceptError> {
        let deadline = self.world.deadline_in(self.limits.bound(timeout)?);
        let (now, terms) = (self.world.now(), client.terms());
        Ok(Caller { id, client, arrived: now, read: now, deadline, detail: Detail::Usual, terms })
    }

    /// Returns the threads for long texts.
    pub fn tokenizing(&self) -> &Tokenizing {
        &self.tokenizing
    }

    /// Refuses texts that are much too long for the context before they are tokenized. A count of tokens has no limit.
    pub async fn check_lengths(
        &self,
        model: &ServedModel,
        asked: &AskedInputs,
        caller: &Caller,
    ) -> Result<(), RequestError> {
        let context = AcceptContext::of(model, &caller.client);
        let checked = asked.check_beginnings(&self.tokenizing, model, &context, caller.deadline).await;
        checked.inspect_err(|error| {
            if let RequestError::Accept(error) = error {
                self.tenants.refused(&caller.client, error);
            }
        })
    }

    /// Tokenizes the prompts of a request.
    pub async fn tokenized(
        &self,
        model: &ServedModel,
        asked: AskedInputs,
        params: &SamplingParams,
        caller: &Caller,
    ) -> Result<Inputs, RequestError> {
        let scope = CacheScope { tenant: caller.client.tenant.clone(), salt: params.cache_salt.clone() };
        asked.tokenized(&self.tokenizing, model, &scope, caller.deadline).await
    }

    /// Checks the grammar of a request on a blocking thread. [`accept`](Self::accept) would check it on the caller's.
    pub async fn check_grammar(
        &self,
        model: &ServedModel,
        params: &SamplingParams,
        caller: &Caller,
    ) -> Result<(), RequestError> {
        let Some(asked) = &params.grammar else { return Ok(()) };
        self.grammars.check(model, asked, caller.deadline).await
    }

    /// Makes the prompts of a request. One invalid input refuses the whole request.
    pub fn accept(
        &self,
        model: &ServedModel,
        inputs: Inputs,
        params: &SamplingParams,
        caller: &Caller,
    ) -> Result<AcceptedRequest, AcceptError> {
        let accepted = self.accepted(model, inputs, params, caller);
        accepted.inspect_err(|error| self.tenants.refused(&caller.client, error))
    }

    fn accepted(
        &self,
        model: &ServedModel,
        inputs: Inputs,
        params: &SamplingParams,
        caller: &Caller,
    ) -> Result<AcceptedRequest, AcceptError> {
        check_counts(&inputs, params)?;
        check_end(params)?;
        let context = AcceptContext::of(model, &caller.client);
        let sampling = self.sampling(model, params)?;
        let stop = StopStrings::new(params.stop.clone())?;
        let mut prompts = Vec::with_capacity(inputs.tokens.len());
        for tokens in inputs.tokens {
            check_tokens(model, &context, inputs.param, &tokens)?;
            let stop = stop_rules(model, &context, tokens.len(), params)?;
            let rules =
                PromptRules { sampling: sampling.clone(), stop, cache_salt: params.cache_salt.clone() };
            prompts.push(prompt(model, tokens, rules, caller.clone()));
        }
        check_prompt_logprobs(&prompts)?;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let prompts = fanned_out(prompts, params.n);
        check_answers(prompts.len(), self.requests_max)?;
        let permit = self.tenants.admit(&caller.client, prompts.len(), prompt_tokens)?;
        let Caller { arrived, read, detail, terms, .. } = *caller;
        let arrival = Arrival { at: arrived, read, accepted: self.world.now(), detail, terms };
        Ok(AcceptedRequest { prompts, stop, origin: RequestOrigin { arrival, permit } })
    }

    fn sampling(&self, model: &ServedModel, params: &SamplingParams) -> Result<Sampling, AcceptError> {
        let defaults = &model.defaults;
        Ok(Sampling {
            temperature: number("temperature", params.temperature, defaults.temperature, 0.0..=2.0)?,
            top_p: number(
                "top_p",
                params.top_p,
                defaults.top_p,
                (Bound::Excluded(0.0), Bound::Included(1.0)),
            )?,
            top_k: top_k(params.top_k, defaults.top_k)?,
            min_p: number("min_p", params.min_p, defaults.min_p, 0.0..=1.0)?,
            repetition_penalty: number(
                "repetition_penalty",
                params.repetition_penalty,
                defaults.repetition_penalty,
                0.01..=10.0,
            )?,
            presence_penalty: penalty(
                "presence_penalty",
                params.presence_penalty,
                defaults.presence_penalty,
            )?,
            frequency_penalty: penalty(
                "frequency_penalty",
                params.frequency_penalty,
                defaults.frequency_penalty,
            )?,
            logit_bias: logit_bias(model, &params.logit_bias)?,
            seed: params.seed.unwrap_or_else(|| self.world.draw()),
            logprobs: params.logprobs.map(|n| logprobs("top_logprobs", n)).transpose()?,
            prompt_logprobs: params.prompt_logprobs.map(|n| logprobs("prompt_logprobs", n)).transpose()?,
            grammar: self.grammars.accepted(model, params.grammar.as_ref())?,
        })
    }
}

/// The checked parameters of one prompt.
struct PromptRules {
    sampling: Sampling,
    stop: StopRules,
    cache_salt: CacheSalt,
}

fn prompt(model: &ServedModel, tokens: Vec<TokenId>, rules: PromptRules, caller: Caller) -> Prompt {
    let Caller { id, client: Client { tenant, priority, .. }, deadline, .. } = caller;
    let PromptRules { sampling, stop, cache_salt } = rules;
    let model = RequestedModel::named(model.name.as_str());
    Prompt {
        id,
        tenant,
        cache_salt,
        model,
        tokens: tokens.into(),
        n_generated: 0,
        sampling,
        stop,
        priority,
        deadline,
    }
}

/// Returns the salt of a request, for both APIs.
pub(crate) fn cache_salt(asked: Option<String>) -> Result<CacheSalt, AcceptError> {
    match asked {
        None => Ok(CacheSalt::default()),
        Some(salt) if (1..=CACHE_SALT_BYTES_MAX).contains(&salt.len()) => Ok(CacheSalt::new(salt)),
        Some(salt) => {
            let reason = format!("from 1 to {CACHE_SALT_BYTES_MAX} bytes, not {}", salt.len());
            Err(AcceptError::invalid("cache_salt", reason))
        }
    }
}

// === the caller ===

/// Returns whether the text is a valid name. Names go into logs, headers and gRPC metadata, so they are short
/// and plain.
pub fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(plain)
}

pub(crate) fn checked_tenant(tenant: Option<&str>) -> Result<TenantId, AcceptError> {
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

impl Default for Deadlines {
    fn default() -> Self {
        Self { unsaid: Duration::from_secs(600), longest: Duration::from_secs(3600) }
    }
}

impl Deadlines {
    fn bound(self, asked: Option<Duration>) -> Result<Duration, AcceptError> {
        match asked {
            None => Ok(self.unsaid.min(self.longest)),
            Some(Duration::ZERO) => Err(AcceptError::invalid("x-baton-timeout-ms", "at least 1 ms")),
            Some(asked) => Ok(asked.min(self.longest)),
        }
    }
}

// === counts and lengths ===

fn check_counts(inputs: &Inputs, params: &SamplingParams) -> Result<(), AcceptError> {
    if !(1..=N_MAX).contains(&params.n) {
        return Err(AcceptError::invalid("n", format!("from 1 to {N_MAX}, not {}", params.n)));
    }
    let n_inputs = inputs.tokens.len();
    if !(1..=INPUTS_MAX).contains(&n_inputs) {
        return Err(AcceptError::invalid(
            inputs.param,
            format!("from 1 to {INPUTS_MAX} prompts, not {n_inputs}"),
        ));
    }
    let n_choices = n_inputs * params.n as usize;
    if n_choices > CHOICES_MAX {
        let reason = format!("{n_inputs} prompts with {} answers each are more than {CHOICES_MAX}", params.n);
        return Err(AcceptError::invalid("n", reason));
    }
    Ok(())
}

/// Refuses a request with more answers than the router serves together: it could never be served.
pub(crate) fn check_answers(n_answers: usize, requests_max: usize) -> Result<(), AcceptError> {
    if n_answers <= requests_max {
        return Ok(());
    }
    let reason =
        format!("{n_answers} answers are more than the {requests_max} requests of router.requests_max");
    Err(AcceptError::invalid("n", reason))
}

/// Refuses a request whose answer would have too many log-probabilities of prompts.
fn check_prompt_logprobs(prompts: &[Prompt]) -> Result<(), AcceptError> {
    let n: usize = prompts.iter().map(Prompt::n_prompt_logprobs).sum();
    if n <= PROMPT_LOGPROBS_MAX {
        return Ok(());
    }
    let reason = format!(
        "the prompts' log-probabilities have {n} entries, more than the maximum of {PROMPT_LOGPROBS_MAX}"
    );
    Err(AcceptError::invalid("prompt_logprobs", reason))
}

/// Refuses rules about the end of an answer that contradict a grammar, which says where an answer may end.
fn check_end(params: &SamplingParams) -> Result<(), AcceptError> {
    let reason = "cannot be combined with a grammar, which says where the answer ends";
    match params.grammar {
        Some(_) if params.ignore_eos => Err(AcceptError::unsupported("ignore_eos", reason)),
        Some(_) if params.min_tokens > 0 => Err(AcceptError::unsupported("min_tokens", reason)),
        _ => Ok(()),
    }
}

/// The longest sequence of a request: the model's context, or the tenant's limit if it is lower.
struct AcceptContext {
    tokens: u32,
    of_tenant: bool,
    text: String,
}

impl AcceptContext {
    fn of(model: &ServedModel, client: &Client) -> Self {
        let limit = client.account.as_ref().and_then(|account| account.limits().context_tokens_max);
        match limit.map(NonZeroU32::get) {
            Some(tokens) if tokens < model.context_tokens => Self {
                tokens,
                of_tenant: true,
                text: format!("the {tokens} tokens that the tenant may have"),
            },
            _ => Self { tokens: model.context_tokens, of_tenant: false, text: model.context() },
        }
    }

    fn too_long(&self, param: &'static str, reason: String) -> AcceptError {
        let param = param.into();
        if self.of_tenant {
            AcceptError::TenantContext { param, reason }
        } else {
            AcceptError::TooLong { param, reason }
        }
    }
}

fn check_tokens(
    model: &ServedModel,
    context: &AcceptContext,
    param: &'static str,
    tokens: &[TokenId],
) -> Result<(), AcceptError> {
    if tokens.is_empty() {
        return Err(AcceptError::invalid(param, "the prompt is empty: it needs at least one token"));
    }
    if tokens.len() >= context.tokens as usize {
        let (n, context_text) = (tokens.len(), &context.text);
        let reason = format!("the prompt has {n} tokens, which leaves no room in {context_text}");
        return Err(context.too_long(param, reason));
    }
    tokens.iter().try_for_each(|token| check_token(model, param, *token))
}

fn check_token(model: &ServedModel, param: &'static str, token: TokenId) -> Result<(), AcceptError> {
    let vocab = model.vocab;
    if token.0 < vocab {
        return Ok(());
    }
    Err(AcceptError::invalid(param, format!("token {} is not in the vocabulary of {vocab}", token.0)))
}

fn stop_rules(
    model: &ServedModel,
    context: &AcceptContext,
    n_prompt: usize,
    params: &SamplingParams,
) -> Result<StopRules, AcceptError> {
    let max_tokens = max_tokens(context, n_prompt, params.max_tokens)?;
    if params.min_tokens > max_tokens {
        let reason = format!("{} is more than the answer's limit of {max_tokens} tokens", params.min_tokens);
        return Err(AcceptError::invalid("min_tokens", reason));
    }
    let stop_tokens = params.stop_tokens.clone();
    if stop_tokens.len() > STOP_TOKENS_MAX {
        let reason = format!("at most {STOP_TOKENS_MAX} stop tokens, not {}", stop_tokens.len());
        return Err(AcceptError::invalid("stop_token_ids", reason));
    }
    stop_tokens.iter().try_for_each(|token| check_token(model, "stop_token_ids", *token))?;
    Ok(StopRules { max_tokens, min_tokens: params.min_tokens, stop_tokens, ignore_eos: params.ignore_eos })
}

/// Returns the largest number of tokens of an answer. The caller has checked that the prompt leaves room for
/// at least one.
fn max_tokens(context: &AcceptContext, n_prompt: usize, asked: MaxTokens) -> Result<u32, AcceptError> {
    let room = context.tokens - n_prompt as u32;
    match asked {
        MaxTokens::RestOfContext => Ok(room),
        MaxTokens::AtMost(tokens) => Ok(tokens.min(room)),
        MaxTokens::Asked { tokens: 0, param } => Err(AcceptError::invalid(param, "at least 1 token")),
        MaxTokens::Asked { tokens, .. } if tokens <= room => Ok(tokens),
        MaxTokens::Asked { tokens, param } => {
            let context_text = &context.text;
            let reason = format!(
                "the prompt's {n_prompt} tokens and the {tokens} of {param} are more than {context_text}"
            );
            Err(context.too_long(param, reason))
        }
    }
}

// === sampling ===

fn logit_bias(model: &ServedModel, asked: &[(TokenId, f32)]) -> Result<Vec<(TokenId, f32)>, AcceptError> {
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

/// Makes `n` prompts from each of `prompts`, equal except for their ids and seeds.
fn fanned_out(prompts: Vec<Prompt>, n: u32) -> Vec<Prompt> {
    if prompts.len() == 1 && n == 1 {
        return prompts;
    }
    let answers = |prompt: Prompt| (0..n).map(move |answer| with_seed(&prompt, answer));
    prompts
        .into_iter()
        .flat_map(answers)
        .enumerate()
        .map(|(choice, prompt)| with_choice(prompt, choice))
        .collect()
}

fn with_seed(prompt: &Prompt, answer: u32) -> Prompt {
    let mut prompt = prompt.clone();
    prompt.sampling.seed = prompt.sampling.seed.wrapping_add(u64::from(answer));
    prompt
}

fn with_choice(prompt: Prompt, choice: usize) -> Prompt {
    Prompt { id: RequestId::new(format!("{}-{choice}", prompt.id)), ..prompt }
}

#[cfg(test)]
mod tests;
