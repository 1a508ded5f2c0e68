//! A server that follows a script and records its times: the reference for tests of the harness.
//!
//! [`script`] is pure: it gives the bytes and their times. [`server`] plays scripts on a socket.

pub mod script;
pub mod server;

pub use script::{Counting, Ending, Script, ScriptAction, Step};
pub use server::{PlayedRequest, ScriptedServer};
