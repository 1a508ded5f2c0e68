//! The gRPC API for clients: `baton.v1.Inference` takes text, tokens or a chat and returns steps with their text.
//!
//! Suggested reading order: the path of a call (this file); its messages (`request`); the events of its answers
//! (`events`); errors (`status`), also of messages that cannot be read (`client_calls`); the health of the service
//! (`health`).

#[cfg(test)]
mod bounds_tests;
mod client_calls;
mod events;
pub(crate) mod health;
#[cfg(test)]
mod id_tests;
mod request;
mod status;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use chassis::{Shutdown, World};
use proto::v1;
use proto::v1::generate_request::Input;
use proto::v1::inference_server::{Inference, InferenceServer};
use tonic::codec::CompressionEncoding;
use tonic::metadata::{AsciiMetadataValue, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};
use tracing::{Span, error, info};
use types::{Deadline, RequestId, TokenId};

use crate::accept::{Acceptor, AskedInputs, AskedPrompt, Caller};
use crate::admission::terms::{SHEDDABLE, SLO};
use crate::answers::AskedRequest;
use crate::error::{AcceptError, RequestError, ServeError};
use crate::http::{self, BodyLimits};
use crate::metrics::RouterMetrics;
use crate::serve::{Detail, Serve};
use crate::tenants::{Claims, Client};
use crate::text::{PromptText, RouterModels, ServedModel};
use client_calls::ClientCalls;
use events::Events;

/// The metadata with the request's id.
const REQUEST_ID: &str = "x-request-id";
/// The metadata with the API key.
const AUTHORIZATION: &str = "authorization";

/// The service `baton.v1.Inference` for clients.
#[derive(Clone, Debug)]
pub struct GrpcApi {
    pub serve: Arc<dyn Serve>,
    pub models: RouterModels,
    pub acceptor: Acceptor,
    pub metrics: RouterMetrics,
    pub world: World,
    /// The shutdown request. After it, no further call is accepted.
    pub shutdown: Shutdown,
}

impl GrpcApi {
    /// Returns the service. A message has at most the bytes of a body over HTTP, also after it is decompressed.
    pub fn server(self) -> ClientCalls {
        let (access, api) = (AccessCheck(self.clone()), self.clone());
        let server = InferenceServer::new(self)
            .max_decoding_message_size(BodyLimits::default().bytes_max)
            .accept_compressed(CompressionEncoding::Gzip);
        ClientCalls::new(InterceptedService::new(server, access), api)
    }

    async fn answer(
        &self,
        request: Request<v1::GenerateRequest>,
        id: RequestId,
    ) -> Result<Events, RequestError> {
        if self.shutdown.requested() {
            return Err(ServeError::Draining.into());
        }
        let caller = self.caller(&request, id)?;
        let request = request.into_inner();
        let model = self.model(&request)?;
        let asked = self.asked(model, request, caller.deadline).await?;
        let answers = asked.begin(self.serve.as_ref(), &self.acceptor, &caller).await?;
        Ok(events::events(answers, caller.id))
    }

    /// Returns the id of a call: the message's, the one in the metadata, or a new one.
    fn id(&self, call: &Request<v1::GenerateRequest>) -> RequestId {
        let in_metadata = text_of(call.metadata(), REQUEST_ID);
        self.acceptor.request_id(given(&call.get_ref().request_id).or(in_metadata))
    }

    /// Counts and logs a refusal, as over HTTP.
    fn refused(&self, code: http::Code) {
        self.metrics.refused(code.as_str());
        match code {
            http::Code::Internal => error!(code = code.as_str(), "request failed with an internal error"),
            _ => info!(code = code.as_str(), "request refused"),
        }
    }

    fn model(&self, request: &v1::GenerateRequest) -> Result<Arc<ServedModel>, AcceptError> {
        self.serve.model(&self.models, given(&request.model))
    }

