//! The check of a grammar's text without a model's vocabulary. The router does it for each request.
//!
//! Whether a grammar can be compiled does not depend on the bytes of the vocabulary, so a vocabulary of single bytes serves.
//! A grammar that names tokens by their ids needs one with as many tokens as the model has.

use std::sync::{Arc, LazyLock};

use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, TokenParser};
use serde_json::{Map, Value};
use types::{Grammar, GrammarKind};

use crate::constraint::failed;
use crate::error::{ConstraintError, GrammarError};
use crate::limits::{limited, plain};
use crate::parts::Parts;
use crate::sources;

/// The most schemas that are compiled to find the place of an error.
const PLACES_MAX: usize = 200;

/// The number of bytes, and the token that ends an answer.
const N_BYTES: u32 = u8::MAX as u32 + 1;

/// Compiles grammars over a vocabulary of single bytes.
static BYTES: LazyLock<ParserFactory> = LazyLock::new(|| factory(N_BYTES + 1));

/// Returns the compiler of grammars over single bytes and tokens without bytes, together `n_tokens`.
fn factory(n_tokens: u32) -> ParserFactory {
    let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.resize(n_tokens.max(N_BYTES + 1) as usize, Vec::new());
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, N_BYTES), &words);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[]);
    limited(factory.expect("a vocabulary of bytes is valid"))
}

/// Compiles a grammar for a model with `n_tokens` tokens and drops the result. Refuses it if a part of it cannot be
/// enforced, and names the place.
///
/// Takes up to about a second for the worst texts, so it belongs on a blocking thread.
pub fn check(grammar: &Grammar, n_tokens: u32) -> Result<(), GrammarError> {
    let parsed = sources::parsed(grammar)?;
    let parser = match sources::names_tokens(grammar) {
        true => factory(n_tokens).create_parser(parsed),
        false => BYTES.create_parser(parsed),
    };
    let Err(reason) = parser.map_err(|error| plain(&error)).and_then(may_begin) else { return Ok(()) };
    match grammar.kind() {
        GrammarKind::JsonSchema => Err(placed(&sources::schema(grammar.text())?, reason)),
        GrammarKind::Regex | GrammarKind::Lark => Err(GrammarError::Text(reason)),
    }
}

/// Refuses a grammar that allows no first token, such as a rule that only names itself.
fn may_begin(parser: TokenParser) -> Result<(), String> {
    let first = Matcher::new(Ok(parser)).compute_mask_or_eos();
    first.map(drop).map_err(|error| match failed(error) {
        ConstraintError::DeadEnd => "nothing matches it".to_owned(),
        ConstraintError::Failed(reason) => reason,
    })
}

/// Finds the innermost schema with the same error as the whole.
fn placed(root: &Value, reason: String) -> GrammarError {
    let (mut schema, mut place, mut tries) = (root, String::new(), 0);
    loop {
        let has_it = |(_, part): &(String, &Value)| {
            tries += 1;
            tries <= PLACES_MAX && error_of(root, part).is_some_and(|error| error == reason)
        };
        match parts(schema).into_iter().find(has_it) {
            Some((step, part)) => {
                place.push_str(&step);
                schema = part;
            }
            None => return GrammarError::Schema { place, reason },
        }
    }
}

/// Returns the error of a part alone, with the definitions of the root.
fn error_of(root: &Value, part: &Value) -> Option<String> {
    let mut alone = part.as_object()?.clone();
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(name) {
            alone.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    let parsed = sources::of_schema(Value::Object(alone)).ok()?;
    BYTES.create_parser(parsed).map_err(|error| plain(&error)).and_then(may_begin).err()
}

/// Returns the schemas in a schema, with the steps of their JSON pointers.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let fields = schema.as_object().into_iter().flatten();
    fields.flat_map(|(name, value)| parts_of(name, value)).collect()
}

fn parts_of<'a>(name: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    let of_map = |map: &'a Map<String, Value>| {
        map.iter().map(|(key, part)| (format!("/{name}/{}", escaped(key)), part)).collect()
    };
    match (Parts::under(name), value) {
        (Some(Parts::Map), Value::Object(map)) => of_map(map),
        (Some(Parts::List), Value::Array(list)) => {
            list.iter().enumerate().map(|(nth, part)| (format!("/{name}/{nth}"), part)).collect()
        }
        (Some(Parts::One), Value::Object(_)) => vec![(format!("/{name}"), value)],
        _ => Vec::new(),
    }
}

/// Escapes a key for a JSON pointer.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}
