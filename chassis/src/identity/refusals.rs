//! Counts of refused callers, by kind and reason.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, Opts};

/// The kind of thing that was refused, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusedKind {
    Call,
    Link,
    Entry,
    Page,
    /// A TLS connection of gRPC, of either end, before any call.
    Connection,
}

/// Why a call, link, entry or page was refused, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The signature, certificate or key is missing.
    Unsigned,
    /// The signature was made without the cluster's secret, or for other data.
    Signature,
    /// The signature was used before.
    Replayed,
    /// The clocks of the two processes differ too much.
    Clock,
    /// The call was signed for another process.
    Target,
    /// The peer does not speak TLS.
    Plaintext,
    /// The certificate has expired, or is not valid yet.
    Expired,
    /// The certificate is of another CA.
    Authority,
    /// The certificate is for another cluster.
    Cluster,
    /// The certificate is for a role or node that may not be here.
    Role,
    /// The TLS handshake failed for another reason, as a replayed one does.
    Handshake,
}

impl RefusedKind {
    const ALL: [Self; 5] = [Self::Call, Self::Link, Self::Entry, Self::Page, Self::Connection];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Call => "call",
            Self::Link => "link",
            Self::Entry => "entry",
            Self::Page => "page",
            Self::Connection => "connection",
        }
    }
}

impl Reason {
    const ALL: [Self; 11] = [
        Self::Unsigned,
        Self::Signature,
        Self::Replayed,
        Self::Clock,
        Self::Target,
        Self::Plaintext,
        Self::Expired,
        Self::Authority,
        Self::Cluster,
        Self::Role,
        Self::Handshake,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Unsigned => "unsigned",
            Self::Signature => "signature",
            Self::Replayed => "replayed",
            Self::Clock => "clock",
            Self::Target => "target",
            Self::Plaintext => "plaintext",
            Self::Expired => "expired",
            Self::Authority => "authority",
            Self::Cluster => "cluster",
            Self::Role => "role",
            Self::Handshake => "handshake",
        }
    }
}

/// How often each kind was refused for each reason. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Arc<Mutex<BTreeMap<(RefusedKind, Reason), u64>>>);

impl Refusals {
    pub fn count(&self, refused: RefusedKind, reason: Reason) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry((refused, reason)).or_default() += 1;
    }

    pub fn get(&self, refused: RefusedKind, reason: Reason) -> u64 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(&(refused, reason)).copied().unwrap_or(0)
    }

    fn all(&self) -> BTreeMap<(RefusedKind, Reason), u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The collector that writes the counts on a process's metrics page.
pub(crate) struct RefusalsOnPage {
    refusals: Refusals,
    opts: Opts,
    /// A vector that describes the metric and stays empty: each page fills a vector of its own.
    empty: IntCounterVec,
}

impl RefusalsOnPage {
    pub(crate) fn new(refusals: Refusals, opts: Opts) -> Self {
        let empty = Self::vector(&opts);
        Self { refusals, opts, empty }
    }

    fn vector(opts: &Opts) -> IntCounterVec {
        IntCounterVec::new(opts.clone(), &["what", "reason"]).expect("the name is well-formed")
    }
}

impl Collector for RefusalsOnPage {
    fn desc(&self) -> Vec<&Desc> {
        self.empty.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let (counters, counts) = (Self::vector(&self.opts), self.refusals.all());
        // Counts of zero are written too: Prometheus sees no increase in a series that begins with 1.
        for refused in RefusedKind::ALL {
            for reason in Reason::ALL {
                let count = counts.get(&(refused, reason)).copied().unwrap_or(0);
                counters.with_label_values(&[refused.as_str(), reason.as_str()]).inc_by(count);
            }
        }
        counters.collect()
    }
}
