//! The address of an HTTP server as users type it.

use hyper::Uri;

use crate::exit::CommandError;

/// Returns `text` as `http://host:port/path` without a trailing slash. The scheme and the path may be
/// missing.
pub(crate) fn parse(text: &str) -> Result<String, CommandError> {
    let refused = |reason: &str| CommandError::usage(format!("{text:?} is not an address: {reason}"));
    let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
    match scheme {
        "http" => {}
        "https" => {
            return Err(refused("Baton's ports use plain http; give one of them, or a proxy's http port"));
        }
        _ => return Err(refused("it must begin with http://, or be host:port")),
    }
    let url = format!("http://{}", rest.trim_end_matches('/'));
    let uri: Uri = url.parse().map_err(|error: hyper::http::uri::InvalidUri| refused(&error.to_string()))?;
    let authority = uri.authority().ok_or_else(|| refused("the host is missing"))?;
    let after_host = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    if authority.host().is_empty() || !after_host.is_empty() && authority.port_u16().is_none() {
        return Err(refused("expected host:port, with a port from 1 to 65535"));
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_scheme_and_no_slash() {
        for (text, url) in [
            ("127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("localhost:8000/", "http://localhost:8000"),
            ("http://router/v1/", "http://router/v1"),
            ("http://[::1]:80/x", "http://[::1]:80/x"),
        ] {
            assert_eq!(parse(text).expect(text), url);
        }
        for text in ["https://a:1", "ftp://a", "", "http://", "a:99999", "a:port", "a b"] {
            parse(text).expect_err(text);
        }
    }
}
