//! The reason why a TLS connection is refused, found in the errors of rustls.

use std::io;

use rustls::{AlertDescription, CertificateError};

use crate::identity::certificate::CertName;
use crate::identity::refusals::Reason;

/// The reason for a failed handshake. It is in the [`io::Error`] of the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsRefused {
    #[error("the peer speaks plaintext: set `[tls]` in its configuration too")]
    Plaintext,
    #[error("the peer shows no certificate: set `[tls]` in its configuration")]
    NoCertificate,
    #[error(
        "the peer's certificate has expired, or is not valid yet: renew it, and check the time on both machines"
    )]
    Expired,
    #[error("the peer's certificate is not signed by a CA in `tls.ca`")]
    Authority,
    #[error("the peer's certificate has no name `baton://CLUSTER/ROLE/NODE` among its URI names")]
    Unnamed,
    #[error("the peer's certificate names {name}, and this process belongs to the cluster {own}")]
    Cluster { name: CertName, own: String },
    #[error("the peer's certificate names {name}, and the role or node is wrong: expected is {expected}")]
    Role { name: CertName, expected: String },
    #[error("the peer refuses this process's certificate: {0}")]
    ByPeer(&'static str),
    #[error(
        "the peer closed the connection in the TLS handshake: it has ended, does not speak TLS, or refuses this \
         process's certificate"
    )]
    Closed,
    #[error("the TLS handshake failed: {0}")]
    Handshake(String),
}

impl TlsRefused {
    /// The reason by which it is counted; `None` if this process has refused no peer.
    pub(in crate::identity) fn reason(&self) -> Option<Reason> {
        match self {
            Self::Plaintext => Some(Reason::Plaintext),
            Self::NoCertificate => Some(Reason::Unsigned),
            Self::Expired => Some(Reason::Expired),
            Self::Authority => Some(Reason::Authority),
            Self::Cluster { .. } => Some(Reason::Cluster),
            Self::Unnamed | Self::Role { .. } => Some(Reason::Role),
            Self::Handshake(_) => Some(Reason::Handshake),
            Self::ByPeer(_) | Self::Closed => None,
        }
    }

    /// The reason in the error of a handshake.
    pub(super) fn of(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(error) => Self::of_rustls(error),
            None if is_end(error.kind()) => Self::Closed,
            None => Self::Handshake(error.to_string()),
        }
    }

    pub(super) fn of_rustls(error: &rustls::Error) -> Self {
        match error {
            // The first bytes are no TLS record.
            rustls::Error::InvalidMessage(_) => Self::Plaintext,
            rustls::Error::NoCertificatesPresented => Self::NoCertificate,
            rustls::Error::InvalidCertificate(wrong) => Self::of_certificate(wrong),
            rustls::Error::AlertReceived(alert) => Self::ByPeer(told(*alert)),
            other => Self::Handshake(other.to_string()),
        }
    }

    fn of_certificate(wrong: &CertificateError) -> Self {
        match wrong {
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => Self::Expired,
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::Authority,
            CertificateError::Other(inner) => match inner.0.downcast_ref::<Self>() {
                Some(refused) => refused.clone(),
                None => Self::Handshake(inner.to_string()),
            },
            other => Self::Handshake(other.to_string()),
        }
    }

    /// The error that makes rustls end the handshake with an alert.
    pub(super) fn into_rustls(self) -> rustls::Error {
        let inner = rustls::OtherError(std::sync::Arc::new(self));
        rustls::Error::InvalidCertificate(CertificateError::Other(inner))
    }

    pub(in crate::identity) fn into_io(self) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, self)
    }
}

fn is_end(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    [UnexpectedEof, ConnectionReset, ConnectionAborted, BrokenPipe].contains(&kind)
}

/// The meaning of an alert of a peer that runs the same code.
fn told(alert: AlertDescription) -> &'static str {
    match alert {
        AlertDescription::CertificateExpired => "it has expired, or is not valid yet for the peer's clock",
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is not signed by a CA in the peer's `tls.ca`"
        }
        AlertDescription::CertificateUnknown => "its cluster, role or node is not the expected one",
        AlertDescription::CertificateRequired => "the peer got none",
        _ => "the peer's log and its `callers_refused_total` name the reason",
    }
}
