//! A table with the bytes of every token of a `tokenizer.json`.
//!
//! The decoders of `tokenizers` convert a list of tokens to text and lose incomplete characters. Most
//! decoders of language models work token by token, so the bytes of each token can be computed in advance.
//! Other decoders are refused.

use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{Decoder as _, DecoderWrapper as Decoder, Tokenizer};
use types::TokenId;

/// The largest number of token ids. Larger ids mean a broken file.
const TOKENS_MAX: usize = 1 << 22;

/// The bytes of all tokens, concatenated.
#[derive(Debug)]
pub struct TokenBytes {
    bytes: Vec<u8>,
    /// The end of each token's bytes in `bytes`, which is the beginning of the next token's.
    ends: Vec<u32>,
    prefix: Prefix,
}

/// The prefix that the tokenizer adds to every text, and removes when it decodes a whole text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Prefix {
    /// The character of the prefix; `None`: the tokenizer adds none.
    content: Option<char>,
    n_max: usize,
}

/// The error of a decoder that does not work token by token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`decoder`: {0}, which gives tokens no bytes of their own")]
pub struct UnknownDecoder(pub String);

/// The reason why a vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    #[error(transparent)]
    Parse(#[from] tokenizers::Error),
    #[error("read {}", file.display())]
    AddedTokens { file: std::path::PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("`model.vocab`: token {0} is above the largest supported id")]
    Ids(u32),
    #[error(transparent)]
    Decoder(#[from] UnknownDecoder),
    #[error("the model has no token that ends an answer")]
    NoEnd,
    #[error("make the tree of tokens: {0}")]
    Tree(String),
}

/// Returns the name of a special token; `None` for other tokens.
pub fn special(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id)?;
    added.special.then(|| added.content.clone())
}

impl TokenBytes {
    /// Returns the bytes of all tokens. Special tokens and unused ids have none.
    pub fn of_tokenizer(tokenizer: &Tokenizer) -> Result<Self, VocabularyError> {
        let last = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        if last as usize >= TOKENS_MAX {
            return Err(VocabularyError::Ids(last));
        }
        let text = |id: usize| match special(tokenizer, id as u32) {
            Some(_) => None,
            None => tokenizer.id_to_token(id as u32),
        };
        Ok(Self::new((0..last as usize + 1).map(text), tokenizer.get_decoder())?)
    }

    /// Builds the table. `tokens` are the texts of tokens 0, 1, 2, …; `None` for a token that adds nothing to
    /// a text.
    pub fn new(
        tokens: impl ExactSizeIterator<Item = Option<String>>,
        decoder: Option<&Decoder>,
    ) -> Result<Self, UnknownDecoder> {
        assert!(tokens.len() <= TOKENS_MAX, "the caller has checked the vocabulary's size");
        let (stages, prefix) = stages(decoder)?;
        let mut table = Self { bytes: Vec::new(), ends: Vec::with_capacity(tokens.len()), prefix };
        for token in tokens {
            if let Some(token) = token {
                write(&stages, token, &mut table.bytes)?;
            }
            table.ends.push(table.bytes.len() as u32);
        }
        Ok(table)
    }

    pub fn n_tokens(&self) -> u32 {
        self.ends.len() as u32
    }

    pub fn of(&self, token: TokenId) -> &[u8] {
        let idx = token.0 as usize;
        let end = self.ends.get(idx).copied().unwrap_or(0);
        let start = idx.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.bytes.get(start as usize..end as usize).unwrap_or_default()
    }

    pub fn without_prefix<'a>(&self, mut text: &'a str) -> &'a str {
        let Prefix { content: Some(content), n_max } = self.prefix else { return text };
        for _ in 0..n_max {
            text = text.strip_prefix(content).unwrap_or(text);
        }
        text
    }
}

// === from a decoder to stages ===

