//! The measured server: its address, and requests around a run.

use std::net::SocketAddr;
use std::time::Duration;

use rustls::RootCertStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::client::http::{Progress, ResponseReader};
use crate::client::stream::{Stream, Tls, system_roots};
use crate::error::{BenchError, Result};

/// The timeout of a request outside the measurement.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
const PLAIN_ANSWER_BYTES_MAX: usize = 1 << 20;

/// An OpenAI-compatible server to measure. Its name is resolved once, so that no request includes a look-up.
#[derive(Clone, Debug)]
pub struct TargetServer {
    pub url: String,
    pub addr: SocketAddr,
    host: String,
    base_path: String,
    tls: Option<Tls>,
}

/// The parts of a URL.
#[derive(Debug, PartialEq, Eq)]
struct UrlParts {
    is_https: bool,
    /// The host, with its port if there is one.
    host: String,
    base_path: String,
}

impl TargetServer {
    /// Resolves `http://host:port/base`, or `https://`, and keeps the first address that accepts a connection.
    pub async fn resolve(url: &str) -> Result<Self> {
        Self::resolve_trusting(url, system_roots).await
    }

    /// Resolves a URL as [`TargetServer::resolve`] does, but trusts the authorities of `roots` instead of the
    /// machine's.
    async fn resolve_trusting(url: &str, roots: impl FnOnce() -> RootCertStore) -> Result<Self> {
        let UrlParts { is_https, host, base_path } = split_url(url)?;
        let port = if is_https { 443 } else { 80 };
        let with_port = if has_port(&host) { host.clone() } else { format!("{host}:{port}") };
        let name = with_port.rsplit_once(':').map_or(host.as_str(), |(name, _)| name);
        let tls = is_https.then(|| Tls::new(name, roots())).transpose();
        let tls = tls.map_err(|reason| BenchError::target(url, reason))?;
        let addrs =
            tokio::net::lookup_host(&with_port).await.map_err(|error| BenchError::target(url, error))?;
        let mut refusal = "the name has no address".to_owned();
        for addr in addrs {
            match timeout(ASK_TIMEOUT, Stream::connect(addr, tls.as_ref())).await {
                Ok(Ok(_)) => return Ok(Self { url: url.to_owned(), addr, host, base_path, tls }),
                Ok(Err(error)) => refusal = error.to_string(),
                Err(_) => refusal = format!("{addr} does not accept a connection"),
            }
        }
        Err(BenchError::target(url, refusal))
    }

    pub(crate) async fn connect(&self) -> std::io::Result<Stream> {
        Stream::connect(self.addr, self.tls.as_ref()).await
    }

    /// Returns the beginning of a request's head, to which the content length and the body are added.
    pub fn head(&self, method: &str, path: &str) -> String {
        format!("{method} {}{path} HTTP/1.1\r\nhost: {}\r\n", self.base_path, self.host)
    }

    /// Sends a plain GET. Returns the status and the beginning of the body. For requests before and after a
    /// run.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let answer = timeout(ASK_TIMEOUT, self.get_unbounded(path)).await;
        answer
            .map_err(|_| BenchError::target(&self.url, format!("GET {path}: no answer within 10 s")))?
            .map_err(|error| BenchError::target(&self.url, format!("GET {path}: {error}")))
    }

    async fn get_unbounded(&self, path: &str) -> std::io::Result<(u16, String)> {
        let mut stream = self.connect().await?;
        let head = self.head("GET", path) + "accept: application/json\r\nconnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        stream.flush().await?;
        let mut reader = ResponseReader::keeping(PLAIN_ANSWER_BYTES_MAX);
        let mut buffer = vec![0; 16 << 10];
        loop {
            let n = stream.read(&mut buffer).await?;
            let progress = if n == 0 {
                reader.close().map(|()| Progress::Whole { reusable: false })
            } else {
                reader.feed(&buffer[..n], &mut |_| ())
            };
            if progress.map_err(std::io::Error::other)? != Progress::More {
                let body = String::from_utf8_lossy(reader.plain_body()).into_owned();
                return Ok((reader.status(), body));
            }
        }
    }
}

/// Splits `http://host:port/base/` into `host:port` and `/base`.
fn split_url(url: &str) -> Result<UrlParts> {
    let (is_https, rest) = match url.split_once("://") {
        None => (false, url),
        Some(("http", rest)) => (false, rest),
        Some(("https", rest)) => (true, rest),
        Some(_) => return Err(BenchError::target(url, "a URL begins with http:// or https://")),
    };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let path = path.trim_end_matches('/').trim_end_matches("/v1");
    if host.is_empty() {
        Err(BenchError::target(url, "no host"))
    } else {
        Ok(UrlParts { is_https, host: host.to_owned(), base_path: path.to_owned() })
    }
}

fn has_port(host: &str) -> bool {
    host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use chassis::{Gate, spawn_guarded};

    #[test]
    fn urls_are_split() {
        let check = |url: &str, host: &str, path: &str| {
            let split = split_url(url).expect(url);
            assert_eq!((split.host.as_str(), split.base_path.as_str()), (host, path), "{url}");
            assert_eq!(split.is_https, url.starts_with("https"), "{url}");
        };
        check("http://localhost:8000", "localhost:8000", "");
        check("http://localhost:8000/v1/", "localhost:8000", "");
        check("http://[::1]:80/models/x/", "[::1]:80", "/models/x");
        check("localhost:8000", "localhost:8000", "");
        check("10.0.0.5:8000/v1", "10.0.0.5:8000", "");
        check("https://api.example.com/v1", "api.example.com", "");
        assert!(split_url("ftp://x").is_err());
        assert!(has_port("[::1]:80") && !has_port("[::1]") && !has_port("host"));
    }

    /// Starts a server with its own certificate that answers every request alike. Returns its address and its
    /// authority.
    async fn https_server(name: &str) -> (SocketAddr, RootCertStore) {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("a certificate");
        let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).expect("a key");
        let ring = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(ring)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key)
            .expect("they belong together");
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone()).expect("an authority");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
        let serve = async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let Ok(mut tls) = acceptor.accept(tcp).await else { continue };
                let mut head = [0; 1024];
                if tls.read(&mut head).await.is_ok_and(|n| n > 0) {
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nthere\n";
                    tls.write_all(answer).await.expect("a client that reads");
                    tls.flush().await.expect("sent");
                }
            }
        };
        spawn_guarded(&Gate::new("https server"), "serve", serve).detach();
        (addr, roots)
    }

    #[tokio::test]
    async fn an_https_server_is_asked_and_must_prove_its_name() {
        let (addr, roots) = https_server("localhost").await;
        let url = format!("https://localhost:{}/v1", addr.port());
        let target = TargetServer::resolve_trusting(&url, || roots.clone()).await.expect("it is trusted");
        assert_eq!(target.get("/live").await.expect("an answer"), (200, "there\n".to_owned()));
        let stranger =
            TargetServer::resolve_trusting(&url, RootCertStore::empty).await.expect_err("no authority");
        assert!(stranger.to_string().contains("certificate"), "{stranger}");
        let other = format!("https://127.0.0.1:{}", addr.port());
        assert!(
            TargetServer::resolve_trusting(&other, || roots).await.is_err(),
            "the certificate has another name"
        );
    }
}
