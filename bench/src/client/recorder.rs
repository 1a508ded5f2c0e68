//! Hot path. Turns the events of one stream into a record while they arrive.

use serde_json::Value;

use crate::client::event::EventFacts;
use crate::explanation::Explanation;
use crate::record::{Chunk, CountedBy, Failure, FailureKind};

/// The record of a stream that is still arriving.
#[derive(Debug)]
pub struct Recorder {
    pub chunks: Vec<Chunk>,
    pub counted_by: CountedBy,
    pub first_text_us: Option<u32>,
    pub usage_tokens: Option<u32>,
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: u32,
    /// The text and tokens of the answer, for the next turn of a conversation; `None` if they are not needed.
    pub answer: Option<Answer>,
    /// The server's explanation of the request's time, if the request asked for it.
    pub explanation: Option<Box<Explanation>>,
    n_tokens: u32,
    is_counting: bool,
    has_finished: bool,
    is_done: bool,
    error: Option<String>,
}

/// The tokens and the text of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub token_ids: Vec<u32>,
    pub text: String,
}

/// Whether an answer is kept, for the next turn of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerText {
    Keep,
    Discard,
}

/// How the stream of an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    Complete,
    /// The connection broke before the end.
    Cut,
}

impl Recorder {
    /// Makes a recorder with room for `n_expected` chunks, so that nothing is allocated while tokens arrive.
    pub fn new(n_expected: u32, text: AnswerText) -> Self {
        Self {
            chunks: Vec::with_capacity(n_expected as usize + 2),
            counted_by: CountedBy::Chunks,
            first_text_us: None,
            usage_tokens: None,
            prompt_tokens: None,
            cached_tokens: 0,
            answer: (text == AnswerText::Keep).then(Answer::default),
            explanation: None,
            n_tokens: 0,
            is_counting: false,
            has_finished: false,
            is_done: false,
            error: None,
        }
    }

    /// Records one event that arrived at `at_us`.
    pub fn on_data(&mut self, at_us: u32, data: &[u8]) {
        if data == b"[DONE]" {
            self.is_done = true;
            return;
        }
        let facts = EventFacts::read(data);
        if facts.is_error {
            self.error
                .get_or_insert_with(|| String::from_utf8_lossy(&data[..data.len().min(300)]).into_owned());
            return;
        }
        if facts.is_finish {
            self.explanation = Explanation::in_event(data).map(Box::new).or(self.explanation.take());
        }
        self.note_usage(&facts);
        if facts.has_choices {
            self.note_chunk(at_us, &facts);
        }
        if let Some(answer) = &mut self.answer {
            answer.extend(data);
        }
    }

    fn note_usage(&mut self, facts: &EventFacts) {
        self.usage_tokens = facts.completion_tokens.or(self.usage_tokens);
        self.prompt_tokens = facts.prompt_tokens.or(self.prompt_tokens);
        self.cached_tokens = facts.cached_tokens.unwrap_or(self.cached_tokens);
    }

    fn note_chunk(&mut self, at_us: u32, facts: &EventFacts) {
        self.has_finished |= facts.is_finish;
        if facts.has_text {
            self.first_text_us.get_or_insert(at_us);
        }
        let tokens = self.count(facts);
        self.n_tokens += tokens;
        self.chunks.push(Chunk { at_us, tokens });
    }

    /// Returns the number of tokens in a chunk. The first chunk with content decides how this stream's tokens
    /// are counted. A total that comes only with the last chunk is not used here, because all tokens would
    /// fall into that chunk.
    fn count(&mut self, facts: &EventFacts) -> u32 {
        if !self.is_counting {
            self.counted_by = match facts {
                EventFacts { token_ids: Some(1..), .. } => CountedBy::TokenIds,
                EventFacts { completion_tokens: Some(1..), is_finish: false, .. } => CountedBy::Usage,
                _ => CountedBy::Chunks,
            };
            self.is_counting = facts.has_text || self.counted_by != CountedBy::Chunks;
        }
        match self.counted_by {
            CountedBy::TokenIds => facts.token_ids.unwrap_or(0),
            CountedBy::Usage => facts.completion_tokens.unwrap_or(0).saturating_sub(self.n_tokens),
            CountedBy::Chunks | CountedBy::Total => u32::from(facts.has_text),
        }
    }

    /// Returns the reason why an ended stream is no finished request; `None` if it is one.
    pub fn failure(&self, end: StreamEnd) -> Option<Failure> {
        let failure = |kind, message: &str| Some(Failure { kind, message: message.to_owned() });
        match &self.error {
            Some(error) => failure(FailureKind::ErrorEvent, error),
            None if !self.is_done && (end == StreamEnd::Cut || !self.has_finished) => {
                failure(FailureKind::Broken, "the stream ended without a finish reason or [DONE]")
            }
            None if self.n_tokens == 0 => failure(FailureKind::Empty, "the stream held no token"),
            None => None,
        }
    }

