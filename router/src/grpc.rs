//! The gRPC API for clients: `baton.v1.Inference` takes text or tokens and returns steps with their text.
//! Only this file of the router uses gRPC codes for clients.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use chassis::Shutdown;
use futures::{Stream, StreamExt as _};
use proto::v1;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_server::{Inference, InferenceServer};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Response, Status};
use types::{CallerAction, NodeId, RequestId, TokenId, Usage};

use crate::accept::{AcceptedOne, Acceptor, AskedInputs, AskedPrompt, Caller, MaxTokens, SamplingParams};
use crate::admission::terms::{SHEDDABLE, SLO};
use crate::choice::{Choice, Delta};
use crate::error::{AcceptError, RequestError, ServeError, whole_seconds};
use crate::grammars::AskedGrammar;
use crate::http;
use crate::metrics::RouterMetrics;
use crate::requests::{Explanation, Gap, KvTransfer, PartTimes};
use crate::serve::{Detail, Serve};
use crate::tenants::Claims;
use crate::text::{Detokenizer, PromptText, RouterModels, ServedModel};

/// The service `baton.v1.Inference` for clients.
#[derive(Clone, Debug)]
pub struct GrpcApi {
    pub serve: Arc<dyn Serve>,
    pub models: RouterModels,
    pub acceptor: Acceptor,
    pub metrics: RouterMetrics,
    /// The shutdown request. After it, no further call is accepted.
    pub shutdown: Shutdown,
}

impl GrpcApi {
    pub fn server(self) -> InferenceServer<Self> {
        InferenceServer::new(self).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    async fn answer(&self, request: Request<v1::GenerateRequest>) -> Result<Events, RequestError> {
        if self.shutdown.requested() {
            return Err(ServeError::Draining.into());
        }
        let caller = self.caller(&request)?;
        let request = request.into_inner();
        let model = self.model(&request)?;
        let AcceptedOne { prompt, stop, origin } = self.accept(&model, request, &caller).await?;
        let detokenizer = Detokenizer::new(model.tokenizer.clone(), &stop, prompt.stop.min_tokens);
        let choice = Choice::begin(&*self.serve, 0, prompt, detokenizer, origin).await?;
        Ok(events(choice, caller.id))
    }

    fn model(&self, request: &v1::GenerateRequest) -> Result<Arc<ServedModel>, AcceptError> {
        let name = (!request.model.is_empty()).then_some(request.model.as_str());
        self.serve.model(&self.models, name)
    }

    fn caller(&self, call: &Request<v1::GenerateRequest>) -> Result<Caller, AcceptError> {
        let request = call.get_ref();
        let given = |text: &'_ str| (!text.is_empty()).then(|| text.to_owned());
        let priority = i8::try_from(request.priority).map_err(|_| {
            AcceptError::invalid("priority", format!("from -128 to 127, not {}", request.priority))
        })?;
        let client = self.acceptor.client(&Claims {
            peer: call.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.ip()),
            authorization: call.metadata().get("authorization").and_then(|value| value.to_str().ok()),
            tenant: Some(request.tenant.as_str()).filter(|tenant| !tenant.is_empty()),
            priority: Some(priority),
        })?;
        let id = self.acceptor.request_id(given(&request.request_id).as_deref());
        let timeout = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms));
        let detail = if request.explain { Detail::Explained } else { Detail::Usual };
        let caller = self.acceptor.caller(id, client, timeout)?;
        let metadata = |name| call.metadata().get(name).and_then(|value| value.to_str().ok());
        let terms = caller.terms.asked(metadata(SLO), metadata(SHEDDABLE))?;
        Ok(Caller { detail, terms, ..caller })
    }

    async fn accept(
        &self,
        model: &Arc<ServedModel>,
        request: v1::GenerateRequest,
        caller: &Caller,
    ) -> Result<AcceptedOne, RequestError> {
        let params = params(&request)?;
        self.acceptor.check_grammar(model, &params, caller).await?;
        let (param, prompt) = match request.input {
            Some(Input::Text(text)) => ("text", AskedPrompt::Text(PromptText::Plain(text))),
            Some(Input::Tokens(tokens)) => {
                ("tokens", AskedPrompt::Tokens(tokens.ids.into_iter().map(TokenId).collect()))
            }
            None => return Err(AcceptError::missing("input").into()),
        };
        let asked = AskedInputs { param, prompts: vec![prompt] };
        let inputs = self.acceptor.tokenized(model, asked, &params, caller).await?;
        Ok(self.acceptor.accept_one(model, inputs, &params, caller)?)
    }
}

