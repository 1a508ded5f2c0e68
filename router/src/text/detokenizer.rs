//! Hot path. Converts tokens to text one at a time: whole characters only, and nothing after a stop string.

use std::ops::ControlFlow;
use std::sync::Arc;

use types::TokenId;

use super::stop::{StopScanner, StopStrings};
use super::tokenizer::Tokenizer;

/// Converts the tokens of one answer to text, as they arrive.
///
/// The result does not depend on how the text is split into tokens: the joined pieces are the text of all
/// tokens, up to but excluding the first stop string. A piece is held back while a character is incomplete,
/// or while it may be the beginning of a stop string.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    characters: Characters,
    stop: StopScanner,
    /// The number of tokens whose text is still not searched for stop strings. It starts at `min_tokens`.
    n_unsearched: u32,
    /// The special tokens whose names are part of the text. The names of others are not.
    shown: Vec<TokenId>,
    /// The number of characters of all tokens so far, also of those that are held back.
    n_characters: usize,
    /// A buffer for the characters between `characters` and `stop`, kept for its allocation.
    whole: String,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>, stop: &StopStrings, min_tokens: u32) -> Self {
        Self {
            tokenizer,
            characters: Characters::default(),
            stop: StopScanner::new(stop.clone()),
            n_unsearched: min_tokens,
            shown: Vec::new(),
            n_characters: 0,
            whole: String::new(),
        }
    }

    /// Makes the names of these special tokens part of the text.
    #[must_use]
    pub fn showing(self, shown: Vec<TokenId>) -> Self {
        Self { shown, ..self }
    }

    /// Appends the text that is certain after this token. `Break`: a stop string is complete, and the answer
    /// ends before it.
    pub fn push(&mut self, token: TokenId, text: &mut String) -> ControlFlow<()> {
        self.whole.clear();
        if self.shown.contains(&token) {
            self.characters.push(self.tokenizer.shown(token).as_bytes(), &mut self.whole);
        } else {
            self.characters.push(self.tokenizer.bytes_of(token), &mut self.whole);
        }
        self.n_characters += self.whole.chars().count();
        if self.n_unsearched > 0 {
            self.n_unsearched -= 1;
            text.push_str(&self.whole);
            return ControlFlow::Continue(());
        }
        self.stop.push(&self.whole, text)
    }

    /// Returns the number of whole characters of the tokens so far: the position of the next token's text.
    pub fn n_characters(&self) -> usize {
        self.n_characters
    }

    /// Returns the stop string that is complete.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stop.matched()
    }

    /// Appends the text that was held back, at the end of the tokens. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        self.whole.clear();
        self.characters.finish(&mut self.whole);
        // The rest is not searched: U+FFFD may be part of a stop string, but an answer that has ended is not
        // stopped again.
        self.stop.finish(text);
        text.push_str(&self.whole);
    }
}

/// Converts bytes to characters. The result equals [`String::from_utf8_lossy`] of all bytes together.
#[derive(Debug, Default)]
struct Characters {
    /// The first bytes of an incomplete character, at most 3 between two calls.
    incomplete: Vec<u8>,
}

impl Characters {
    fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.incomplete.extend_from_slice(bytes);
        let n_done = write_whole(&self.incomplete, text);
        self.incomplete.drain(..n_done);
    }

    fn finish(&mut self, text: &mut String) {
        text.push_str(&String::from_utf8_lossy(&self.incomplete));
        self.incomplete.clear();
    }
}

/// Writes all complete characters of `bytes`, and U+FFFD for invalid bytes. Returns the number of bytes used.
fn write_whole(bytes: &[u8], text: &mut String) -> usize {
    let mut n_done = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        n_done += chunk.valid().len();
        let (at_end, invalid) = (n_done + chunk.invalid().len() == bytes.len(), chunk.invalid());
        if invalid.is_empty() || (at_end && may_become_a_character(invalid)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        n_done += invalid.len();
    }
    n_done
}

fn may_become_a_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
