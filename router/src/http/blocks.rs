//! Answers that are lists of blocks: Anthropic's messages and OpenAI's responses. A block is reasoning, text or a
//! tool call.

use axum::Json;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, BytesMut};
use futures::StreamExt;
use serde::de::IgnoredAny;
use serde_json::Value;
use tracing::info;
use types::Usage;

use super::answer::{Answer, AnswerContext, AnswerShape};
use super::error::HttpError;
use super::explanation::explained;
use super::sse::{self, EventWriter};
use crate::choice::{ChoiceFinish, Delta};
use crate::error::ServeError;
use crate::requests::Explanation;
use crate::text::Parts;
use crate::text::tools::CallStart;

/// The format of one endpoint's answers.
pub(crate) trait BlockFormat: AnswerShape {
    /// Returns the events before the first block.
    fn start(&mut self, context: &AnswerContext, usage: Usage) -> Vec<NamedEvent>;

    fn block(&mut self, event: BlockEvent<'_>) -> Vec<NamedEvent>;

    /// Returns the events after the last block.
    fn end(&mut self, context: &AnswerContext, answer: &BlockAnswer) -> Vec<NamedEvent>;

    fn error(&mut self, error: &HttpError) -> NamedEvent;

    fn whole(&self, context: &AnswerContext, answer: &BlockAnswer) -> Value;
}

/// The name and the data of a server-sent event.
pub(crate) type NamedEvent = (&'static str, Value);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BlockKind {
    Reasoning,
    Text,
    /// The block's text is the arguments.
    Call(CallStart),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) index: usize,
    pub(crate) kind: BlockKind,
    pub(crate) text: String,
    /// Whether the answer's longest length ended the block.
    pub(crate) is_cut: bool,
}

