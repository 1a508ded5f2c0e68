//! A wrapper around any connector, for tests that inject faults.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use types::{Destination, Landing, Scheme, WireAddress};

use crate::arrival::Arrival;
use crate::connector::{KvConnector, KvSender};
use crate::connector_parts::ConnectorParts;
use crate::connectors;
use crate::error::TransferError;
use crate::faults::{Fault, Faults};
use crate::landings::LandRequest;
use crate::quiet::Quiet;

/// A connector that works normally until a test injects faults.
///
/// The connector inside applies faults between digest and peer, through [`ConnectorParts::faults`]. This wrapper adds
/// a wire that cannot prove that it is quiet.
#[derive(Debug)]
pub struct Flaky<T: ?Sized> {
    faults: Faults,
    /// When this is cancelled, failed landings can prove quiet again; `None` if they always can. Held for one
    /// read or write, never across an await.
    unproven_until: Mutex<Option<CancellationToken>>,
    inner: Arc<T>,
}

impl Flaky<dyn KvConnector> {
    /// Builds the connector of this name, with an empty list of faults.
    pub async fn build(name: &str, parts: ConnectorParts) -> Result<Arc<Self>, TransferError> {
        let faults = Faults::programmable();
        let inner = connectors::build(name, ConnectorParts { faults: faults.clone(), ..parts }).await?;
        Ok(Self::over(inner, faults))
    }

    /// Wraps a connector that was built with these faults.
    pub fn over(inner: Arc<dyn KvConnector>, faults: Faults) -> Arc<Self> {
        Arc::new(Self { faults, unproven_until: Mutex::default(), inner })
    }
}

impl<T: KvConnector + ?Sized> Flaky<T> {
    /// Injects a fault into KV that this side sends.
    pub fn inject(&self, fault: Fault) {
        self.faults.inject(fault);
    }

    /// Keeps the blocks of every landing that fails from now on in quarantine until `until` is cancelled.
    pub fn cannot_prove_quiet(&self, until: CancellationToken) {
        *self.unproven_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
    }

    fn unproven_until(&self) -> Option<CancellationToken> {
        self.unproven_until.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl<T: KvConnector + ?Sized> KvConnector for Flaky<T> {
    fn scheme(&self) -> Scheme {
        self.inner.scheme()
    }

    fn address(&self) -> WireAddress {
        self.inner.address()
    }

    fn reaches(&self, wire: &WireAddress) -> bool {
        self.inner.reaches(wire)
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        let (landing, arrival) = self.inner.land(request)?;
        if let Some(until) = self.unproven_until() {
            arrival.needs_proof(Arc::new(Unproven { until }));
        }
        Ok((landing, arrival))
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        self.inner.open(to).await
    }
}

/// A proof of quiet that the test gives by cancelling `until`.
#[derive(Debug)]
struct Unproven {
    until: CancellationToken,
}

#[async_trait]
impl Quiet for Unproven {
    fn awaited(&self) -> &'static str {
        "the proof of a flaky wire"
    }

    fn revoke(&self) -> bool {
        self.until.is_cancelled()
    }

    async fn proven(&self) {
        self.until.cancelled().await;
    }
}
