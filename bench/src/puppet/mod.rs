//! A server that does what a script says, and writes down when it did: the truth against which the harness is held.
//!
//! [`script`] is pure: it says which bytes go out when. [`server`] plays scripts on a socket.

pub mod script;
pub mod server;

pub use script::{Counting, Ending, Script, ScriptAction, Step};
pub use server::{PlayedRequest, ScriptedServer};
