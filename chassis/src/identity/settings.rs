//! The sections `[cluster]`, with the secret's file and the permission to run without one, and `[tls]`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Identity;
use super::admin_key::AdminKey;
use super::secret::{ClusterSecret, SecretError};
use super::tls::{Tls, TlsFileError, TlsFiles};

/// The `[cluster]` section of a configuration: how the processes of a cluster authenticate each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterSection {
    /// The file with the cluster's secret, the same for all its processes: at least 16 bytes. Calls, KV links
    /// and registry entries are authenticated with it. Empty: none, which loopback addresses and `[tls]` allow.
    pub secret_file: String,
    /// Serve with neither a secret nor `[tls]` on addresses that other machines reach: any of them can read and change prompts.
    pub insecure: bool,
    /// The file with the key for `/sleep`, `/wake`, `/role` and `/debug`, sent as `Authorization: Bearer KEY`. Empty: none is
    /// needed on loopback or with `insecure`, elsewhere these pages are refused.
    pub admin_key_file: String,
}

/// The `[tls]` section: the certificate of a process, and the CAs of its peers. All three files, or none: then its connections are plaintext.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TlsSection {
    /// The file with the CAs of the cluster, as PEM. Peers must show a certificate of one of them. Like the other
    /// two it is read again within 4 s of a change, for new connections.
    pub ca: String,
    /// The file with this process's certificate, and intermediate ones if there are any. Its URI name
    /// `baton://CLUSTER/ROLE/NODE` says which process it is for: `baton certs` makes such certificates.
    pub cert: String,
    /// The file with the private key of `cert`.
    pub key: String,
}

impl TlsSection {
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }

    /// Reads the files; `None` if none is set.
    fn tls(&self) -> Result<Option<Tls>, TlsFileError> {
        let files = [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)];
        if !self.is_set() {
            return Ok(None);
        }
        if let Some((missing, _)) = files.iter().find(|(_, path)| path.is_empty()) {
            return Err(TlsFileError::Incomplete { missing });
        }
        let [ca, cert, key] = files.map(|(_, path)| PathBuf::from(path));
        Tls::load(TlsFiles { ca, cert, key }).map(Some)
    }
}

/// The reason why a process does not start: a bad secret or certificate, or an open port without either.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("`cluster.secret_file`")]
    Secret(#[source] SecretError),
    #[error("`cluster.admin_key_file`")]
    AdminKey(#[source] SecretError),
    #[error("`[tls]`")]
    Tls(#[source] TlsFileError),
    #[error(
        "`{setting}` = {address:?} is reached from other machines, and callers are not authenticated: set \
         `cluster.secret_file` to a file with the cluster's secret, or the files of `[tls]`, or `cluster.insecure = true` \
         where every machine of the network may read and change prompts"
    )]
    Open { setting: &'static str, address: String },
    #[error(
        "`registry.url` is an etcd, whose entries only a secret authenticates: set `cluster.secret_file` besides `[tls]`"
    )]
    UnsignedEntries,
}

impl ClusterSection {
    /// Refuses to listen on addresses that other machines reach if there is neither a secret nor TLS, and to use an etcd
    /// with TLS and no secret. Reads no file.
    pub fn check(
        &self,
        tls: &TlsSection,
        registry_url: Option<&str>,
        listening: &[(&'static str, &str)],
    ) -> Result<(), IdentityError> {
        if self.insecure || !self.secret_file.is_empty() {
            return Ok(());
        }
        if tls.is_set() {
            let in_etcd = registry_url.is_some_and(|url| url.starts_with("etcd"));
            return if in_etcd { Err(IdentityError::UnsignedEntries) } else { Ok(()) };
        }
        match listening.iter().find(|(_, address)| !is_loopback(address)) {
            Some((setting, address)) => Err(IdentityError::Open { setting, address: (*address).to_owned() }),
            None => Ok(()),
        }
    }

    /// Reads the files of the secret and of `tls`.
    pub fn identity(&self, tls: &TlsSection) -> Result<Identity, IdentityError> {
        let identity = match file(&self.secret_file) {
            None => Identity::default(),
            Some(path) => {
                ClusterSecret::read(&path).map(Identity::of_cluster).map_err(IdentityError::Secret)?
            }
        };
        match tls.tls().map_err(IdentityError::Tls)? {
            None => Ok(identity),
            Some(tls) => Ok(identity.with_tls(tls)),
        }
    }

    /// Returns the requirement for the operators' pages of a port that listens on `address`.
    pub fn admin_key(&self, address: &str) -> Result<AdminKey, IdentityError> {
        match file(&self.admin_key_file) {
            Some(path) => AdminKey::read(&path).map_err(IdentityError::AdminKey),
            None if self.insecure || is_loopback(address) => Ok(AdminKey::NotNeeded),
            None => Ok(AdminKey::Missing),
        }
    }
}

fn file(setting: &str) -> Option<PathBuf> {
    (!setting.is_empty()).then(|| Path::new(setting).to_owned())
}

/// Returns whether only this machine can reach `host:port`. An empty address means no port.
pub fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || address.is_empty() || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
