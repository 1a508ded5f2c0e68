//! Converts errors to gRPC statuses. No other file of the router uses gRPC codes for clients.

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use types::CallerAction;

use super::request::name_of;
use crate::error::{AcceptError, RequestError, ServeError, whole_seconds};
use crate::http;

/// The metadata with the error code of `docs/errors.md`, which HTTP has in its body.
pub(super) const CODE: &str = "baton-code";

/// Makes the status of a request that was not begun.
pub(super) fn of(error: RequestError) -> Status {
    match error {
        RequestError::Accept(error) => refused(&error.renamed(name_of)),
        RequestError::Serve(error) => failed(&error),
    }
}

/// Returns the code of a call that the gRPC library refuses: its message is too large, late, in an unknown compression
/// or malformed.
pub(super) fn unread(code: Code) -> http::Code {
    match code {
        Code::OutOfRange | Code::ResourceExhausted => http::Code::BodyTooLarge,
        Code::DeadlineExceeded => http::Code::BodyTimeout,
        Code::Unimplemented => http::Code::UnsupportedParameter,
        _ => http::Code::InvalidValue,
    }
}

fn refused(error: &AcceptError) -> Status {
    let code = match error {
        AcceptError::UnknownModel { .. } => Code::NotFound,
        AcceptError::Unauthorized { .. } => Code::Unauthenticated,
        AcceptError::TenantLimit(_) => Code::ResourceExhausted,
        AcceptError::NoNodes { .. } => Code::Unavailable,
        _ => Code::InvalidArgument,
    };
    with_metadata(Status::new(code, error.to_string()), error.into(), error.caller_action())
}

/// Makes the status of a request that could not be served.
pub(super) fn failed(error: &ServeError) -> Status {
    let code = match (error, error.caller_action()) {
        (ServeError::DeadlinePassed { .. }, _) => Code::DeadlineExceeded,
        (ServeError::Overloaded { .. }, _) => Code::ResourceExhausted,
        (_, CallerAction::Reject) => Code::InvalidArgument,
        (_, CallerAction::RetryLater(_) | CallerAction::RetryElsewhere) => Code::Unavailable,
        (_, CallerAction::Bug) => Code::Internal,
    };
    with_metadata(Status::new(code, error.to_string()), error.into(), error.caller_action())
}

/// Puts the error code into the metadata, and the time after which the client may try again, which HTTP has in a
/// header.
fn with_metadata(mut status: Status, code: http::Code, action: CallerAction) -> Status {
    let metadata = status.metadata_mut();
    metadata.insert(CODE, MetadataValue::from_static(code.as_str()));
    if let CallerAction::RetryLater(after) = action {
        metadata.insert("retry-after", MetadataValue::from(whole_seconds(after)));
    }
    status
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use types::RefusalKind;

    use super::*;

    #[test]
    fn errors_that_may_be_retried_say_when() {
        let reason = || "a reason".to_owned();
        let delay = |status: Status| {
            status.metadata().get("retry-after").map(|after| after.to_str().expect("ASCII").to_owned())
        };
        let overloaded =
            ServeError::Overloaded { retry_after: Duration::from_millis(2500), reason: reason() };
        let cases = [
            (overloaded, Code::ResourceExhausted, Some("3")),
            (ServeError::NoNodes { reason: reason() }, Code::Unavailable, Some("1")),
            (ServeError::Draining, Code::Unavailable, Some("1")),
            (ServeError::Refused { kind: RefusalKind::Full, reason: reason() }, Code::Unavailable, Some("1")),
            (ServeError::DeadlinePassed { reason: reason() }, Code::DeadlineExceeded, None),
            (ServeError::Failed { reason: reason() }, Code::Internal, None),
        ];
        for (error, code, after) in cases {
            let status = failed(&error);
            assert_eq!((status.code(), delay(status).as_deref()), (code, after), "{error}");
        }
        let status = refused(&AcceptError::NoNodes { reason: reason() });
        assert_eq!((status.code(), delay(status).as_deref()), (Code::Unavailable, Some("1")));
    }
}
