//! Compiled grammars of one vocabulary, in a bounded cache.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use types::Grammar;
use types::grammar::GrammarHash;

use crate::constraint::{Compiled, Constraint};
use crate::error::GrammarError;
use crate::limits::{limited, plain};
use crate::sources;
use crate::token_bytes::VocabularyError;
use crate::vocabulary::Vocabulary;

/// The number of compiled grammars that are kept.
pub const KEPT_MAX: usize = 32;

/// Compiles grammars for one vocabulary, and keeps those that were used last.
pub struct Compiler {
    factory: ParserFactory,
    /// The compiled grammars, the one that was used last at the end. Locked for moments, never during a compilation.
    kept: Mutex<VecDeque<(GrammarHash, Arc<Compiled>)>>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

impl Compiler {
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, VocabularyError> {
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(vocabulary.env(), InferenceCapabilities::default(), &slices);
        let factory = factory.map_err(|error| VocabularyError::Tree(plain(&error)))?;
        Ok(Self { factory: limited(factory), kept: Mutex::default() })
    }

    /// Returns a constraint at the beginning of the grammar, compiled before or now. A compilation takes up to about a
    /// second, so this belongs on a blocking thread unless [`kept`](Self::kept) has it.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        if let Some(kept) = self.kept(grammar) {
            return Ok(kept);
        }
        let parser = self.factory.create_parser(sources::parsed(grammar)?);
        let parser = parser.map_err(|error| GrammarError::Text(plain(&error)))?;
        let compiled = Arc::new(Compiled::new(Matcher::new(Ok(parser))));
        self.keep(grammar.hash(), Arc::clone(&compiled));
        Ok(Constraint::new(compiled))
    }

    /// Returns a constraint if the grammar is compiled.
    pub fn kept(&self, grammar: &Grammar) -> Option<Constraint> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let place = kept.iter().position(|(hash, _)| *hash == grammar.hash())?;
        let (hash, compiled) = kept.remove(place)?;
        if compiled.is_spent() {
            return None;
        }
        let constraint = Constraint::new(Arc::clone(&compiled));
        kept.push_back((hash, compiled));
        Some(constraint)
    }

    fn keep(&self, hash: GrammarHash, compiled: Arc<Compiled>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(other, _)| *other != hash);
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back((hash, compiled));
    }
}
