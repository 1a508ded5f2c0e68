//! The client and the options of a request, from its headers.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, header};
use types::RequestId;

use crate::accept::{Acceptor, Caller};
use crate::admission::terms::{SHEDDABLE, SLO};
use crate::error::AcceptError;
use crate::serve::Detail;
use crate::tenants::{Claims, Client};

pub(crate) const REQUEST_ID: &str = "x-request-id";
/// The header in which Anthropic's clients look for the request's id.
pub(crate) const REQUEST_ID_OF_ANTHROPIC: &str = "request-id";
/// The header with the API key of Anthropic's clients, and of the live page's chat. Others send `authorization`.
const API_KEY: &str = "x-api-key";
const TIMEOUT: &str = "x-baton-timeout-ms";
/// The header with the tenant. Ignored if API keys are used; otherwise accepted only from trusted proxies.
const TENANT: &str = "x-baton-tenant";
/// The header with the priority. Higher values run first; zero if absent.
const PRIORITY: &str = "x-baton-priority";
/// The header that asks for an explanation of the request's time: `1`, or `0` as if absent.
const EXPLAIN: &str = "x-baton-explain";

/// Removes the admin key from a request on the admin port, so that it is not taken for an API key.
pub(crate) async fn without_admin_key(mut request: Request, next: Next) -> Response {
    request.headers_mut().remove(header::AUTHORIZATION);
    next.run(request).await
}

pub(crate) fn client(
    acceptor: &Acceptor,
    peer: Option<SocketAddr>,
    headers: &HeaderMap,
) -> Result<Client, AcceptError> {
    let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let key = headers.get(API_KEY).and_then(|value| value.to_str().ok()).map(|key| format!("Bearer {key}"));
    acceptor.client(&Claims {
        peer: peer.map(|peer| peer.ip()),
        authorization: authorization.or(key.as_deref()),
        tenant: text(headers, TENANT)?,
        priority: number(headers, PRIORITY, "a number from -128 to 127")?,
    })
}

pub(crate) fn caller(
    acceptor: &Acceptor,
    id: RequestId,
    client: Client,
    headers: &HeaderMap,
) -> Result<Caller, AcceptError> {
    let timeout = number(headers, TIMEOUT, "a number of milliseconds")?.map(Duration::from_millis);
    let caller = acceptor.caller(id, client, timeout)?;
    let terms = caller.terms.asked(text(headers, SLO)?, text(headers, SHEDDABLE)?)?;
    Ok(Caller { detail: detail(headers)?, terms, ..caller })
}

/// Refuses a compressed body, which would be taken for text.
pub(crate) fn check_encoding(headers: &HeaderMap) -> Result<(), AcceptError> {
    const NAME: &str = "content-encoding";
    match text(headers, NAME)? {
        None | Some("" | "identity") => Ok(()),
        Some(other) => Err(AcceptError::unsupported(NAME, format!("send the body without `{other}`"))),
    }
}

fn detail(headers: &HeaderMap) -> Result<Detail, AcceptError> {
    match text(headers, EXPLAIN)?.map(str::trim) {
        None | Some("0") => Ok(Detail::Usual),
        Some("1") => Ok(Detail::Explained),
        Some(other) => Err(AcceptError::invalid(EXPLAIN, format!("0 or 1, not `{other}`"))),
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<Option<&'a str>, AcceptError> {
    let plain = |value: &'a http::HeaderValue| {
        value.to_str().map_err(|_| AcceptError::invalid(name, "not plain text"))
    };
    headers.get(name).map(plain).transpose()
}

fn number<T: std::str::FromStr>(
    headers: &HeaderMap,
    name: &'static str,
    wanted: &str,
) -> Result<Option<T>, AcceptError> {
    let parsed = |text: &str| {
        text.trim().parse().map_err(|_| AcceptError::invalid(name, format!("{wanted}, not `{text}`")))
    };
    text(headers, name)?.map(parsed).transpose()
}

#[cfg(test)]
mod tests {
    use chassis::World;
    use chassis::metrics::Metrics;
    use types::prompt::Priority;

    use super::*;
    use crate::admission::{AdmissionTerms, Shedding};
    use crate::metrics::RouterMetrics;
    use crate::tenants::{Tenants, TrustedProxies};

    fn check(headers: &[(&'static str, &'static str)]) -> Result<Caller, AcceptError> {
        let proxies = TrustedProxies::parse(&["10.0.0.0/8".to_owned()]).expect("a network");
        let metrics = RouterMetrics::new(&Metrics::new("router"));
        let acceptor = Acceptor::new(World::seeded(1), crate::accept::Deadlines::default(), metrics);
        let acceptor = acceptor.with_tenants(Tenants::without_keys(proxies));
        let header =
            |(name, value): &(&'static str, &'static str)| (name.parse().unwrap(), value.parse().unwrap());
        let headers = headers.iter().map(header).collect();
        let client = client(&acceptor, Some("10.1.2.3:80".parse().unwrap()), &headers)?;
        caller(&acceptor, RequestId::new("r"), client, &headers)
    }

    #[tokio::test(start_paused = true)]
    async fn headers_say_who_asks() {
        let caller = check(&[(TENANT, "acme"), (PRIORITY, "-3"), (TIMEOUT, "1500")]).expect("sane");
        assert_eq!((caller.client.tenant.as_str(), caller.client.priority), ("acme", Priority(-3)));
        assert_eq!(caller.deadline, World::seeded(1).deadline_in(Duration::from_millis(1500)));
        assert_eq!(check(&[]).expect("nothing said").client.priority, Priority(0));
        let detail = |value| check(&[(EXPLAIN, value)]).expect("a choice").detail;
        assert_eq!(
            [detail("1"), detail("0"), caller.detail],
            [Detail::Explained, Detail::Usual, Detail::Usual]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn headers_say_on_which_terms() {
        let terms = |headers| check(headers).expect("sane").terms;
        let asked = terms(&[(SLO, "ttft=2s,tbt=50ms"), (SHEDDABLE, "1")]);
        assert_eq!(
            (asked.objective.to_string(), asked.shedding),
            ("ttft=2000ms,tbt=50ms".to_owned(), Shedding::First)
        );
        assert_eq!(terms(&[(SHEDDABLE, "0")]), AdmissionTerms::default());
    }

    #[tokio::test(start_paused = true)]
    async fn a_malformed_value_names_the_header() {
        for (name, value) in [
            (TIMEOUT, "soon"),
            (TIMEOUT, "-1"),
            (TIMEOUT, "0"),
            (PRIORITY, "128"),
            (TENANT, "a b"),
            (EXPLAIN, "yes"),
            (SLO, "fast"),
            (SHEDDABLE, "2"),
        ] {
            assert_eq!(check(&[(name, value)]).expect_err("refused").param(), name);
        }
    }
}
