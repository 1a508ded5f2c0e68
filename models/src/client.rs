//! HTTP requests to a hub, with redirects. The token is sent to the hub only.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, LOCATION, PROXY_AUTHORIZATION, RANGE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::Response;
use hyper::body::Incoming;
use hyper_rustls::builderstates::WantsSchemes;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::error::HubError;
use crate::proxy::ProxyConnector;
use crate::settings::HubSettings;
use crate::trust;

/// The longest time without a byte from a hub, or from the store that it redirects to.
pub(crate) const SILENT_MAX: Duration = Duration::from_secs(30);
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 5;
/// The largest response that is read as a whole, in bytes: a list of files.
const ANSWER_BYTES_MAX: usize = 16 << 20;
const AGENT: &str = concat!("baton/", env!("CARGO_PKG_VERSION"));

type Http = HyperClient<HttpsConnector<ProxyConnector>, Empty<Bytes>>;

/// An HTTP client of one hub.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    http: Http,
    connector: ProxyConnector,
    endpoint: Uri,
    authorization: Option<HeaderValue>,
}

/// Which redirects are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follow {
    /// Redirects to another path of the hub are followed, as after a model was renamed. A redirect to another
    /// server is returned as the response.
    OnHub,
    Anywhere,
}

impl Client {
    pub(crate) fn new(settings: &HubSettings) -> Result<Self, HubError> {
        let endpoint = settings.endpoint.parse::<Uri>().ok().filter(is_http);
        let authorization = settings.token.as_ref().and_then(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
        tcp.set_nodelay(true);
        let connector = ProxyConnector::new(tcp, &settings.proxies);
        Ok(Self {
            http: http(trust::tls(&settings.authorities)?, connector.clone()),
            connector,
            endpoint: endpoint.ok_or_else(|| HubError::Endpoint { endpoint: settings.endpoint.clone() })?,
            authorization,
        })
    }

    /// Returns the address of `path` on the hub. `path` begins with a slash and is already encoded.
    pub(crate) fn url(&self, path: &str) -> Result<Uri, HubError> {
        let base = self.endpoint.to_string();
        let url = format!("{}{path}", base.trim_end_matches('/'));
        url.parse()
            .map_err(|error: http::uri::InvalidUri| HubError::Answer { url, reason: error.to_string() })
    }

    /// Sends a HEAD request. Returns the status and the headers.
    pub(crate) async fn head(&self, url: &Uri) -> Result<(StatusCode, HeaderMap), HubError> {
        let (_, response) = self.send(&Method::HEAD, url, None, Follow::OnHub).await?;
        let (parts, _) = response.into_parts();
        Ok((parts.status, parts.headers))
    }

    /// Sends a GET request. Returns the status, the headers and the whole body, which must be short.
    pub(crate) async fn text(&self, url: &Uri) -> Result<(StatusCode, HeaderMap, Bytes), HubError> {
        let (url, response) = self.send(&Method::GET, url, None, Follow::Anywhere).await?;
        let (parts, body) = response.into_parts();
        let collected =
            tokio::time::timeout(SILENT_MAX, Limited::new(body, ANSWER_BYTES_MAX).collect()).await;
        let collected = collected.map_err(|_| silent(&url))?;
        let body = collected.map_err(|source| HubError::Unreachable { url: shown(&url), source })?;
        Ok((parts.status, parts.headers, body.to_bytes()))
    }

    /// Requests a file from byte `first` on. Returns the response, and the address that it comes from.
    pub(crate) async fn content(&self, url: &Uri, first: u64) -> Result<(Uri, Response<Incoming>), HubError> {
        let range = (first > 0)
            .then(|| HeaderValue::from_str(&format!("bytes={first}-")).expect("the range is ASCII"));
        self.send(&Method::GET, url, range.as_ref(), Follow::Anywhere).await
    }

    async fn send(
        &self,
        method: &Method,
        url: &Uri,
        range: Option<&HeaderValue>,
        follow: Follow,
    ) -> Result<(Uri, Response<Incoming>), HubError> {
        let mut url = url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let response = self.once(method, &url, range).await?;
            match elsewhere(&url, &response) {
                Some(next) if follow == Follow::Anywhere || next.authority() == url.authority() => url = next,
                _ => return Ok((url, response)),
            }
        }
        Err(HubError::Answer { url: url.to_string(), reason: "too many redirects".to_owned() })
    }

    async fn once(
        &self,
        method: &Method,
        url: &Uri,
        range: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, HubError> {
        // Compression is refused, because lengths and ranges refer to the content itself only without it.
        let mut request = Request::builder()
            .method(method)
            .uri(url)
            .header(USER_AGENT, AGENT)
            .header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        if let Some(authorization) = self.authorization.as_ref().filter(|_| self.is_hub(url)) {
            request = request.header(AUTHORIZATION, authorization);
        }
        if let Some(authorization) = self.connector.authorization(url) {
            request = request.header(PROXY_AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::new()).expect("the parts of the request are valid");
        let response = tokio::time::timeout(SILENT_MAX, self.http.request(request)).await;
        response.map_err(|_| silent(url))?.map_err(|error| unreachable(url, error))
    }

    fn is_hub(&self, url: &Uri) -> bool {
        (url.scheme(), url.authority()) == (self.endpoint.scheme(), self.endpoint.authority())
    }
}

fn http(tls: HttpsConnectorBuilder<WantsSchemes>, connector: ProxyConnector) -> Http {
    let tls = tls.https_or_http().enable_http1().wrap_connector(connector);
    HyperClient::builder(TokioExecutor::new()).build(tls)
}

fn is_http(uri: &Uri) -> bool {
    matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some()
}

/// Returns the target of a redirect; `None` for other responses.
fn elsewhere(url: &Uri, response: &Response<Incoming>) -> Option<Uri> {
    if !response.status().is_redirection() {
        return None;
    }
    let location = response.headers().get(LOCATION)?.to_str().ok()?;
    let next: Uri = location.parse().ok()?;
    if is_http(&next) {
        return Some(next);
    }
    let mut parts = url.clone().into_parts();
    parts.path_and_query = Some(next.path_and_query()?.clone());
    Uri::from_parts(parts).ok()
}

pub(crate) fn silent(url: &Uri) -> HubError {
    HubError::Silent { url: shown(url), waited: SILENT_MAX }
}

pub(crate) fn unreachable(url: &Uri, error: impl std::error::Error + Send + Sync + 'static) -> HubError {
    match trust::refusal(&error) {
        Some(why) => HubError::Untrusted { url: shown(url), why },
        None => HubError::Unreachable { url: shown(url), source: Box::new(error) },
    }
}

/// Returns the address without its query for messages, because stores put signatures into the query.
pub(crate) fn shown(url: &Uri) -> String {
    let url = url.to_string();
    url.split('?').next().unwrap_or_default().to_owned()
}
