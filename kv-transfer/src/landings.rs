//! The landings that one connector has granted, by transfer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use chassis::{Task, spawn_guarded};
use kv_cache::BlockLease;
use types::{BlockIdx, Deadline, GroupIdx, KvLayout, Landing, TransferId, WireAddress};

use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::{Credentials, OpenLanding, Opener, bad_request};

/// The most open landings of one connector. A decode node runs hundreds of sequences, so the limit is far
/// above normal use.
const LANDINGS_MAX: usize = 16 << 10;

/// A request for a landing: the leased blocks of one sequence, and its lengths.
#[derive(Debug)]
pub struct LandRequest {
    pub transfer: TransferId,
    /// The blocks of the whole sequence, with the held blocks first. The lease may be longer: blocks for
    /// further tokens are not sent to.
    pub lease: BlockLease,
    pub n_tokens: u32,
    /// Tokens at the start of the sequence whose KV this node already holds: a whole number of blocks.
    pub held_tokens: u32,
    /// The time at which the landing fails by itself.
    pub deadline: Deadline,
}

/// The table of one connector's open landings.
#[derive(Clone, Debug)]
pub struct Landings {
    table: Arc<Table>,
}

/// A landing that was just granted.
#[derive(Debug)]
pub(crate) struct GrantedLanding {
    #[expect(dead_code, reason = "held for its Drop")]
    entry: LandingEntry,
    pub(crate) open: Arc<OpenLanding>,
    /// The task that fails the landing at its deadline.
    #[expect(dead_code, reason = "held for its Drop")]
    timer: Task<()>,
}

/// A landing's entry in its connector's table. The drop removes it.
#[derive(Debug)]
pub(crate) struct LandingEntry {
    table: Weak<Table>,
    transfer: TransferId,
}

#[derive(Debug)]
struct Table {
    parts: ConnectorParts,
    wire: WireAddress,
    /// The landings by transfer. An entry exists as long as its arrival. Held for a look-up, never across an
    /// await.
    open: Mutex<BTreeMap<TransferId, Weak<OpenLanding>>>,
}

impl Landings {
    pub(crate) fn new(parts: ConnectorParts, wire: WireAddress) -> Self {
        Self { table: Arc::new(Table { parts, wire, open: Mutex::default() }) }
    }

    /// Grants a landing.
    pub(crate) fn grant(&self, request: LandRequest) -> Result<GrantedLanding, TransferError> {
        let landing = self.landing(&request)?;
        let deadline = request.deadline;
        let open = Arc::new(OpenLanding::new(landing, request.lease, &self.table.parts));
        let entry = self.enter(&open)?;
        let timer = spawn_guarded(&self.table.parts.gate, "landing deadline", {
            let (open, world) = (Arc::downgrade(&open), self.table.parts.world.clone());
            async move {
                world.sleep_until(deadline).await;
                if let Some(open) = open.upgrade() {
                    open.fail(TransferError::Expired);
                }
            }
        });
        Ok(GrantedLanding { entry, open, timer })
    }

    fn landing(&self, request: &LandRequest) -> Result<Landing, TransferError> {
        let parts = &self.table.parts;
        let layout = parts.memory.layout();
        if parts.gate.is_closed() {
            return Err(TransferError::Closed);
        }
        check_held(request.held_tokens, request.n_tokens, layout)?;
        let n_blocks = layout.blocks_for(request.n_tokens as usize);
        let table = |group: GroupIdx| request.lease.table(group).get(..n_blocks).map(<[BlockIdx]>::to_vec);
        let tables: Option<Vec<_>> = layout.group_indices().map(table).collect();
        Ok(Landing {
            transfer: request.transfer,
            node: parts.node.clone(),
            epoch: parts.epoch,
            grant: parts.world.grant(),
            bound: false,
            wire: self.table.wire.clone(),
            n_tokens: request.n_tokens,
            held_tokens: request.held_tokens,
            tables: tables.ok_or_else(|| bad_request("the lease is shorter than the sequence"))?,
            layout: layout.clone(),
            fingerprint: parts.fingerprint.clone(),
        })
    }

    fn enter(&self, open: &Arc<OpenLanding>) -> Result<LandingEntry, TransferError> {
        let mut table = self.table.open();
        if table.len() >= LANDINGS_MAX {
            return Err(TransferError::TooMany);
        }
        if table.contains_key(&open.landing().transfer) {
            return Err(bad_request("this transfer has a landing already"));
        }
        let transfer = open.landing().transfer;
        table.insert(transfer, Arc::downgrade(open));
        Ok(LandingEntry { table: Arc::downgrade(&self.table), transfer })
    }

    /// Admits one sender to its landing. All checks come before any KV moves. A sender learns nothing about a landing
    /// that it has no right to.
    pub(crate) fn open(
        &self,
        transfer: TransferId,
        shown: &Credentials,
        opener: Arc<dyn Opener>,
    ) -> Result<Arc<OpenLanding>, TransferError> {
        let open = self.table.open().get(&transfer).and_then(Weak::upgrade);
        let open = open.ok_or(TransferError::UnknownLanding)?;
        open.admit(shown, opener)?;
        Ok(open)
    }

    /// Fails all landings, because the connector is being dropped.
    pub(crate) fn close(&self) {
        let open: Vec<_> = self.table.open().values().filter_map(Weak::upgrade).collect();
        for landing in open {
            landing.fail(TransferError::Closed);
        }
    }
}

impl Table {
    fn open(&self) -> MutexGuard<'_, BTreeMap<TransferId, Weak<OpenLanding>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LandingEntry {
    fn drop(&mut self) {
        if let Some(table) = self.table.upgrade() {
            table.open().remove(&self.transfer);
        }
    }
}

/// Refuses held tokens that are not whole blocks at the start of the sequence.
pub(crate) fn check_held(held_tokens: u32, n_tokens: u32, layout: &KvLayout) -> Result<(), TransferError> {
    if held_tokens > n_tokens || !held_tokens.is_multiple_of(layout.block_tokens.into()) {
        return Err(bad_request("held tokens are not whole blocks of the sequence"));
    }
    Ok(())
}
