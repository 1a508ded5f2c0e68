//! Text to tokens, and tokens to bytes. One arm per kind of tokenizer.

use std::borrow::Cow;

use types::TokenId;

/// A model's vocabulary and the way text is cut into it.
///
/// Tokens become *bytes*, not text: a character may be spread over several tokens, and only the
/// [`Detokenizer`](super::Detokenizer) knows when it is whole.
#[derive(Debug)]
pub enum Tokenizer {
    /// The mock's: a token is a byte, and a few special tokens follow.
    Bytes,
}

/// Ends an answer of the mock.
pub const END: TokenId = TokenId(256);

/// The byte tokenizer's special tokens, in order of their ids, the first one being [`END`].
const SPECIALS: [&str; 5] = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"];

/// Every byte as a slice of its own.
static BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut value = 0;
    while value < 256 {
        bytes[value] = value as u8;
        value += 1;
    }
    bytes
};

impl Tokenizer {
    /// The tokens that it writes are numbered below this.
    pub fn vocab(&self) -> u32 {
        match self {
            Self::Bytes => END.0 + SPECIALS.len() as u32,
        }
    }

    /// Cuts text into tokens. The names of special tokens become these tokens: that is how templates write them.
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        match self {
            Self::Bytes => encode_bytes(text),
        }
    }

    /// The bytes that a token adds to the text: none for a special token, and none for one that does not exist.
    pub fn bytes_of(&self, token: TokenId) -> &[u8] {
        match self {
            Self::Bytes => BYTES.get(token.0 as usize..).and_then(|rest| rest.get(..1)).unwrap_or_default(),
        }
    }

    /// How a token is shown by itself, where one is listed: special tokens by their names.
    pub fn shown(&self, token: TokenId) -> Cow<'_, str> {
        match self {
            Self::Bytes => {
                special(token).map_or_else(|| String::from_utf8_lossy(self.bytes_of(token)), Cow::Borrowed)
            }
        }
    }
}

fn special(token: TokenId) -> Option<&'static str> {
    token.0.checked_sub(END.0).and_then(|at| SPECIALS.get(at as usize)).copied()
}

fn encode_bytes(text: &str) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let (token, next) = special_at(rest).unwrap_or((TokenId(u32::from(*byte)), after));
        tokens.push(token);
        rest = next;
    }
    tokens
}

/// The special token whose name the text begins with, and what follows it.
fn special_at(text: &[u8]) -> Option<(TokenId, &[u8])> {
    let named = |(id, name): (u32, &&str)| Some((TokenId(id), text.strip_prefix(name.as_bytes())?));
    (END.0..).zip(&SPECIALS).find_map(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|token| Tokenizer::Bytes.bytes_of(*token)).copied().collect();
        String::from_utf8(bytes).expect("the tokens of a text are the bytes of a text")
    }

    #[test]
    fn text_comes_back() {
        for text in ["", "plain", "ünïcode → 🦀", "<|almost|", "\0"] {
            let tokens = Tokenizer::Bytes.encode(text);
            assert_eq!(tokens.len(), text.len());
            assert_eq!(decoded(&tokens), text);
        }
    }

    #[test]
    fn names_become_special_tokens_and_special_tokens_become_nothing() {
        let tokens = Tokenizer::Bytes.encode("<|user|>a<|end|>");
        assert_eq!(tokens, [TokenId(258), TokenId(97), END]);
        assert_eq!(decoded(&tokens), "a");
        assert_eq!(Tokenizer::Bytes.shown(TokenId(258)), "<|user|>");
        assert_eq!(Tokenizer::Bytes.shown(TokenId(97)), "a");
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_nothing() {
        assert_eq!(Tokenizer::Bytes.vocab(), 261);
        assert!(Tokenizer::Bytes.bytes_of(TokenId(u32::MAX)).is_empty());
        assert_eq!(Tokenizer::Bytes.shown(TokenId(261)), "");
    }
}
