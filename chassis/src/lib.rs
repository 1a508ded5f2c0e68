//! The base of every process: its world, tasks that end, configuration, telemetry, admin port, and limits on its ports.
//!
//! Suggested reading order: time, randomness and network ([`world`], [`net`]); the authentication of callers
//! ([`identity`]); the end of work ([`gate`], [`task`], [`shutdown`]); suspension in simulations ([`standstill`]);
//! bounded counters ([`counted`]); configuration ([`config`], [`byte_size`], [`reload`]); telemetry ([`telemetry`], [`metrics`],
//! [`admin`]); and servers ([`server`] with its [`connections`] and answers that are [`unread`], [`rpc`]).
#![forbid(unsafe_code)]

pub mod world;
pub mod identity;
pub mod net;
pub mod gate;
pub mod task;
pub mod shutdown;
pub mod standstill;
pub mod counted;
pub mod config;
pub mod byte_size;
pub mod reload;
pub mod telemetry;
pub mod metrics;
mod process_usage;
pub mod admin;
pub mod connections;
pub mod server;
pub mod unread;
pub mod rpc;
pub mod guards;
pub mod error;

pub use error::{ConfigError, ConfigProblem, Origin, StartError};
pub use gate::{Gate, GateClosed, GateGuard, StillHeld};
pub use identity::Identity;
pub use net::{Listener, Net, Stream, StreamReader, StreamWriter};
pub use shutdown::Shutdown;
pub use standstill::Standstill;
pub use task::{Task, TaskError, spawn_guarded};
pub use world::{Jumps, World};
