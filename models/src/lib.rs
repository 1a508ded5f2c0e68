//! Provides the folder of a model: the bundled demo model, one unpacked from a file, or one downloaded from a hub.
//!
//! Suggested reading order: the bundled model ([`bundled`]) and how it is unpacked ([`unpack`]); then the hub: the name of
//! a model ([`id`]), the settings ([`settings`]), the cache, in the layout of the hub's own tools ([`cache`]), the files
//! that are needed ([`needed`]), the download of a folder ([`fetch`]), of one file (`download`), and the HTTP client
//! (`client`, `proxy`, `trust`).
//!
//! A download happens before a process serves, so files are read and written with blocking calls. See
//! `docs/decisions/0004-own-hub-client.md`.
#![forbid(unsafe_code)]

pub mod bundled;
pub mod unpack;
pub mod id;
pub mod settings;
pub mod cache;
pub mod needed;
pub mod fetch;
mod download;
mod digest;
mod client;
mod proxy;
mod trust;
mod progress;
pub mod error;

pub use error::HubError;
pub use fetch::{ConfigJudge, Hub};
pub use id::ModelId;
pub use settings::{Authorities, HubSettings, Proxies};
