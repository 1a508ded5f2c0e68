//! Copies KV from one node's memory to another's within one process, and verifies it as every other wire does.
//!
//! It has no sockets and no tasks of its own, so a test can run it on a paused clock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use kv_cache::{BlockLease, KvMemory};
use types::{Destination, Handoff, KvSpan, Landing, Scheme, WireAddress};

use super::link::span_out::{SpanOut, copy_out, corrupt_first};
use crate::arrival::Arrival;
use crate::connector::{Auto, KvConnector, KvSender, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::{Claim, Credentials, OpenLanding, PageAt};
use crate::landings::{LandRequest, Landings};
use crate::lanes::LaneSpan;
use crate::outgoing::{Outgoing, Sender, Wire, landing_of};
use crate::runs::Runs;

pub const SCHEME: &str = "loopback";

pub(super) const WIRE: WireKind =
    WireKind { name: SCHEME, build: |parts| Box::pin(async { Ok(Loopback::shared(parts)) }), auto: Auto::No };

/// The connectors that can be reached, by endpoint. The table is global, because an address is valid within
/// the process. The lock is held for a look-up, never across an await.
static REACHABLE: Mutex<Option<HashMap<String, Weak<Loopback>>>> = Mutex::new(None);
static NEXT_ENDPOINT: AtomicU64 = AtomicU64::new(0);

/// The connector of this module: one node's end.
#[derive(Debug)]
pub struct Loopback {
    parts: ConnectorParts,
    address: WireAddress,
    landings: Landings,
}

impl Loopback {
    /// Builds the connector. Others in this process can reach it while it lives.
    pub fn shared(parts: ConnectorParts) -> Arc<dyn KvConnector> {
        let number = NEXT_ENDPOINT.fetch_add(1, Ordering::Relaxed);
        let address = WireAddress {
            scheme: Scheme::new(SCHEME),
            endpoint: format!("{}#{number}", parts.node),
            within_host: true,
        };
        let landings = Landings::new(parts.clone(), address.clone());
        let node = Arc::new(Self { parts, address, landings });
        reachable().get_or_insert_default().insert(node.address.endpoint.clone(), Arc::downgrade(&node));
        node
    }

    fn at(endpoint: &str) -> Result<Arc<Self>, TransferError> {
        let found = reachable().as_ref().and_then(|nodes| nodes.get(endpoint).and_then(Weak::upgrade));
        found.ok_or_else(|| TransferError::lost_because("no connector of this name is in this process"))
    }
}

fn reachable() -> MutexGuard<'static, Option<HashMap<String, Weak<Loopback>>>> {
    REACHABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl KvConnector for Loopback {
    fn scheme(&self) -> Scheme {
        self.address.scheme.clone()
    }

    fn address(&self) -> WireAddress {
        self.address.clone()
    }

    fn reaches(&self, wire: &WireAddress) -> bool {
        wire.scheme == self.address.scheme && Self::at(&wire.endpoint).is_ok()
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        Arrival::of(&self.landings, request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        let (landing, lanes) = landing_of(to, &self.address.scheme, &self.parts)?;
        let receiver = Self::at(&landing.wire.endpoint)?;
        let (out, refetches) = Outgoing::new(landing, lanes);
        let shown = Credentials::new(&out.landing, self.parts.memory.layout(), &self.parts.fingerprint);
        let target = receiver.landings.open(out.transfer(), &shown, Arc::clone(&out) as _)?;
        let wire = Copying { parts: self.parts.clone(), target };
        Ok(Sender::start(out, refetches, Arc::new(wire), &self.parts))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        if let Some(nodes) = reachable().as_mut() {
            nodes.remove(&self.address.endpoint);
        }
        self.landings.close();
    }
}

/// One outgoing transfer, with the receiver's landing.
#[derive(Debug)]
struct Copying {
    parts: ConnectorParts,
    target: Arc<OpenLanding>,
}

#[async_trait]
impl Wire for Copying {
    async fn put(
        &self,
        out: &Arc<Outgoing>,
        piece: LaneSpan,
        from: Arc<BlockLease>,
    ) -> Result<(), TransferError> {
        let span = SpanOut { out: Arc::clone(out), piece, from, pending_copy: out.pending_copies.begin() };
        let Some(fault) = self.parts.faults.next(span.runs(&self.parts).bytes()) else {
            return self.copy(&span, None).await;
        };
        match fault {
            FaultKind::Lose => Err(self.lost()),
            FaultKind::Stall => std::future::pending().await,
            FaultKind::Delay(by) => {
                tokio::time::sleep(by).await;
                self.copy(&span, None).await
            }
            FaultKind::Duplicate => {
                self.copy(&span, None).await?;
                self.copy(&span, None).await
            }
            FaultKind::FlipBit(_) | FaultKind::WrongDigest => self.copy(&span, Some(fault)).await,
        }
    }

    async fn hand_off(&self, _out: &Arc<Outgoing>, handoff: Handoff) -> Result<(), TransferError> {
        self.target.handed_off(handoff)
    }

    fn leave(&self, _out: &Outgoing, unfinished: Option<&TransferError>) {
        if let Some(error) = unfinished {
            self.target.fail(error.clone());
        }
    }
}

impl Copying {
    /// Fails both ends of the transfer, as a broken connection does, and returns the error.
    fn lost(&self) -> TransferError {
        let error = TransferError::lost_because("a fault was injected");
        self.target.fail(error.clone());
        error
    }

    /// Copies and verifies the pages, and copies wrong pages once more.
    async fn copy(&self, span: &SpanOut, fault: Option<FaultKind>) -> Result<(), TransferError> {
        for wrong in self.copy_once(span, fault)? {
            let again = span.page(wrong);
            // The fault list is checked again, because a page that is sent again takes the same wire.
            let fault = self.parts.faults.next(again.runs(&self.parts).bytes());
            self.copy_once(&again, fault)?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Copies and verifies the pages once. Returns the pages that failed verification.
    fn copy_once(&self, span: &SpanOut, mut fault: Option<FaultKind>) -> Result<Vec<KvSpan>, TransferError> {
        let mut digests = span.digests(&self.parts)?;
        if self.target.claim(&span.piece, digests.len())? == Claim::Skip {
            return Ok(Vec::new());
        }
        if fault == Some(FaultKind::WrongDigest) {
            corrupt_first(&mut digests);
        }
        let (mut wrong, mut bytes) = (Vec::new(), 0);
        for page in PageAt::all(&span.piece) {
            let heads = self.target.heads(span.piece.lane, page.group, page.layer_pos).range().len();
            let of_page: Vec<Digest> = digests.drain(..heads.min(digests.len())).collect();
            let copied = self.copy_page(&span.page(page.span()), page, &of_page, fault.take())?;
            bytes += copied.bytes;
            if !copied.right {
                wrong.push(page.span());
            }
        }
        self.target.arrived(&span.piece, bytes, &wrong)?;
        Ok(wrong)
    }

    fn copy_page(
        &self,
        span: &SpanOut,
        page: PageAt,
        digests: &[Digest],
        fault: Option<FaultKind>,
    ) -> Result<CopyResult, TransferError> {
        let runs = span.runs(&self.parts);
        let mut bytes = vec![0; runs.bytes()];
        copy_out(&self.parts.memory, &runs, &mut bytes)?;
        if let Some(FaultKind::FlipBit(bit)) = fault {
            flip(&mut bytes, bit);
        }
        let write = |memory: &KvMemory| {
            copy_in(memory, &self.target.runs(&span.piece), &bytes)?;
            match digests.is_empty() {
                true => Ok(true),
                false => self.target.verify(memory, span.piece.lane, page, digests).map_err(busy),
            }
        };
        let right = self.target.while_open(write).ok_or(TransferError::Cancelled)??;
        Ok(CopyResult { bytes: bytes.len(), right })
    }
}

/// Copies the KV of a page into the receiver's memory.
fn copy_in(memory: &KvMemory, runs: &Runs, mut bytes: &[u8]) -> Result<(), TransferError> {
    let mut pages = runs.write(memory, 0).map_err(busy)?;
    for mut slice in pages.slices() {
        let (now, later) = bytes.split_at(slice.len());
        slice.copy_from_slice(now);
        bytes = later;
    }
    Ok(())
}

struct CopyResult {
    bytes: usize,
    right: bool,
}

fn busy(busy: kv_cache::PageBusy) -> TransferError {
    TransferError::Memory(busy.to_string())
}
