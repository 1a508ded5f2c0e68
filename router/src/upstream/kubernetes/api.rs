//! Calls to the API server of the cluster that this process runs in, as the service account of its pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use types::in_full;

/// The longest time of a TCP connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// The largest answer that is read as a whole.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// How much of a refusal's message is shown.
const MESSAGE_CHARS_MAX: usize = 300;

/// The body of an answer. Its errors are their reasons.
pub(super) type AnswerBytes = BoxBody<Bytes, String>;

type ApiClient = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

/// The API server as every pod reaches it.
#[derive(Clone, Debug)]
pub(super) struct ApiServer {
    authority: String,
    /// The folder with `token`, `ca.crt` and `namespace`.
    folder: PathBuf,
}

impl ApiServer {
    /// Reads the variables and files that a pod has. An error says which one is missing or wrong.
    pub(super) fn new(folder: &Path, variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let needed =
            |name| variable(name).ok_or_else(|| format!("{name} is not set: this is no pod of Kubernetes"));
        let (host, port) = (needed("KUBERNETES_SERVICE_HOST")?, needed("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let api = Self { authority: format!("{host}:{port}"), folder: folder.to_owned() };
        api.authorization()?;
        api.client()?;
        Ok(api)
    }

    /// Returns the namespace of this pod.
    pub(super) fn own_namespace(&self) -> Result<String, String> {
        Ok(String::from_utf8_lossy(&self.read("namespace")?).trim().to_owned())
    }

    /// Sends a request. Returns the answer once its head is there. A refusal is an error.
    ///
    /// The token and the CA are read for each call, because Kubernetes replaces the files. They are small and in memory.
    pub(super) async fn get(&self, target: &str) -> Result<AnswerBytes, String> {
        let request = Request::get(format!("https://{}{target}", self.authority))
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, "baton-router")
            .header(header::AUTHORIZATION, self.authorization()?)
            .body(Empty::new());
        let request = request.map_err(|error| error.to_string())?;
        let answer = self.client()?.request(request).await.map_err(|error| in_full(&error))?;
        let (head, body) = answer.into_parts();
        let body = body.map_err(|error| in_full(&error)).boxed();
        match head.status.is_success() {
            true => Ok(body),
            false => Err(refusal(&head.status.to_string(), &whole(body).await?)),
        }
    }

    fn authorization(&self) -> Result<HeaderValue, String> {
        let token = self.read("token")?;
        let value = HeaderValue::from_bytes(&[b"Bearer ", token.trim_ascii()].concat());
        let mut value = value.map_err(|_| self.wrong("token", "it is not plain text"))?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Makes a client that trusts the cluster's CA only.
    fn client(&self) -> Result<ApiClient, String> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&self.read("ca.crt")?) {
            let certificate = certificate.map_err(|error| self.wrong("ca.crt", &error.to_string()))?;
            roots.add(certificate).map_err(|error| self.wrong("ca.crt", &error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(self.wrong("ca.crt", "no certificate in PEM"));
        }
        let config = ClientConfig::builder_with_provider(default_provider().into());
        let config = config.with_safe_default_protocol_versions().map_err(|error| in_full(&error))?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
        tcp.enforce_http(false);
        let https = HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http1();
        Ok(Client::builder(TokioExecutor::new()).build(https.wrap_connector(tcp)))
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, String> {
        std::fs::read(self.folder.join(name)).map_err(|error| self.wrong(name, &error.to_string()))
    }

    fn wrong(&self, name: &str, reason: &str) -> String {
        format!("read {} of the pod's service account: {reason}", self.folder.join(name).display())
    }
}

/// Reads an answer to its end.
pub(super) async fn whole(body: AnswerBytes) -> Result<Bytes, String> {
    let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
    Ok(body.map_err(|error| format!("the answer broke: {error}"))?.to_bytes())
}

/// Names the reason why the API server refused a call, and the missing right. `status` is such as `403
/// Forbidden`.
fn refusal(status: &str, body: &[u8]) -> String {
    let message = match serde_json::from_slice::<Value>(body) {
        Ok(Value::Object(answer)) => answer.get("message").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    };
    let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    let advice = match &status[..3] {
        "401" => ". It does not accept the token of the pod's service account",
        "403" => {
            ". The pod's service account needs a Role in that namespace with the verbs get, list and watch on the resource \
             endpointslices of the API group discovery.k8s.io, and a RoleBinding"
        }
        _ => "",
    };
    format!("the API server answers {status}: {message}{advice}")
}

#[cfg(test)]
mod tests {
    use rcgen::generate_simple_self_signed;

    use super::*;

    #[test]
    fn a_pod_has_variables_and_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let made = generate_simple_self_signed(vec!["kubernetes".to_owned()]).expect("a certificate");
        let open = |host: &str| {
            let host = host.to_owned();
            let variable = |name: &str| match name {
                "KUBERNETES_SERVICE_HOST" => Some(host.clone()).filter(|host| !host.is_empty()),
                _ => Some("443".to_owned()),
            };
            ApiServer::new(folder.path(), variable)
        };
        let reason = |host| open(host).expect_err("something is missing");
        let write = |name, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        assert_eq!(reason(""), "KUBERNETES_SERVICE_HOST is not set: this is no pod of Kubernetes");
        assert!(
            reason("10.0.0.1").contains("/token of the pod's service account: No such file"),
            "{}",
            reason("10.0.0.1")
        );
        write("token", "a\u{1}b");
        assert!(reason("10.0.0.1").ends_with("it is not plain text"));
        write("token", "secret\n");
        assert!(reason("10.0.0.1").contains("/ca.crt of the pod's service account: No such file"));
        for (text, expected) in
            [("", "no certificate in PEM"), ("-----BEGIN CERTIFICATE-----\nx\n", "ca.crt")]
        {
            write("ca.crt", text);
            assert!(reason("10.0.0.1").contains(expected), "{}", reason("10.0.0.1"));
        }
        write("ca.crt", &made.cert.pem());
        for (host, authority) in [("10.0.0.1", "10.0.0.1:443"), ("fd00::1", "[fd00::1]:443")] {
            let api = open(host).expect("all is there");
            assert_eq!(api.authority, authority);
            assert_eq!(api.authorization().expect("a token"), "Bearer secret");
            assert!(!format!("{:?}", api.authorization()).contains("secret"));
        }
        assert!(open("10.0.0.1").expect("all is there").own_namespace().is_err());
        write("namespace", "prod\n");
        assert_eq!(open("10.0.0.1").expect("all is there").own_namespace().as_deref(), Ok("prod"));
    }

    #[test]
    fn refusals_say_what_is_missing() {
        let long = "x".repeat(400);
        for (status, body, expected) in [
            (
                "500 Internal Server Error",
                r#"{"message":"etcd is away"}"#,
                "500 Internal Server Error: etcd is away",
            ),
            ("502 Bad Gateway", "<html>", "502 Bad Gateway: <html>"),
            ("404 Not Found", long.as_str(), &long[..MESSAGE_CHARS_MAX]),
            (
                "401 Unauthorized",
                r#"{"message":"Unauthorized"}"#,
                "Unauthorized. It does not accept the token",
            ),
            ("403 Forbidden", "{}", "needs a Role in that namespace with the verbs get, list and watch"),
        ] {
            let reason = refusal(status, body.as_bytes());
            assert!(reason.contains(expected) && reason.chars().count() < 600, "{reason}");
        }
    }
}
