//! Hot path. Stop strings: the answer ends before the first of them, wherever it is cut into tokens.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::error::AcceptError;

/// The most stop strings of one request. OpenAI takes 4.
pub const STOP_STRINGS_MAX: usize = 16;
/// The longest stop string: so much text may have to be held back.
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

/// Looks for stop strings in a text that comes in pieces, and holds back what may become one.
#[derive(Debug)]
pub(super) struct StopScanner {
    strings: StopStrings,
    /// The end of the text so far, as long as a stop string could begin in it. Shorter than the longest one.
    held: String,
}

impl StopScanner {
    pub(super) fn new(strings: StopStrings) -> Self {
        Self { strings, held: String::new() }
    }

    /// Appends to `text` what cannot be part of a stop string any more. `Break`: one is complete.
    pub(super) fn push(&mut self, piece: &str, text: &mut String) -> ControlFlow<()> {
        self.held.push_str(piece);
        let (n_free, flow) = match self.first_match() {
            Some(start) => (start, ControlFlow::Break(())),
            None => (self.held.len() - self.n_may_become(), ControlFlow::Continue(())),
        };
        text.push_str(&self.held[..n_free]);
        self.held.drain(..n_free);
        flow
    }

    /// Appends what was held back: nothing follows that could complete it.
    pub(super) fn finish(&mut self, text: &mut String) {
        text.push_str(&self.held);
        self.held.clear();
    }

    /// Where the stop string begins that is complete first; of several that end together, the longest.
    /// To go by the end makes the choice independent of how the text was cut.
    fn first_match(&self) -> Option<usize> {
        let found = |string: &str| self.held.find(string).map(|start| (start + string.len(), start));
        self.strings.iter().filter_map(found).min().map(|(_, start)| start)
    }

    /// How much of the end of the text is the beginning of a stop string, the longest such piece.
    fn n_may_become(&self) -> usize {
        self.strings.iter().map(|string| overlap(&self.held, string)).max().unwrap_or(0)
    }
}

/// The length of the longest end of `text` with which `string` begins, but for all of it.
fn overlap(text: &str, string: &str) -> usize {
    let longest = text.len().min(string.len() - 1);
    (1..=longest).rev().find(|n| text.as_bytes().ends_with(&string.as_bytes()[..*n])).unwrap_or(0)
}
