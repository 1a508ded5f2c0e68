//! The client's side of signatures: the whole message is collected before it is sent.

use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use axum::body::Bytes;
use futures::future::BoxFuture;
use http::request::Parts;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use tonic::body::Body;
use tonic::transport::Channel;
use tower::{BoxError, Service, ServiceExt as _};

use crate::identity::call::{INSTANCE_HEADER, TARGET_HEADER, sign};
use crate::world::World;

/// A channel that signs each call if the process has the cluster's secret.
///
/// A signature covers the whole message, so the message is collected before it is sent. All of Baton's calls
/// send one message; a stream of messages would wait for its end here.
#[derive(Clone, Debug)]
pub struct SignedChannel {
    channel: Channel,
    world: World,
    /// The address that the channel connects to, or the instance there, once it has asked for its name. Locked for a
    /// clone, never across an await.
    target: Arc<RwLock<HeaderValue>>,
}

impl SignedChannel {
    pub(super) fn new(channel: Channel, world: World, addr: &str) -> Self {
        let target = HeaderValue::from_str(addr).unwrap_or(HeaderValue::from_static(""));
        Self { channel, world, target: Arc::new(RwLock::new(target)) }
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
        let (world, target) = (self.world.clone(), Arc::clone(&self.target));
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let message = body.collect().await?.to_bytes();
            let known = target.read().unwrap_or_else(PoisonError::into_inner).clone();
            let answer = channel.call(signed(&world, head.clone(), known, &message)).await?;
            let Some(instance) = answer.headers().get(INSTANCE_HEADER).cloned() else { return Ok(answer) };
            target.write().unwrap_or_else(PoisonError::into_inner).clone_from(&instance);
            let again = signed(&world, head, instance, &message);
            Ok(channel.ready().await?.call(again).await?)
        })
    }
}

fn signed(world: &World, mut head: Parts, target: HeaderValue, message: &Bytes) -> Request<Body> {
    head.headers.insert(TARGET_HEADER, target);
    if let Some(secret) = world.identity().secret() {
        sign(world, secret, head.uri.path(), &mut head.headers, message);
    }
    Request::from_parts(head, Body::new(Full::new(message.clone())))
}
