//! CORS: the origins whose pages may send requests from a browser. None by default.

use std::time::Duration;

use axum::Router;
use http::{HeaderName, HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::caller::{REQUEST_ID, REQUEST_ID_OF_ANTHROPIC};

/// How long a browser may keep the answer to a preflight request.
const PREFLIGHT_KEPT: Duration = Duration::from_secs(600);

/// The allowed origins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CorsOrigins {
    /// No page of another origin may send requests.
    #[default]
    None,
    Any,
    These(Vec<HeaderValue>),
}

impl CorsOrigins {
    /// Parses a list of origins, or `*` alone. The error is the text that is neither.
    pub fn parse(texts: &[String]) -> Result<Self, String> {
        match texts {
            [] => Ok(Self::None),
            [any] if any == "*" => Ok(Self::Any),
            texts => texts.iter().map(|text| origin(text)).collect::<Result<_, _>>().map(Self::These),
        }
    }

    /// Answers preflight requests, which have no API key, and names the allowed origin in all answers.
    pub fn layer(&self, routes: Router) -> Router {
        let origins = match self {
            Self::None => return routes,
            Self::Any => AllowOrigin::any(),
            Self::These(origins) => AllowOrigin::list(origins.iter().cloned()),
        };
        let cors = CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST])
            // The official clients send headers of their own.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([
                HeaderName::from_static(REQUEST_ID),
                HeaderName::from_static(REQUEST_ID_OF_ANTHROPIC),
                header::RETRY_AFTER,
            ])
            .max_age(PREFLIGHT_KEPT);
        routes.layer(cors)
    }
}

/// Parses `scheme://host[:port]`, as browsers send it.
fn origin(text: &str) -> Result<HeaderValue, String> {
    let refused = || text.to_owned();
    let uri: http::Uri = text.parse().map_err(|_| refused())?;
    let is_web = matches!(uri.scheme_str(), Some("http" | "https"));
    let is_bare =
        uri.authority().is_some_and(|host| text.ends_with(host.as_str()) && !host.as_str().contains('@'));
    match HeaderValue::from_str(text) {
        Ok(value) if is_web && is_bare && text == text.to_lowercase() => Ok(value),
        _ => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::post;
    use http::{Request, Response, StatusCode};
    use tower::ServiceExt as _;

    use super::*;

    fn parse(texts: &[&str]) -> Result<CorsOrigins, String> {
        CorsOrigins::parse(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn origins_are_checked() {
        for text in
            ["*.example", "chat.example", "https://chat.example/", "https://a@b", "ftp://a", "https://A", ""]
        {
            assert_eq!(parse(&[text]), Err(text.to_owned()));
        }
        assert_eq!(parse(&["*", "https://a"]), Err("*".to_owned()));
        assert_eq!(parse(&[]), Ok(CorsOrigins::None));
        assert!(
            matches!(parse(&["https://a", "http://localhost:3000"]), Ok(CorsOrigins::These(two)) if two.len() == 2)
        );
    }

    /// Headers that the official clients of OpenAI and Anthropic send from a page.
    const HEADERS: &str = "authorization,content-type,x-api-key,anthropic-version,x-stainless-os";

    async fn ask(origins: &[&str], method: Method, origin: &str) -> Response<Body> {
        let routes = Router::new().route("/v1/completions", post(async || "answer"));
        let request = Request::builder()
            .method(method)
            .uri("/v1/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", HEADERS);
        let request = request.body(Body::empty()).expect("a request");
        parse(origins).expect("origins").layer(routes).oneshot(request).await.expect("an answer")
    }

    fn allowed(answer: &Response<Body>) -> Option<&str> {
        answer.headers().get("access-control-allow-origin").map(|origin| origin.to_str().expect("text"))
    }

    #[tokio::test]
    async fn only_these_origins_are_named() {
        let (chat, other) = ("https://chat.example", "https://other.example");
        for method in [Method::OPTIONS, Method::POST] {
            let answer = ask(&[chat], method.clone(), chat).await;
            assert_eq!((answer.status(), allowed(&answer)), (StatusCode::OK, Some(chat)), "{method}");
            assert_eq!(allowed(&ask(&[chat], method.clone(), other).await), None, "{method}");
            assert_eq!(allowed(&ask(&["*"], method.clone(), other).await), Some("*"), "{method}");
            assert_eq!(allowed(&ask(&[], method.clone(), chat).await), None, "{method}");
        }
        let preflight = ask(&[chat], Method::OPTIONS, chat).await;
        let headers = preflight.headers()["access-control-allow-headers"].to_str().expect("text");
        assert_eq!(headers, HEADERS);
        assert_eq!(ask(&[], Method::OPTIONS, chat).await.status(), StatusCode::METHOD_NOT_ALLOWED);
    }
}
