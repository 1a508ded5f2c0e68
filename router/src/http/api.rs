//! The common part of the endpoints: the path of one request from its body to its answer.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::response::Response;
use chassis::World;
use futures::future::try_join_all;
use http::HeaderMap;
use http::request::Parts;
use types::{Prompt, RequestId};

use super::answer::{Answer, AnswerContext, AnswerFormat};
use super::body::{self, BodyLimits};
use super::caller;
use super::error::{Code, HttpError};
use super::fields::AnswerOptions;
use super::sse;
use crate::accept::{AcceptedRequest, Acceptor, Caller, Inputs, SamplingParams};
use crate::choice::Choice;
use crate::serve::Serve;
use crate::tenants::Client;
use crate::text::{Detokenizer, RouterModels, ServedModel, run_by_size};

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
    pub(crate) inputs: Inputs,
    pub(crate) params: SamplingParams,
    pub(crate) options: AnswerOptions,
    pub(crate) shape: S,
}

/// The function that parses an endpoint's JSON: fields, template, tokens.
pub(crate) type RequestParser<S> = fn(&HttpApi, &[u8]) -> Result<ParsedRequest<S>, HttpError>;

/// Lets handlers take a [`Client`]: a request without access is refused before the handler runs.
impl FromRequestParts<HttpApi> for Client {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, api: &HttpApi) -> Result<Self, HttpError> {
        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
        Ok(caller::client(&api.acceptor, peer.map(|peer| peer.0), &parts.headers)?)
    }
}

impl HttpApi {
    pub(crate) async fn answer<S: AnswerFormat>(
        self,
        head: RequestHead,
        body: Body,
        parse_request: RequestParser<S>,
    ) -> Result<Response, HttpError> {
        let RequestHead { id, client, headers } = head;
        let mut caller = caller::caller(&self.acceptor, id, client, &headers)?;
        let within = self.body.within.min(self.world.left(caller.deadline));
        let body = body::read(body, BodyLimits { within, ..self.body }).await?;
        caller.read = self.world.now();
        let api = self.clone();
        let understood = run_by_size(body.len(), move || parse_request(&api, &body)).await;
        let ask = understood.map_err(|error| HttpError::new(Code::Internal, error.to_string()))??;
        let stream = ask.options.stream;
        let answer = self.begin(ask, &caller).await?;
        if stream { Ok(sse::respond(answer)) } else { answer.whole().await }
    }

    /// Begins all choices. Returns when each choice has its first step, or refuses the whole request.
    async fn begin<S: AnswerFormat>(
        &self,
        ask: ParsedRequest<S>,
        caller: &Caller,
    ) -> Result<Answer<S>, HttpError> {
        let ParsedRequest { model, inputs, params, options, shape } = ask;
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
        let begin = |choice: usize, prompt: Prompt| {
            let detokenizer = Detokenizer::new(Arc::clone(&model.tokenizer), &stop, params.min_tokens);
            Choice::begin(self.serve.as_ref(), choice, prompt, detokenizer, origin.clone())
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
