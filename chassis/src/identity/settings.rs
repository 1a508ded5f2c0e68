//! The `[cluster]` section: the secret's file, and permission to run without a secret.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Identity;
use super::admin_key::AdminKey;
use super::secret::{ClusterSecret, SecretError};

/// The `[cluster]` section of a configuration: how the processes of a cluster authenticate each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterSection {
    /// The file with the cluster's secret, the same for all its processes: at least 16 bytes. Calls, KV links
    /// and registry entries are authenticated with it. Empty: none, which only loopback addresses allow.
    pub secret_file: String,
    /// Serve without a secret on addresses that other machines reach: any of them can read and change prompts.
    pub insecure: bool,
    /// The file with the key for `/sleep`, `/wake` and `/debug`, sent as `Authorization: Bearer KEY`. Empty: none is
    /// needed on loopback or with `insecure`, elsewhere these pages are refused.
    pub admin_key_file: String,
}

/// The reason why a process does not start: a bad secret, or an open port without one.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("`cluster.secret_file`")]
    Secret(#[source] SecretError),
    #[error("`cluster.admin_key_file`")]
    AdminKey(#[source] SecretError),
    #[error(
        "`{setting}` = {address:?} is reached from other machines, and callers are not authenticated: set \
         `cluster.secret_file` to a file with the cluster's secret, or `cluster.insecure = true` where every machine of \
         the network may read and change prompts"
    )]
    Open { setting: &'static str, address: String },
}

impl ClusterSection {
    /// Refuses to listen on addresses that other machines reach if there is no secret. Reads no file.
    pub fn check(&self, listening: &[(&'static str, &str)]) -> Result<(), IdentityError> {
        if self.insecure || !self.secret_file.is_empty() {
            return Ok(());
        }
        match listening.iter().find(|(_, address)| !is_loopback(address)) {
            Some((setting, address)) => Err(IdentityError::Open { setting, address: (*address).to_owned() }),
            None => Ok(()),
        }
    }

    /// Reads the secret's file.
    pub fn identity(&self) -> Result<Identity, IdentityError> {
        match file(&self.secret_file) {
            None => Ok(Identity::default()),
            Some(path) => ClusterSecret::read(&path).map(Identity::of_cluster).map_err(IdentityError::Secret),
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
