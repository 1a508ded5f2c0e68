//! Divides the calls in an answer from its text, whatever their format.

use std::sync::Arc;

use super::{CallDelta, CallReader, Calls, Place, Progress, ToolFormat, ToolSet};
use crate::text::tags::TagFinder;

/// Divides one answer, as its text arrives. It reads one character at a time, so the result does not depend
/// on how the text is cut.
#[derive(Debug)]
pub(in crate::text) struct ToolParser {
    format: ToolFormat,
    tools: Arc<ToolSet>,
    calls: Calls,
    finder: TagFinder,
    open: Option<OpenCalls>,
    place: Place,
}

/// The text after a marker while it is read.
#[derive(Debug)]
struct OpenCalls {
    reader: Box<dyn CallReader>,
    /// The text since the marker or the last call, which becomes text if it is not a call.
    held: String,
    /// Whether a call has begun in it, so that it cannot become text.
    has_begun: bool,
}

impl ToolParser {
    pub(in crate::text) fn new(format: ToolFormat, tools: Arc<ToolSet>, calls: Calls) -> Self {
        Self { format, tools, calls, finder: TagFinder::dropping_spaces(), open: None, place: Place::Start }
    }

    /// Appends a piece's text, and its parts of calls.
    pub(in crate::text) fn push(&mut self, piece: &str, text: &mut String, calls: &mut Vec<CallDelta>) {
        piece.chars().for_each(|c| self.read(c, text));
        self.calls.take(calls);
    }

    /// Appends the text that is held back, at the end of the answer.
    pub(in crate::text) fn finish(&mut self, text: &mut String) {
        let held = match self.open.take() {
            Some(open) => open.held,
            None => self.finder.take_held(),
        };
        let is_separator = |c: char| c.is_whitespace() || c == ';';
        let ends_calls = self.calls.n() > 0 && held.chars().all(is_separator);
        if !ends_calls {
            text.push_str(&held);
        }
    }

    fn read(&mut self, c: char, text: &mut String) {
        match self.open.take() {
            None => self.search(c, text),
            Some(open) => self.read_call(open, c, text),
        }
    }

    fn search(&mut self, c: char, text: &mut String) {
        let n_before = text.len();
        if let Some(marker) = self.finder.push(c, self.format.markers(self.place), text) {
            let held = self.finder.take_spaces() + marker;
            let reader = self.format.reader(marker, &self.tools);
            self.open = Some(OpenCalls { reader, held, has_begun: false });
        }
        if text.len() > n_before {
            self.place = Place::Inside;
        }
    }

    fn read_call(&mut self, mut open: OpenCalls, c: char, text: &mut String) {
        let n_before = self.calls.n();
        let progress = open.reader.read(c, &mut self.calls);
        open.has_begun |= self.calls.n() > n_before;
        match progress {
            Progress::More => {
                if open.has_begun {
                    open.held.clear();
                } else {
                    open.held.push(c);
                }
                self.open = Some(open);
            }
            Progress::Taken => {
                open.held.clear();
                self.open = Some(OpenCalls { has_begun: false, ..open });
            }
            Progress::Ended(rest) => {
                self.place = Place::Start;
                rest.chars().for_each(|c| self.read(c, text));
            }
            Progress::NotACall => {
                self.place = if open.has_begun { Place::Start } else { Place::Inside };
                text.push_str(&open.held);
                self.read(c, text);
            }
        }
    }
}
