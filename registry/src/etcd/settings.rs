//! Where etcd is, who we are there, and which cluster is ours.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::error::RegistryError;
use crate::url::{RegistryUrl, User, port_of};

const PORT: u16 = 2379;
const CLUSTER: &str = "default";
/// How long a node that died without a word stays a member; also how long etcd may be away unnoticed by its leases.
const TTL: Duration = Duration::from_secs(10);
/// etcd counts leases in seconds, and refuses shorter ones than its election takes.
const TTL_S_MIN: u64 = 1;
const TTL_S_MAX: u64 = 600;

const NAMES: [&str; 6] = ["ca", "cert", "key", "server_name", "password_file", "ttl_s"];

/// Everything needed to use an etcd. `Debug` shows no password.
#[derive(Clone, Debug)]
pub struct EtcdSettings {
    /// `host:port`, at least one.
    pub endpoints: Vec<String>,
    /// Clusters with different names share an etcd and see nothing of each other.
    pub cluster: String,
    pub user: Option<User>,
    /// `None` is plain text.
    pub tls: Option<TlsFiles>,
    pub ttl: Duration,
}

/// PEM files. They are read again for every connection, so that renewed certificates are picked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Who may vouch for etcd.
    pub ca: PathBuf,
    /// Our certificate and its key, where etcd asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in etcd's certificate, where it is not the host in the address.
    pub server_name: Option<String>,
}

impl EtcdSettings {
    /// Plain text, no user.
    pub fn new(endpoints: Vec<String>, cluster: impl Into<String>) -> Self {
        Self { endpoints, cluster: cluster.into(), user: None, tls: None, ttl: TTL }
    }

    /// Reads `etcd://user:password@host:port,host:port/cluster?ca=FILE&cert=FILE&key=FILE&server_name=NAME`.
    ///
    /// Ports default to 2379, the cluster to `default`. TLS is used if there is a `ca`. `password_file=FILE` keeps
    /// the password out of process lists; `ttl_s` is the lease's length.
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

    /// Finds out now what would otherwise be found out at the first connection.
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
            Err(url.refuse("there is a password and a `password_file`"))
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
        _ => return Err(url.refuse("`cert` and `key` go together")),
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

/// Small files, once per connection: not worth a thread.
fn read(path: &Path) -> Result<Vec<u8>, RegistryError> {
    std::fs::read(path).map_err(|source| RegistryError::ReadFile { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
