//! The address of an HTTP server as users type it.

use std::error::Error;

use hyper::{Response, Uri};
use types::in_full;

use crate::exit::CommandError;

/// The ports that most commands need.
const ADMIN_PORTS: &str =
    "give an admin port (node.admin, router.admin), or the router's http port for `chat`";

/// The advice for a port that uses TLS. Only the HTTP port has the pages that `chat` needs.
const NO_TLS: &str = "this command does not speak TLS: give a port with plain http, as the admin ports of nodes and \
                      routers (node.admin, router.admin) are; for `chat`, the http port of a proxy";

/// Returns a failed request's error with its causes, and says what to do if the port does not speak plain http.
pub(crate) fn failure(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    let is_no_http =
        causes.filter_map(|cause| cause.downcast_ref::<hyper::Error>()).any(hyper::Error::is_parse);
    match is_no_http {
        true => format!("the port does not answer in plain http; {NO_TLS}"),
        false => in_full(error),
    }
}

/// Refuses the answer of a gRPC port, which has the status 200 whatever it says.
pub(crate) fn refuse_grpc<T>(response: &Response<T>) -> Result<(), String> {
    let kind = response.headers().get("content-type").and_then(|kind| kind.to_str().ok());
    match kind {
        Some(kind) if kind.starts_with("application/grpc") => {
            Err(format!("this is a gRPC port; {ADMIN_PORTS}"))
        }
        _ => Ok(()),
    }
}

/// Returns `text` as `http://host:port/path` without a trailing slash. The scheme and the path may be
/// missing.
pub(crate) fn parse(text: &str) -> Result<String, CommandError> {
    let refused = |reason: &str| CommandError::usage(format!("{text:?} is not an address: {reason}"));
    let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
    match scheme {
        "http" => {}
        "https" => return Err(CommandError::usage(format!("{text:?}: {NO_TLS}"))),
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
    use http_body_util::Empty;
    use hyper::body::Bytes;
    use hyper_util::client::legacy::Client;
    use hyper_util::rt::TokioExecutor;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_port_with_tls_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url: Uri = format!("http://{}/", listener.local_addr().expect("bound")).parse().expect("a URL");
        let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let alert = async {
            let (mut stream, _) = listener.accept().await.expect("it connects");
            stream.read_u8().await.expect("a request");
            // The alert with which a port with TLS answers a request in plain http.
            stream.write_all(&[21, 3, 3, 0, 2, 2, 50]).await.expect("sent");
            stream
        };
        let (answer, _open) = tokio::join!(client.get(url), alert);
        let told = failure(&answer.expect_err("this is no http"));
        assert!(told.contains("does not answer in plain http") && told.contains("router.admin"), "{told}");
        let told = failure(&std::io::Error::other("gone"));
        assert_eq!(told, "gone");
    }

    #[test]
    fn the_answer_of_a_grpc_port_is_refused() {
        let answer =
            |kind: &str| Response::builder().header("content-type", kind).body(()).expect("a response");
        assert_eq!(refuse_grpc(&answer("application/json")), Ok(()));
        let refused = refuse_grpc(&answer("application/grpc")).expect_err("gRPC");
        assert!(refused.contains("node.admin"), "{refused}");
    }

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
        let error = format!("{:?}", parse("https://a:1").expect_err("TLS"));
        assert!(error.contains("does not speak TLS") && error.contains("router.admin"), "{error}");
        for text in ["ftp://a", "", "http://", "a:99999", "a:port", "a b"] {
            parse(text).expect_err(text);
        }
    }
}
