//! Fetches model folders from a hub and keeps them as the hub's own tools do.
//!
//! Suggested reading order: what is asked for ([`id`]) and how ([`settings`]), where it is kept ([`cache`]), what is
//! needed of it ([`needed`]), and the whole way ([`fetch`]) over one file's (`download`) and the wire (`client`, `trust`).
//!
//! A fetch happens before a process serves anybody, so files are read and written where the code stands.
#![forbid(unsafe_code)]

pub mod id;
pub mod settings;
pub mod cache;
pub mod needed;
pub mod fetch;
mod download;
mod digest;
mod client;
mod trust;
mod progress;
pub mod error;

pub use error::HubError;
pub use fetch::{ConfigJudge, Hub};
pub use id::ModelId;
pub use settings::{Authorities, HubSettings};
