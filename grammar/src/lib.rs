//! Grammars that answers must follow: the router checks their text, and nodes mask tokens by them.
//!
//! Suggested reading order: the texts of grammars ([`sources`], `formats`, `parts`); their check without a vocabulary
//! ([`check()`]); the tokens beside a `tokenizer.json` ([`added_tokens`]); the bytes in a vocabulary ([`token_bytes`],
//! [`vocabulary`]); compiled grammars ([`compiler`]) and their cache (`recent`); and the state of one sequence
//! ([`constraint`]). `docs/decisions/0027-nodes-know-their-vocabulary.md` says why nodes know the bytes of tokens.
#![forbid(unsafe_code)]

pub mod added_tokens;
mod check;
pub mod compiler;
pub mod constraint;
mod error;
mod formats;
mod limits;
mod parts;
mod recent;
pub mod sources;
pub mod token_bytes;
pub mod vocabulary;

#[cfg(test)]
mod tests;

pub use added_tokens::AddedTokens;
pub use check::check;
pub use compiler::Compiler;
pub use constraint::Constraint;
pub use error::{ConstraintError, GrammarError};
pub use recent::Recent;
pub use token_bytes::TokenBytes;
pub use vocabulary::Vocabulary;
