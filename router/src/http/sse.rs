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
use super::fields::StreamUsage;
use crate::choice::Delta;
use crate::error::ServeError;

/// The time without an event after which a comment is sent, so that no proxy closes the connection as idle.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The initial size of the buffer, usually enough for the events of one step.
const ROOM_BYTES: usize = 512;

/// The header that asks proxies not to buffer the stream.
const ACCEL_BUFFERING: &str = "x-accel-buffering";

/// Writes the events of one answer.
pub(crate) trait EventWriter: Send + 'static {
    fn delta(&mut self, delta: &Delta, out: &mut BytesMut);

    /// Writes an error event. The head with status 200 is already sent, so only the event reports the error.
    fn error(&mut self, error: ServeError, out: &mut BytesMut);

    fn end(&mut self, out: &mut BytesMut);
}

/// Makes the response of a streamed answer. Its first event follows the head directly, because the first step
/// is available.
pub(crate) fn respond(deltas: Deltas, writer: impl EventWriter) -> Response {
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    let events = Events { deltas, writer, out: BytesMut::new() };
    (headers, [(ACCEL_BUFFERING, "no")], Body::from_stream(in_span(stream_of(events)))).into_response()
}

impl<S: AnswerFormat> Answer<S> {
    /// Answers a request, whole or as events.
    pub(crate) async fn respond(self) -> Result<Response, HttpError> {
        if !self.context.options.stream {
            return self.whole().await;
        }
        let (usage, opened) = (self.usage(), vec![false; self.choices.len()]);
        let (context, shape, deltas) = self.into_parts();
        Ok(respond(deltas, ChunkWriter { context, shape, opened, usage, completion_tokens: 0 }))
    }
}

/// Polls the body's stream in the request's span, because the connection that polls it has another span.
fn in_span(mut stream: impl Stream<Item = Bytes> + Unpin) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let span = Span::current();
    futures::stream::poll_fn(move |cx| {
        span.in_scope(|| stream.poll_next_unpin(cx)).map(|bytes| bytes.map(Ok))
    })
}

fn stream_of(events: Events<impl EventWriter>) -> impl Stream<Item = Bytes> + Unpin {
    let next = |events: Option<Events<_>>| async move { events?.next().await };
    futures::stream::unfold(Some(events), next).boxed()
}

/// The events of one answer. Dropping it cancels all its choices.
struct Events<W> {
    deltas: Deltas,
    writer: W,
    /// The buffer for events. Its memory is reused after the bytes are sent.
    out: BytesMut,
}

impl<W: EventWriter> Events<W> {
    /// Returns the next bytes, and the events after them unless these are the last. `None` after the end.
    async fn next(mut self) -> Option<(Bytes, Option<Self>)> {
        let Self { deltas, writer, out } = &mut self;
        out.reserve(ROOM_BYTES);
        let mut goes_on = true;
        while out.is_empty() {
            match timeout(KEEP_ALIVE, deltas.next()).await {
                Err(_) => out.put_slice(b": keep-alive\n\n"),
                Ok(Some(Ok(delta))) => writer.delta(&delta, out),
                Ok(last) => {
                    match last {
                        Some(Err(error)) => {
                            warn!(%error, "streamed answer to client failed");
                            writer.error(error, out);
                        }
                        _ => writer.end(out),
                    }
                    goes_on = false;
                    break;
                }
            }
        }
        Some((self.out.split().freeze(), goes_on.then_some(self)))
    }
}

/// Writes an answer that is a list of choices, as OpenAI's chunks.
struct ChunkWriter<S> {
    context: AnswerContext,
    shape: S,
    /// Whether each choice has sent its opening chunk.
    opened: Vec<bool>,
    usage: Usage,
    completion_tokens: u32,
}

impl<S: AnswerFormat> ChunkWriter<S> {
    /// Returns the field `usage` of a chunk: `null` in chunks without it, if another chunk has it.
    fn usage_so_far(&self) -> Option<Option<UsageFields>> {
        match self.context.options.usage {
            StreamUsage::None => None,
            StreamUsage::Last => Some(None),
            StreamUsage::All => Some(Some(UsageFields::new(self.usage, self.completion_tokens))),
        }
    }
}

impl<S: AnswerFormat> EventWriter for ChunkWriter<S> {
    fn delta(&mut self, delta: &Delta, out: &mut BytesMut) {
        self.completion_tokens += 1;
        let usage = self.usage_so_far();
        let Self { context, shape, .. } = self;
        if !std::mem::replace(&mut self.opened[delta.choice], true)
            && let Some(opening) = shape.opening(context, delta.choice)
        {
            let prompt_token_ids = shape.prompt_tokens(context).filter(|_| delta.choice == 0);
            write_event(out, &Envelope { prompt_token_ids, ..chunk::<S, _>(context, usage, [opening]) });
        }
        if shows(context, delta) {
            let explanations = delta.explanation.iter().map(|one| explained(delta.choice, one)).collect();
            let chunk = chunk::<S, _>(context, usage, [shape.chunk(context, delta)]);
            write_event(out, &Envelope { explanations, ..chunk });
        }
    }

    fn error(&mut self, error: ServeError, out: &mut BytesMut) {
        out.put_slice(b"event: error\n");
        write_event(out, &HttpError::from(error).body());
    }

    fn end(&mut self, out: &mut BytesMut) {
        if self.context.options.usage != StreamUsage::None {
            let usage = Some(Some(UsageFields::new(self.usage, self.completion_tokens)));
            let no_choices: [S::Chunk<'_>; 0] = [];
            write_event(out, &chunk::<S, _>(&self.context, usage, no_choices));
        }
        out.put_slice(b"data: [DONE]\n\n");
        info!(n_choices = self.opened.len(), completion_tokens = self.completion_tokens, "request answered");
    }
}

/// Returns whether a delta has visible output. A step in the middle of a character has none.
fn shows(context: &AnswerContext, delta: &Delta) -> bool {
    let about_the_token = context.options.token_ids || delta.step.logprobs.is_some();
    !delta.parts.is_empty() || delta.finish.is_some() || about_the_token
}

fn chunk<S: AnswerFormat, C>(
    context: &AnswerContext,
    usage: Option<Option<UsageFields>>,
    choices: C,
) -> Envelope<'_, C> {
    Envelope { usage, ..Envelope::new(context, S::CHUNK, choices) }
}

pub(crate) fn write_event(out: &mut BytesMut, event: &impl Serialize) {
    out.put_slice(b"data: ");
    serde_json::to_writer(out.writer(), event).expect("strings and numbers always have a JSON form");
    out.put_slice(b"\n\n");
}
