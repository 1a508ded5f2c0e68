//! What every process has: a world, tasks that end, configuration, telemetry, an admin port and limits on its rpcs.
//!
//! Suggested reading order: what is not a function of its input ([`world`], [`net`]), who callers are ([`identity`]), how work ends ([`gate`],
//! [`task`], [`shutdown`]), how a simulation stops a process ([`standstill`]), what is counted up to a bound ([`counted`]), what a process is told ([`config`], [`byte_size`]), what it tells ([`telemetry`],
//! [`metrics`], [`admin`]), and how processes talk ([`server`] with its
//! [`connections`], [`rpc`]).
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
pub use identity::Identity;
pub use net::{Listener, Net, Stream, StreamReader, StreamWriter};
pub use shutdown::Shutdown;
pub use standstill::Standstill;
pub use task::{Task, TaskError, spawn_guarded};
pub use world::{Jumps, World};
