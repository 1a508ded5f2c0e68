//! The messages between Baton's processes: the .proto files, the generated code, and conversions to `types`.
//!
//! The conversions check every received value once; code outside this crate uses `types` only.
#![forbid(unsafe_code)]

mod convert;
mod error;

pub use convert::node::role_from_wire;
pub use convert::prompt::{prompt_from_wire, prompt_to_wire};
pub use convert::step::{prompt_logprobs_from_wire, prompt_logprobs_to_wire};
pub use convert::transfer::{transfer_from_wire, transfer_to_wire};
pub use error::ConvertError;

/// The generated code. Documentation is in the .proto files.
#[allow(clippy::all, clippy::pedantic, missing_debug_implementations)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
}

/// Returns the bytes of a message that does not travel over gRPC.
pub fn encode(message: &impl prost::Message) -> Vec<u8> {
    message.encode_to_vec()
}

/// Reads a message that [`encode`] has written.
pub fn decode<M: prost::Message + Default>(bytes: impl bytes::Buf) -> Result<M, prost::DecodeError> {
    M::decode(bytes)
}

/// The file descriptor set of `baton.v1`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton_descriptor.bin"));

pub use prost::Message;
pub use types::node::MESSAGE_BYTES_MAX;
