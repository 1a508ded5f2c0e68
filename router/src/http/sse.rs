//! Hot path. Writes an answer as server-sent events: one for each step with visible output.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use chassis::telemetry::mark_failed;
use futures::stream::{Stream, StreamExt};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep_until};
use tracing::{Span, info};
use types::Usage;

use super::answer::{Answer, AnswerContext, AnswerFormat, Envelope, UsageFields};
use super::error::{Code, HttpError};
use super::explanation::explained;
use super::fields::{AnswerOptions, StreamUsage};
use crate::answers::Deltas;
use crate::choice::Delta;
use crate::error::ServeError;
use crate::text::Parts;

/// The time without an event after which a comment is sent, so that no proxy closes the connection as idle.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The initial size of the buffer, usually enough for the events of one step.
const ROOM_BYTES: usize = 512;

/// The size after which events are sent without those of further steps that are ready.
const WRITE_BYTES: usize = 16 << 10;

/// The header that asks proxies not to buffer the stream.
const ACCEL_BUFFERING: &str = "x-accel-buffering";

/// Writes the events of one answer.
pub(crate) trait EventWriter: Send + Unpin + 'static {
    fn delta(&mut self, delta: &Delta, out: &mut BytesMut);

    /// Writes an error event. The head with status 200 is already sent, so only the event reports the error.
    fn error(&mut self, error: ServeError, out: &mut BytesMut);

    fn end(&mut self, out: &mut BytesMut);
}

/// Makes the response of a streamed answer. Its first event follows the head directly, because the first step
/// is available.
pub(crate) fn respond(deltas: Deltas, writer: impl EventWriter) -> Response {
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    let events = Events::new(deltas, writer);
    (headers, [(ACCEL_BUFFERING, "no")], Body::from_stream(in_span(events))).into_response()
}

impl<S: AnswerFormat> Answer<S> {
    /// Answers a request, whole or as events.
    pub(crate) async fn respond(self) -> Result<Response, HttpError> {
        if !self.context.options.stream {
            return self.whole().await;
        }
        let (usage, opened) = (self.usage(), vec![false; self.answers.choices.len()]);
        let (context, shape, deltas) = self.into_parts();
        let plain = std::iter::repeat_with(|| None).take(opened.len()).collect();
        Ok(respond(deltas, ChunkWriter { context, shape, opened, plain, usage, completion_tokens: 0 }))
    }
}

/// Polls the body's stream in the request's span, because the connection that polls it has another span. Without a
/// collector of spans there is none.
fn in_span(mut stream: impl Stream<Item = Bytes> + Unpin) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let span = Some(Span::current()).filter(|span| !span.is_none());
    futures::stream::poll_fn(move |cx| {
        let _entered = span.as_ref().map(Span::enter);
        stream.poll_next_unpin(cx).map(|bytes| bytes.map(Ok))
    })
}

/// The events of one answer. Dropping it cancels all its choices.
struct Events<W> {
    deltas: Deltas,
    writer: W,
    /// The buffer for events. Its memory is reused after the bytes are sent.
    out: BytesMut,
    has_ended: bool,
    idle: IdleTimer,
}

/// One timer for the comments in silence. An event moves the time of the next comment, and the timer only follows when it
/// fires.
struct IdleTimer {
    timer: Pin<Box<Sleep>>,
    due: Instant,
}

impl<W> Events<W> {
    fn new(deltas: Deltas, writer: W) -> Self {
        let due = Instant::now() + KEEP_ALIVE;
        let idle = IdleTimer { timer: Box::pin(sleep_until(due)), due };
        Self { deltas, writer, out: BytesMut::new(), has_ended: false, idle }
    }
}

impl IdleTimer {
    /// Polls the time of the next comment.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(cx));
            if self.timer.deadline() >= self.due {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(self.due);
        }
    }

    fn restart(&mut self) {
        self.due = Instant::now() + KEEP_ALIVE;
    }
}

