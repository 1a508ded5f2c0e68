//! The interface between the APIs and the router: a prompt in, steps out.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures::stream::BoxStream;
use types::{ModelInfo, Prompt, Step, Usage};

use crate::error::AcceptError;
pub use crate::error::ServeError;
use crate::text::{RouterModel, RouterModels};

/// The cluster as the HTTP and gRPC APIs see it. `Dispatch` implements it; tests use `FakeServe`.
///
/// A door calls [`generate`](Self::generate) once for each prompt that [`accept`](crate::accept) made. Everything that a
/// prompt needs on any node belongs to the [`Generation`]: dropping it, or the future that would have returned it, cancels
/// the request everywhere, and there is no other way to cancel.
#[async_trait]
pub trait Serve: fmt::Debug + Send + Sync + 'static {
    /// The models that the cluster can serve now.
    fn models(&self) -> Vec<ModelInfo>;

    /// Returns with the first step in hand, or an error: until then a refusal can still be a status code.
    async fn generate(&self, prompt: Prompt) -> Result<Generation, ServeError>;

    /// Whether tokens can flow: at least one usable pair of nodes. Otherwise the reason why not.
    fn ready(&self) -> Result<(), String>;

    /// Whether the cluster's nodes are known, so that a model that no node brought does not exist. Otherwise why not.
    fn knows_nodes(&self) -> Result<(), AcceptError>;
}

impl dyn Serve {
    /// The model that a request names. A request that names none means the only one there is.
    pub(crate) fn model(
        &self,
        models: &RouterModels,
        name: Option<&str>,
    ) -> Result<Arc<RouterModel>, AcceptError> {
        models.find(name).map_err(|unknown| self.knows_nodes().err().unwrap_or(unknown))
    }
}

/// Set by the API when an answer is complete before its last step, at a stop string. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Complete(Arc<AtomicBool>);

impl Complete {
    pub(crate) fn say(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// One prompt's answer while it is being made.
pub struct Generation {
    pub usage: Usage,
    /// Said before the steps are dropped, the request counts as finished and not as cancelled.
    pub complete: Complete,
    /// Every step, the first one included, in order of [`Step::index`] and without gaps, whatever died meanwhile.
    ///
    /// It ends after the step that has `finish` set, or after one error. An end without either is a bug of the router.
    pub steps: BoxStream<'static, Result<Step, ServeError>>,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("usage", &self.usage).finish_non_exhaustive()
    }
}
