//! The headers of every call between Baton's processes.

use http::{HeaderMap, HeaderValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};
use tracing::Span;
use types::node::PROTOCOL;
use types::{ProtocolRange, RequestId};

use crate::telemetry;

/// The header with the protocol versions that the caller speaks: `MIN-MAX`, both ends included.
pub const PROTOCOL_HEADER: &str = "baton-protocol";
/// The header with the id of the request that caused the call. Announcements and status streams have none.
pub const REQUEST_ID_HEADER: &str = "baton-request-id";

/// Attaches the request `id` to an outgoing message.
pub fn call<T>(id: &RequestId, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(id.clone());
    request
}

/// Writes the headers of outgoing calls: the current span, the protocol versions, and the request id attached by
/// [`call`].
#[derive(Clone, Copy, Debug)]
pub struct CallHeaders;

impl Interceptor for CallHeaders {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let id =
            request.extensions().get::<RequestId>().and_then(|id| HeaderValue::from_str(id.as_str()).ok());
        let headers: &mut HeaderMap = request.metadata_mut().as_mut();
        headers.insert(PROTOCOL_HEADER, written(PROTOCOL));
        if let Some(id) = id {
            headers.insert(REQUEST_ID_HEADER, id);
        }
        telemetry::inject(&Span::current(), headers);
        Ok(request)
    }
}

fn written(range: ProtocolRange) -> HeaderValue {
    HeaderValue::try_from(format!("{}-{}", range.min, range.max))
        .expect("digits and a dash are a valid header value")
}

/// Reads the caller's protocol range: `Ok(None)` if it sent none.
pub(super) fn protocol(headers: &HeaderMap) -> Result<Option<ProtocolRange>, MalformedProtocol> {
    headers
        .get(PROTOCOL_HEADER)
        .map(|value| parse(value).ok_or_else(|| MalformedProtocol(value.clone())))
        .transpose()
}

fn parse(value: &HeaderValue) -> Option<ProtocolRange> {
    let (min, max) = value.to_str().ok()?.split_once('-')?;
    Some(ProtocolRange { min: min.parse().ok()?, max: max.parse().ok()? })
}

pub(super) fn request_id(headers: &HeaderMap) -> Option<RequestId> {
    headers.get(REQUEST_ID_HEADER)?.to_str().ok().map(RequestId::new)
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`baton-protocol` must be MIN-MAX, not {0:?}")]
pub(super) struct MalformedProtocol(HeaderValue);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_header_table() {
        let range = |min, max| Ok(Some(ProtocolRange { min, max }));
        let malformed = |text: &'static str| Err(MalformedProtocol(HeaderValue::from_static(text)));
        for (text, expected) in [
            ("1-1", range(1, 1)),
            ("2-13", range(2, 13)),
            ("1", malformed("1")),
            ("1-x", malformed("1-x")),
            ("1..2", malformed("1..2")),
            ("70000-70001", malformed("70000-70001")),
        ] {
            let headers = HeaderMap::from_iter([(
                http::HeaderName::from_static(PROTOCOL_HEADER),
                HeaderValue::from_static(text),
            )]);
            assert_eq!(protocol(&headers), expected, "{text}");
        }
        assert_eq!(protocol(&HeaderMap::new()), Ok(None));
        assert_eq!(parse(&written(PROTOCOL)), Some(PROTOCOL));
    }
}