impl<W: EventWriter> Events<W> {
    /// Writes the events of all steps that are ready. Returns `Pending` when no other step is ready.
    fn poll_deltas(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.has_ended && self.out.len() < WRITE_BYTES {
            match ready!(self.deltas.poll_next_unpin(cx)) {
                Some(Ok(delta)) => self.writer.delta(&delta, &mut self.out),
                Some(Err(error)) => {
                    if Code::from(&error).status().is_server_error() {
                        mark_failed(&Span::current());
                    }
                    self.writer.error(error, &mut self.out);
                    self.has_ended = true;
                }
                None => {
                    self.writer.end(&mut self.out);
                    self.has_ended = true;
                }
            }
        }
        Poll::Ready(())
    }
}

/// Each item is one write to the client.
impl<W: EventWriter> Stream for Events<W> {
    type Item = Bytes;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let events = self.get_mut();
        if events.has_ended {
            return Poll::Ready(None);
        }
        events.out.reserve(ROOM_BYTES);
        if events.poll_deltas(cx).is_pending() && events.out.is_empty() {
            ready!(events.idle.poll(cx));
            events.out.put_slice(b": keep-alive\n\n");
        }
        events.idle.restart();
        Poll::Ready(Some(events.out.split().freeze()))
    }
}

/// Writes an answer that is a list of choices, as OpenAI's chunks.
struct ChunkWriter<S> {
    context: AnswerContext,
    shape: S,
    /// Whether each choice has sent its opening chunk.
    opened: Vec<bool>,
    /// The constant parts of each choice's events that have only text, from its first such event on.
    plain: Vec<Option<TextEvent>>,
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

impl<S: AnswerFormat> ChunkWriter<S> {
    /// Writes the event of a delta that has only text. Returns false for other deltas, without writing.
    fn write_plain(&mut self, delta: &Delta, out: &mut BytesMut) -> bool {
        let Self { context, shape, opened, plain, .. } = self;
        let AnswerOptions { usage, token_ids, .. } = context.options;
        if token_ids || usage == StreamUsage::All || !opened[delta.choice] || !has_only_text(delta) {
            return false;
        }
        let event = plain[delta.choice].get_or_insert_with(|| {
            let mut example = delta.clone();
            TEXT_MARK.clone_into(&mut example.parts.text);
            let usage = (usage == StreamUsage::Last).then_some(None);
            TextEvent::of(&chunk::<S, _>(context, usage, [shape.chunk(context, &example)]))
        });
        event.write(&delta.parts.text, out);
        true
    }
}

fn has_only_text(delta: &Delta) -> bool {
    let Parts { reasoning, text, calls } = &delta.parts;
    let has_others = !reasoning.is_empty() || !calls.is_empty() || delta.step.logprobs.is_some();
    !text.is_empty() && !has_others && delta.finish.is_none() && delta.explanation.is_none()
}

/// A text that no other value of an event has: names have no control characters.
const TEXT_MARK: &str = "\u{1}text\u{1}";

/// The bytes before and after the text in an event.
#[derive(Debug)]
struct TextEvent {
    before: Bytes,
    after: Bytes,
}

impl TextEvent {
    /// Divides an event at the mark, which is its text.
    fn of(example: &impl Serialize) -> Self {
        let mut event = BytesMut::new();
        write_event(&mut event, example);
        let mark = serde_json::to_vec(TEXT_MARK).expect("a text always has a JSON form");
        let at = event.windows(mark.len()).rposition(|bytes| bytes == mark).expect("it is the event's text");
        let mut after = event.split_off(at);
        Self { before: event.freeze(), after: after.split_off(mark.len()).freeze() }
    }

    fn write(&self, text: &str, out: &mut BytesMut) {
        out.put_slice(&self.before);
        serde_json::to_writer((&mut *out).writer(), text).expect("a text always has a JSON form");
        out.put_slice(&self.after);
    }
}

impl<S: AnswerFormat> EventWriter for ChunkWriter<S> {
    fn delta(&mut self, delta: &Delta, out: &mut BytesMut) {
        self.completion_tokens += u32::from(!self.context.options.prompt_only);
        if self.write_plain(delta, out) {
            return;
        }
        let usage = self.usage_so_far();
        let Self { context, shape, .. } = self;
        if !std::mem::replace(&mut self.opened[delta.choice], true)
            && let Some(opening) = shape.opening(context, delta.choice)
        {
            let prompt = shape.only_prompt(context).filter(|_| delta.choice == 0);
            let prompt_token_ids = prompt.and_then(|prompt| context.if_ids(&prompt.tokens));
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
