//! The mock's tokenizer: a token is a byte, followed by a few special tokens.

use types::TokenId;

/// The token that ends an answer of the mock.
pub const END: TokenId = TokenId(256);

/// The special tokens in order of their ids; the first one is [`END`].
const SPECIALS: [&str; 5] = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"];

pub(super) const VOCAB: u32 = END.0 + SPECIALS.len() as u32;

/// A table with every byte as a slice.
static BYTES: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut value = 0;
    while value < 256 {
        bytes[value] = value as u8;
        value += 1;
    }
    bytes
};

pub(super) fn bytes_of(token: TokenId) -> &'static [u8] {
    BYTES.get(token.0 as usize..).and_then(|rest| rest.get(..1)).unwrap_or_default()
}

pub(super) fn special(token: TokenId) -> Option<&'static str> {
    token.0.checked_sub(END.0).and_then(|at| SPECIALS.get(at as usize)).copied()
}

pub(super) fn encode(text: &str) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let (token, next) = special_at(rest).unwrap_or((TokenId(u32::from(*byte)), after));
        tokens.push(token);
        rest = next;
    }
    tokens
}

/// Returns the special token whose name begins `text`, and the text after the name.
fn special_at(text: &[u8]) -> Option<(TokenId, &[u8])> {
    let named = |(id, name): (u32, &&str)| Some((TokenId(id), text.strip_prefix(name.as_bytes())?));
    (END.0..).zip(&SPECIALS).find_map(named)
}
