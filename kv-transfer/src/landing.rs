//! A landing on the node that granted it: from the grant to the arrival, or to the failure.
//!
//! Every wire fills an [`OpenLanding`] the same way: it is opened once, spans are claimed, written and verified, and the
//! handoff ends it. It ends once, and the lease moves: into [`ArrivedKv`], or back to the pool.
//!
//! Its three parts: what a sender must show (`credentials`), the gate over the lease (`lease_gate`), and how far the
//! transfer is (`progress`).

mod credentials;
mod lease_gate;
mod progress;
mod summary;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use chassis::{Gate, spawn_guarded};
use kv_cache::{BlockLease, KvMemory, PageBusy};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tracing::{info, trace, warn};
use types::{GroupIdx, Handoff, KvSpan, Landing};

pub use self::credentials::Credentials;
use self::credentials::Demands;
use self::lease_gate::LeaseGate;
pub(crate) use self::progress::Outcome;
use self::progress::Progress;
pub use self::progress::{Claim, Opener};
use crate::arrived::ArrivedKv;
use crate::connector::ConnectorParts;
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::landings::Table;
use crate::lanes::{LaneSpan, Lanes};
use crate::metrics::TransferMetrics;
use crate::pages::Pages;
use crate::pending_copies::PendingCopy;
use crate::quiet::Quiet;
use crate::reshard::{Heads, Lane};
use crate::runs::Runs;

/// A proof of quiet that takes longer than this is a matter for a human.
const PROOF_IS_LATE_AFTER: Duration = Duration::from_secs(10);

/// One landing. Shared by its [`Arrival`](crate::Arrival), its timer, and the code that fills it.
#[derive(Debug)]
pub struct OpenLanding {
    landing: Landing,
    demands: Demands,
    /// Shapes of the pages of one rank, by group and layer.
    shapes: Vec<Vec<PageShape>>,
    /// Known once a sender is let in.
    lanes: OnceLock<Lanes>,
    memory: KvMemory,
    /// Whether spans must bring digests.
    verifies: bool,
    since: Instant,
    lease: LeaseGate,
    /// Held for bookkeeping, never across an await.
    progress: Mutex<Progress>,
    changed: Notify,
    gate: Gate,
    runtime: Handle,
    metrics: TransferMetrics,
    table: Weak<Table>,
}

fn shapes(landing: &Landing) -> Vec<Vec<PageShape>> {
    let shape = |group: GroupIdx| {
        let n_layers = landing.layout.group(group).layers.len() as u16;
        (0..n_layers).map(|layer_pos| PageShape::new(&landing.layout, group, layer_pos)).collect()
    };
    landing.layout.group_indices().map(shape).collect()
}

pub(crate) fn bad_request(why: &str) -> TransferError {
    TransferError::BadRequest(why.to_owned())
}

// === impl OpenLanding ===

impl OpenLanding {
    /// `table` forgets the landing when its arrival is gone. Must be called within a runtime.
    pub(crate) fn new(
        landing: Landing,
        lease: BlockLease,
        parts: &ConnectorParts,
        table: Weak<Table>,
    ) -> Self {
        let pages = Pages::of(&landing, Lanes::only());
        Self {
            demands: Demands::of(&landing),
            shapes: shapes(&landing),
            lanes: OnceLock::new(),
            landing,
            memory: parts.memory.clone(),
            verifies: parts.settings.digests,
            since: parts.world.now(),
            lease: LeaseGate::new(lease),
            progress: Mutex::new(Progress::new(pages)),
            changed: Notify::new(),
            gate: parts.gate.clone(),
            runtime: Handle::current(),
            metrics: parts.metrics.clone(),
            table,
        }
    }

    pub(crate) fn landing(&self) -> &Landing {
        &self.landing
    }

    pub(crate) fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// The shape of one rank's page.
    pub(crate) fn shape(&self, group: GroupIdx, layer_pos: u16) -> PageShape {
        self.shapes[usize::from(group.0)][usize::from(layer_pos)]
    }

    /// The lanes between the sender's ranks and this side's.
    ///
    /// # Panics
    /// If no sender was let in yet.
    pub(crate) fn lanes(&self) -> &Lanes {
        self.lanes.get().expect("a landing is filled by a sender that it let in")
    }

    /// The heads of a lane in a page of this side.
    pub(crate) fn heads(&self, lane: Lane, group: GroupIdx, layer_pos: u16) -> Heads {
        let shape = self.landing.layout.group(group).layers[usize::from(layer_pos)];
        self.lanes().heads(shape.n_kv_heads, lane).to
    }

    /// Where this side wants a part of a span.
    pub(crate) fn runs(&self, span: &LaneSpan) -> Runs {
        let table = &self.landing.tables[usize::from(span.group.0)];
        Runs::wanted(&self.landing.layout, self.lanes(), table, span)
    }

