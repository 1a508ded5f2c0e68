//! A server that follows a script and records its times: the reference for tests of the harness.
//!
//! [`script`] computes the bytes of an answer and their times, without I/O. [`server`] sends them on a
//! socket.

pub mod script;
pub mod server;

pub use script::{Counting, Ending, Script, ScriptAction, Step};
pub use server::{PlayedRequest, ScriptedServer};
