//! The parts that all kinds of nodes share: configuration, connectors, announcement, status stream, watchdog and drain.
//!
//! Suggested reading order: settings ([`config`], [`kv_memory`]); the parts of a node ([`parts`],
//! [`connectors`], [`grammars`]); its status stream ([`status`]) and the routers' reports on the node ([`standing`]); the
//! [`watchdog`]; the path from announcement to drain ([`running`], [`ports`]); one life of a node that
//! computes ([`life`]); several lives with sleep between them, or several roles in one life ([`lives`], [`switch`], `role`);
//! and a node of several processes ([`group`]).
#![forbid(unsafe_code)]

pub mod config;
pub mod kv_memory;
pub mod parts;
pub mod connectors;
pub mod grammars;
mod paced;
pub mod standing;
pub mod status;
pub mod ports;
pub mod running;
pub mod host;
pub mod life;
pub mod lives;
pub mod switch;
mod role;
pub mod watchdog;
pub mod group;
mod gpus;
pub mod metrics;
pub mod error;

pub use chassis::counted::{Counter, CounterGuard};
pub use config::{DecodeExpertSettings, NodeConfig, RawNodeConfig};
pub use connectors::{Connectors, PeerWires};
pub use error::NodeError;
pub use kv_memory::{KvMemorySize, ModelKvMemory};
pub use lives::{Lives, Services};
pub use parts::{Drive, NodeParts};
pub use ports::{KeptListener, Ports};
pub use running::{Announcement, RunningNode};
pub use standing::Standings;
pub use status::{StatusParts, StatusService};
pub use watchdog::StuckStage;
