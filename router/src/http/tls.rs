//! TLS on the HTTP port. The certificate is read again when its files change; open connections keep theirs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use chassis::identity::certificate::{Expiry, check_validity, not_after};
use chassis::server::PortTls;
use chassis::{World, reload};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
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
    /// error is logged once. A new certificate that is not valid now is such an error.
    pub async fn follow_files(self: Arc<Self>, world: World) {
        let read = || {
            let (files, current, now) = (self.files.clone(), self.current().hash, world.unix_time());
            move || {
                let new = files.read()?;
                let check = || new.key.cert.iter().try_for_each(|one| check_validity(one, now));
                if new.hash != current {
                    check().map_err(|why| refused(&files.certificate, &why))?;
                }
                Ok(new)
            }
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

    /// Returns the TLS of a port that uses this certificate for new connections.
    pub fn port_tls(self: &Arc<Self>) -> PortTls {
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has TLS 1.2 and 1.3")
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as _);
        config.alpn_protocols = [&b"h2"[..], b"http/1.1"].map(<[u8]>::to_vec).to_vec();
        PortTls::Clients(Arc::new(config))
    }

    /// Returns the end of the certificate's validity.
    pub fn expiry(&self) -> Option<Expiry> {
        let end = self.current().key.cert.iter().filter_map(not_after).min()?;
        Some(Expiry { setting: "router.tls_cert_file", end })
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

#[cfg(test)]
mod tests;
