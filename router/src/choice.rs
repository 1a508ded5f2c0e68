//! Hot path. One answer to one prompt while it is generated: steps in, text out.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::stream::{Stream, StreamExt};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tracing::info;
use types::step::PromptLogprob;
use types::{FinishReason, Prompt, Step, Usage};

use crate::accept::RequestOrigin;
use crate::error::ServeError;
use crate::requests::{Explanation, Part};
use crate::serve::{Generation, Serve};
use crate::text::{Detokenizer, Parts, PartsParser};

/// The part of an answer that one step adds.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    /// The index of the answer among the request's answers.
    pub choice: usize,
    /// The new text, and what a chat's answer has besides text. Empty while a character is incomplete, or while
    /// the text may be the beginning of a stop string or a tool call.
    pub parts: Parts,
    /// The position of the step's text in the answer, in characters.
    pub offset: usize,
    pub step: Step,
    /// Why the answer ended; `None` before the last delta.
    pub finish: Option<ChoiceFinish>,
    /// The stop string that ended the answer.
    pub stop_string: Option<String>,
    /// Where the time went, in the last delta of a request that asks for it.
    pub explanation: Option<Box<Explanation>>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChoiceFinish {
    Stop,
    Length,
    /// The model stopped after a tool call, and waits for the tool's result.
    ToolCalls,
}

/// One answer while it is generated: a stream that ends after a delta with `finish` set, or after an error. Dropping it
/// cancels the work on all nodes.
#[derive(Debug)]
pub struct Choice {
    index: usize,
    generation: Generation,
    detokenizer: Detokenizer,
    /// Divides the text; `None`: all of it is text.
    parts: Option<PartsParser>,
    has_calls: bool,
    /// The timer that aborts the answer. The cluster enforces deadlines too, but this does not rely on it.
    deadline: Pin<Box<Sleep>>,
    has_ended: bool,
    n_steps: u32,
    /// The parts of the answer that were read while other answers of the request began. The answer's tokens
    /// bound it.
    ahead: VecDeque<Delta>,
    origin: RequestOrigin,
}

impl Choice {
    /// Starts an answer. Returns when its first step is available, or with an error that can still become a
    /// status code.
    pub async fn begin(
        serve: &dyn Serve,
        index: usize,
        prompt: Prompt,
        detokenizer: Detokenizer,
        origin: RequestOrigin,
    ) -> Result<Self, ServeError> {
        let deadline = prompt.deadline.instant().into();
        let generating = serve.generate(prompt, origin.arrival);
        let generation = timeout_at(deadline, generating).await.map_err(|_| too_late())??;
        Ok(Self {
            index,
            generation,
            detokenizer,
            parts: None,
            has_calls: false,
            deadline: Box::pin(sleep_until(deadline)),
            has_ended: false,
            n_steps: 0,
            ahead: VecDeque::new(),
            origin,
        })
    }

