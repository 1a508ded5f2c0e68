//! Compiled grammars of one vocabulary, in a bounded cache.

use std::fmt;
use std::sync::Arc;

use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use types::Grammar;

use crate::constraint::{Compiled, Constraint};
use crate::error::GrammarError;
use crate::limits::{limited, plain};
use crate::recent::Recent;
use crate::sources;
use crate::token_bytes::VocabularyError;
use crate::vocabulary::Vocabulary;

/// The number of compiled grammars that are kept.
pub const KEPT_MAX: usize = 32;

/// Compiles grammars for one vocabulary, and keeps those that were used last.
pub struct Compiler {
    factory: ParserFactory,
    kept: Recent<Arc<Compiled>>,
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
        Ok(Self { factory: limited(factory), kept: Recent::new(KEPT_MAX) })
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
        self.kept.keep(grammar, Arc::clone(&compiled));
        Ok(Constraint::new(compiled))
    }

    /// Returns a constraint if the grammar is compiled.
    pub fn kept(&self, grammar: &Grammar) -> Option<Constraint> {
        self.kept.get(grammar).filter(|compiled| !compiled.is_spent()).map(Constraint::new)
    }
}
