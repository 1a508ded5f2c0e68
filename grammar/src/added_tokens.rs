//! Tokens that a model's folder lists beside its `tokenizer.json`, which may lack some of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use crate::token_bytes::VocabularyError;

/// The tokens by id: `added_tokens_decoder` of `tokenizer_config.json`, or the older `added_tokens.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddedTokens(BTreeMap<u32, AddedToken>);

impl AddedTokens {
    /// Reads the files in a model's folder.
    pub fn in_folder(folder: &Path) -> Result<Self, VocabularyError> {
        let config = read(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
        if let Some(listed) = config.get("added_tokens_decoder").and_then(Value::as_object) {
            let token = |(id, token): (&String, &Value)| Some((id.parse().ok()?, described(token)?));
            return Ok(Self(listed.iter().filter_map(token).collect()));
        }
        let Some(listed) = read(&folder.join("added_tokens.json"))? else { return Ok(Self::default()) };
        let map = read(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
        let specials: BTreeSet<&str> = specials(&config).chain(specials(&map)).collect();
        let token = |(text, id): (&String, &Value)| {
            let id = u32::try_from(id.as_u64()?).ok()?;
            let is_special = specials.contains(text.as_str());
            // Normalized unless it is special, as in `transformers`.
            Some((id, AddedToken::from(text.as_str(), is_special)))
        };
        Ok(Self(listed.iter().filter_map(token).collect()))
    }

    /// Makes the tokenizer of a `tokenizer.json`, with the tokens that it lacks. Also returns the tokens that are left out,
    /// because the tokenizer would give them other ids.
    pub fn tokenizer(&self, json: &[u8]) -> Result<(Tokenizer, Vec<&str>), VocabularyError> {
        let mut tokenizer = Tokenizer::from_bytes(json)?;
        let known = tokenizer.get_added_tokens_decoder();
        let mut next = next_id(&tokenizer);
        let (mut added, mut left_out) = (Vec::new(), Vec::new());
        for (id, token) in &self.0 {
            match tokenizer.token_to_id(&token.content) {
                Some(found) if found == *id => added.extend((!known.contains_key(id)).then(|| token.clone())),
                None if *id == next => {
                    next += 1;
                    added.push(token.clone());
                }
                _ => left_out.push(token.content.as_str()),
            }
        }
        tokenizer.add_tokens(added)?;
        Ok((tokenizer, left_out))
    }
}

/// Returns the id that the tokenizer gives its next token.
fn next_id(tokenizer: &Tokenizer) -> u32 {
    let n_of_model = tokenizer.get_vocab_size(false) as u32;
    let last = tokenizer.get_added_tokens_decoder().keys().copied().max();
    last.map_or(n_of_model, |last| n_of_model.max(last + 1))
}

/// Returns a token of `added_tokens_decoder`.
fn described(token: &Value) -> Option<AddedToken> {
    let content = token.get("content")?.as_str()?;
    let flag = |name: &str| token.get(name).and_then(Value::as_bool);
    let plain = AddedToken::from(content, flag("special").unwrap_or(false));
    Some(AddedToken {
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(plain.normalized),
        ..plain
    })
}

/// Returns the texts of the special tokens that a file names.
fn specials(file: &Map<String, Value>) -> impl Iterator<Item = &str> {
    let named = file.iter().filter(|(key, _)| key.ends_with("_token")).map(|(_, token)| token);
    let lists = ["additional_special_tokens", "extra_special_tokens"];
    let listed = lists.into_iter().filter_map(|key| file.get(key)?.as_array()).flatten();
    named.chain(listed).filter_map(|token| token.get("content").unwrap_or(token).as_str())
}

/// Returns a file's object; `None` if there is no such file.
fn read(file: &Path) -> Result<Option<Map<String, Value>>, VocabularyError> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| VocabularyError::AddedTokens {
        file: file.to_owned(),
        source,
    };
    match std::fs::read(file) {
        Ok(json) => serde_json::from_slice(&json).map(Some).map_err(|error| failed(error.into())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error.into())),
    }
}
