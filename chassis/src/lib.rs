//! What every process has: a world, tasks that end, configuration, telemetry, an admin port and limits on its rpcs.
//!
//! Suggested reading order: what is not a function of its input ([`world`], [`net`]), how work ends ([`gate`],
//! [`task`], [`shutdown`]), what a process is told ([`config`], [`byte_size`]), what it tells ([`telemetry`],
//! [`metrics`], [`admin`]), and how processes talk ([`server`] with its
//! [`connections`], [`rpc`]).
#![forbid(unsafe_code)]

pub mod world;
pub mod net;
pub mod gate;
pub mod task;
pub mod shutdown;
pub mod config;
pub mod byte_size;
pub mod telemetry;
pub mod metrics;
pub mod admin;
pub mod connections;
pub mod server;
pub mod rpc;
pub mod guards;
pub mod error;

pub use error::{ConfigError, ConfigProblem, Origin, StartError};
pub use gate::{Gate, GateClosed, GateGuard, StillHeld};
pub use net::{Listener, Net, Stream, StreamReader, StreamWriter};
pub use shutdown::Shutdown;
pub use task::{Task, TaskError, spawn_guarded};
pub use world::{Jumps, World};