    /// Lets one sender in, once, if it shows what it must.
    pub(crate) fn admit(&self, shown: &Credentials, opener: Arc<dyn Opener>) -> Result<(), TransferError> {
        self.demands.check(shown, &self.landing)?;
        let lanes = Lanes::between(shown.tp_size, &self.landing.layout);
        let lanes = lanes.map_err(|error| TransferError::Mismatch(error.to_string()))?;
        let mut progress = self.progress();
        progress.let_in(opener)?;
        progress.pages = Pages::of(&self.landing, self.lanes.get_or_init(|| lanes).clone());
        Ok(())
    }

    /// Marks a span's pages as being written by the caller, who must then say [`arrived`](Self::arrived).
    pub(crate) fn claim(&self, span: &LaneSpan, n_digests: usize) -> Result<Claim, TransferError> {
        let mut progress = self.progress();
        let may_be_bare = n_digests == 0 && !self.verifies;
        if !progress.pages.contains(span) || !(may_be_bare || n_digests == self.n_digests(span)) {
            return Err(TransferError::Mismatch(format!("{span:?} is not part of the transfer")));
        }
        Ok(progress.claim(span))
    }

    /// Like [`claim`](Self::claim), for a span whose digests follow.
    pub(crate) fn claim_promised(&self, span: &LaneSpan) -> Result<Claim, TransferError> {
        // Asked before digests are counted: a span that is not part of the transfer has none.
        let is_part = self.progress().pages.contains(span);
        self.claim(span, if is_part { self.n_digests(span) } else { 0 })
    }

    fn n_digests(&self, span: &LaneSpan) -> usize {
        let heads = |layer_pos| self.heads(span.lane, span.group, layer_pos).range().len();
        span.layers.clone().map(heads).sum::<usize>() * span.blocks.len()
    }

    /// Runs `attempt` on the memory while the landing is open; `None` once it is closed.
    ///
    /// Only here may a wire touch the landing's pages. `attempt` borrows pages and gives them back before it returns,
    /// and never waits; so when the landing is closed, no page of it is borrowed and none will be.
    pub(crate) fn while_open<T>(&self, attempt: impl FnOnce(&KvMemory) -> T) -> Option<T> {
        let attempt = || attempt(&self.memory);
        match self.lanes.get().is_some_and(Lanes::share_pages) {
            true => self.lease.in_turn(attempt),
            false => self.lease.while_open(attempt),
        }
    }

    /// Like [`while_open`](Self::while_open), for an attempt that starts device copies which outlast it.
    ///
    /// The landing's blocks are not reused before the copy is done, however the landing ends.
    pub(crate) fn begin_copy<T>(&self, attempt: impl FnOnce(&KvMemory) -> T) -> Option<(T, PendingCopy)> {
        self.while_open(|memory| {
            let pending_copy = self.lease.begin_copy();
            (attempt(memory), pending_copy)
        })
    }

    /// Whether a lane's part of one page is what its digests say. Call it within [`while_open`](Self::while_open).
    pub(crate) fn verify(
        &self,
        memory: &KvMemory,
        lane: Lane,
        page: PageAt,
        digests: &[Digest],
    ) -> Result<bool, PageBusy> {
        let place = self.landing.tables[usize::from(page.group.0)][page.block as usize].0;
        let bytes = memory.rank(lane.to).read(page.group, page.layer_pos, place..place + 1)?;
        let n_tokens = self.landing.valid_tokens(page.block);
        let heads = self.heads(lane, page.group, page.layer_pos).range();
        Ok(self.shape(page.group, page.layer_pos).verify_heads(&bytes, heads, n_tokens, digests))
    }

    /// A claimed span is written. The pages in `wrong` did not pass; the caller has them sent again if this is `Ok`.
    pub(crate) fn arrived(
        &self,
        span: &LaneSpan,
        bytes: usize,
        wrong: &[KvSpan],
    ) -> Result<(), TransferError> {
        trace!(target: "walk", transfer = %self.landing.transfer, layers = ?span.layers, bytes, "pages in place");
        let mut progress = self.progress();
        progress.bytes += bytes as u64;
        let hopeless = progress.pages.arrived(span, wrong);
        drop(progress);
        self.metrics.refetched(&self.landing.wire.scheme, wrong.len());
        if hopeless > 0 {
            let error = TransferError::Corrupted { pages: hopeless };
            self.fail(error.clone());
            return Err(error);
        }
        self.complete();
        self.changed.notify_waiters();
        Ok(())
    }