/// Returns the call's sampling parameters. Zero means "not given", because protobuf does not distinguish zero
/// from an absent field.
fn params(request: &v1::GenerateRequest) -> Result<SamplingParams, AcceptError> {
    let stop = request.stop.clone().unwrap_or_default();
    let max_tokens = match stop.max_tokens {
        0 => MaxTokens::RestOfContext,
        tokens => MaxTokens::Asked { tokens, param: "stop.max_tokens" },
    };
    let params = SamplingParams {
        max_tokens,
        min_tokens: stop.min_tokens,
        stop: request.stop_strings.clone(),
        stop_tokens: stop.stop_tokens.into_iter().map(TokenId).collect(),
        ignore_eos: stop.ignore_eos,
        cache_salt: (!request.cache_salt.is_empty()).then(|| request.cache_salt.clone()),
        temperature: Some(0.0),
        ..SamplingParams::default()
    };
    match &request.sampling {
        Some(sampling) => sampled(params, sampling),
        None => Ok(params),
    }
}

fn sampled(params: SamplingParams, sampling: &v1::Sampling) -> Result<SamplingParams, AcceptError> {
    let said = |value: f32| (value != 0.0).then_some(value);
    Ok(SamplingParams {
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
        grammar: sampling.grammar.clone().map(grammar).transpose()?,
        ..params
    })
}

fn grammar(wire: v1::Grammar) -> Result<AskedGrammar, AcceptError> {
    let grammar = wire.try_into();
    let wrong = |error: proto::ConvertError| AcceptError::invalid("sampling.grammar", error.to_string());
    Ok(AskedGrammar::new("sampling.grammar", grammar.map_err(wrong)?))
}

type Events = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

