//! The client: sends one request and records the time of each token.
//!
//! The client reads HTTP/1.1 itself. One call goes from the socket's buffer to the token count, without
//! another task in between, so the time of a token is taken next to the `read` that returned it, and 10,000
//! streams fit one core. [`reception`] is the same call without a socket: tests pass it bytes at times of
//! their choice. See `docs/decisions/0005-the-harness-reads-http-itself.md`.

pub mod chunked;
pub mod connection;
pub mod event;
pub mod exchange;
pub mod http;
pub mod reception;
pub mod recorder;
pub mod request;
pub mod sse;
pub mod stream;
pub mod survey;
pub mod target;

pub use exchange::Client;
pub use reception::Reception;
pub use request::{Endpoint, Prompt, RequestShape};
pub use target::TargetServer;
