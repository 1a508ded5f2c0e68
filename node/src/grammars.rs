//! The grammars of a node's prompts, compiled for the vocabulary of its model.

use std::path::PathBuf;
use std::sync::Arc;

use engine::Backend;
use grammar::{AddedTokens, Compiler, Constraint, Vocabulary};
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::spawn_blocking;
use tracing::info;
use types::node::{TOKENIZER, tokenizer_digest};
use types::{Grammar, Prompt, Refusal, RefusalKind, TokenId, in_full};

/// Compiles the grammars of prompts. Cheap to clone.
///
/// The vocabulary is read from the model's `tokenizer.json` for the first prompt with a grammar.
#[derive(Clone, Debug)]
pub struct Grammars {
    model: Arc<TextOfModel>,
    compiler: Arc<OnceCell<Arc<Compiler>>>,
    /// One compilation runs at a time; other prompts wait until their deadline.
    turn: Arc<Semaphore>,
}

/// The parts of a model that concern text: its vocabulary and its end tokens.
#[derive(Debug)]
struct TextOfModel {
    name: String,
    /// The path of `tokenizer.json`, and the digest that the file had when the model was opened.
    file: Option<(PathBuf, String)>,
    n_tokens: u32,
    ends: Vec<TokenId>,
}

impl Grammars {
    pub(crate) fn of(backend: &dyn Backend) -> Self {
        let model = backend.model();
        let digest = model.fingerprint.part(TOKENIZER).filter(|digest| digest.starts_with("blake3:"));
        let text = TextOfModel {
            name: model.name.clone(),
            file: backend.tokenizer_file().zip(digest.map(str::to_owned)),
            n_tokens: model.vocab,
            ends: model.eos_tokens.clone(),
        };
        Self { model: Arc::new(text), compiler: Arc::default(), turn: Arc::new(Semaphore::new(1)) }
    }

    /// Returns the beginning of the prompt's grammar; `None` if it has none. Waits for a compilation until the prompt's
    /// deadline.
    pub async fn constraint(&self, prompt: &Prompt) -> Result<Option<Constraint>, Refusal> {
        let Some(grammar) = &prompt.sampling.grammar else { return Ok(None) };
        let compiled = tokio::time::timeout_at(prompt.deadline.instant().into(), self.compiled(grammar));
        let late =
            |_| Refusal::new(RefusalKind::Deadline, "the deadline passed before the grammar was compiled");
        compiled.await.map_err(late)?.map(Some)
    }

    async fn compiled(&self, grammar: &Grammar) -> Result<Constraint, Refusal> {
        let open = || {
            let model = Arc::clone(&self.model);
            blocking(move || model.compiler().map(Arc::new))
        };
        let compiler = self.compiler.get_or_try_init(open).await?;
        if let Some(kept) = compiler.kept(grammar) {
            return Ok(kept);
        }
        let closed = |_| Refusal::new(RefusalKind::Failed, "grammars are no longer compiled");
        // The thread holds the permit: a compilation goes on after its prompt is dropped.
        let turn = Arc::clone(&self.turn).acquire_owned().await.map_err(closed)?;
        let (compiler, grammar) = (Arc::clone(compiler), grammar.clone());
        blocking(move || {
            let _turn = turn;
            let wrong =
                |error| Refusal::new(RefusalKind::Invalid, format!("{}: {error}", grammar.kind().as_str()));
            compiler.constraint(&grammar).map_err(wrong)
        })
        .await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let panicked = |_| Refusal::new(RefusalKind::Failed, "a thread that compiles grammars has panicked");
    spawn_blocking(work).await.map_err(panicked)?
}

impl TextOfModel {
    fn compiler(&self) -> Result<Compiler, Refusal> {
        let Self { name, file, n_tokens, ends } = self;
        let Some((file, digest)) = file else {
            let reason = format!(
                "constrained output needs a model with a tokenizer, and `{name}` has none on this node"
            );
            return Err(Refusal::new(RefusalKind::Invalid, reason));
        };
        let failed = |reason: String| {
            let reason =
                format!("the vocabulary of `{name}` cannot be read from {}: {reason}", file.display());
            Refusal::new(RefusalKind::Failed, reason)
        };
        let json = std::fs::read(file).map_err(|error| failed(error.to_string()))?;
        if tokenizer_digest(&json) != *digest {
            return Err(failed("the file has changed since the model was opened".to_owned()));
        }
        let added = AddedTokens::in_folder(file.parent().unwrap_or(file));
        let vocabulary = added.and_then(|added| Vocabulary::new(&json, &added, *n_tokens, ends));
        let vocabulary = vocabulary.map_err(|error| failed(in_full(&error)))?;
        let compiler = Compiler::new(&vocabulary).map_err(|error| failed(in_full(&error)))?;
        info!(n_tokens = vocabulary.n_tokens(), file = %file.display(), "vocabulary read for grammars");
        Ok(compiler)
    }
}
