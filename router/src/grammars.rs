//! Checks the grammars of requests before a node sees them.

use std::sync::Arc;

use grammar::Recent;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use types::{Deadline, Grammar};

use crate::error::AcceptError;
use crate::text::{ServedModel, Tokenizer};

/// The number of accepted grammars whose hashes are kept. An application has few, and sends them again and again.
const KEPT_MAX: usize = 1024;
/// The number of grammars that are checked at the same time, each for up to about a second. Other requests wait until their
/// deadline.
const CHECKS_MAX: usize = 2;

/// The grammar that a request asks for, unchecked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedGrammar {
    /// The field that contained it.
    pub param: &'static str,
    pub grammar: Grammar,
}

/// Checks grammars, each text once. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GrammarChecks {
    accepted: Arc<Recent<()>>,
    turn: Arc<Semaphore>,
}

impl Default for GrammarChecks {
    fn default() -> Self {
        Self { accepted: Arc::new(Recent::new(KEPT_MAX)), turn: Arc::new(Semaphore::new(CHECKS_MAX)) }
    }
}

impl GrammarChecks {
    /// Checks a grammar on a blocking thread, unless it was accepted before.
    pub async fn check(
        &self,
        model: &ServedModel,
        asked: &AskedGrammar,
        deadline: Deadline,
    ) -> Result<(), AcceptError> {
        needs_tokenizer(model, asked.param)?;
        if self.is_accepted(&asked.grammar) {
            return Ok(());
        }
        let (checks, asked) = (self.clone(), asked.clone());
        let param = asked.param;
        let failed = |reason: &str| AcceptError::invalid(param, reason);
        let checked = async {
            // The thread holds the permit: a check goes on after its request is dropped.
            let turn =
                Arc::clone(&self.turn).acquire_owned().await.map_err(|_| failed("the router stops"))?;
            let work = spawn_blocking(move || {
                let _turn = turn;
                checks.check_now(&asked)
            });
            work.await.map_err(|_| failed("the check of the grammar has failed"))?
        };
        let in_time = tokio::time::timeout_at(deadline.instant().into(), checked);
        in_time.await.map_err(|_| failed("the deadline passed before the grammar was checked"))?
    }

    /// Returns the grammar, checked now if it was not accepted before.
    pub(crate) fn accepted(
        &self,
        model: &ServedModel,
        asked: Option<&AskedGrammar>,
    ) -> Result<Option<Grammar>, AcceptError> {
        let Some(asked) = asked else { return Ok(None) };
        needs_tokenizer(model, asked.param)?;
        if !self.is_accepted(&asked.grammar) {
            self.check_now(asked)?;
        }
        Ok(Some(asked.grammar.clone()))
    }

    fn check_now(&self, AskedGrammar { param, grammar }: &AskedGrammar) -> Result<(), AcceptError> {
        grammar::check(grammar).map_err(|error| AcceptError::invalid(*param, error.to_string()))?;
        self.accepted.keep(grammar, ());
        Ok(())
    }

    fn is_accepted(&self, grammar: &Grammar) -> bool {
        self.accepted.get(grammar).is_some()
    }
}

/// Refuses a grammar for a model whose tokens are not known as bytes of text.
fn needs_tokenizer(model: &ServedModel, param: &'static str) -> Result<(), AcceptError> {
    match *model.tokenizer {
        Tokenizer::HuggingFace(_) => Ok(()),
        Tokenizer::Bytes | Tokenizer::Absent => {
            Err(AcceptError::unsupported(param, "constrained output needs a model with a `tokenizer.json`"))
        }
    }
}
