//! Checks the grammars of requests before a node sees them.

use std::sync::Arc;

use grammar::{GrammarError, Recent, sources};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use types::{Deadline, Grammar, GrammarKind};

use crate::error::{AcceptError, RequestError, ServeError};
use crate::text::reasoning::ReasoningRules;
use crate::text::tools::after_reasoning;
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
    /// The parts that the client wrote: schemas of tools, or its own grammar. A refusal names the field of the wrong part.
    pub schemas: Vec<AskedSchema>,
}

/// A part of a grammar, and the field that contained it.
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

    /// Returns the grammar for a model that reasons before its answer. A grammar whose text cannot be read stays as it is:
    /// the check refuses it.
    pub(crate) fn after_reasoning(self, reasoning: &ReasoningRules, tokenizer: &Tokenizer) -> Self {
        match after_reasoning(&self.grammar, reasoning, tokenizer) {
            Ok(grammar) => {
                let own = AskedSchema { param: self.param.to_owned(), grammar: self.grammar };
                Self { param: self.param, grammar, schemas: vec![own] }
            }
            Err(_) => self,
        }
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
    ) -> Result<(), RequestError> {
        let asked = with_ids(model, asked)?;
        if self.is_accepted(&asked.grammar) {
            return Ok(());
        }
        let (checks, n_tokens) = (self.clone(), model.vocab);
        let checked = async {
            let turn = Arc::clone(&self.turn).acquire_owned().await.expect("the semaphore is never closed");
            // The thread holds the permit: a check goes on after its request is dropped.
            let work = spawn_blocking(move || {
                let _turn = turn;
                checks.check_now(&asked, n_tokens)
            });
            work.await.map_err(|error| ServeError::Failed { reason: error.to_string() })
        };
        let late =
            |_| ServeError::DeadlinePassed { reason: "the grammar was not checked in time".to_owned() };
        let in_time = tokio::time::timeout_at(deadline.instant().into(), checked).await;
        Ok(in_time.map_err(late)???)
    }

    /// Returns the grammar, checked now if it was not accepted before.
    pub(crate) fn accepted(
        &self,
        model: &ServedModel,
        asked: Option<&AskedGrammar>,
    ) -> Result<Option<Grammar>, AcceptError> {
        let Some(asked) = asked else { return Ok(None) };
        let asked = with_ids(model, asked)?;
        if !self.is_accepted(&asked.grammar) {
            self.check_now(&asked, model.vocab)?;
        }
        Ok(Some(asked.grammar))
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

/// Returns the grammar with the ids of its special tokens in place of their names, for a model with a tokenizer: nodes
/// identify tokens by their ids.
fn with_ids(model: &ServedModel, asked: &AskedGrammar) -> Result<AskedGrammar, AcceptError> {
    needs_tokenizer(model, asked.param)?;
    let mut asked = asked.clone();
    let parts = asked.schemas.iter_mut().map(|schema| &mut schema.grammar);
    let grammars = std::iter::once(&mut asked.grammar).chain(parts);
    for grammar in grammars.filter(|grammar| grammar.kind() == GrammarKind::Lark) {
        let written = sources::with_token_ids(grammar.text(), |name| model.tokenizer.special_named(name));
        match written {
            Ok(written) => *grammar = written.unwrap_or_else(|| grammar.clone()),
            Err(error) => return Err(AcceptError::invalid(asked.param, error.to_string())),
        }
    }
    Ok(asked)
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use chassis::World;

    use super::*;
    use crate::text::tokenizer::HuggingFace;

    fn demo() -> ServedModel {
        let json = include_bytes!("../../models/demo/tokenizer.json");
        let tokenizer = Tokenizer::HuggingFace(Box::new(HuggingFace::new(json).expect("the demo model's")));
        ServedModel { tokenizer: tokenizer.into(), vocab: 2048, ..ServedModel::mock("demo", 64) }
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_waits_too_long_is_late() {
        let (checks, asked) = (GrammarChecks::default(), AskedGrammar::new("regex", sources::regex("a+")));
        let _busy = checks.turn.try_acquire_many(CHECKS_MAX as u32).expect("no check yet");
        let deadline = World::seeded(1).deadline_in(Duration::from_secs(5));
        let late = checks.check(&demo(), &asked, deadline).await;
        assert!(matches!(late, Err(RequestError::Serve(ServeError::DeadlinePassed { .. }))), "{late:?}");
    }

    #[test]
    fn a_grammar_names_special_tokens() {
        let (checks, demo) = (GrammarChecks::default(), demo());
        let accepted = |text: &str| {
            let asked = AskedGrammar::lark("guided_grammar", text).expect("Lark");
            checks.accepted(&demo, Some(&asked)).map(|grammar| grammar.expect("a grammar").text().to_owned())
        };
        let user = demo.tokenizer.special_named("<|user|>").expect("the demo model's").0;
        assert_eq!(accepted("start: \"<|user|>\" <|user|>"), Ok(format!("start: \"<|user|>\" <[{user}]>")));
        let error = accepted("start: \"a\" <|missing|>").expect_err("the tokenizer has no such token");
        assert_eq!(error.to_string(), "guided_grammar: the model has no special token `<|missing|>`");
    }
}
