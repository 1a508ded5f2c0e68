//! The errors of decoding a message.

/// The error of a message from the wire that cannot be decoded. It names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("{field} is out of range: {value}")]
    Range { field: &'static str, value: String },
    #[error("{field} has {found} bytes instead of {wanted}")]
    Length { field: &'static str, wanted: usize, found: usize },
    #[error("{field} is not known here: {value}")]
    Unknown { field: &'static str, value: String },
}

impl ConvertError {
    pub(crate) fn range(field: &'static str, value: impl ToString) -> Self {
        Self::Range { field, value: value.to_string() }
    }

    pub(crate) fn unknown(field: &'static str, value: impl ToString) -> Self {
        Self::Unknown { field, value: value.to_string() }
    }
}

impl From<ConvertError> for tonic::Status {
    fn from(error: ConvertError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}
