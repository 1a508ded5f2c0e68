//! Certificates for one test.

use std::path::{Path, PathBuf};

use baton_registry::etcd::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

/// A certificate authority with certificates for an etcd at 127.0.0.1 and for one client, as PEM files.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    pub fn new() -> Self {
        let certificates = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        let mut params = CertificateParams::new([]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, key()).expect("it can sign itself");
        certificates.write("ca.pem", &authority.pem());
        certificates.issue(&authority, "server", ExtendedKeyUsagePurpose::ServerAuth);
        certificates.issue(&authority, "client", ExtendedKeyUsagePurpose::ClientAuth);
        certificates
    }

    fn issue(&self, authority: &CertifiedIssuer<'_, KeyPair>, name: &str, purpose: ExtendedKeyUsagePurpose) {
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).expect("a good name");
        // The certificate is also valid for clients, because etcd connects to itself with its own
        // certificate.
        params.extended_key_usages = vec![purpose, ExtendedKeyUsagePurpose::ClientAuth];
        let key = key();
        let certificate = params.signed_by(&key, authority).expect("the authority can sign");
        self.write(&format!("{name}.pem"), &certificate.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("the folder is ours");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the arguments with which an etcd uses TLS and requires client certificates of this authority.
    pub fn etcd_arguments(&self) -> Vec<String> {
        let file = |name| self.path(name).display().to_string();
        ["--client-cert-auth".to_owned()]
            .into_iter()
            .chain(["--trusted-ca-file".to_owned(), file("ca.pem")])
            .chain(["--cert-file".to_owned(), file("server.pem")])
            .chain(["--key-file".to_owned(), file("server.key")])
            .collect()
    }

    pub fn client_files(&self) -> TlsFiles {
        let identity = Some((self.path("client.pem"), self.path("client.key")));
        TlsFiles { ca: self.path("ca.pem"), identity, server_name: None }
    }

    /// Returns the query of a registry address with these certificates.
    pub fn query(&self) -> String {
        let file = |name: &str| -> String { shown(&self.path(name)) };
        format!("ca={}&cert={}&key={}", file("ca.pem"), file("client.pem"), file("client.key"))
    }
}

pub fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn key() -> KeyPair {
    KeyPair::generate().expect("randomness")
}
