//! Checks the grammars of requests before a node sees them.

use std::sync::Arc;

use grammar::{GrammarError, Recent, sources};
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
/// The most texts of a choice.
const CHOICES_MAX: usize = 1024;

/// The most schemas of one grammar that are compiled to find the one that is wrong.
const PLACED_MAX: usize = 32;

/// The grammar that a request asks for, unchecked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedGrammar {
    /// The field that contained it.
    pub param: &'static str,
    pub grammar: Grammar,
    /// The schemas in the grammar. A refusal names the field of the one that is wrong.
    pub schemas: Vec<AskedSchema>,
}

/// A schema in a grammar, and the field that contained it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedSchema {
    pub param: String,
    pub grammar: Grammar,
}

impl AskedGrammar {
    pub fn new(param: &'static str, grammar: Grammar) -> Self {
        Self { param, grammar, schemas: Vec::new() }
    }

    /// Makes the grammar of answers that are one of these texts.
    pub(crate) fn choice(param: &'static str, texts: &[String]) -> Result<Self, AcceptError> {
        if !(1..=CHOICES_MAX).contains(&texts.len()) {
            let reason = format!("from 1 to {CHOICES_MAX} texts, not {}", texts.len());
            return Err(AcceptError::invalid(param, reason));
        }
        if texts.iter().any(String::is_empty) {
            return Err(AcceptError::invalid(param, "a text of a choice is not empty"));
        }
        Ok(Self::new(param, sources::choice(texts.iter().map(String::as_str))))
    }

    /// Makes a grammar in the language of Lark.
    pub(crate) fn lark(param: &'static str, text: &str) -> Result<Self, AcceptError> {
        if text.contains("::=") {
            let reason = "a grammar is in the language of Lark, without `::=`";
            return Err(AcceptError::unsupported(param, reason));
        }
        Ok(Self::new(param, sources::lark(text)))
    }
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
        let (checks, asked, n_tokens) = (self.clone(), asked.clone(), model.vocab);
        let param = asked.param;
        let failed = |reason: &str| AcceptError::invalid(param, reason);
        let checked = async {
            // The thread holds the permit: a check goes on after its request is dropped.
            let turn =
                Arc::clone(&self.turn).acquire_owned().await.map_err(|_| failed("the router stops"))?;
            let work = spawn_blocking(move || {
                let _turn = turn;
                checks.check_now(&asked, n_tokens)
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
            self.check_now(asked, model.vocab)?;
        }
        Ok(Some(asked.grammar.clone()))
    }

    fn check_now(&self, asked: &AskedGrammar, n_tokens: u32) -> Result<(), AcceptError> {
        let AskedGrammar { param, grammar, schemas } = asked;
        if let Err(error) = grammar::check(grammar, n_tokens) {
            for AskedSchema { param, grammar } in schemas.iter().take(PLACED_MAX) {
                let wrong = |error: GrammarError| AcceptError::invalid(param.clone(), error.to_string());
                grammar::check(grammar, n_tokens).map_err(wrong)?;
            }
            return Err(AcceptError::invalid(*param, error.to_string()));
        }
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
