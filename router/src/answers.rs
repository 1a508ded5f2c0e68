//! The answers to one request, from the parsed request until each answer has its first step. Both APIs use it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use futures::stream::{FuturesUnordered, SelectAll, Stream, StreamExt};
use tracing::{info, warn};
use types::step::PromptLogprob;
use types::{Prompt, TokenId, Usage};

use crate::accept::{AcceptedRequest, Acceptor, AskedInputs, Caller, SamplingParams};
use crate::choice::{Choice, Delta};
use crate::error::{RequestError, ServeError};
use crate::http::Code;
use crate::serve::Serve;
use crate::text::{Detokenizer, PartsRules, ServedModel, Tokenizer};

/// A parsed request that is not accepted yet.
#[derive(Debug)]
pub(crate) struct AskedRequest {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) inputs: AskedInputs,
    pub(crate) params: SamplingParams,
    /// How the answers' text is divided; `None`: all of it is text.
    pub(crate) parts: Option<PartsRules>,
}

/// All answers to one request, while they are generated.
#[derive(Debug)]
pub(crate) struct BegunAnswers {
    /// The number of answers to each input: choices `0..n` belong to the first input.
    n: usize,
    /// The prompt of each choice, one entry per choice. Choices of one input share it.
    pub(crate) prompts: Vec<Arc<AnsweredPrompt>>,
    pub(crate) choices: Vec<Choice>,
}

/// A prompt, for answers that show it.
#[derive(Debug)]
pub(crate) struct AnsweredPrompt {
    pub(crate) tokens: Arc<[TokenId]>,
    /// The log-probabilities of the tokens from the second on, if the request asks for them.
    pub(crate) logprobs: Option<Vec<PromptLogprob>>,
    text: OnceLock<String>,
}

impl AnsweredPrompt {
    fn new(prompt: &Prompt, logprobs: Vec<PromptLogprob>) -> Self {
        let logprobs = prompt.sampling.prompt_logprobs.map(|_| logprobs);
        Self { tokens: Arc::clone(&prompt.tokens), logprobs, text: OnceLock::new() }
    }

    /// Returns the text of the tokens with the names of special ones. It is made once.
    pub(crate) fn text(&self, tokenizer: &Tokenizer) -> &str {
        self.text.get_or_init(|| tokenizer.whole_text_of(&self.tokens))
    }
}

impl AskedRequest {
    /// Accepts the request and begins all its answers. Returns when each answer has its first step, or refuses the
    /// whole request.
    pub(crate) async fn begin(
        self,
        serve: &dyn Serve,
        acceptor: &Acceptor,
        caller: &Caller,
    ) -> Result<BegunAnswers, RequestError> {
        let Self { model, inputs, params, parts } = self;
        acceptor.check_lengths(&model, &inputs, caller).await?;
        let inputs = acceptor.tokenized(&model, inputs, &params, caller).await?;
        acceptor.check_grammar(&model, &params, caller).await?;
        let AcceptedRequest { prompts, stop, origin } = acceptor.accept(&model, inputs, &params, caller)?;
        let shown = parts.as_ref().map(|rules| rules.shown_tokens(&model.tokenizer)).unwrap_or_default();
        let begin = async |choice: usize, prompt: Prompt| {
            let detokenizer = Detokenizer::new(Arc::clone(&model.tokenizer), &stop, params.min_tokens)
                .showing(shown.clone());
            let begun = Choice::begin(serve, choice, prompt, detokenizer, origin.clone());
            let parser = parts.as_ref().map(|rules| rules.parser(choice));
            begun.await.map(|begun| begun.divided_by(parser))
        };
        let n = (params.n as usize).max(1);
        let mut choices = begin_all(&prompts, n, begin).await?;
        let of_input = prompts.chunks(n).zip(choices.chunks_mut(n)).flat_map(|(prompts, choices)| {
            let prompt = AnsweredPrompt::new(&prompts[0], choices[0].take_prompt_logprobs());
            std::iter::repeat_n(Arc::new(prompt), choices.len())
        });
        let prompts = of_input.collect();
        Ok(BegunAnswers { n, prompts, choices })
    }
}

