//! The door for programs: `baton.v1.Inference`, text or tokens in, steps with their text out.
//! The only file of the router that knows gRPC codes for clients.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use chassis::Shutdown;
use futures::{Stream, StreamExt as _};
use proto::v1;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_server::{Inference, InferenceServer};
use tonic::{Code, Request, Response, Status};
use types::prompt::Priority;
use types::{Prompt, RequestId, TokenId, Usage, Verdict};

use crate::accept::{Acceptor, Caller, MaxTokens, Wishes};
use crate::choice::{Choice, Delta};
use crate::error::{AcceptError, ServeError};
use crate::serve::Serve;
use crate::text::{Detokenizer, RouterModel, RouterModels, StopStrings, Tokenizer, by_size};

/// The gRPC door: what it needs to answer calls.
#[derive(Clone, Debug)]
pub struct GrpcDoor {
    pub serve: Arc<dyn Serve>,
    pub models: RouterModels,
    pub acceptor: Acceptor,
    /// Once it is requested, no further call is taken.
    pub shutdown: Shutdown,
}

impl GrpcDoor {
    pub fn server(self) -> InferenceServer<Self> {
        InferenceServer::new(self).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    async fn answer(&self, request: v1::GenerateRequest) -> Result<Events, Status> {
        let model = self.model(&request).map_err(|error| refused(&error))?;
        let caller = self.caller(&request).map_err(|error| refused(&error))?;
        let (prompt, stop) = self.accept(&model, request, &caller).await?;
        let detokenizer = Detokenizer::new(model.tokenizer.clone(), &stop, prompt.stop.min_tokens);
        let choice =
            Choice::begin(&*self.serve, 0, prompt, detokenizer).await.map_err(|error| failed(&error))?;
        Ok(events(choice, caller.id))
    }

    fn model(&self, request: &v1::GenerateRequest) -> Result<Arc<RouterModel>, AcceptError> {
        self.models.find((!request.model.is_empty()).then_some(request.model.as_str()))
    }

    fn caller(&self, request: &v1::GenerateRequest) -> Result<Caller, AcceptError> {
        let given = |text: &'_ str| (!text.is_empty()).then(|| text.to_owned());
        let id = self.acceptor.request_id(given(&request.request_id).as_deref());
        let timeout = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms));
        let priority = i8::try_from(request.priority).map_err(|_| {
            AcceptError::invalid("priority", format!("from -128 to 127, not {}", request.priority))
        })?;
        self.acceptor.caller(id, given(&request.tenant).as_deref(), timeout, Priority(priority))
    }

    async fn accept(
        &self,
        model: &Arc<RouterModel>,
        request: v1::GenerateRequest,
        caller: &Caller,
    ) -> Result<(Prompt, StopStrings), Status> {
        let wishes = wishes(&request);
        let (param, tokens) = match request.input {
            Some(Input::Text(text)) => ("text", encoded(model.tokenizer.clone(), text).await?),
            Some(Input::Tokens(tokens)) => ("tokens", tokens.ids.into_iter().map(TokenId).collect()),
            None => return Err(refused(&AcceptError::missing("input"))),
        };
        self.acceptor.accept_one(model, param, tokens, &wishes, caller).map_err(|error| refused(&error))
    }
}

async fn encoded(tokenizer: Arc<Tokenizer>, text: String) -> Result<Vec<TokenId>, Status> {
    let encoded = by_size(text.len(), move || tokenizer.encode_plain(&text)).await;
    let encoded = encoded.map_err(|error| Status::internal(error.to_string()))?;
    encoded.map_err(|error| refused(&error.at("text")))
}

/// What the call wishes for. A message's zero is "not said": protobuf cannot tell the two apart.
fn wishes(request: &v1::GenerateRequest) -> Wishes {
    let stop = request.stop.clone().unwrap_or_default();
    let max_tokens = match stop.max_tokens {
        0 => MaxTokens::RestOfContext,
        tokens => MaxTokens::Asked { tokens, param: "stop.max_tokens" },
    };
    let wishes = Wishes {
        max_tokens,
        min_tokens: stop.min_tokens,
        stop: request.stop_strings.clone(),
        stop_tokens: stop.stop_tokens.into_iter().map(TokenId).collect(),
        ignore_eos: stop.ignore_eos,
        temperature: Some(0.0),
        ..Wishes::default()
    };
    match &request.sampling {
        Some(sampling) => sampled(wishes, sampling),
        None => wishes,
    }
}

fn sampled(wishes: Wishes, sampling: &v1::Sampling) -> Wishes {
    let said = |value: f32| (value != 0.0).then_some(value);
    Wishes {
        temperature: Some(sampling.temperature),
        top_p: said(sampling.top_p),
        top_k: (sampling.top_k > 0).then(|| i64::from(sampling.top_k)),
        min_p: said(sampling.min_p),
        repetition_penalty: said(sampling.repetition_penalty),
        presence_penalty: said(sampling.presence_penalty),
        frequency_penalty: said(sampling.frequency_penalty),
        logit_bias: sampling.logit_bias.iter().map(|(id, bias)| (TokenId(*id), *bias)).collect(),
        seed: Some(sampling.seed),
        logprobs: sampling.logprobs,
        ..wishes
    }
}

type Events = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

/// One event a token, and after the last one the end.
fn events(choice: Choice, id: RequestId) -> Events {
    let usage = choice.usage();
    let tokens = choice.into_deltas().flat_map(move |delta| {
        let events = match delta {
            Ok(delta) => {
                let end = delta.finish.map(|_| Ok(end(&delta, usage, &id)));
                [Some(Ok(token(&delta))), end]
            }
            Err(error) => [Some(Err(failed(&error))), None],
        };
        futures::stream::iter(events.into_iter().flatten())
    });
    tokens.boxed()
}

fn token(delta: &Delta) -> v1::GenerateEvent {
    let token = v1::GeneratedToken { step: Some((&delta.step).into()), text: delta.text.clone() };
    v1::GenerateEvent { event: Some(Event::Token(token)) }
}

fn end(delta: &Delta, usage: Usage, id: &RequestId) -> v1::GenerateEvent {
    let mut end = v1::GenerateEnd {
        usage: Some(usage.into()),
        completion_tokens: delta.step.index + 1,
        request_id: id.to_string(),
        ..v1::GenerateEnd::default()
    };
    if let Some(reason) = delta.finish {
        end.set_reason(reason.into());
    }
    v1::GenerateEvent { event: Some(Event::End(end)) }
}

#[tonic::async_trait]
impl Inference for GrpcDoor {
    type GenerateStream = Events;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Events>, Status> {
        if self.shutdown.requested() {
            return Err(Status::unavailable("the router is stopping"));
        }
        self.answer(request.into_inner()).await.map(Response::new)
    }
}

fn refused(error: &AcceptError) -> Status {
    match error {
        AcceptError::UnknownModel { .. } => Status::not_found(error.to_string()),
        _ => Status::invalid_argument(error.to_string()),
    }
}

fn failed(error: &ServeError) -> Status {
    let code = match (error, error.verdict()) {
        (ServeError::DeadlinePassed { .. }, _) => Code::DeadlineExceeded,
        (ServeError::Overloaded { .. }, _) => Code::ResourceExhausted,
        (_, Verdict::Reject) => Code::InvalidArgument,
        (_, Verdict::RetryLater(_) | Verdict::RetryElsewhere) => Code::Unavailable,
        (_, Verdict::Bug) => Code::Internal,
    };
    Status::new(code, error.to_string())
}
