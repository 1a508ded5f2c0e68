//! The client's side of signatures: the whole message is collected before it is sent.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use tonic::body::Body;
use tonic::transport::Channel;
use tower::{BoxError, Service};

use crate::identity::call::{TARGET_HEADER, sign};
use crate::world::World;

/// A channel that signs each call if the process has the cluster's secret.
///
/// A signature covers the whole message, so the message is collected before it is sent. All of Baton's calls
/// send one message; a stream of messages would wait for its end here.
#[derive(Clone, Debug)]
pub struct SignedChannel {
    channel: Channel,
    world: World,
    /// The address that the channel connects to.
    target: HeaderValue,
}

impl SignedChannel {
    pub(super) fn new(channel: Channel, world: World, addr: &str) -> Self {
        let target = HeaderValue::from_str(addr).unwrap_or(HeaderValue::from_static(""));
        Self { channel, world, target }
    }
}

impl Service<Request<Body>> for SignedChannel {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.channel.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let next = self.channel.clone();
        // The clone is polled for the next call; the channel that is ready makes this call.
        let mut channel = std::mem::replace(&mut self.channel, next);
        if self.world.identity().secret().is_none() {
            let answer = channel.call(request);
            return Box::pin(async move { answer.await.map_err(Into::into) });
        }
        let (world, target) = (self.world.clone(), self.target.clone());
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let message = body.collect().await?.to_bytes();
            head.headers.insert(TARGET_HEADER, target);
            if let Some(secret) = world.identity().secret() {
                sign(&world, secret, head.uri.path(), &mut head.headers, &message);
            }
            let request = Request::from_parts(head, Body::new(Full::new(message)));
            Ok(channel.call(request).await?)
        })
    }
}
