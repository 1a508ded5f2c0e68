//! TLS on the HTTP port. The certificate is read again when its files change; open connections keep theirs.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use chassis::{Listener, Stream, reload};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};
use tracing::{info, warn};

/// The files of a certificate, with its chain, and of its key. Both are PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// The reason why the files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct CertificateError {
    file: PathBuf,
    reason: String,
}

/// The certificate of new connections.
pub struct Certificate {
    files: CertificateFiles,
    /// Locked for a clone, never across an await.
    current: RwLock<Pair>,
}

/// A certificate and its key, with the hash of their files.
#[derive(Clone)]
struct Pair {
    key: Arc<CertifiedKey>,
    hash: blake3::Hash,
}

impl CertificateFiles {
    /// Reads both files. Blocks.
    fn read(&self) -> Result<Pair, CertificateError> {
        let (certificate, key) = (read(&self.certificate)?, read(&self.key)?);
        let hash = *blake3::Hasher::new().update(&certificate).update(&key).finalize().as_bytes();
        let chain = CertificateDer::pem_slice_iter(&certificate).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| refused(&self.certificate, &error))?;
        if chain.is_empty() {
            return Err(refused(&self.certificate, &"no certificate in PEM"));
        }
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| refused(&self.key, &error))?;
        let key = CertifiedKey::from_der(chain, key, &default_provider());
        let key = key.map_err(|error| refused(&self.key, &error))?;
        Ok(Pair { key: Arc::new(key), hash: hash.into() })
    }
}

fn read(file: &Path) -> Result<Vec<u8>, CertificateError> {
    std::fs::read(file).map_err(|error| refused(file, &error))
}

fn refused(file: &Path, reason: &dyn fmt::Display) -> CertificateError {
    CertificateError { file: file.to_owned(), reason: reason.to_string() }
}

impl Certificate {
    /// Reads the files. Blocks.
    pub fn load(files: CertificateFiles) -> Result<Arc<Self>, CertificateError> {
        let current = RwLock::new(files.read()?);
        Ok(Arc::new(Self { files, current }))
    }

    /// Applies changes of the files until the future is dropped. Files with an error change nothing: the
    /// error is logged once.
    pub async fn follow_files(self: Arc<Self>) {
        let read = || {
            let files = self.files.clone();
            move || files.read()
        };
        let first = self.current().hash;
        reload::follow(first, |pair: &Pair| pair.hash, read, |read| self.take_over(read)).await;
    }

    fn take_over(&self, read: Result<Pair, CertificateError>) {
        match read {
            // After an error the files may have their old content again.
            Ok(new) if new.hash != self.current().hash => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
                info!("certificate reloaded");
            }
            Ok(_) => {}
            Err(error) => warn!(%error, "certificate was not reloaded, the previous one stays in use"),
        }
    }

    fn current(&self) -> Pair {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current().key)
    }
}

/// The key is not printed.
impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

/// Accepts connections that begin with a TLS handshake.
pub struct TlsListener {
    inner: Box<dyn Listener>,
    acceptor: TlsAcceptor,
}

impl TlsListener {
    pub fn new(inner: Box<dyn Listener>, certificate: Arc<Certificate>) -> Self {
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has TLS 1.2 and 1.3")
            .with_no_client_auth()
            .with_cert_resolver(certificate);
        config.alpn_protocols = [&b"h2"[..], b"http/1.1"].map(<[u8]>::to_vec).to_vec();
        Self { inner, acceptor: Arc::new(config).into() }
    }
}

impl fmt::Debug for TlsListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsListener").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[async_trait]
impl Listener for TlsListener {
    /// Does not wait for the handshake, which runs when the connection is first read. Its time counts as the
    /// wait for the first byte of a request, which has a bound.
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        let (stream, peer) = self.inner.accept().await?;
        Ok((Stream::other(Handshaken::Begun(Box::new(self.acceptor.accept(stream)))), peer))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection whose first read or write completes the handshake.
enum Handshaken {
    Begun(Box<Accept<Stream>>),
    Done(Box<TlsStream<Stream>>),
    Failed,
}

impl fmt::Debug for Handshaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begun(_) => "Handshaken::Begun",
            Self::Done(_) => "Handshaken::Done",
            Self::Failed => "Handshaken::Failed",
        })
    }
}

impl Handshaken {
    fn poll_done(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut TlsStream<Stream>>>> {
        if let Self::Begun(accept) = self {
            match ready!(Pin::new(accept).poll(cx)) {
                Ok(stream) => *self = Self::Done(Box::new(stream)),
                Err(error) => {
                    *self = Self::Failed;
                    return Poll::Ready(Err(error));
                }
            }
        }
        match self {
            Self::Done(stream) => Poll::Ready(Ok(Pin::new(stream))),
            Self::Begun(_) | Self::Failed => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl AsyncRead for Handshaken {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_done(cx))?.poll_read(cx, buf)
    }
}

impl AsyncWrite for Handshaken {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_done(cx))?.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_done(cx))?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            // Nothing was written.
            Self::Begun(_) | Self::Failed => Poll::Ready(Ok(())),
            Self::Done(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            // The connection is closed when it is dropped.
            Self::Begun(_) | Self::Failed => Poll::Ready(Ok(())),
            Self::Done(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests;