    fn caller(&self, call: &Request<v1::GenerateRequest>, id: RequestId) -> Result<Caller, AcceptError> {
        let request = call.get_ref();
        let priority = i8::try_from(request.priority).map_err(|_| {
            AcceptError::invalid("priority", format!("from -128 to 127, not {}", request.priority))
        })?;
        let known = call.extensions().get::<Client>().cloned();
        let client = match known.and_then(|client| client.asking(priority)) {
            Some(client) => client,
            None => self.acceptor.client(&Claims {
                peer: call.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.ip()),
                authorization: text_of(call.metadata(), AUTHORIZATION),
                tenant: given(&request.tenant),
                priority: Some(priority),
            })?,
        };
        let timeout = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms));
        let detail = if request.explain { Detail::Explained } else { Detail::Usual };
        let caller = self.acceptor.caller(id, client, timeout)?;
        let asked = |name| text_of(call.metadata(), name);
        let terms = caller.terms.asked(asked(SLO), asked(SHEDDABLE))?;
        Ok(Caller { detail, terms, ..caller })
    }

    /// Converts a call's input and parameters. A large chat is parsed and rendered on another thread.
    async fn asked(
        &self,
        model: Arc<ServedModel>,
        mut request: v1::GenerateRequest,
        deadline: Deadline,
    ) -> Result<AskedRequest, RequestError> {
        let params = request::params(&mut request)?;
        let (param, prompt) = match request.input.ok_or_else(|| AcceptError::missing("input"))? {
            Input::Text(text) => ("text", AskedPrompt::Text(PromptText::Plain(text))),
            Input::Tokens(tokens) => {
                ("tokens", AskedPrompt::Tokens(tokens.ids.into_iter().map(TokenId).collect()))
            }
            Input::Chat(chat) => {
                let (n_bytes, world) = (request::n_bytes(&chat), self.world.clone());
                let asked = move || request::chat(chat)?.rendered(&world, &model)?.asked(model, params);
                return Ok(self.acceptor.tokenizing().parse(n_bytes, deadline, asked).await??);
            }
        };
        Ok(AskedRequest { model, inputs: AskedInputs { param, prompts: vec![prompt] }, params, parts: None })
    }
}

/// Refuses a call without access before its message is read and decompressed, as HTTP does with bodies. A key is checked here
/// only: the call gets its [`Client`].
#[derive(Clone, Debug)]
pub struct AccessCheck(GrpcApi);

impl Interceptor for AccessCheck {
    fn call(&mut self, mut call: Request<()>) -> Result<Request<()>, Status> {
        let Self(api) = self;
        let authorization = text_of(call.metadata(), AUTHORIZATION);
        let claims = Claims { peer: None, authorization, tenant: None, priority: None };
        match api.acceptor.client(&claims) {
            Ok(client) => {
                call.extensions_mut().insert(client);
                Ok(call)
            }
            Err(error) => {
                let id = api.acceptor.request_id(text_of(call.metadata(), REQUEST_ID));
                Span::current().record("request_id", id.as_str());
                let error = error.into();
                api.refused(http::Code::from(&error));
                Err(with_id(status::of(error), &id))
            }
        }
    }
}

fn text_of<'a>(metadata: &'a MetadataMap, name: &'static str) -> Option<&'a str> {
    metadata.get(name).and_then(|value| value.to_str().ok())
}

fn value_of(id: &RequestId) -> AsciiMetadataValue {
    MetadataValue::try_from(id.as_str()).expect("ids are letters, digits and a few plain signs")
}

fn with_id(mut status: Status, id: &RequestId) -> Status {
    status.metadata_mut().insert(REQUEST_ID, value_of(id));
    status
}

/// Returns a text that is not empty.
fn given(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

#[tonic::async_trait]
impl Inference for GrpcApi {
    type GenerateStream = Events;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Events>, Status> {
        let id = self.id(&request);
        Span::current().record("request_id", id.as_str());
        let answer = self.answer(request, id.clone()).await;
        let answer = answer.inspect_err(|error| self.refused(http::Code::from(error)));
        match answer.map(Response::new) {
            Ok(mut response) => {
                response.metadata_mut().insert(REQUEST_ID, value_of(&id));
                Ok(response)
            }
            Err(error) => Err(with_id(status::of(error), &id)),
        }
    }
}
