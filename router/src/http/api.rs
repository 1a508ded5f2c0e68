//! The common part of the endpoints: the path of one request from its body to its answer.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Extension, FromRequestParts};
use chassis::World;
use futures::future::try_join_all;
use http::HeaderMap;
use http::request::Parts;
use types::{Deadline, Prompt, RequestId};

use super::answer::{Answer, AnswerContext, AnswerShape};
use super::body::{self, BodyLimits};
use super::caller;
use super::error::{Code, HttpError};
use super::fields::AnswerOptions;
use crate::accept::{AcceptedRequest, Acceptor, AskedInputs, Caller, SamplingParams};
use crate::choice::Choice;
use crate::serve::Serve;
use crate::tenants::Client;
use crate::text::{Detokenizer, PartsRules, RouterModels, ServedModel};

/// The state of the HTTP API. Cheap to clone.
#[derive(Clone, Debug)]
pub struct HttpApi {
    pub serve: Arc<dyn Serve>,
    pub models: RouterModels,
    pub acceptor: Acceptor,
    pub world: World,
    pub body: BodyLimits,
}

/// A request without its body.
#[derive(Debug)]
pub(crate) struct RequestHead {
    pub(crate) id: RequestId,
    pub(crate) client: Client,
    pub(crate) headers: HeaderMap,
}

/// A parsed request that is not accepted yet.
#[derive(Debug)]
pub(crate) struct ParsedRequest<S> {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) inputs: AskedInputs,
    pub(crate) params: SamplingParams,
    pub(crate) options: AnswerOptions,
    /// How the answers' text is divided; `None`: all of it is text.
    pub(crate) parts: Option<PartsRules>,
    pub(crate) shape: S,
}

impl<S> ParsedRequest<S> {
    /// Replaces the format of the answers.
    pub(crate) fn with_shape<T>(self, shape: T) -> ParsedRequest<T> {
        let Self { model, inputs, params, options, parts, .. } = self;
        ParsedRequest { model, inputs, params, options, parts, shape }
    }
}

/// The function that parses an endpoint's JSON: fields and template.
pub(crate) type RequestParser<S> = fn(&HttpApi, &[u8]) -> Result<ParsedRequest<S>, HttpError>;

/// Lets handlers take a [`Client`]: a request without access is refused before the handler runs.
impl FromRequestParts<HttpApi> for Client {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, api: &HttpApi) -> Result<Self, HttpError> {
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
        Ok(caller::client(&api.acceptor, peer.map(|peer| peer.0), &parts.headers)?)
    }
}

/// Lets handlers take a [`RequestHead`].
impl FromRequestParts<HttpApi> for RequestHead {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, api: &HttpApi) -> Result<Self, HttpError> {
        let id = Extension::<RequestId>::from_request_parts(parts, api).await;
        let Extension(id) = id.map_err(|error| HttpError::new(Code::Internal, error.to_string()))?;
        let client = Client::from_request_parts(parts, api).await?;
        Ok(Self { id, client, headers: parts.headers.clone() })
    }
}

impl HttpApi {
    /// Reads, accepts and begins a request.
    pub(crate) async fn answer<S: AnswerShape>(
        self,
        head: RequestHead,
        body: Body,
        parse_request: RequestParser<S>,
    ) -> Result<Answer<S>, HttpError> {
        let RequestHead { id, client, headers } = head;
        let mut caller = caller::caller(&self.acceptor, id, client, &headers)?;
        let within = self.body.within.min(self.world.left(caller.deadline));
        let body = body::read(body, BodyLimits { within, ..self.body }).await?;
        caller.read = self.world.now();
        let ask = self.parsed(body, caller.deadline, parse_request).await?;
        self.begin(ask, &caller).await
    }

    /// Parses a body, on another thread if it is large.
    pub(crate) async fn parsed<T: Send + 'static>(
        &self,
        body: Bytes,
        deadline: Deadline,
        parse: fn(&Self, &[u8]) -> Result<T, HttpError>,
    ) -> Result<T, HttpError> {
        let (api, n_bytes) = (self.clone(), body.len());
        self.acceptor.tokenizing().parse(n_bytes, deadline, move || parse(&api, &body)).await?
    }

    /// Begins all choices. Returns when each choice has its first step, or refuses the whole request.
    async fn begin<S: AnswerShape>(
        &self,
        ask: ParsedRequest<S>,
        caller: &Caller,
    ) -> Result<Answer<S>, HttpError> {
        let ParsedRequest { model, inputs, params, options, parts, shape } = ask;
        let inputs = self.acceptor.tokenized(&model, inputs, &params, caller).await?;
        self.acceptor.check_grammar(&model, &params, caller).await?;
        let AcceptedRequest { prompts, stop, origin } =
            self.acceptor.accept(&model, inputs, &params, caller)?;
        let context = AnswerContext {
            id: format!("{}{}", S::ID, caller.id),
            created: self.world.unix_time().as_secs(),
            model: Arc::clone(&model),
            options,
            n: params.n as usize,
            prompts: AnswerContext::prompts(&prompts),
        };
        let shown = parts.as_ref().map(|rules| rules.shown_tokens(&model.tokenizer)).unwrap_or_default();
        let begin = async |choice: usize, prompt: Prompt| {
            let detokenizer = Detokenizer::new(Arc::clone(&model.tokenizer), &stop, params.min_tokens)
                .showing(shown.clone());
            let begun = Choice::begin(self.serve.as_ref(), choice, prompt, detokenizer, origin.clone());
            let parser = parts.as_ref().map(|rules| rules.parser(choice));
            begun.await.map(|begun| begun.divided_by(parser))
        };
        let n = context.n.max(1);
        let inputs = prompts.chunks(n).enumerate();
        let begun = inputs.map(|(nth, answers)| begin_answers(nth * n, answers, &begin));
        let choices = try_join_all(begun).await?.into_iter().flatten().collect();
        Ok(Answer { context, shape, choices })
    }
}

/// Begins all answers to one prompt: the first one alone, and the others after its prefill. The others lease
/// its cached blocks on the nodes, so that a prompt is computed once for any number of answers. See
/// `docs/decisions/0009-answers-share-blocks.md`.
async fn begin_answers<E, F: Future<Output = Result<Choice, E>>>(
    first_choice: usize,
    answers: &[Prompt],
    begin: impl Fn(usize, Prompt) -> F,
) -> Result<Vec<Choice>, E> {
    let mut answers = (first_choice..).zip(answers.iter().cloned());
    let mut choices = Vec::new();
    if let Some((choice, prompt)) = answers.next() {
        choices.push(begin(choice, prompt).await?);
    }
    choices.extend(try_join_all(answers.map(|(choice, prompt)| begin(choice, prompt))).await?);
    Ok(choices)
}
