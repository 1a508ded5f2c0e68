//! The grammar of an answer, as text. The crate `grammar` compiles it.

use std::fmt;
use std::sync::Arc;

/// The longest text of a grammar.
pub const GRAMMAR_BYTES_MAX: usize = 128 << 10;

/// The language of a grammar's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarKind {
    /// JSON Schema, draft 2020-12.
    JsonSchema,
    /// A regular expression that the whole answer matches.
    Regex,
    /// A context-free grammar in the language of Lark, as `llguidance` reads it.
    Lark,
}

/// A grammar that a whole answer must follow. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Grammar {
    kind: GrammarKind,
    text: Arc<str>,
    hash: GrammarHash,
}

/// The hash of a grammar's language and text: 128 bits of BLAKE3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrammarHash(pub [u8; 16]);

impl Grammar {
    pub fn new(kind: GrammarKind, text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        let mut hasher = blake3::Hasher::new_derive_key("baton grammar v1");
        hasher.update(kind.as_str().as_bytes()).update(&[0]).update(text.as_bytes());
        let mut hash = [0; 16];
        hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self { kind, text, hash: GrammarHash(hash) }
    }

    pub fn kind(&self) -> GrammarKind {
        self.kind
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn hash(&self) -> GrammarHash {
        self.hash
    }
}

/// The text may be long, so only its length is shown.
impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammar({}, {} bytes)", self.kind.as_str(), self.text.len())
    }
}

impl GrammarKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::JsonSchema => "JSON schema",
            Self::Regex => "regular expression",
            Self::Lark => "grammar",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_depends_on_language_and_text() {
        let of = |kind, text: &str| Grammar::new(kind, text).hash();
        assert_eq!(of(GrammarKind::Regex, "a"), of(GrammarKind::Regex, "a"));
        assert_ne!(of(GrammarKind::Regex, "a"), of(GrammarKind::Regex, "b"));
        assert_ne!(of(GrammarKind::Regex, "a"), of(GrammarKind::Lark, "a"));
    }
}
