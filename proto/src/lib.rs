//! The messages between Baton's processes: the .proto files, the generated code, and conversions to `types`.
//!
//! The conversions check every received value once; code outside this crate uses `types` only.
#![forbid(unsafe_code)]

mod convert;
mod error;

use prost::encoding::{WireType, encode_key, encode_varint};

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

/// The place of a field with many bytes: the number of a message's field, and the number of a bytes field in the message that
/// it holds.
#[derive(Clone, Copy, Debug)]
pub struct EndField {
    pub message: u32,
    pub bytes: u32,
}

/// Encodes a message up to `n_bytes` bytes that its last field will have, so that they need not be copied. The field is empty
/// in `message`, and the caller writes the bytes after the result.
///
/// The inner message comes twice then, and readers merge the two.
pub fn encode_before_bytes(message: &impl prost::Message, field: EndField, n_bytes: usize) -> Vec<u8> {
    let mut bytes_key = Vec::new();
    encode_key(field.bytes, WireType::LengthDelimited, &mut bytes_key);
    encode_varint(n_bytes as u64, &mut bytes_key);
    let mut encoded = message.encode_to_vec();
    encode_key(field.message, WireType::LengthDelimited, &mut encoded);
    encode_varint((bytes_key.len() + n_bytes) as u64, &mut encoded);
    encoded.extend(bytes_key);
    encoded
}

/// Reads a message that [`encode`] has written.
pub fn decode<M: prost::Message + Default>(bytes: impl bytes::Buf) -> Result<M, prost::DecodeError> {
    M::decode(bytes)
}

/// The file descriptor set of `baton.v1`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton_descriptor.bin"));

pub use prost::Message;
pub use types::node::MESSAGE_BYTES_MAX;
