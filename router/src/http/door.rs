//! What the endpoints share: one request's way from its body to its answer.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use chassis::World;
use futures::future::try_join_all;
use http::HeaderMap;
use types::{Prompt, RequestId};

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
        let begin = |choice: usize, prompt: Prompt| {
            let detokenizer = Detokenizer::new(Arc::clone(&model.tokenizer), &stop, wishes.min_tokens);
            Choice::begin(self.serve.as_ref(), choice, prompt, detokenizer)
        };
        let n = about.n.max(1);
        let inputs = prompts.chunks(n).enumerate();
        let begun = inputs.map(|(nth, answers)| begin_answers(nth * n, answers, &begin));
        let choices = try_join_all(begun).await?.into_iter().flatten().collect();
        Ok(Answer { about, shape, choices })
    }
}

/// Begins all answers to one prompt: the first one alone, and the others when its prefill is done. They find its blocks
/// in the nodes' caches and lease them, so that a prompt is computed once, however many answers are asked for.
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
