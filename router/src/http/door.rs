//! What the endpoints share: one request's way from its body to its answer.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use chassis::World;
use futures::future::try_join_all;
use http::HeaderMap;
use types::RequestId;

use super::answer::{About, Answer, Shape};
use super::body::{self, BodyLimits};
use super::caller::caller;
use super::error::{Code, HttpError};
use super::fields::Manner;
use super::sse;
use crate::accept::{Accepted, Acceptor, Caller, Inputs, Wishes};
use crate::choice::Choice;
use crate::serve::Serve;
use crate::text::{Detokenizer, RouterModel, RouterModels, by_size};

/// The HTTP door: what it needs to answer requests. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Door {
    pub serve: Arc<dyn Serve>,
    pub models: RouterModels,
    pub acceptor: Acceptor,
    pub world: World,
    pub body: BodyLimits,
}

/// A request that is understood, but not accepted yet.
#[derive(Debug)]
pub(crate) struct Ask<S> {
    pub(crate) model: Arc<RouterModel>,
    pub(crate) inputs: Inputs,
    pub(crate) wishes: Wishes,
    pub(crate) manner: Manner,
    pub(crate) shape: S,
}

/// Reads an endpoint's JSON: fields, template, tokens.
pub(crate) type Understand<S> = fn(&Door, &[u8]) -> Result<Ask<S>, HttpError>;

impl Door {
    pub(crate) async fn answer<S: Shape>(
        self,
        id: RequestId,
        headers: HeaderMap,
        body: Body,
        understand: Understand<S>,
    ) -> Result<Response, HttpError> {
        let caller = caller(&self.acceptor, id, &headers)?;
        let within = self.body.within.min(self.world.left(caller.deadline));
        let body = body::read(body, BodyLimits { within, ..self.body }).await?;
        let door = self.clone();
        let understood = by_size(body.len(), move || understand(&door, &body)).await;
        let ask = understood.map_err(|error| HttpError::new(Code::Internal, error.to_string()))??;
        let stream = ask.manner.stream;
        let answer = self.begin(ask, &caller).await?;
        if stream { Ok(sse::respond(answer)) } else { answer.whole().await }
    }

    /// Every choice has its first step when this returns, or the whole request is refused.
    async fn begin<S: Shape>(&self, ask: Ask<S>, caller: &Caller) -> Result<Answer<S>, HttpError> {
        let Ask { model, inputs, wishes, manner, shape } = ask;
        let Accepted { prompts, stop } = self.acceptor.accept(&model, inputs, &wishes, caller)?;
        let about = About {
            id: format!("{}{}", S::ID, caller.id),
            created: self.world.unix_time().as_secs(),
            model: Arc::clone(&model),
            manner,
            n: wishes.n as usize,
            prompts: About::prompts(&prompts),
        };
        let begin = |(choice, prompt)| {
            let detokenizer = Detokenizer::new(Arc::clone(&model.tokenizer), &stop, wishes.min_tokens);
            Choice::begin(self.serve.as_ref(), choice, prompt, detokenizer)
        };
        let choices = try_join_all(prompts.into_iter().enumerate().map(begin)).await?;
        Ok(Answer { about, shape, choices })
    }
}
