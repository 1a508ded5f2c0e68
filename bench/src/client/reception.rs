//! Hot path. Handles one response from its first byte to its record, without a socket or a clock: bytes and
//! times are arguments.

use crate::client::exchange::Assignment;
use crate::client::http::{Progress, ResponseReader};
use crate::client::recorder::{AnswerText, Recorder, StreamEnd};
use crate::record::{Failure, FailureKind, Outcome, RequestRecord};

/// The parser and the recorder of one response.
#[derive(Debug)]
pub struct Reception {
    reader: ResponseReader,
    pub recorder: Recorder,
}

/// The times of an exchange that its stream does not show. All but the first count from the intended time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    pub intended_us: u64,
    pub lag_us: u32,
    pub sent_us: u32,
    pub end_us: u32,
}

/// Whether more bytes of the response are expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceptionState {
    More,
    End { outcome: Outcome, reusable: bool },
}

impl Reception {
    pub fn new(n_expected: u32, text: AnswerText) -> Self {
        Self { reader: ResponseReader::new(), recorder: Recorder::new(n_expected, text) }
    }

    /// Returns whether a byte of the response has been parsed. Before the first byte, a request may be sent
    /// again.
    pub fn has_begun(&self) -> bool {
        self.reader.status() != 0
    }

    /// Takes bytes that arrived at `at_us`. All events in them get this time, because they were in the
    /// kernel's buffer together.
    pub fn feed(&mut self, bytes: &[u8], at_us: u32) -> ReceptionState {
        let recorder = &mut self.recorder;
        match self.reader.feed(bytes, &mut |data| recorder.on_data(at_us, data)) {
            Ok(Progress::More) => ReceptionState::More,
            Ok(Progress::Whole { reusable }) => {
                ReceptionState::End { outcome: self.outcome(StreamEnd::Complete), reusable }
            }
            Err(error) => {
                let failure = Failure { kind: FailureKind::Broken, message: error.to_string() };
                ReceptionState::End { outcome: Outcome::Failed(failure), reusable: false }
            }
        }
    }

    /// Handles the end of the connection, and returns the outcome of the request.
    pub fn close(&mut self) -> Outcome {
        let end = if self.reader.close().is_ok() { StreamEnd::Complete } else { StreamEnd::Cut };
        self.outcome(end)
    }

    /// Returns the record of everything that was received.
    pub fn into_record(self, assignment: &Assignment, timing: Timing, outcome: Outcome) -> RequestRecord {
        let mut recorder = self.recorder;
        recorder.settle();
        RequestRecord {
            index: assignment.index,
            session: assignment.session,
            turn: assignment.turn,
            slice: assignment.slice,
            intended_us: timing.intended_us,
            lag_us: timing.lag_us,
            sent_us: timing.sent_us,
            prompt_tokens: recorder.prompt_tokens.unwrap_or(assignment.prompt_tokens),
            cached_tokens: recorder.cached_tokens,
            wanted_tokens: assignment.wanted_tokens,
            usage_tokens: recorder.usage_tokens,
            counted_by: recorder.counted_by,
            first_text_us: recorder.first_text_us,
            end_us: timing.end_us,
            outcome,
            chunks: recorder.chunks,
            explanation: recorder.explanation,
        }
    }

    fn outcome(&self, end: StreamEnd) -> Outcome {
        let failure = if self.has_begun() && !self.reader.is_stream() {
            Some(self.refusal())
        } else {
            self.recorder.failure(end)
        };
        failure.map_or(Outcome::Finished, Outcome::Failed)
    }

    fn refusal(&self) -> Failure {
        let status = self.reader.status();
        let body = String::from_utf8_lossy(self.reader.plain_body());
        match status {
            200 => Failure {
                kind: FailureKind::Broken,
                message: format!("the answer is not an event stream: {body}"),
            },
            _ => Failure { kind: FailureKind::Status, message: format!("HTTP {status}: {body}") },
        }
    }
}
