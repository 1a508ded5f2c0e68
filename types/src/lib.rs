//! Plain value types that all crates share, with no I/O, no async and no serde.
//!
//! Suggested reading order: the request ([`prompt`], [`grammar`], [`step`]), the nodes ([`node`], [`load`]), the memory layout of
//! KV ([`layout`], [`stages`], [`processes`], [`block`]), its transfer between nodes ([`transfer`]), and the text of an error ([`text`]).
#![forbid(unsafe_code)]

pub mod block;
pub mod grammar;
pub mod ids;
pub mod layout;
pub mod load;
pub mod node;
pub mod place;
pub mod processes;
pub mod prompt;
pub mod stages;
pub mod step;
pub mod text;
pub mod transfer;
pub mod refusal;

pub use block::{BlockHash, BlockHashKey, BlockHasher, BlockIdx};
pub use grammar::{Grammar, GrammarKind};
pub use ids::{Epoch, Grant, NodeId, RequestId, TenantId, TransferId};
pub use layout::{GroupIdx, KvDtype, KvLayout};
pub use load::{BlockChange, BlockCounts, BlockEvent, LearnedCosts, NodeLoad, PromptWork};
pub use node::{Fingerprint, FingerprintDigest, MissingWire, ModelInfo, NodeInfo, ProtocolRange, Role};
pub use processes::{GridError, ProcessGrid, ProcessShare};
pub use prompt::{CacheSalt, Deadline, Prompt, PromptDigest, RequestedModel, Sampling, StopRules, TokenId};
pub use refusal::{CallerAction, Refusal, RefusalKind};
pub use stages::{StageError, StageLayers, StageSplit};
pub use step::{ComputedPrompt, FinishReason, Step, Usage};
pub use text::in_full;
pub use transfer::{Destination, Handoff, KvSpan, Landing, Scheme, WireAddress};
