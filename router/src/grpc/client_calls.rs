//! The calls of clients, in which errors that the gRPC library makes get the form of all other errors.

use std::convert::Infallible;
use std::task::{Context, Poll};

use ::http::{HeaderValue, Request, Response};
use futures::future::{BoxFuture, FutureExt as _};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::service::interceptor::ResponseBody;
use tracing::Span;

use super::{AccessCheck, GrpcApi, InferenceServer, InterceptedService, REQUEST_ID, status};

type Answer = Response<ResponseBody<Body>>;
type Inner = InterceptedService<InferenceServer<GrpcApi>, AccessCheck>;

/// The service for clients. A message that the library cannot read, such as one that is too large, does not reach the
/// API: its refusal gets a code and the request's id here, and is counted and logged.
#[derive(Clone, Debug)]
pub struct ClientCalls {
    inner: Inner,
    api: GrpcApi,
}

impl ClientCalls {
    pub(super) fn new(inner: Inner, api: GrpcApi) -> Self {
        Self { inner, api }
    }
}

impl NamedService for ClientCalls {
    const NAME: &'static str = <Inner as NamedService>::NAME;
}

impl<B> Service<Request<B>> for ClientCalls
where
    Inner: Service<Request<B>, Response = Answer, Error = Infallible, Future: Send + 'static>,
{
    type Response = Answer;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, call: Request<B>) -> Self::Future {
        let (api, asked_id) = (self.api.clone(), call.headers().get(REQUEST_ID).cloned());
        let answered = self.inner.call(call);
        async move {
            let mut response = answered.await?;
            let headers = response.headers_mut();
            let made_by_library = |status: &Status| !status.metadata().contains_key(status::CODE);
            if let Some(status) = Status::from_header_map(headers).filter(made_by_library) {
                let code = status::unread(status.code());
                let id = api.acceptor.request_id(asked_id.as_ref().and_then(|id| id.to_str().ok()));
                Span::current().record("request_id", id.as_str());
                api.refused(code);
                let id = HeaderValue::from_str(id.as_str())
                    .expect("ids are letters, digits and a few plain signs");
                headers.insert(status::CODE, HeaderValue::from_static(code.as_str()));
                headers.insert(REQUEST_ID, id);
            }
            Ok(response)
        }
        .boxed()
    }
}
