//! One node's life, shared by all kinds of them: what it is made of, announcing, its status stream, its drain.
//!
//! Suggested reading order: [`config`], the memory that is asked for ([`kv_memory`]), what a node is made of ([`parts`], [`connectors`]), what it tells of
//! itself ([`status`]) and hears of itself ([`standing`]), how it notices that it makes no progress ([`watchdog`]), what every kind of node does from announcing to drain ([`running`], [`ports`]), one life of a node that computes ([`life`]), and
//! one after another with sleep between them ([`lives`], [`switch`]).
#![forbid(unsafe_code)]

pub mod config;
pub mod kv_memory;
pub mod parts;
pub mod connectors;
mod paced;
pub mod standing;
pub mod status;
pub mod ports;
pub mod running;
pub mod host;
pub mod life;
pub mod lives;
pub mod switch;
pub mod watchdog;
pub mod metrics;
pub mod error;

pub use chassis::counted::{Counted, Counter};
pub use config::{DecodeExpert, NodeConfig, RawNodeConfig};
pub use connectors::{Connectors, PeerWires};
pub use error::NodeError;
pub use kv_memory::{KvMemorySize, ModelKvMemory};
pub use lives::{Lives, Services};
pub use parts::{Drive, NodeParts};
pub use ports::Ports;
pub use running::{Announcement, RunningNode};
pub use standing::Standings;
pub use status::{StatusParts, StatusService};
pub use watchdog::Stuck;
