//! What the doors ask of the house: a prompt in, steps out.

use std::fmt;

use async_trait::async_trait;
use futures::stream::BoxStream;
use types::{ModelInfo, Prompt, Step, Usage};

pub use crate::error::ServeError;

/// The one thing that a door (HTTP, gRPC) knows of the cluster. Dispatch implements it; tests put a puppet in its place.
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
}

/// One prompt's answer while it is being made.
pub struct Generation {
    pub usage: Usage,
    /// Every step, the first one included, in order of [`Step::index`] and without gaps, whatever died meanwhile.
    ///
    /// It ends after the step that has `finish` set, or after one error. An end without either is a bug of the house.
    pub steps: BoxStream<'static, Result<Step, ServeError>>,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("usage", &self.usage).finish_non_exhaustive()
    }
}