    /// Replaces the counted tokens by the server's total, if chunks were counted and a total came at the end.
    /// The chunks with text share it evenly.
    pub fn settle(&mut self) {
        let n_chunks = u64::from(self.n_tokens);
        let Some(total) = self.usage_tokens.filter(|_| self.counted_by == CountedBy::Chunks && n_chunks > 0)
        else {
            return;
        };
        self.counted_by = CountedBy::Total;
        let share = |nth: u64| (nth * u64::from(total) / n_chunks) as u32;
        for (nth, chunk) in (0..).zip(self.chunks.iter_mut().filter(|chunk| chunk.tokens > 0)) {
            chunk.tokens = share(nth + 1) - share(nth);
        }
    }

    /// Returns whether the event `[DONE]` has arrived.
    pub fn is_done(&self) -> bool {
        self.is_done
    }
}

impl Answer {
    fn extend(&mut self, data: &[u8]) {
        let Ok(event) = serde_json::from_slice::<Value>(data) else { return };
        let choice = &event["choices"][0];
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        self.token_ids.extend(ids.filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        self.text.push_str(text.unwrap_or(""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(events: &[&str]) -> Recorder {
        let mut recorder = Recorder::new(4, AnswerText::Keep);
        for (nth, event) in events.iter().enumerate() {
            recorder.on_data(nth as u32 * 10, event.as_bytes());
        }
        recorder
    }

    fn tokens(recorder: &Recorder) -> Vec<u32> {
        recorder.chunks.iter().map(|chunk| chunk.tokens).collect()
    }

    #[test]
    fn ids_are_counted_even_where_no_text_shows() {
        let seen = record(&[
            r#"{"choices":[{"text":"","token_ids":[]}]}"#,
            r#"{"choices":[{"text":"","token_ids":[5]}]}"#,
            r#"{"choices":[{"text":"ab","token_ids":[6,7]}]}"#,
            r#"{"choices":[{"text":"","token_ids":[],"finish_reason":"length"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":3}}"#,
            "[DONE]",
        ]);
        assert_eq!((tokens(&seen), seen.counted_by), (vec![0, 1, 2, 0], CountedBy::TokenIds));
        assert_eq!((seen.first_text_us, seen.failure(StreamEnd::Complete)), (Some(20), None));
        assert_eq!(
            seen.answer.map(|answer| (answer.token_ids, answer.text)),
            Some((vec![5, 6, 7], "ab".to_owned()))
        );
    }

    #[test]
    fn running_totals_are_counted_by_difference() {
        let seen = record(&[
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":{"completion_tokens":0}}"#,
            r#"{"choices":[{"delta":{"content":"a"}}],"usage":{"completion_tokens":1}}"#,
            r#"{"choices":[{"delta":{"content":"bcd"}}],"usage":{"completion_tokens":4}}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":4}}"#,
        ]);
        assert_eq!((tokens(&seen), seen.counted_by), (vec![0, 1, 3, 0], CountedBy::Usage));
        assert_eq!(seen.failure(StreamEnd::Complete), None);
    }

    #[test]
    fn without_counts_a_chunk_with_text_is_a_token_and_a_late_total_changes_nothing() {
        let seen = record(&[
            r#"{"choices":[{"delta":{"content":"a"}}]}"#,
            r#"{"choices":[{"delta":{"content":"b"}}]}"#,
            r#"{"choices":[{"delta":{"content":""},"finish_reason":"stop"}],"usage":{"completion_tokens":9}}"#,
        ]);
        assert_eq!(
            (tokens(&seen), seen.counted_by, seen.usage_tokens),
            (vec![1, 1, 0], CountedBy::Chunks, Some(9))
        );
    }

    #[test]
    fn a_total_at_the_end_is_shared_by_the_chunks_with_text() {
        let mut seen = record(&[
            r#"{"choices":[{"delta":{"content":""}}]}"#,
            r#"{"choices":[{"delta":{"content":"a"}}]}"#,
            r#"{"choices":[{"delta":{"content":"b"}}]}"#,
            r#"{"choices":[{"delta":{"content":"c"}}]}"#,
            r#"{"choices":[],"usage":{"completion_tokens":8}}"#,
        ]);
        seen.settle();
        assert_eq!((tokens(&seen), seen.counted_by), (vec![0, 2, 3, 3], CountedBy::Total));
        let mut by_ids = record(&[
            r#"{"choices":[{"text":"ab","token_ids":[6,7]}]}"#,
            r#"{"choices":[],"usage":{"completion_tokens":9}}"#,
        ]);
        by_ids.settle();
        assert_eq!((tokens(&by_ids), by_ids.counted_by), (vec![2], CountedBy::TokenIds), "ids are better");
    }

    #[test]
    fn failures_are_named() {
        let kind = |events: &[&str], end| record(events).failure(end).map(|failure| failure.kind);
        let token = r#"{"choices":[{"text":"a","finish_reason":null}]}"#;
        assert_eq!(
            kind(&[token, r#"{"error":{"message":"no"}}"#, "[DONE]"], StreamEnd::Complete),
            Some(FailureKind::ErrorEvent)
        );
        assert_eq!(kind(&[token], StreamEnd::Complete), Some(FailureKind::Broken));
        assert_eq!(kind(&[token, "[DONE]"], StreamEnd::Cut), None);
        assert_eq!(kind(&["[DONE]"], StreamEnd::Complete), Some(FailureKind::Empty));
    }
}