    /// The sender has nothing more to send. What it sent may still be under way on other streams.
    pub(crate) fn handed_off(&self, handoff: Handoff) -> Result<(), TransferError> {
        if (handoff.transfer, handoff.n_tokens) != (self.landing.transfer, self.landing.n_tokens) {
            return Err(TransferError::Mismatch("the handoff is for another sequence".to_owned()));
        }
        trace!(target: "walk", transfer = %self.landing.transfer, "handoff came");
        self.progress().handoff = Some(handoff);
        self.complete();
        Ok(())
    }

    /// Ends the landing with success if nothing is missing.
    fn complete(&self) {
        if !self.progress().is_whole() {
            return;
        }
        let Some(lease) = self.lease.close() else { return };
        let mut progress = self.progress();
        let handoff = progress.handoff.take().expect("a landing is whole with its handoff, and ends once");
        let scheme = self.landing.wire.scheme.clone();
        trace!(target: "walk", transfer = %self.landing.transfer, "arrived");
        let moved = progress.first_byte.map(|first| first.elapsed());
        self.metrics.arrived(&scheme, progress.bytes, moved);
        let (bytes, waited) = (progress.bytes, self.since.elapsed());
        progress.outcome = Some(Outcome::Arrived(ArrivedKv { lease, handoff, bytes, scheme, waited }));
        self.tell(progress, Ok(()));
    }

    /// Ends the landing without success. The first end counts; later ones change nothing.
    pub(crate) fn fail(&self, error: TransferError) {
        let Some(lease) = self.lease.close() else { return };
        self.metrics.failed(&self.landing.wire.scheme, &error);
        self.retire(lease);
        let mut progress = self.progress();
        progress.outcome = Some(Outcome::Failed(error.clone()));
        self.tell(progress, Err(&error));
    }

    fn tell(&self, mut progress: MutexGuard<'_, Progress>, outcome: Result<(), &TransferError>) {
        let opener = progress.opener.take();
        drop(progress);
        self.changed.notify_waiters();
        if let Some(opener) = opener {
            opener.ended(self.landing.transfer, outcome);
        }
    }

    /// Gives the blocks back: at once if the wire is quiet, otherwise once it is proven to be.
    fn retire(&self, lease: BlockLease) {
        let Some(quiet) = self.lease.unproven() else { return drop(lease) };
        let n_blocks = lease.n_blocks();
        let transfer = self.landing.transfer;
        info!(%transfer, blocks = n_blocks, awaited = quiet.awaited(), "quarantined");
        let quarantine = lease.quarantine(quiet.awaited());
        let counted = self.metrics.quarantined(n_blocks);
        let _entered = self.runtime.enter();
        let release = async move {
            if timeout(PROOF_IS_LATE_AFTER, quiet.proven()).await.is_err() {
                warn!(%transfer, blocks = n_blocks, awaited = quiet.awaited(), "still quarantined");
                quiet.proven().await;
            }
            quarantine.release();
            drop(counted);
        };
        spawn_guarded(&self.gate, "quarantine", release).detach();
    }

    pub(crate) fn needs_proof(&self, quiet: Arc<dyn Quiet>) {
        self.lease.needs_proof(quiet);
    }

    /// Ends when the landing has, or something has arrived. May also end early.
    pub(crate) async fn changed_since(&self, is_over: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if is_over(self) {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.progress().outcome.is_some()
    }

    /// Pages verified, and pages wanted.
    pub(crate) fn received(&self) -> (usize, usize) {
        let progress = self.progress();
        (progress.pages.n_verified(), progress.pages.total())
    }

    /// How it ended, if it has. An arrival is handed out once.
    pub(crate) fn take_outcome(&self) -> Option<Outcome> {
        self.progress().take_outcome()
    }

    /// The landing's arrival is gone.
    pub(crate) fn leave(&self) {
        self.fail(TransferError::Cancelled);
        // KV that arrived and was never asked for goes back now, and not when the last wire forgets the landing.
        drop(self.take_outcome());
        if let Some(table) = self.table.upgrade() {
            table.forget(self.landing.transfer);
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One page of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageAt {
    pub group: GroupIdx,
    pub layer_pos: u16,
    /// Its block's ordinal in the sequence.
    pub block: u32,
}

impl PageAt {
    /// All pages of a span, in the wire's order.
    pub fn all(span: &KvSpan) -> impl Iterator<Item = Self> + use<> {
        let (group, blocks) = (span.group, span.blocks.clone());
        let row = move |layer_pos| blocks.clone().map(move |block| Self { group, layer_pos, block });
        span.layers.clone().flat_map(row)
    }

    pub fn span(self) -> KvSpan {
        let (blocks, layers) = (self.block..self.block + 1, self.layer_pos..self.layer_pos + 1);
        KvSpan { group: self.group, blocks, layers }
    }
}
