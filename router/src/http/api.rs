//! The common part of the endpoints: the path of one request from its body to its answer.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Extension, FromRequestParts};
use chassis::World;
use http::HeaderMap;
use http::request::Parts;
use types::{Deadline, RequestId};

use super::answer::{Answer, AnswerContext, AnswerShape};
use super::body::{self, BodyLimits};
use super::caller;
use super::error::{Code, HttpError};
use super::fields::AnswerOptions;
use crate::accept::{Acceptor, Caller};
use crate::answers::AskedRequest;
use crate::serve::Serve;
use crate::tenants::Client;
use crate::text::RouterModels;

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
    pub(crate) request: AskedRequest,
    pub(crate) options: AnswerOptions,
    pub(crate) shape: S,
}

impl<S> ParsedRequest<S> {
    /// Replaces the format of the answers.
    pub(crate) fn with_shape<T>(self, shape: T) -> ParsedRequest<T> {
        let Self { request, options, .. } = self;
        ParsedRequest { request, options, shape }
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
        let (ask, caller) = self.asked(head, body, parse_request).await?;
        self.begin(ask, &caller).await
    }

    /// Reads and parses a request.
    pub(crate) async fn asked<S: Send + 'static>(
        &self,
        head: RequestHead,
        body: Body,
        parse_request: RequestParser<S>,
    ) -> Result<(ParsedRequest<S>, Caller), HttpError> {
        let RequestHead { id, client, headers } = head;
        let mut caller = caller::caller(&self.acceptor, id, client, &headers)?;
        caller::check_encoding(&headers)?;
        let within = self.body.within.min(self.world.left(caller.deadline));
        let body = body::read(body, BodyLimits { within, ..self.body }).await?;
        caller.read = self.world.now();
        let ask = self.parsed(body, caller.deadline, parse_request).await?;
        Ok((ask, caller))
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

    /// Begins all answers. Returns when each has its first step, or refuses the whole request. An error names the field as
    /// the endpoint does.
    async fn begin<S: AnswerShape>(
        &self,
        ask: ParsedRequest<S>,
        caller: &Caller,
    ) -> Result<Answer<S>, HttpError> {
        let ParsedRequest { request, options, shape } = ask;
        let (model, created) = (Arc::clone(&request.model), self.world.unix_time().as_secs());
        let answers = request.begin(self.serve.as_ref(), &self.acceptor, caller).await;
        let answers = answers.map_err(|error| HttpError::from(error).renamed(S::NAMES))?;
        let (id, prompts) = (format!("{}{}", S::ID, caller.id), answers.prompts.clone());
        let context = AnswerContext { id, created, model, options, prompts };
        Ok(Answer { context, shape, answers })
    }
}
