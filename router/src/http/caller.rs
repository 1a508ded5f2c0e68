//! Who asks, as the request's headers say.

use std::time::Duration;

use http::HeaderMap;
use types::RequestId;
use types::prompt::Priority;

use crate::accept::{Acceptor, Caller};
use crate::error::AcceptError;

pub(crate) const REQUEST_ID: &str = "x-request-id";
const TIMEOUT: &str = "x-baton-timeout-ms";
/// The router believes it: whoever stands in front of the router vouches for its clients.
const TENANT: &str = "x-baton-tenant";
/// Higher runs first; zero when absent.
const PRIORITY: &str = "x-baton-priority";

pub(crate) fn caller(acceptor: &Acceptor, id: RequestId, headers: &HeaderMap) -> Result<Caller, AcceptError> {
    let timeout = number(headers, TIMEOUT, "a number of milliseconds")?.map(Duration::from_millis);
    let priority = number(headers, PRIORITY, "a number from -128 to 127")?.unwrap_or_default();
    acceptor.caller(id, text(headers, TENANT)?, timeout, Priority(priority))
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

    use super::*;

    fn check(headers: &[(&'static str, &'static str)]) -> Result<Caller, AcceptError> {
        let acceptor = Acceptor::new(World::seeded(1), Duration::from_secs(600));
        let header =
            |(name, value): &(&'static str, &'static str)| (name.parse().unwrap(), value.parse().unwrap());
        caller(&acceptor, RequestId::new("r"), &headers.iter().map(header).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn headers_say_who_asks() {
        let caller = check(&[(TENANT, "acme"), (PRIORITY, "-3"), (TIMEOUT, "1500")]).expect("sane");
        assert_eq!((caller.tenant.as_str(), caller.priority), ("acme", Priority(-3)));
        assert_eq!(caller.deadline, World::seeded(1).deadline_in(Duration::from_millis(1500)));
        assert_eq!(check(&[]).expect("nothing said").priority, Priority(0));
    }

    #[tokio::test(start_paused = true)]
    async fn nonsense_names_the_header() {
        for (name, value) in
            [(TIMEOUT, "soon"), (TIMEOUT, "-1"), (TIMEOUT, "0"), (PRIORITY, "128"), (TENANT, "a b")]
        {
            assert_eq!(check(&[(name, value)]).expect_err("refused").param(), name);
        }
    }
}
