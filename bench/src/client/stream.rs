//! A byte stream to the target, over TCP alone or within TLS.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The server name that an `https` target must prove, and the certificate authorities that are trusted.
#[derive(Clone, Debug)]
pub struct Tls {
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Makes TLS settings for `host` that trust the authorities `roots`.
    pub fn new(host: &str, roots: RootCertStore) -> Result<Self, String> {
        let name = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(name).map_err(|error| error.to_string())?;
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(ring)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { name, config: Arc::new(config) })
    }
}

/// Returns the certificate authorities of this machine, or of the file that `SSL_CERT_FILE` names.
pub fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

#[derive(Debug)]
pub enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    pub async fn connect(addr: SocketAddr, tls: Option<&Tls>) -> io::Result<Self> {
        let tcp = TcpStream::connect(addr).await?;
        tcp.set_nodelay(true)?;
        let Some(Tls { name, config }) = tls else { return Ok(Self::Plain(tcp)) };
        let connected = TlsConnector::from(Arc::clone(config)).connect(name.clone(), tcp).await?;
        Ok(Self::Tls(Box::new(connected)))
    }

    /// Returns whether the stream is open and has nothing to read: a byte or an end here belongs to no
    /// request.
    pub fn is_quiet(&self) -> bool {
        let tcp = match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
        };
        matches!(tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, read: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, read),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, read),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, bytes),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}