impl Block {
    /// Returns whether the block is a call with complete arguments, which nothing follows.
    fn is_whole_call(&self) -> bool {
        matches!(self.kind, BlockKind::Call(_)) && serde_json::from_str::<IgnoredAny>(&self.text).is_ok()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum BlockEvent<'a> {
    Begin(&'a Block),
    /// A piece was appended to the block.
    Piece(&'a Block, &'a str),
    End(&'a Block),
}

/// An answer, complete or under way.
#[derive(Debug, Default)]
pub(crate) struct BlockAnswer {
    pub(crate) blocks: Vec<Block>,
    pub(crate) usage: Usage,
    pub(crate) output_tokens: u32,
    /// The tokens up to the end of the reasoning; zero without reasoning.
    pub(crate) reasoning_tokens: u32,
    pub(crate) finish: Option<ChoiceFinish>,
    /// The stop string that ended the answer.
    pub(crate) stop_string: Option<String>,
    /// Where the time went, for a request that asks for it.
    explanation: Option<Box<Explanation>>,
    /// Whether the last block may go on.
    is_open: bool,
}

impl BlockAnswer {
    /// Makes an answer without blocks.
    pub(crate) fn of(usage: Usage) -> Self {
        Self { usage, ..Self::default() }
    }

    /// Adds a delta and reports its effect on blocks.
    fn add(&mut self, delta: &Delta, report: &mut impl FnMut(BlockEvent<'_>)) {
        let Parts { reasoning, text, calls } = &delta.parts;
        self.output_tokens += 1;
        self.append(&BlockKind::Reasoning, reasoning, report);
        let in_call =
            self.is_open && matches!(self.blocks.last(), Some(Block { kind: BlockKind::Call(_), .. }));
        if !in_call {
            self.append(&BlockKind::Text, text, report);
        }
        for call in calls {
            if let Some(start) = &call.start {
                self.begin(BlockKind::Call(start.clone()), report);
            }
            self.extend(&call.arguments, report);
        }
        if in_call {
            self.append(&BlockKind::Text, text, report);
        }
        if self.blocks.last().is_some_and(|block| block.kind == BlockKind::Reasoning) {
            self.reasoning_tokens = self.output_tokens;
        }
        if delta.finish.is_some() {
            (self.finish, self.stop_string) = (delta.finish, delta.stop_string.clone());
            self.explanation = delta.explanation.clone();
            if let Some(block) = self.blocks.last_mut().filter(|_| self.is_open) {
                block.is_cut = delta.finish == Some(ChoiceFinish::Length) && !block.is_whole_call();
            }
            self.close(report);
        }
    }

    fn append(&mut self, kind: &BlockKind, piece: &str, report: &mut impl FnMut(BlockEvent<'_>)) {
        if piece.is_empty() {
            return;
        }
        let goes_on = self.is_open && self.blocks.last().is_some_and(|block| block.kind == *kind);
        if !goes_on {
            self.begin(kind.clone(), report);
        }
        self.extend(piece, report);
    }

    fn begin(&mut self, kind: BlockKind, report: &mut impl FnMut(BlockEvent<'_>)) {
        self.close(report);
        let block = Block { index: self.blocks.len(), kind, text: String::new(), is_cut: false };
        report(BlockEvent::Begin(&block));
        self.blocks.push(block);
        self.is_open = true;
    }

    fn extend(&mut self, piece: &str, report: &mut impl FnMut(BlockEvent<'_>)) {
        if let Some(block) = self.blocks.last_mut().filter(|_| !piece.is_empty()) {
            block.text.push_str(piece);
            report(BlockEvent::Piece(block, piece));
        }
    }

    fn close(&mut self, report: &mut impl FnMut(BlockEvent<'_>)) {
        if let Some(block) = self.blocks.last().filter(|_| self.is_open) {
            report(BlockEvent::End(block));
        }
        self.is_open = false;
    }

    /// Adds the explanation to the complete answer, or to the last event of a stream.
    fn explain(&self, data: &mut Value) {
        if let Some(explanation) = &self.explanation {
            data["explanations"] = Value::from(vec![explained(0, explanation)]);
        }
    }
}

/// Answers a request, whole or as events.
pub(crate) async fn respond<F: BlockFormat>(answer: Answer<F>) -> Result<Response, HttpError> {
    let usage = answer.usage();
    let is_streamed = answer.context.options.stream;
    let (context, format, mut deltas) = answer.into_parts();
    let mut blocks = BlockAnswer::of(usage);
    if is_streamed {
        return Ok(sse::respond(deltas, BlockWriter { context, format, answer: blocks }));
    }
    while let Some(delta) = deltas.next().await {
        blocks.add(&delta?, &mut |_| ());
    }
    info!(n_choices = 1, completion_tokens = blocks.output_tokens, "request answered");
    let mut whole = format.whole(&context, &blocks);
    blocks.explain(&mut whole);
    Ok(Json(whole).into_response())
}

/// Writes the events of one streamed answer.
struct BlockWriter<F> {
    context: AnswerContext,
    format: F,
    answer: BlockAnswer,
}

impl<F: BlockFormat> EventWriter for BlockWriter<F> {
    fn delta(&mut self, delta: &Delta, out: &mut BytesMut) {
        let Self { context, format, answer } = self;
        if answer.output_tokens == 0 {
            write_all(out, format.start(context, answer.usage));
        }
        answer.add(delta, &mut |event| write_all(out, format.block(event)));
    }

    fn error(&mut self, error: ServeError, out: &mut BytesMut) {
        let event = self.format.error(&error.into());
        write_all(out, vec![event]);
    }

    fn end(&mut self, out: &mut BytesMut) {
        let mut events = self.format.end(&self.context, &self.answer);
        if let Some((_, data)) = events.last_mut() {
            self.answer.explain(data);
        }
        write_all(out, events);
        info!(n_choices = 1, completion_tokens = self.answer.output_tokens, "request answered");
    }
}

fn write_all(out: &mut BytesMut, events: Vec<NamedEvent>) {
    for (name, data) in events {
        out.put_slice(b"event: ");
        out.put_slice(name.as_bytes());
        out.put_slice(b"\n");
        sse::write_event(out, &data);
    }
}
