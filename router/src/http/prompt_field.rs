//! The field `prompt` of completions: one prompt or several, as text or token ids.

use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Unexpected, Visitor};
use types::TokenId;

use crate::accept::{AskedPrompt, INPUTS_MAX};
use crate::error::AcceptError;
use crate::text::PromptText;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl PromptField {
    /// Returns the prompts. Their number is checked here, before they are tokenized, which is costly.
    pub(super) fn into_prompts(self) -> Result<Vec<AskedPrompt>, AcceptError> {
        let text = |text: String| AskedPrompt::Text(PromptText::Plain(text));
        let ids = |ids: Vec<u32>| AskedPrompt::Tokens(ids.into_iter().map(TokenId).collect());
        match self {
            Self::Text(prompt) => Ok(vec![text(prompt)]),
            Self::Tokens(tokens) => Ok(vec![ids(tokens)]),
            Self::Texts(texts) => Ok(bounded(texts)?.into_iter().map(text).collect()),
            Self::TokenLists(lists) => Ok(bounded(lists)?.into_iter().map(ids).collect()),
        }
    }
}

fn bounded<T>(prompts: Vec<T>) -> Result<Vec<T>, AcceptError> {
    if prompts.len() > INPUTS_MAX {
        return Err(AcceptError::invalid(
            "prompt",
            format!("at most {INPUTS_MAX} prompts, not {}", prompts.len()),
        ));
    }
    Ok(prompts)
}

/// Reads the field in one pass: the first element of a list determines the type of the others. `serde`'s untagged enums
/// would keep each token id in 32 bytes first.
impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids, or a list of such lists")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptField, E> {
        Ok(PromptField::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptField, A::Error> {
        Ok(match list.next_element()? {
            None => PromptField::Tokens(Vec::new()),
            Some(First::Token(first)) => PromptField::Tokens(with_rest(first, list)?),
            Some(First::Text(first)) => PromptField::Texts(with_rest(first, list)?),
            Some(First::Tokens(first)) => PromptField::TokenLists(with_rest(first, list)?),
        })
    }
}

/// Reads the rest of a list.
fn with_rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut list: A) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(next) = list.next_element()? {
        all.push(next);
    }
    Ok(all)
}

/// The first element of a list.
enum First {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FirstVisitor)
    }
}

struct FirstVisitor;

impl<'de> Visitor<'de> for FirstVisitor {
    type Value = First;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id, or a list of token ids")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<First, E> {
        let token = u32::try_from(number);
        token.map(First::Token).map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &"u32"))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<First, E> {
        Ok(First::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<First, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(First::Tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_tells_what_a_list_holds() {
        let text = |text: &str| text.to_owned();
        for (json, expected) in [
            (r#""a\n""#, PromptField::Text(text("a\n"))),
            ("[]", PromptField::Tokens(Vec::new())),
            ("[0, 4294967295]", PromptField::Tokens(vec![0, u32::MAX])),
            (r#"["a", ""]"#, PromptField::Texts(vec![text("a"), text("")])),
            ("[[1, 2], [], [3]]", PromptField::TokenLists(vec![vec![1, 2], vec![], vec![3]])),
        ] {
            assert_eq!(serde_json::from_str::<PromptField>(json).expect(json), expected);
        }
    }

    #[test]
    fn a_wrong_element_is_refused_by_its_place() {
        for (json, expected) in [
            (
                "7",
                "prompt: invalid type: integer `7`, expected a string, a list of strings, a list of token ids",
            ),
            ("[1, \"a\"]", "prompt[1]: invalid type: string \"a\", expected u32"),
            ("[\"a\", 1]", "prompt[1]: invalid type: integer `1`, expected a string"),
            ("[[1], [-2]]", "prompt[1][0]: invalid value: integer `-2`, expected u32"),
            ("[4294967296]", "prompt[0]: invalid value: integer `4294967296`, expected u32"),
            ("[1.5]", "prompt[0]: invalid type: floating point `1.5`, expected a string, a token id"),
            ("[{}]", "prompt[0]: invalid type: map, expected a string, a token id"),
            ("[null]", "prompt[0]: invalid type: null, expected a string, a token id"),
        ] {
            let body = format!("{{\"prompt\": {json}}}");
            let parsed =
                crate::http::body::parse::<std::collections::BTreeMap<String, PromptField>>(body.as_bytes());
            let error = parsed.expect_err(json).message;
            assert!(error.starts_with(expected), "{json}: {error}");
        }
    }
}