/// One step of decoding a token's text.
enum Stage<'a> {
    /// Each character represents a byte, as in GPT-2. This is always the last stage.
    ByteLevel,
    /// A token such as `<0x0A>` becomes the byte in its name.
    ByteFallback,
    /// Replaces a pattern by another text.
    Replace(&'a Decoder),
    /// Replaces this character by a space.
    Space(char),
}

/// Returns the stages that decode each token, and the prefix to remove from a whole text.
///
/// A decoder that joins the tokens' texts ends the stages. Only stripping the beginning may follow it.
fn stages(decoder: Option<&Decoder>) -> Result<(Vec<Stage<'_>>, Prefix), UnknownDecoder> {
    let chain = match decoder {
        Some(Decoder::Sequence(sequence)) => sequence.get_decoders(),
        Some(decoder) => std::slice::from_ref(decoder),
        None => return Err(UnknownDecoder("none".to_owned())),
    };
    let (mut stages, mut prefix, mut joined) = (Vec::new(), Prefix::default(), false);
    for decoder in chain {
        match decoder {
            Decoder::Strip(strip) if joined && strip.stop == 0 => {
                prefix = Prefix { content: Some(strip.content), n_max: strip.start };
            }
            Decoder::Fuse(_) => joined = true,
            Decoder::ByteLevel(_) if !joined => {
                stages.push(Stage::ByteLevel);
                joined = true;
            }
            Decoder::ByteFallback(_) if !joined => stages.push(Stage::ByteFallback),
            Decoder::Replace(_) if !joined => stages.push(Stage::Replace(decoder)),
            Decoder::Metaspace(spaces) if !joined => {
                stages.push(Stage::Space(spaces.get_replacement()));
                prefix = metaspace_prefix(spaces.get_prepend_scheme());
            }
            other => return Err(UnknownDecoder(kind(other))),
        }
    }
    Ok((stages, prefix))
}

fn metaspace_prefix(scheme: PrependScheme) -> Prefix {
    match scheme {
        PrependScheme::Never => Prefix::default(),
        PrependScheme::First | PrependScheme::Always => Prefix { content: Some(' '), n_max: 1 },
    }
}

/// Returns the decoder's name in `tokenizer.json`.
fn kind(decoder: &Decoder) -> String {
    let json = serde_json::to_value(decoder).unwrap_or_default();
    json["type"].as_str().unwrap_or("of no known type").to_owned()
}

// === from a token's text to its bytes ===

fn write(stages: &[Stage<'_>], mut text: String, bytes: &mut Vec<u8>) -> Result<(), UnknownDecoder> {
    for stage in stages {
        match stage {
            Stage::ByteLevel => {
                write_byte_level(&text, bytes);
                return Ok(());
            }
            Stage::ByteFallback => {
                if let Some(byte) = fallback_byte(&text) {
                    bytes.push(byte);
                    return Ok(());
                }
            }
            Stage::Replace(decoder) => text = replaced(decoder, text)?,
            Stage::Space(character) => text = text.replace(*character, " "),
        }
    }
    bytes.extend_from_slice(text.as_bytes());
    Ok(())
}

fn replaced(decoder: &Decoder, text: String) -> Result<String, UnknownDecoder> {
    let replaced = decoder.decode_chain(vec![text]).map_err(|error| UnknownDecoder(error.to_string()))?;
    Ok(replaced.concat())
}

/// Writes the bytes of a byte-level text. A text with other characters is written as it is: it is the name of
/// a token that was added by hand.
fn write_byte_level(text: &str, bytes: &mut Vec<u8>) {
    let n_before = bytes.len();
    for character in text.chars() {
        let Some(byte) = byte_level(character) else {
            bytes.truncate(n_before);
            bytes.extend_from_slice(text.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// Decodes GPT-2's encoding of bytes as visible characters: a visible byte represents itself, and the other
/// bytes are U+0100 and up, in order.
fn byte_level(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121) as u8 + 0x7f),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Returns the byte in the name of a token such as `<0x0A>`.
fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}
