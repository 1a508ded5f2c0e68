//! TLS in front of the fake hub, with a certificate of a test authority.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// A TLS server in front of the fake hub, with its address and its authority's certificate.
#[derive(Debug)]
pub struct Front {
    folder: TempDir,
    addr: SocketAddr,
}

impl Front {
    /// Starts TLS in front of `hub`, with a certificate for `name`.
    pub async fn of(hub: SocketAddr, name: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut params = CertificateParams::new([]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, format!("the authority for {name}"));
        let authority = CertifiedIssuer::self_signed(params, key()).expect("it can sign itself");
        std::fs::write(folder.path().join("ca.pem"), authority.pem()).expect("written");
        let key = key();
        let params = CertificateParams::new([name.to_owned()]).expect("a good name");
        let certificate = params.signed_by(&key, &authority).expect("the authority can sign");
        let private = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let ring = rustls::crypto::ring::default_provider().into();
        let config = ServerConfig::builder_with_provider(ring).with_safe_default_protocol_versions();
        let config = config.expect("ring speaks them").with_no_client_auth();
        let config = config.with_single_cert(vec![certificate.der().clone()], private).expect("they fit");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("it is bound");
        #[allow(clippy::disallowed_methods, reason = "a test's server ends with its runtime")]
        tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), hub));
        Self { folder, addr }
    }

    pub fn endpoint(&self) -> String {
        format!("https://{}", self.addr)
    }

    /// Returns the path of the authority's certificate.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }
}

fn key() -> KeyPair {
    KeyPair::generate().expect("randomness")
}

async fn serve(listener: TcpListener, tls: TlsAcceptor, hub: SocketAddr) {
    loop {
        let (stream, _) = listener.accept().await.expect("a socket");
        let tls = tls.clone();
        let pass = async move {
            // An error here is expected: a client that does not trust the certificate closes the connection.
            let mut near = tls.accept(stream).await?;
            copy_bidirectional(&mut near, &mut TcpStream::connect(hub).await?).await
        };
        #[allow(clippy::disallowed_methods, reason = "a test's server ends with its runtime")]
        tokio::spawn(pass);
    }
}
