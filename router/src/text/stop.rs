//! Hot path. Stop strings: an answer ends before the first stop string in its text, however the text is split
//! into tokens.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::error::AcceptError;

/// The largest number of stop strings in one request. OpenAI allows 4.
pub const STOP_STRINGS_MAX: usize = 16;
/// The longest stop string in bytes, and so the largest amount of text held back.
pub const STOP_STRING_BYTES_MAX: usize = 1024;

/// The texts that end an answer. None of them is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStrings(Arc<[String]>);

impl StopStrings {
    pub fn new(strings: Vec<String>) -> Result<Self, AcceptError> {
        if strings.len() > STOP_STRINGS_MAX {
            let reason = format!("at most {STOP_STRINGS_MAX} stop strings, not {}", strings.len());
            return Err(AcceptError::invalid("stop", reason));
        }
        match strings.iter().find(|string| string.is_empty() || string.len() > STOP_STRING_BYTES_MAX) {
            Some(bad) => {
                let reason =
                    format!("a stop string has 1 to {STOP_STRING_BYTES_MAX} bytes, not {}", bad.len());
                Err(AcceptError::invalid("stop", reason))
            }
            None => Ok(Self(strings.into())),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// Searches for stop strings in a text that arrives in pieces, and holds back a possible beginning of one.
#[derive(Debug)]
pub(super) struct StopScanner {
    strings: StopStrings,
    /// The end of the text so far that may be the beginning of a stop string. It is shorter than the longest
    /// stop string.
    held: String,
    /// The index of the complete stop string.
    matched: Option<usize>,
}

impl StopScanner {
    pub(super) fn new(strings: StopStrings) -> Self {
        Self { strings, held: String::new(), matched: None }
    }

    /// Returns the stop string that is complete.
    pub(super) fn matched(&self) -> Option<&str> {
        self.matched.and_then(|nth| self.strings.iter().nth(nth))
    }

    /// Appends the text that cannot be part of a stop string any more. `Break`: a stop string is complete.
    pub(super) fn push(&mut self, piece: &str, text: &mut String) -> ControlFlow<()> {
        self.held.push_str(piece);
        let (n_free, flow) = match self.first_match() {
            Some((start, nth)) => {
                self.matched = Some(nth);
                (start, ControlFlow::Break(()))
            }
            None => (self.held.len() - self.n_may_become(), ControlFlow::Continue(())),
        };
        text.push_str(&self.held[..n_free]);
        self.held.drain(..n_free);
        flow
    }

    /// Appends the text that was held back, at the end of the answer.
    pub(super) fn finish(&mut self, text: &mut String) {
        text.push_str(&self.held);
        self.held.clear();
    }

    /// Returns the start and the index of the stop string that ends first; if several end together, that of the longest.
    /// Choosing by the end makes the result independent of the split into pieces.
    fn first_match(&self) -> Option<(usize, usize)> {
        let found = |(nth, string): (usize, &str)| {
            self.held.find(string).map(|start| (start + string.len(), start, nth))
        };
        self.strings.iter().enumerate().filter_map(found).min().map(|(_, start, nth)| (start, nth))
    }

    /// Returns the length of the longest suffix of the text that is the beginning of a stop string.
    fn n_may_become(&self) -> usize {
        self.strings.iter().map(|string| overlap(&self.held, string)).max().unwrap_or(0)
    }
}

/// Returns the length of the longest proper prefix of `string` that is a suffix of `text`.
fn overlap(text: &str, string: &str) -> usize {
    let longest = text.len().min(string.len() - 1);
    (1..=longest).rev().find(|n| text.as_bytes().ends_with(&string.as_bytes()[..*n])).unwrap_or(0)
}
