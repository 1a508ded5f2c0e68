//! Conversions between `types` and wire messages. Encoding always succeeds; decoding can refuse.

pub(crate) mod load;
pub(crate) mod node;
pub(crate) mod prompt;
pub(crate) mod step;
pub(crate) mod transfer;

use crate::error::ConvertError;

/// Returns a required field, or an error that names it.
fn present<T>(value: Option<T>, field: &'static str) -> Result<T, ConvertError> {
    value.ok_or(ConvertError::Missing { field })
}

/// Converts a message's number to the field's type. A number out of range is an error that names the field.
fn narrow<T: TryFrom<u32>>(value: u32, field: &'static str) -> Result<T, ConvertError> {
    T::try_from(value).map_err(|_| ConvertError::range(field, value))
}

/// Reads a field of 16 bytes, such as an id, a grant or a digest.
fn sixteen(bytes: &[u8], field: &'static str) -> Result<[u8; 16], ConvertError> {
    bytes.try_into().map_err(|_| ConvertError::Length { field, wanted: 16, found: bytes.len() })
}

#[cfg(test)]
mod tests;
