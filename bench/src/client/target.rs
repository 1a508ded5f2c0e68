//! Who is measured: an address, and how to ask for things there.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::client::http::{Progress, ResponseReader};
use crate::error::{BenchError, Result};

/// How long a question outside the measurement may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
const PLAIN_ANSWER_BYTES_MAX: usize = 1 << 20;

/// An OpenAI-compatible server. Resolved once, so that name look-ups are no part of any request.
#[derive(Clone, Debug)]
pub struct Target {
    pub url: String,
    pub addr: SocketAddr,
    host: String,
    base_path: String,
}

impl Target {
    /// Resolves `http://host:port/base` and keeps the first address that accepts a connection.
    pub async fn resolve(url: &str) -> Result<Self> {
        let (host, base_path) = split_url(url)?;
        let with_port = if has_port(&host) { host.clone() } else { format!("{host}:80") };
        let addrs =
            tokio::net::lookup_host(&with_port).await.map_err(|error| BenchError::target(url, error))?;
        let mut refusal = "the name has no address".to_owned();
        for addr in addrs {
            match timeout(ASK_TIMEOUT, TcpStream::connect(addr)).await {
                Ok(Ok(_)) => return Ok(Self { url: url.to_owned(), addr, host, base_path }),
                Ok(Err(error)) => refusal = error.to_string(),
                Err(_) => refusal = format!("{addr} does not accept a connection"),
            }
        }
        Err(BenchError::target(url, refusal))
    }

    /// The head of a request, up to where the length and the body go.
    pub fn head(&self, method: &str, path: &str) -> String {
        format!("{method} {}{path} HTTP/1.1\r\nhost: {}\r\n", self.base_path, self.host)
    }

    /// A plain GET: status and the beginning of the body. For questions around a run, not inside it.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let answer = timeout(ASK_TIMEOUT, self.get_unbounded(path)).await;
        answer
            .map_err(|_| BenchError::target(&self.url, format!("GET {path}: no answer within 10 s")))?
            .map_err(|error| BenchError::target(&self.url, format!("GET {path}: {error}")))
    }

    async fn get_unbounded(&self, path: &str) -> std::io::Result<(u16, String)> {
        let mut stream = TcpStream::connect(self.addr).await?;
        let head = self.head("GET", path) + "accept: application/json\r\nconnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
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

/// `http://host:port/base/` into `host:port` and `/base`.
fn split_url(url: &str) -> Result<(String, String)> {
    let rest = url.strip_prefix("http://").ok_or_else(|| {
        BenchError::target(
            url,
            "only http:// is spoken: measure behind the proxy that ends TLS, or tunnel to it",
        )
    })?;
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let path = path.trim_end_matches('/').trim_end_matches("/v1");
    if host.is_empty() {
        Err(BenchError::target(url, "no host"))
    } else {
        Ok((host.to_owned(), path.to_owned()))
    }
}

fn has_port(host: &str) -> bool {
    host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split() {
        let check = |url: &str, host: &str, path: &str| {
            let split = split_url(url).expect(url);
            assert_eq!((split.0.as_str(), split.1.as_str()), (host, path), "{url}");
        };
        check("http://localhost:8000", "localhost:8000", "");
        check("http://localhost:8000/v1/", "localhost:8000", "");
        check("http://[::1]:80/models/x/", "[::1]:80", "/models/x");
        assert!(split_url("https://x").is_err());
        assert!(has_port("[::1]:80") && !has_port("[::1]") && !has_port("host"));
    }
}
