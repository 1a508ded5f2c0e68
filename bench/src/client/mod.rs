//! The client: sends one request and writes down when which token came.
//!
//! It reads HTTP/1.1 itself, from the socket's buffer to the token count in one call with no hand-over between tasks,
//! so that the time of a token is taken next to the `read` that brought it, and 10,000 streams fit one core.
//! [`reception`] is that call, without a socket: tests feed it bytes at times of their choosing.
//! See `docs/decisions/0005-the-harness-reads-http-itself.md`.

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
pub use target::Target;
