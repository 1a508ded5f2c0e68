//! The trait between the APIs and the cluster: a prompt in, steps out.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures::stream::BoxStream;
use tokio::time::Instant;
use types::step::PromptLogprob;
use types::{ModelInfo, Prompt, Step, Usage};

use crate::admission::terms::AdmissionTerms;
use crate::error::AcceptError;
pub use crate::error::ServeError;
use crate::requests::RequestRecord;
use crate::text::{RouterModels, ServedModel};

/// The servers behind the router as `/ready` sees them: Baton's nodes, or pools of another engine.
pub trait Ready: fmt::Debug + Send + Sync + 'static {
    /// Checks that requests can be served, by at least one usable pair of nodes. An error is the reason why
    /// not.
    fn ready(&self) -> Result<(), String>;
}

/// The cluster as the HTTP and gRPC APIs see it. `Dispatch` implements the trait; tests use `FakeServe`.
///
/// An API calls [`generate`](Self::generate) once for each prompt that [`accept`](crate::accept) made. The
/// [`Generation`] owns everything that the prompt has on any node. Dropping it, or the future that returns
/// it, cancels the request on all nodes; there is no other way to cancel.
#[async_trait]
pub trait Serve: Ready {
    /// Returns the models that the cluster can serve now.
    fn models(&self) -> Vec<ModelInfo>;

    /// Starts a prompt. Returns when its first step is available, or an error; until then a refusal can
    /// become a status code.
    async fn generate(&self, prompt: Prompt, arrival: Arrival) -> Result<Generation, ServeError>;

    /// Checks that the cluster's nodes are known. Only then does a model without a node count as nonexistent.
    /// An error is the reason why they are not known.
    fn knows_nodes(&self) -> Result<(), AcceptError>;
}

impl dyn Serve {
    /// Returns the model that a request names. A request without a name gets the only model, if there is just
    /// one.
    pub(crate) fn model(
        &self,
        models: &RouterModels,
        name: Option<&str>,
    ) -> Result<Arc<ServedModel>, AcceptError> {
        models.find(name).map_err(|unknown| self.knows_nodes().err().unwrap_or(unknown))
    }
}

/// The times of a request before it is a prompt, the detail that its record gets, and its terms of admission.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The time at which the request reached the router.
    pub at: Instant,
    /// The time at which its body was read.
    pub read: Instant,
    /// The time at which its prompt was accepted.
    pub accepted: Instant,
    pub detail: Detail,
    /// The request's terms for admission.
    pub terms: AdmissionTerms,
}

/// How much the record of a request says about its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    #[default]
    Usual,
    /// Decode nodes time each step, and the answer has an explanation.
    Explained,
}

impl Arrival {
    /// Returns the arrival of a request that is a prompt already.
    pub fn now() -> Self {
        let now = Instant::now();
        let terms = AdmissionTerms::default();
        Self { at: now, read: now, accepted: now, detail: Detail::Usual, terms }
    }
}

/// A flag that the API sets when an answer is complete before its last step, because of a stop string. Clones
/// share it.
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

/// The answer to one prompt, while it is generated.
pub struct Generation {
    pub usage: Usage,
    /// The log-probabilities of the prompt's tokens from the second on; empty unless the prompt asks for them.
    pub prompt_logprobs: Vec<PromptLogprob>,
    /// The flag for a complete answer. If it is set before the steps are dropped, the request counts as
    /// finished instead of cancelled.
    pub complete: Complete,
    /// The record of the request, if its answer must have an explanation.
    pub explained: Option<RequestRecord>,
    /// All steps, including the first, in order of [`Step::index`] and without gaps, also across failures of nodes.
    ///
    /// The stream ends after the step that has `finish` set, or after one error. An end without either is a
    /// bug.
    pub steps: BoxStream<'static, Result<Step, ServeError>>,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("usage", &self.usage).finish_non_exhaustive()
    }
}