/// Begins `n` answers to each input: the first one alone, and the others after its prefill. The others lease
/// its cached blocks on the nodes, so that a prompt is computed once for any number of answers. See
/// `docs/decisions/0009-answers-share-blocks.md`.
///
/// Answers that have begun are read meanwhile.
async fn begin_all<F: Future<Output = Result<Choice, ServeError>>>(
    prompts: &[Prompt],
    n: usize,
    begin: impl Fn(usize, Prompt) -> F,
) -> Result<Vec<Choice>, ServeError> {
    let firsts = prompts.iter().enumerate().step_by(n);
    let mut beginning: FuturesUnordered<F> =
        firsts.map(|(choice, prompt)| begin(choice, prompt.clone())).collect();
    let mut begun: Vec<Choice> = Vec::with_capacity(prompts.len());
    while let Some(choice) = poll_fn(|cx| poll_begun(&mut beginning, &mut begun, cx)).await {
        let choice = choice?;
        if choice.index().is_multiple_of(n) {
            let others = prompts.iter().enumerate().skip(choice.index()).take(n).skip(1);
            beginning
                .extend(others.map(|(other, prompt)| begin(other, prompt.clone().without_prompt_logprobs())));
        }
        begun.push(choice);
    }
    begun.sort_unstable_by_key(Choice::index);
    Ok(begun)
}

/// Polls for the next answer that begins, and reads ahead in those that have begun.
fn poll_begun<F: Future<Output = Result<Choice, ServeError>>>(
    beginning: &mut FuturesUnordered<F>,
    begun: &mut [Choice],
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Choice, ServeError>>> {
    if !beginning.is_empty()
        && let Err(error) = begun.iter_mut().try_for_each(|choice| choice.poll_ahead(cx))
    {
        return Poll::Ready(Some(Err(error)));
    }
    beginning.poll_next_unpin(cx)
}

impl BegunAnswers {
    /// Returns the usage of all prompts. A prompt with several answers counts once.
    pub(crate) fn usage(&self) -> Usage {
        let usages = self.choices.iter().step_by(self.n).map(Choice::usage);
        usages.fold(Usage::default(), |sum, usage| Usage {
            prompt_tokens: sum.prompt_tokens + usage.prompt_tokens,
            cached_tokens: sum.cached_tokens + usage.cached_tokens,
        })
    }

    pub(crate) fn into_deltas(self) -> Deltas {
        Deltas::of(self.choices)
    }
}

/// The deltas of all choices, in order of arrival.
#[derive(Debug)]
pub(crate) enum Deltas {
    /// The only choice, which is polled without a set of wakers.
    One(Box<Choice>),
    Several(SelectAll<Choice>),
}

impl Deltas {
    fn of(mut choices: Vec<Choice>) -> Self {
        match choices.pop() {
            Some(only) if choices.is_empty() => Self::One(Box::new(only)),
            last => Self::Several(futures::stream::select_all(choices.into_iter().chain(last))),
        }
    }
}

impl Stream for Deltas {
    type Item = Result<Delta, ServeError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = match self.get_mut() {
            Self::One(choice) => choice.poll_next_unpin(cx),
            Self::Several(choices) => choices.poll_next_unpin(cx),
        };
        if let Poll::Ready(Some(Err(error))) = &polled {
            log_failed(error);
        }
        polled
    }
}

/// Logs why a streamed answer ends early. A deadline that passes, for one, is no warning.
fn log_failed(error: &ServeError) {
    match Code::from(error).is_fault() {
        true => warn!(%error, "streamed answer to client failed"),
        false => info!(%error, "streamed answer to client failed"),
    }
}
