//! The settings for etcd: endpoints, user, TLS and the cluster's name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::error::RegistryError;
use crate::url::{RegistryUrl, User, port_of};

const PORT: u16 = 2379;
const CLUSTER: &str = "default";
/// The lifetime of a node's lease: how long a dead node stays a member, and how long etcd may be unreachable
/// without an expiry.
const TTL: Duration = Duration::from_secs(10);
/// The shortest lease, in seconds, as etcd counts them. etcd refuses leases shorter than its election
/// timeout.
const TTL_S_MIN: u64 = 1;
const TTL_S_MAX: u64 = 600;

const NAMES: [&str; 6] = ["ca", "cert", "key", "server_name", "password_file", "ttl_s"];

/// The settings of the connection to one etcd. `Debug` does not show the password.
#[derive(Clone, Debug)]
pub struct EtcdSettings {
    /// The addresses of etcd's members as `host:port`, at least one.
    pub endpoints: Vec<String>,
    /// The name of the Baton cluster. Clusters with different names can share an etcd.
    pub cluster: String,
    pub user: Option<User>,
    /// The certificates for TLS; `None` for plain text.
    pub tls: Option<TlsFiles>,
    pub ttl: Duration,
}

/// The PEM files for TLS. They are read for every connection, so that renewed certificates are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of the authority that signs etcd's certificate.
    pub ca: PathBuf,
    /// The client certificate and its key, if etcd requires them.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in etcd's certificate; `None` if it is the host in the address.
    pub server_name: Option<String>,
}

impl EtcdSettings {
    /// Makes settings for plain text without a user.
    pub fn new(endpoints: Vec<String>, cluster: impl Into<String>) -> Self {
        Self { endpoints, cluster: cluster.into(), user: None, tls: None, ttl: TTL }
    }

    /// Parses `etcd://user:password@host:port,host:port/cluster?ca=FILE&cert=FILE&key=FILE&server_name=NAME`.
    ///
    /// The default port is 2379, and the default cluster `default`. TLS is used if `ca` is given. `password_file=FILE`
    /// keeps the password out of process lists. `ttl_s` is the lifetime of the lease.
    pub fn from_url(url: &RegistryUrl) -> Result<Self, RegistryError> {
        url.only(&NAMES)?;
        Ok(Self {
            endpoints: url.hosts.iter().map(|host| with_port(host)).collect(),
            cluster: cluster(url)?,
            user: user(url)?,
            tls: tls(url)?,
            ttl: ttl(url)?,
        })
    }

    /// Reads the certificate files, so that missing or invalid ones are reported before the first connection.
    pub(crate) fn check(&self) -> Result<(), RegistryError> {
        self.tls.as_ref().map_or(Ok(()), |tls| tls.options().map(drop))
    }
}

fn with_port(host: &str) -> String {
    if port_of(host).is_some() { host.to_owned() } else { format!("{host}:{PORT}") }
}

fn cluster(url: &RegistryUrl) -> Result<String, RegistryError> {
    let name = url.path.trim_end_matches('/');
    if name.contains(|letter: char| !letter.is_ascii_alphanumeric() && !"-_.".contains(letter)) {
        return Err(url.refuse(format!("`{name}` is not a cluster: letters, digits and any of - _ . only")));
    }
    Ok(if name.is_empty() { CLUSTER } else { name }.to_owned())
}

fn user(url: &RegistryUrl) -> Result<Option<User>, RegistryError> {
    match (&url.user, url.value("password_file")) {
        (None, Some(_)) => Err(url.refuse("`password_file` needs a user before the @")),
        (Some(user), Some(_)) if !user.password.is_empty() => {
            Err(url.refuse("give either a password or a `password_file`"))
        }
        (Some(user), Some(file)) => {
            let password = read(Path::new(file))?;
            let password = String::from_utf8_lossy(&password).trim_end().to_owned();
            Ok(Some(User { name: user.name.clone(), password }))
        }
        (user, None) => Ok(user.clone()),
    }
}

fn tls(url: &RegistryUrl) -> Result<Option<TlsFiles>, RegistryError> {
    let path = |name| url.value(name).map(PathBuf::from);
    let identity = match (path("cert"), path("key")) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        _ => return Err(url.refuse("`cert` needs `key`, and `key` needs `cert`")),
    };
    let server_name = url.value("server_name").map(str::to_owned);
    match path("ca") {
        Some(ca) => Ok(Some(TlsFiles { ca, identity, server_name })),
        None if identity.is_some() || server_name.is_some() => Err(url.refuse("TLS needs a `ca`")),
        None => Ok(None),
    }
}

fn ttl(url: &RegistryUrl) -> Result<Duration, RegistryError> {
    let Some(text) = url.value("ttl_s") else { return Ok(TTL) };
    match text.parse() {
        Ok(seconds @ TTL_S_MIN..=TTL_S_MAX) => Ok(Duration::from_secs(seconds)),
        _ => Err(url.refuse(format!("`ttl_s` is {TTL_S_MIN} to {TTL_S_MAX} seconds, not `{text}`"))),
    }
}

impl TlsFiles {
    pub(crate) fn options(&self) -> Result<ClientTlsConfig, RegistryError> {
        let options = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&self.ca)?));
        let options = match &self.identity {
            Some((cert, key)) => options.identity(Identity::from_pem(read(cert)?, read(key)?)),
            None => options,
        };
        Ok(match &self.server_name {
            Some(name) => options.domain_name(name),
            None => options,
        })
    }
}

/// Reads a small file, once per connection. It blocks so briefly that it needs no thread of its own.
fn read(path: &Path) -> Result<Vec<u8>, RegistryError> {
    std::fs::read(path).map_err(|source| RegistryError::ReadFile { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
