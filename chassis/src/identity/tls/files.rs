//! The three PEM files of a process, read and checked.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::refused::TlsRefused;
use super::verify::{AcceptorCheck, DialerCheck, check_chain};
use crate::identity::certificate::{CertName, ExpectedPeer, not_after};

/// The protocol in the handshake of a gRPC connection.
const CALLS: &[u8] = b"h2";
/// The protocol in the handshake of a KV link, so that no connection of one kind is taken for one of the other.
const LINKS: &[u8] = b"baton-kv";

/// The paths in the `[tls]` section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// The reason why this process's own files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    #[error("`[tls]` needs `ca`, `cert` and `key`: `{missing}` is empty")]
    Incomplete { missing: &'static str },
    #[error("read `{setting}` = {}", file.display())]
    Read { setting: &'static str, file: PathBuf, source: io::Error },
    #[error("`{setting}` has no usable PEM content: {problem}")]
    Content { setting: &'static str, problem: String },
    #[error("`tls.key` is not the key of `tls.cert`")]
    OtherKey,
    #[error("`tls.cert` has no name `baton://CLUSTER/ROLE/NODE` among its URI names")]
    Unnamed,
    #[error("`tls.cert` has expired, or is not valid yet: renew it, and check this machine's clock")]
    Expired,
    #[error("`tls.cert` is not signed by a CA in `tls.ca`")]
    Authority,
    #[error("`tls.cert` cannot be used: {0}")]
    Certificate(String),
    #[error("`tls.cert` names {name}, and this process is a {role}")]
    Role { name: CertName, role: &'static str },
    #[error("`tls.cert` names {name}, and `node.id` is {id}")]
    Node { name: CertName, id: String },
    #[error(
        "`tls.cert` names {name}, and the one in use names {current}: restart the process to change its name"
    )]
    Renamed { name: CertName, current: CertName },
}

/// The content of the files.
pub struct TlsPem {
    pub ca: Vec<u8>,
    pub cert: Vec<u8>,
    pub key: Vec<u8>,
}

/// The key is not printed.
impl fmt::Debug for TlsPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsPem")
    }
}

impl TlsFiles {
    pub(super) fn read(&self) -> Result<TlsPem, TlsFileError> {
        let read = |setting, file: &Path| {
            std::fs::read(file).map_err(|source| TlsFileError::Read {
                setting,
                file: file.to_owned(),
                source,
            })
        };
        Ok(TlsPem {
            ca: read("tls.ca", &self.ca)?,
            cert: read("tls.cert", &self.cert)?,
            key: read("tls.key", &self.key)?,
        })
    }
}

/// One content of the files, ready for handshakes.
#[derive(Debug)]
pub(super) struct Certificates {
    pub(super) name: CertName,
    /// Differs for every other content of the files.
    pub(super) hash: blake3::Hash,
    chain: Vec<CertificateDer<'static>>,
    ca_not_after: Option<Duration>,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    key: Arc<SingleCertAndKey>,
    pub(super) calls: Arc<ServerConfig>,
    pub(super) links: Arc<ServerConfig>,
    pub(super) joins: Arc<ServerConfig>,
}