    /// Divides the answer's text.
    #[must_use]
    pub fn divided_by(self, parts: Option<PartsParser>) -> Self {
        Self { parts, ..self }
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub fn usage(&self) -> Usage {
        self.generation.usage
    }

    /// Returns the log-probabilities of the prompt, once.
    pub fn take_prompt_logprobs(&mut self) -> Vec<PromptLogprob> {
        std::mem::take(&mut self.generation.prompt_logprobs)
    }

    /// Reads the parts that are ready, while other answers of the request begin. An answer that is not read keeps its
    /// KV room, and the others may wait for that room.
    pub(crate) fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Result<(), ServeError> {
        while let Poll::Ready(Some(delta)) = self.poll_delta(cx) {
            self.ahead.push_back(delta?);
        }
        Ok(())
    }

    fn poll_delta(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ServeError>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let delta = ready!(self.poll_step(cx)).and_then(|step| self.next_delta(step));
        if delta.as_ref().map_or(true, |delta| delta.finish.is_some()) {
            self.end();
        }
        Poll::Ready(Some(delta))
    }

    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Result<Step, ServeError>> {
        match self.generation.steps.poll_next_unpin(cx) {
            Poll::Ready(Some(step)) => Poll::Ready(step),
            Poll::Ready(None) => Poll::Ready(Err(out_of_order("the steps ended without a last one"))),
            Poll::Pending => self.deadline.as_mut().poll(cx).map(|()| Err(too_late())),
        }
    }

    /// Releases all that the answer holds: its work on the nodes, and its place in the tenant's limits.
    fn end(&mut self) {
        self.has_ended = true;
        self.generation.steps = futures::stream::empty().boxed();
        self.origin.permit = None;
    }

    /// Makes the delta of the next step.
    fn next_delta(&mut self, step: Step) -> Result<Delta, ServeError> {
        if step.index != self.n_steps {
            return Err(out_of_order(&format!("step {} came as step {}", step.index, self.n_steps)));
        }
        self.n_steps += 1;
        if let Some(permit) = &self.origin.permit {
            permit.generated(Instant::now());
        }
        Ok(self.delta(step))
    }

    fn delta(&mut self, step: Step) -> Delta {
        let (mut text, offset) = (String::new(), self.detokenizer.n_characters());
        let stopped = self.detokenizer.push(step.token, &mut text).is_break();
        if stopped {
            self.generation.complete.say();
        }
        let finish = if stopped { Some(FinishReason::Stop) } else { step.finish };
        if finish.is_some() && !stopped {
            self.detokenizer.finish(&mut text);
        }
        let explanation = finish.and_then(|_| self.explanation());
        let parts = match &mut self.parts {
            Some(parser) => {
                let mut parts = parser.push(text);
                if finish.is_some() {
                    parts.add(parser.finish());
                }
                parts
            }
            None => Parts { text, ..Parts::default() },
        };
        self.has_calls |= !parts.calls.is_empty();
        let finish = finish.map(|finish| match finish {
            FinishReason::Stop if self.has_calls => ChoiceFinish::ToolCalls,
            FinishReason::Stop => ChoiceFinish::Stop,
            FinishReason::Length => ChoiceFinish::Length,
        });
        let stop_string = self.detokenizer.stopped_by().filter(|_| stopped).map(str::to_owned);
        Delta { choice: self.index, parts, offset, step, finish, stop_string, explanation }
    }

    /// Returns the explanation of a request that asks for it, and logs it as an event of the request's span.
    fn explanation(&self) -> Option<Box<Explanation>> {
        let explanation = self.generation.explained.as_ref()?.explanation();
        let ms = |took: Duration| took.as_secs_f64() * 1e3;
        info!(
            total_ms = ms(explanation.total),
            first_token_ms = explanation.first_token.map(ms),
            worst_gap_ms = explanation.worst_gap.map(|gap| ms(gap.took)),
            largest = explanation.largest.map(Part::as_str),
            parts = explanation.in_words(),
            "request explained"
        );
        Some(Box::new(explanation))
    }
}

impl Stream for Choice {
    type Item = Result<Delta, ServeError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let choice = self.get_mut();
        match choice.ahead.pop_front() {
            Some(delta) => Poll::Ready(Some(Ok(delta))),
            None => choice.poll_delta(cx),
        }
    }
}

fn too_late() -> ServeError {
    ServeError::DeadlinePassed { reason: "the router waited for the next token".to_owned() }
}

fn out_of_order(reason: &str) -> ServeError {
    ServeError::Failed { reason: reason.to_owned() }
}

/// A complete answer: its parts and all steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeChoice {
    pub parts: Parts,
    /// Every step, with the position of its text in the answer.
    pub steps: Vec<(usize, Step)>,
    pub finish: Option<ChoiceFinish>,
    pub explanation: Option<Box<Explanation>>,
}

impl WholeChoice {
    pub fn add(&mut self, delta: Delta) {
        self.parts.add(delta.parts);
        self.steps.push((delta.offset, delta.step));
        self.finish = delta.finish;
        self.explanation = delta.explanation;
    }

    pub fn token_ids(&self) -> Vec<u32> {
        self.steps.iter().map(|(_, step)| step.token.0).collect()
    }
}