/// Makes the event stream of one answer: one event per token, then the end.
fn events(choice: Choice, id: RequestId) -> Events {
    let usage = choice.usage();
    let tokens = choice.flat_map(move |delta| {
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
    let token = v1::GeneratedToken { step: Some((&delta.step).into()), text: delta.parts.text.clone() };
    v1::GenerateEvent { event: Some(Event::Token(token)) }
}

fn end(delta: &Delta, usage: Usage, id: &RequestId) -> v1::GenerateEvent {
    let mut end = v1::GenerateEnd {
        usage: Some(usage.into()),
        completion_tokens: delta.step.index + 1,
        request_id: id.to_string(),
        explanation: delta.explanation.as_deref().map(explained),
        ..v1::GenerateEnd::default()
    };
    if let Some(reason) = delta.finish {
        end.set_reason(reason.of_steps().into());
    }
    v1::GenerateEvent { event: Some(Event::End(end)) }
}

fn explained(explanation: &Explanation) -> v1::Explanation {
    let node = |node: &Option<NodeId>| node.as_ref().map(ToString::to_string).unwrap_or_default();
    let transfer = |transfer: &KvTransfer| v1::Transfer {
        connector: transfer.connector.clone(),
        bytes: transfer.bytes,
        moved_us: us(transfer.moved),
    };
    v1::Explanation {
        total_us: us(explanation.total),
        first_token_us: explanation.first_token.map(us).unwrap_or_default(),
        before_first_token: parts(&explanation.before),
        after_first_token: parts(&explanation.after),
        prefill_node: node(&explanation.prefill),
        decode_node: node(&explanation.decode),
        tries: explanation.tries,
        continuations: explanation.continuations,
        transfers: explanation.transfers.iter().map(transfer).collect(),
        worst_gap: explanation.worst_gap.as_ref().map(gap),
    }
}

fn gap(gap: &Gap) -> v1::Gap {
    let of_gap =
        v1::Gap { token: gap.token, us: us(gap.took), parts: parts(&gap.parts), ..v1::Gap::default() };
    let Some(report) = gap.report else { return of_gap };
    v1::Gap {
        engine_steps: report.steps,
        prefill_tokens: report.prefill_tokens,
        rows: report.rows,
        last_step_us: us(report.took),
        preemptions: report.preemptions,
        ..of_gap
    }
}

fn parts(times: &PartTimes) -> Vec<v1::PartTime> {
    times.shown().map(|(part, took)| v1::PartTime { part: part.as_str().to_owned(), us: us(took) }).collect()
}

fn us(took: Duration) -> u64 {
    took.as_micros() as u64
}

#[tonic::async_trait]
impl Inference for GrpcApi {
    type GenerateStream = Events;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Events>, Status> {
        let answer = self.answer(request).await;
        let answer = answer.inspect_err(|error| self.metrics.refused(http::Code::from(error).as_str()));
        answer.map(Response::new).map_err(|error| match error {
            RequestError::Accept(error) => refused(&error),
            RequestError::Serve(error) => failed(&error),
        })
    }
}

fn refused(error: &AcceptError) -> Status {
    let status = match error {
        AcceptError::UnknownModel { .. } => Status::not_found(error.to_string()),
        AcceptError::Unauthorized { .. } => Status::unauthenticated(error.to_string()),
        AcceptError::TenantLimit(reached) => Status::resource_exhausted(&reached.reason),
        AcceptError::NoNodes { .. } => Status::unavailable(error.to_string()),
        _ => Status::invalid_argument(error.to_string()),
    };
    with_delay(status, error.caller_action())
}

fn failed(error: &ServeError) -> Status {
    let code = match (error, error.caller_action()) {
        (ServeError::DeadlinePassed { .. }, _) => Code::DeadlineExceeded,
        (ServeError::Overloaded { .. }, _) => Code::ResourceExhausted,
        (_, CallerAction::Reject) => Code::InvalidArgument,
        (_, CallerAction::RetryLater(_) | CallerAction::RetryElsewhere) => Code::Unavailable,
        (_, CallerAction::Bug) => Code::Internal,
    };
    with_delay(Status::new(code, error.to_string()), error.caller_action())
}

/// Puts the time after which the client may try again into the metadata (HTTP has it in a header).
fn with_delay(mut status: Status, action: CallerAction) -> Status {
    if let CallerAction::RetryLater(after) = action {
        status.metadata_mut().insert("retry-after", MetadataValue::from(whole_seconds(after)));
    }
    status
}

#[cfg(test)]
mod tests {
    use types::RefusalKind;

    use super::*;

    #[test]
    fn errors_that_may_be_retried_say_when() {
        let reason = || "a reason".to_owned();
        let delay = |status: Status| {
            status.metadata().get("retry-after").map(|after| after.to_str().expect("ASCII").to_owned())
        };
        let overloaded =
            ServeError::Overloaded { retry_after: Duration::from_millis(2500), reason: reason() };
        let cases = [
            (overloaded, Code::ResourceExhausted, Some("3")),
            (ServeError::NoNodes { reason: reason() }, Code::Unavailable, Some("1")),
            (ServeError::Draining, Code::Unavailable, Some("1")),
            (ServeError::Refused { kind: RefusalKind::Full, reason: reason() }, Code::Unavailable, Some("1")),
            (ServeError::DeadlinePassed { reason: reason() }, Code::DeadlineExceeded, None),
            (ServeError::Failed { reason: reason() }, Code::Internal, None),
        ];
        for (error, code, after) in cases {
            let status = failed(&error);
            assert_eq!((status.code(), delay(status).as_deref()), (code, after), "{error}");
        }
        let status = refused(&AcceptError::NoNodes { reason: reason() });
        assert_eq!((status.code(), delay(status).as_deref()), (Code::Unavailable, Some("1")));
    }
}
