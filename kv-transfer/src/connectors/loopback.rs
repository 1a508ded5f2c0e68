//! KV from one node's memory to another's within one process: a copy, verified like every other wire's bytes.
//!
//! It has no sockets and no tasks of its own, so a test can run it on a paused clock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use kv_cache::{BlockLease, KvMemory};
use types::{Destination, Handoff, KvSpan, Landing, NodeInfo, Scheme, WireAddress};

use crate::arrival::Arrival;
use crate::connector::{ConnectorParts, KvConnector, KvSender, LandRequest};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::{Claim, Credentials, OpenLanding, PageAt};
use crate::landings::Landings;
use crate::outgoing::{Outgoing, Sender, Wire, landing_of};

pub const SCHEME: &str = "loopback";

/// The address space of this wire is the process, so the list of who is reachable belongs to the process too.
/// Held for a look-up, never across an await.
static REACHABLE: Mutex<Option<HashMap<String, Weak<Loopback>>>> = Mutex::new(None);
static NEXT_ENDPOINT: AtomicU64 = AtomicU64::new(0);

/// See the module.
#[derive(Debug)]
pub struct Loopback {
    parts: ConnectorParts,
    address: WireAddress,
    landings: Landings,
}

impl Loopback {
    /// Makes it and lets others of this process reach it for as long as it lives.
    pub fn shared(parts: ConnectorParts) -> Arc<dyn KvConnector> {
        let number = NEXT_ENDPOINT.fetch_add(1, Ordering::Relaxed);
        let address =
            WireAddress { scheme: Scheme::new(SCHEME), endpoint: format!("{}#{number}", parts.node) };
        let landings = Landings::new(parts.clone(), address.clone());
        let node = Arc::new(Self { parts, address, landings });
        reachable().get_or_insert_default().insert(node.address.endpoint.clone(), Arc::downgrade(&node));
        node
    }

    fn at(endpoint: &str) -> Result<Arc<Self>, TransferError> {
        let found = reachable().as_ref().and_then(|nodes| nodes.get(endpoint).and_then(Weak::upgrade));
        found.ok_or_else(|| TransferError::lost_because("nobody of this name is in this process"))
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

    async fn meet(&self, peer: &NodeInfo) -> Result<(), TransferError> {
        match peer.wires.iter().find(|wire| wire.scheme == self.address.scheme) {
            Some(wire) => Self::at(&wire.endpoint).map(|_| ()),
            None => Ok(()),
        }
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        self.landings.land(request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        let landing = landing_of(to, &self.address.scheme, &self.parts)?;
        let receiver = Self::at(&landing.wire.endpoint)?;
        let (out, refetches) = Outgoing::new(landing);
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

/// The wire of one transfer.
#[derive(Debug)]
struct Copying {
    parts: ConnectorParts,
    target: Arc<OpenLanding>,
}

#[async_trait]
impl Wire for Copying {
    async fn put(
        &self,
        _out: &Arc<Outgoing>,
        piece: KvSpan,
        from: Arc<BlockLease>,
    ) -> Result<(), TransferError> {
        let bytes = piece.blocks.len() * self.page_bytes(&piece);
        let Some(fault) = self.parts.faults.next(bytes) else { return self.copy(&piece, &from, None).await };
        match fault {
            FaultKind::Lose => Err(self.lost()),
            FaultKind::Stall => std::future::pending().await,
            FaultKind::Delay(by) => {
                tokio::time::sleep(by).await;
                self.copy(&piece, &from, None).await
            }
            FaultKind::Duplicate => {
                self.copy(&piece, &from, None).await?;
                self.copy(&piece, &from, None).await
            }
            FaultKind::FlipBit(_) | FaultKind::WrongDigest => self.copy(&piece, &from, Some(fault)).await,
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
    fn page_bytes(&self, piece: &KvSpan) -> usize {
        piece.layers.clone().map(|layer_pos| self.target.shape(piece.group, layer_pos).page_bytes()).sum()
    }

    /// What a broken connection does to both ends.
    fn lost(&self) -> TransferError {
        let error = TransferError::lost_because("a fault was injected");
        self.target.fail(error.clone());
        error
    }

    /// Copies, verifies, and copies once more what was wrong.
    async fn copy(
        &self,
        piece: &KvSpan,
        from: &BlockLease,
        fault: Option<FaultKind>,
    ) -> Result<(), TransferError> {
        for wrong in self.copy_once(piece, from, fault)? {
            // The fault hook is asked again: a refetched page takes the same wire.
            let fault = self.parts.faults.next(self.page_bytes(&wrong));
            self.copy_once(&wrong, from, fault)?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// The pages that did not pass.
    fn copy_once(
        &self,
        piece: &KvSpan,
        from: &BlockLease,
        mut fault: Option<FaultKind>,
    ) -> Result<Vec<KvSpan>, TransferError> {
        let n_digests: usize = PageAt::all(piece).map(|page| self.n_heads(page)).sum();
        if self.target.claim(piece, n_digests)? == Claim::Skip {
            return Ok(Vec::new());
        }
        let (mut wrong, mut bytes) = (Vec::new(), 0);
        for page in PageAt::all(piece) {
            let copied = self.copy_page(page, from, fault.take())?;
            bytes += copied.bytes;
            if !copied.right {
                wrong.push(page.span());
            }
        }
        self.target.arrived(piece, bytes, &wrong)?;
        Ok(wrong)
    }

    fn n_heads(&self, page: PageAt) -> usize {
        self.target.shape(page.group, page.layer_pos).n_heads
    }

    fn copy_page(
        &self,
        page: PageAt,
        from: &BlockLease,
        fault: Option<FaultKind>,
    ) -> Result<Copied, TransferError> {
        let place = from.table(page.group)[page.block as usize].0;
        let source = self.parts.memory.read(page.group, page.layer_pos, place..place + 1).map_err(busy)?;
        let mut digests = Vec::new();
        let n_tokens = self.target.landing().valid_tokens(page.block);
        self.target.shape(page.group, page.layer_pos).digest_page(&source, n_tokens, &mut digests);
        if fault == Some(FaultKind::WrongDigest) {
            digests[0].0 ^= 1;
        }
        let right = self.target.while_open(|memory| self.write_page(memory, page, &source, &digests, fault));
        Ok(Copied { bytes: source.len(), right: right.ok_or(TransferError::Cancelled)?? })
    }

    fn write_page(
        &self,
        memory: &KvMemory,
        page: PageAt,
        source: &[u8],
        digests: &[Digest],
        fault: Option<FaultKind>,
    ) -> Result<bool, TransferError> {
        let place = self.target.landing().tables[usize::from(page.group.0)][page.block as usize].0;
        let mut target = memory.write(page.group, page.layer_pos, place..place + 1).map_err(busy)?;
        target.copy_from_slice(source);
        if let Some(FaultKind::FlipBit(bit)) = fault {
            flip(&mut target, bit);
        }
        drop(target);
        self.target.verify(memory, page, digests).map_err(busy)
    }
}

struct Copied {
    bytes: usize,
    right: bool,
}

fn busy(busy: kv_cache::PageBusy) -> TransferError {
    TransferError::Memory(busy.to_string())
}
