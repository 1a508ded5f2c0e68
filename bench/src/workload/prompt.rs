//! Recipes of prompts, which are small until the prompt is needed.
//!
//! Twelve thousand prompts of twelve thousand tokens are half a gigabyte, and their recipes a few megabytes.
//! With another salt, the same recipes are the same load with cold caches.

use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use crate::random::mix;

/// The recipe of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// Tokens that are drawn from seeds. Two recipes with the same first segments share a prefix.
    Drawn(Vec<Segment>),
    /// A given text.
    Text(Arc<str>),
}

/// A run of tokens that depends on its seed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub seed: u64,
    pub n_tokens: u32,
}

/// The token ids to draw from. The default is the range of printable ASCII characters, which every vocabulary
/// has, and in which known ones have no special tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary(pub Range<u32>);

impl Default for Vocabulary {
    fn default() -> Self {
        Self(33..127)
    }
}

impl FromStr for Vocabulary {
    type Err = String;

    /// Parses a range such as `1000..30000`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bounds =
            text.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
        match bounds {
            Some((low, high)) if low < high => Ok(Self(low..high)),
            _ => Err(format!("`{text}` is not a range of token ids as 1000..30000")),
        }
    }
}

/// Words that common tokenizers encode as one token, for prompts that must be text.
const WORDS: [&str; 32] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what",
    "all", "were", "we",
];

impl Recipe {
    /// Returns the planned number of tokens. For a text it is a guess of four characters each, until the
    /// server has counted.
    pub fn n_tokens(&self) -> u32 {
        match self {
            Recipe::Drawn(segments) => segments.iter().map(|segment| segment.n_tokens).sum(),
            Recipe::Text(text) => (text.len() / 4).max(1) as u32,
        }
    }

    /// Appends the prompt's tokens to `ids`. The tokens of a text are not known, so none are appended.
    pub fn draw(&self, salt: u64, vocabulary: &Vocabulary, ids: &mut Vec<u32>) {
        if let Recipe::Drawn(segments) = self {
            segments.iter().for_each(|segment| segment.draw(salt, vocabulary, ids));
        }
    }

    /// Returns the prompt as words: each drawn token becomes one common word.
    pub fn words(&self, salt: u64) -> String {
        match self {
            Recipe::Text(text) => text.to_string(),
            Recipe::Drawn(_) => {
                let mut ids = Vec::with_capacity(self.n_tokens() as usize);
                self.draw(salt, &Vocabulary(0..WORDS.len() as u32), &mut ids);
                ids.iter().map(|id| WORDS[*id as usize]).collect::<Vec<_>>().join(" ")
            }
        }
    }
}

impl Segment {
    fn draw(&self, salt: u64, vocabulary: &Vocabulary, ids: &mut Vec<u32>) {
        let Range { start, end } = vocabulary.0;
        let key = mix(salt, self.seed);
        let token = |position: u32| start + (mix(key, u64::from(position)) % u64::from(end - start)) as u32;
        ids.extend((0..self.n_tokens).map(token));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(segments: &[(u64, u32)], salt: u64) -> Vec<u32> {
        let segments = segments.iter().map(|&(seed, n_tokens)| Segment { seed, n_tokens }).collect();
        let mut ids = Vec::new();
        Recipe::Drawn(segments).draw(salt, &Vocabulary::default(), &mut ids);
        ids
    }

    #[test]
    fn equal_segments_are_equal_prefixes_and_a_salt_changes_all() {
        let (one, other) = (drawn(&[(1, 64), (2, 8)], 0), drawn(&[(1, 64), (3, 8)], 0));
        assert_eq!(one[..64], other[..64]);
        assert_ne!(one[64..], other[64..]);
        assert_ne!(one, drawn(&[(1, 64), (2, 8)], 1));
        assert!(one.iter().all(|id| (33..127).contains(id)));
    }

    #[test]
    fn a_longer_segment_continues_a_shorter_one() {
        assert_eq!(drawn(&[(5, 10)], 0), drawn(&[(5, 20)], 0)[..10]);
    }

    #[test]
    fn a_drawn_token_is_one_word() {
        let recipe = Recipe::Drawn(vec![Segment { seed: 3, n_tokens: 7 }]);
        assert_eq!(recipe.words(1).split(' ').count(), 7);
    }

    #[test]
    fn vocabularies_are_ranges() {
        assert_eq!("10..20".parse(), Ok(Vocabulary(10..20)));
        for text in ["10", "20..10", "a..b"] {
            assert!(text.parse::<Vocabulary>().is_err(), "{text}");
        }
    }
}