impl Certificates {
    /// Parses the files. Neither the CA nor the validity of the own certificate is checked.
    pub(super) fn parse(pem: &TlsPem) -> Result<Self, TlsFileError> {
        let content = |setting, problem: String| TlsFileError::Content { setting, problem };
        let mut roots = RootCertStore::empty();
        let authorities = certificates("tls.ca", &pem.ca)?;
        let ca_not_after = authorities.iter().filter_map(not_after).max();
        for ca in authorities {
            roots.add(ca).map_err(|error| content("tls.ca", error.to_string()))?;
        }
        let chain = certificates("tls.cert", &pem.cert)?;
        let key = PrivateKeyDer::from_pem_slice(&pem.key);
        let key = key.map_err(|error| content("tls.key", error.to_string()))?;
        let name = CertName::of(&chain[0]).ok_or(TlsFileError::Unnamed)?;
        let (roots, provider) = (Arc::new(roots), Arc::new(provider()));
        let key = CertifiedKey::from_der(chain.clone(), key, &provider).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => TlsFileError::OtherKey,
            other => content("tls.key", other.to_string()),
        })?;
        let key = Arc::new(SingleCertAndKey::from(key));
        let acceptor = Acceptor { roots: &roots, provider: &provider, key: &key, cluster: &name.cluster };
        Ok(Self {
            hash: hash(pem),
            calls: acceptor.config(CALLS, None)?,
            links: acceptor.config(LINKS, Some(ExpectedPeer::KvSender))?,
            joins: acceptor.config(LINKS, Some(ExpectedPeer::NodeProcess))?,
            name,
            chain,
            ca_not_after,
            roots,
            provider,
            key,
        })
    }

    /// Checks this process's certificate as a peer with the same CA does.
    pub(super) fn check(&self, now: Duration) -> Result<(), TlsFileError> {
        self.checked(now).map_err(|error| match TlsRefused::of_rustls(&error) {
            TlsRefused::Expired => TlsFileError::Expired,
            TlsRefused::Authority => TlsFileError::Authority,
            _ => TlsFileError::Certificate(error.to_string()),
        })
    }

    /// The end of the certificate's validity, as the time since 1970. A chain ends with the first certificate that
    /// expires.
    pub(super) fn not_after(&self) -> Option<Duration> {
        self.chain.iter().filter_map(not_after).min()
    }

    /// The end of the CA's validity. The file has two CAs while one replaces the other, so the last end counts.
    pub(super) fn ca_not_after(&self) -> Option<Duration> {
        self.ca_not_after
    }

    fn checked(&self, now: Duration) -> Result<(), rustls::Error> {
        let (first, intermediates) = self.chain.split_first().expect("a chain is not empty");
        let now = UnixTime::since_unix_epoch(now);
        check_chain(first, intermediates, &self.roots, &self.provider, now)
    }

    /// The configuration of one dialled connection.
    pub(super) fn dialer(&self, expected: ExpectedPeer) -> Result<ClientConfig, rustls::Error> {
        let is_link = matches!(expected, ExpectedPeer::KvReceiver | ExpectedPeer::NodeProcess);
        let protocol = if is_link { LINKS } else { CALLS };
        let check = AcceptorCheck {
            roots: Arc::clone(&self.roots),
            provider: Arc::clone(&self.provider),
            cluster: self.name.cluster.clone(),
            expected,
        };
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider));
        let builder = builder.with_protocol_versions(&[&TLS13])?.dangerous();
        let builder = builder.with_custom_certificate_verifier(Arc::new(check));
        let mut config = builder.with_client_cert_resolver(Arc::clone(&self.key) as _);
        config.alpn_protocols = vec![protocol.to_vec()];
        // A resumed session would skip the check of the peer's certificate.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(config)
    }
}

/// The parts of an acceptor's configuration.
struct Acceptor<'a> {
    roots: &'a Arc<RootCertStore>,
    provider: &'a Arc<CryptoProvider>,
    key: &'a Arc<SingleCertAndKey>,
    cluster: &'a str,
}

impl Acceptor<'_> {
    /// KV links need a certificate. A gRPC connection without one may use the services for clients.
    fn config(
        &self,
        protocol: &[u8],
        expected: Option<ExpectedPeer>,
    ) -> Result<Arc<ServerConfig>, TlsFileError> {
        let unusable = |problem: String| TlsFileError::Content { setting: "tls.ca", problem };
        let (roots, provider) = (Arc::clone(self.roots), Arc::clone(self.provider));
        let chain = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let chain = if expected.is_none() { chain.allow_unauthenticated() } else { chain };
        let chain = chain.build().map_err(|error| unusable(error.to_string()))?;
        let check = DialerCheck { chain, cluster: self.cluster.to_owned(), expected };
        let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let builder = builder.map_err(|error| unusable(error.to_string()))?;
        let builder = builder.with_client_cert_verifier(Arc::new(check));
        let mut config = builder.with_cert_resolver(Arc::clone(self.key) as _);
        config.alpn_protocols = vec![protocol.to_vec()];
        // Every connection has a whole handshake, so that a renewed or revoked CA applies to it.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

/// rustls on ring. AES with 128 bits comes first: it is the fastest cipher on machines that have AES instructions.
fn provider() -> CryptoProvider {
    use rustls::crypto::ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites =
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    CryptoProvider { cipher_suites, ..rustls::crypto::ring::default_provider() }
}

/// The certificates in a PEM file, at least one.
fn certificates(setting: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let unusable = |problem: String| TlsFileError::Content { setting, problem };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|error| unusable(error.to_string()))?;
    if all.is_empty() { Err(unusable("no certificate".to_owned())) } else { Ok(all) }
}

fn hash(pem: &TlsPem) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in [&pem.ca, &pem.cert, &pem.key] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()
}
