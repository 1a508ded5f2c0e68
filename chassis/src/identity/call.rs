//! The signature of a gRPC call: one header over the method, Baton's headers, the message, the time and a nonce.
//!
//! The header is `baton-signature: TIME-NONCE-MAC` in hexadecimal digits, the time in milliseconds since 1970.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use types::{NodeId, Role};

use super::certificate::CertName;
use super::refusals::{Reason, RefusedKind};
use super::replay::Nonce;
use super::secret::{ClusterSecret, Mac, Use};
use super::{CLOCK_SKEW_MAX, Identity};
use crate::rpc::{PROTOCOL_HEADER, REQUEST_ID_HEADER};
use crate::world::World;

/// The header with the signature.
pub const SIGNATURE_HEADER: &str = "baton-signature";
/// The header with the address that the caller has dialled. A node accepts only calls to its own address.
pub const TARGET_HEADER: &str = "baton-target";

/// The header of an answer to a call for another target: the target that the caller must sign for.
pub const INSTANCE_HEADER: &str = "baton-instance";

/// The targets of the calls that a process accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Accepts {
    Every,
    /// Calls to this address.
    Address(String),
    /// Calls signed for this random name, which callers get from the first answer. For a process that callers dial by
    /// names that are not in its configuration.
    Instance(String),
}

/// The reason why a call is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallRefused {
    #[error(
        "the call is not signed with the cluster's secret: set `cluster.secret_file` in the caller's configuration"
    )]
    Unsigned,
    #[error("the call's signature cannot be parsed")]
    Malformed,
    #[error(
        "the call's signature does not match: the caller has another cluster secret, or the call was changed on its way"
    )]
    Signature,
    #[error(
        "the caller's clock and this process's differ by {} s, at most {} s are allowed: synchronize the clocks",
        skew.as_secs(), CLOCK_SKEW_MAX.as_secs()
    )]
    Clock { skew: Duration },
    #[error("the call's signature was used before: a signature is valid once")]
    Replayed,
    #[error("the call was signed for {signed}, this process is {own}")]
    Target { signed: String, own: String },
    /// Not counted: every caller's first call is one.
    #[error("the call was not signed for this instance: sign it for {own}")]
    Instance { own: String },
    #[error("the caller shows no certificate: set `[tls]` in its configuration")]
    NoCertificate,
    #[error("the caller's certificate names {caller}, and its role does not make this call")]
    Role { caller: CertName },
    #[error("the caller's certificate names {caller}, and it announces the {role} node {id}")]
    Node { caller: CertName, role: Role, id: NodeId },
}

impl CallRefused {
    fn reason(&self) -> Reason {
        match self {
            Self::Unsigned | Self::NoCertificate => Reason::Unsigned,
            Self::Role { .. } | Self::Node { .. } => Reason::Role,
            Self::Malformed | Self::Signature => Reason::Signature,
            Self::Clock { .. } => Reason::Clock,
            Self::Replayed => Reason::Replayed,
            Self::Target { .. } | Self::Instance { .. } => Reason::Target,
        }
    }
}

/// The parsed [`SIGNATURE_HEADER`] of an incoming call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallSignature {
    stamp: Stamp,
    mac: Mac,
}

/// The parts of a signature that make a repeated call another call.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    sent_ms: u64,
    nonce: Nonce,
}

/// The parts of a call that are signed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SignedCall<'a> {
    pub(crate) path: &'a str,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a [u8],
}

/// Signs an outgoing call. `headers` must already contain Baton's other headers.
pub(crate) fn sign(world: &World, secret: &ClusterSecret, path: &str, headers: &mut HeaderMap, body: &[u8]) {
    let stamp = Stamp { sent_ms: world.unix_time().as_millis() as u64, nonce: world.nonce() };
    let mac = mac(secret, SignedCall { path, headers, body }, stamp);
    let Stamp { sent_ms, nonce } = stamp;
    let signature = format!("{sent_ms:x}-{:032x}-{}", u128::from_be_bytes(nonce), mac.to_hex());
    headers
        .insert(SIGNATURE_HEADER, HeaderValue::try_from(signature).expect("digits are a valid header value"));
}

fn mac(secret: &ClusterSecret, call: SignedCall<'_>, stamp: Stamp) -> Mac {
    let (SignedCall { path, headers, body }, Stamp { sent_ms, nonce }) = (call, stamp);
    let header = |name| headers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
    let (protocol, id) = (header(PROTOCOL_HEADER), header(REQUEST_ID_HEADER));
    let fields = [path.as_bytes(), header(TARGET_HEADER), protocol, id, &sent_ms.to_le_bytes(), &nonce, body];
    secret.mac(Use::Call, &fields)
}

fn parse(header: &HeaderValue) -> Option<CallSignature> {
    let mut parts = header.to_str().ok()?.split('-');
    let (sent, nonce, mac) = (parts.next()?, parts.next()?, parts.next()?);
    Some(CallSignature {
        stamp: Stamp {
            sent_ms: u64::from_str_radix(sent, 16).ok()?,
            nonce: u128::from_str_radix(nonce, 16).ok()?.to_be_bytes(),
        },
        mac: Mac::from_hex(mac).ok()?,
    })
}

impl Identity {
    /// Refuses, before the message is read, a call without a signature or with a wrong time.
    pub(crate) fn check_head(
        &self,
        world: &World,
        headers: &HeaderMap,
    ) -> Result<CallSignature, CallRefused> {
        let shown = match headers.get(SIGNATURE_HEADER) {
            None => Err(CallRefused::Unsigned),
            Some(header) => parse(header).ok_or(CallRefused::Malformed),
        };
        let shown = shown.and_then(|shown| {
            let skew =
                Duration::from_millis((world.unix_time().as_millis() as u64).abs_diff(shown.stamp.sent_ms));
            if skew > CLOCK_SKEW_MAX { Err(CallRefused::Clock { skew }) } else { Ok(shown) }
        });
        shown.map_err(|refused| self.call_refused(refused))
    }

    /// Checks the call's signature, target, time and nonce.
    pub(crate) fn check_call(
        &self,
        world: &World,
        shown: CallSignature,
        call: SignedCall<'_>,
        accepts: &Accepts,
    ) -> Result<(), CallRefused> {
        let Some(secret) = self.secret() else { return Ok(()) };
        let signed = mac(secret, call, shown.stamp);
        let target = call.headers.get(TARGET_HEADER).map(|target| String::from_utf8_lossy(target.as_bytes()));
        let target = target.unwrap_or_default();
        let now_ms = world.unix_time().as_millis() as u64;
        let refused = match accepts {
            // blake3 compares hashes in constant time, so `!=` reveals nothing about the MAC.
            _ if signed != shown.mac => CallRefused::Signature,
            Accepts::Instance(own) if *own != target => {
                return Err(CallRefused::Instance { own: own.clone() });
            }
            Accepts::Address(own) if *own != target => {
                CallRefused::Target { signed: target.into_owned(), own: own.clone() }
            }
            _ if !self.seen.is_new(shown.stamp.sent_ms, shown.stamp.nonce, now_ms) => CallRefused::Replayed,
            _ => return Ok(()),
        };
        Err(self.call_refused(refused))
    }

    /// Counts a refused call.
    pub fn call_refused(&self, refused: CallRefused) -> CallRefused {
        self.refusals().count(RefusedKind::Call, refused.reason());
        refused
    }
}
