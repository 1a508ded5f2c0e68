//! Hot path. Writes an answer as server-sent events: one for each step with visible output.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::{Stream, StreamExt};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Serialize;
use tokio::time::timeout;
use tracing::{Span, info, warn};
use types::Usage;

use super::answer::{Answer, AnswerContext, AnswerFormat, Deltas, Envelope, UsageFields};
use super::error::HttpError;
use super::explanation::explained;
use crate::choice::Delta;
use crate::error::ServeError;

/// The time without an event after which a comment is sent, so that no proxy closes the connection as idle.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The initial size of the buffer, usually enough for the events of one step.
const ROOM_BYTES: usize = 512;

/// The header that asks proxies not to buffer the stream.
const ACCEL_BUFFERING: &str = "x-accel-buffering";

/// Makes the response of a streamed answer. Its first event follows the head directly, because the first step
/// is available.
pub(crate) fn respond<S: AnswerFormat>(answer: Answer<S>) -> Response {
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    (headers, [(ACCEL_BUFFERING, "no")], Body::from_stream(in_span(events(Events::new(answer)))))
        .into_response()
}

/// Polls the body's stream in the request's span, because the connection that polls it has another span.
fn in_span(mut stream: impl Stream<Item = Bytes> + Unpin) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let span = Span::current();
    futures::stream::poll_fn(move |cx| {
        span.in_scope(|| stream.poll_next_unpin(cx)).map(|bytes| bytes.map(Ok))
    })
}

fn events<S: AnswerFormat>(events: Events<S>) -> impl Stream<Item = Bytes> + Unpin {
    let next = |events: Option<Events<S>>| async move { events?.next().await };
    futures::stream::unfold(Some(events), next).boxed()
}

/// The writer of one answer's events. Dropping it cancels all its choices.
struct Events<S> {
    context: AnswerContext,
    shape: S,
    deltas: Deltas,
    /// Whether each choice has sent its opening chunk.
    opened: Vec<bool>,
    usage: Usage,
    completion_tokens: u32,
    /// The buffer for events. Its memory is reused after the bytes are sent.
    out: BytesMut,
}

impl<S: AnswerFormat> Events<S> {
    fn new(answer: Answer<S>) -> Self {
        let (usage, opened) = (answer.usage(), vec![false; answer.choices.len()]);
        let (context, shape, deltas) = answer.into_parts();
        Self { context, shape, deltas, opened, usage, completion_tokens: 0, out: BytesMut::new() }
    }

    /// Returns the next bytes, and the writer of the following ones unless these are the last. `None` after
    /// the end.
    async fn next(mut self) -> Option<(Bytes, Option<Self>)> {
        self.out.reserve(ROOM_BYTES);
        let mut goes_on = true;
        while self.out.is_empty() {
            goes_on = match timeout(KEEP_ALIVE, self.deltas.next()).await {
                Err(_) => self.write_comment(),
                Ok(Some(Ok(delta))) => self.write_delta(&delta),
                Ok(Some(Err(error))) => self.write_error(error),
                Ok(None) => self.write_end(),
            };
        }
        Some((self.out.split().freeze(), goes_on.then_some(self)))
    }

    // The methods that write return whether more events may follow.

    fn write_comment(&mut self) -> bool {
        self.out.put_slice(b": keep-alive\n\n");
        true
    }

    fn write_delta(&mut self, delta: &Delta) -> bool {
        let Self { context, shape, out, .. } = self;
        self.completion_tokens += 1;
        if !std::mem::replace(&mut self.opened[delta.choice], true)
            && let Some(opening) = shape.opening(context, delta.choice)
        {
            let prompt_token_ids = shape.prompt_tokens(context).filter(|_| delta.choice == 0);
            write_event(out, &Envelope { prompt_token_ids, ..chunk::<S, _>(context, [opening]) });
        }
        if shows(context, delta) {
            let explanations = delta.explanation.iter().map(|one| explained(delta.choice, one)).collect();
            let chunk = chunk::<S, _>(context, [shape.chunk(context, delta)]);
            write_event(out, &Envelope { explanations, ..chunk });
        }
        true
    }

    /// Writes an error event. The head with status 200 is already sent, so only the event reports the error.
    fn write_error(&mut self, error: ServeError) -> bool {
        warn!(%error, "streamed answer to client failed");
        self.out.put_slice(b"event: error\n");
        write_event(&mut self.out, &HttpError::from(error).body());
        false
    }

    fn write_end(&mut self) -> bool {
        if self.context.options.include_usage {
            let usage = Some(Some(UsageFields::new(self.usage, self.completion_tokens)));
            let no_choices: [S::Chunk<'_>; 0] = [];
            write_event(&mut self.out, &Envelope { usage, ..chunk::<S, _>(&self.context, no_choices) });
        }
        self.out.put_slice(b"data: [DONE]\n\n");
        info!(n_choices = self.opened.len(), completion_tokens = self.completion_tokens, "request answered");
        false
    }
}

/// Returns whether a delta has visible output. A step in the middle of a character has none.
fn shows(context: &AnswerContext, delta: &Delta) -> bool {
    let about_the_token = context.options.token_ids || delta.step.logprobs.is_some();
    !delta.text.is_empty() || delta.finish.is_some() || about_the_token
}

fn chunk<S: AnswerFormat, C>(context: &AnswerContext, choices: C) -> Envelope<'_, C> {
    let usage = context.options.include_usage.then_some(None);
    Envelope { usage, ..Envelope::new(context, S::CHUNK, choices) }
}

fn write_event(out: &mut BytesMut, event: &impl Serialize) {
    out.put_slice(b"data: ");
    serde_json::to_writer(out.writer(), event).expect("strings and numbers always have a JSON form");
    out.put_slice(b"\n\n");
}
