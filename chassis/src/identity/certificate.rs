//! The name in a certificate, `baton://CLUSTER/ROLE/NODE` among its URI names, and the process that is expected at
//! the other end.

use std::fmt;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};
use types::{NodeId, Role};
use webpki::{EndEntityCert, KeyUsage};

/// The role of the process that a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertRole {
    Router,
    Prefill,
    Decode,
    /// A node with both roles, or one that changes between them.
    Both,
    Pool,
    /// An etcd. No process of Baton accepts it.
    Registry,
    /// A person with `baton doctor` or a gRPC client.
    Operator,
}

impl CertRole {
    pub const ALL: [Self; 7] =
        [Self::Router, Self::Prefill, Self::Decode, Self::Both, Self::Pool, Self::Registry, Self::Operator];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
            Self::Pool => "pool",
            Self::Registry => "registry",
            Self::Operator => "operator",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }

    /// Whether a node with this certificate may have `role`.
    pub fn covers(self, role: Role) -> bool {
        self.as_str() == role.as_str() || (self == Self::Both && (role.prefills() || role.decodes()))
    }
}

/// The end of a certificate's validity, as the time since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expiry {
    /// The setting that names the certificate's file.
    pub setting: &'static str,
    pub end: Duration,
}

/// Returns the end of a certificate's validity, as the time since 1970. Nothing else in it is checked.
pub fn not_after(certificate: &CertificateDer<'_>) -> Option<Duration> {
    match time_error(certificate, Duration::from_secs(u64::MAX / 2))? {
        webpki::Error::CertExpired { not_after, .. } => Some(Duration::from_secs(not_after.as_secs())),
        _ => None,
    }
}

/// Refuses a certificate that is not valid at `now`, the time since 1970. Nothing else in it is checked.
pub fn check_validity(certificate: &CertificateDer<'_>, now: Duration) -> Result<(), &'static str> {
    match time_error(certificate, now) {
        Some(webpki::Error::CertExpired { .. }) => Err("the certificate has expired"),
        Some(webpki::Error::CertNotValidYet { .. }) => Err("the certificate is not valid yet"),
        _ => Ok(()),
    }
}

fn time_error(certificate: &CertificateDer<'_>, now: Duration) -> Option<webpki::Error> {
    let now = UnixTime::since_unix_epoch(now);
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    // The validity is checked before the issuer, so no authority is needed.
    parsed.verify_for_usage(&[], &[], &[], now, KeyUsage::server_auth(), None, None).err()
}

/// The node part of a certificate that all processes of its role share.
const ANY_NODE: &str = "*";

/// The name in a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertName {
    pub cluster: String,
    pub role: CertRole,
    /// `*`: the certificate is for every process of its role.
    node: String,
}

impl CertName {
    const SCHEME: &str = "baton://";

    /// Parses `baton://CLUSTER/ROLE/NODE`.
    pub fn parse(uri: &str) -> Option<Self> {
        let mut parts = uri.strip_prefix(Self::SCHEME)?.split('/');
        let (cluster, role, node) = (parts.next()?, parts.next()?, parts.next()?);
        if cluster.is_empty() || node.is_empty() || parts.next().is_some() {
            return None;
        }
        Some(Self { cluster: cluster.to_owned(), role: CertRole::parse(role)?, node: node.to_owned() })
    }

    /// Returns the first such name of a certificate.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let certificate = EndEntityCert::try_from(certificate).ok()?;
        certificate.valid_uri_names().find_map(Self::parse)
    }

    /// The node that the certificate is for; `None`: every process of its role.
    pub fn node(&self) -> Option<&str> {
        (self.node != ANY_NODE).then_some(&self.node)
    }

    /// Whether the certificate is for the node `id` in `role`.
    pub fn is_for(&self, role: Role, id: &NodeId) -> bool {
        self.role.covers(role) && self.node().is_none_or(|node| node == id.as_str())
    }
}

impl fmt::Display for CertName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cluster, role, node } = self;
        write!(f, "{}{cluster}/{}/{node}", Self::SCHEME, role.as_str())
    }
}

/// The process that must be at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedPeer {
    /// The router that serves the embedded registry.
    Registry,
    /// The node that a registry entry names.
    Node { id: NodeId, role: Role },
    /// A node that decodes, for `baton doctor --peer`.
    DecodeNode,
    /// The end of a KV link that accepts it.
    KvReceiver,
    /// A process of a node with several processes: the head, or a follower.
    NodeProcess,
    /// The end of a KV link that dials. `baton doctor --peer` sends KV with an operator's certificate.
    KvSender,
}

impl ExpectedPeer {
    pub fn accepts(&self, name: &CertName) -> bool {
        match self {
            Self::Registry => name.role == CertRole::Router,
            Self::Node { id, role } => name.is_for(*role, id),
            Self::DecodeNode => name.role.covers(Role::Decode),
            Self::KvReceiver => [Role::Decode, Role::Pool].into_iter().any(|role| name.role.covers(role)),
            Self::NodeProcess => [Role::Prefill, Role::Decode].into_iter().any(|role| name.role.covers(role)),
            Self::KvSender => {
                let sends = [Role::Prefill, Role::Pool].into_iter().any(|role| name.role.covers(role));
                sends || name.role == CertRole::Operator
            }
        }
    }
}

impl fmt::Display for ExpectedPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry => f.write_str("a router"),
            Self::Node { id, role } => write!(f, "the {role} node {id}"),
            Self::DecodeNode => f.write_str("a decode node"),
            Self::KvReceiver => f.write_str("a decode or pool node"),
            Self::NodeProcess => f.write_str("a prefill or decode node"),
            Self::KvSender => f.write_str("a prefill or pool node, or an operator"),
        }
    }
}
