//! A landing on the node that granted it: from the grant to the arrival or the failure.
//!
//! Every wire fills an [`OpenLanding`] the same way. A sender opens it once. Spans are claimed, written and verified,
//! and the handoff completes it. It ends once, and its lease moves into [`ArrivedKv`] or back to the pool.
//!
//! Its three parts are the check of the sender's credentials (`credentials`), the gate over the lease (`lease_gate`),
//! and the progress of the transfer (`progress`).
//!
//! A follower of a node of several processes fills a landing of its own for its layers. The head has the lease.

mod credentials;
mod lease_gate;
mod progress;
mod summary;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chassis::{Gate, spawn_guarded};
use kv_cache::{BlockLease, KvMemory, PageBusy};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tracing::{info, trace, warn};
use types::{GroupIdx, Handoff, KvSpan, Landing};

pub use self::credentials::Credentials;
use self::credentials::ExpectedSummaries;
use self::lease_gate::{LandingBlocks, LeaseGate};
pub(crate) use self::progress::Outcome;
use self::progress::Progress;
pub use self::progress::{Claim, Opener};
use crate::arrived::ArrivedKv;
use crate::connector_parts::ConnectorParts;
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::lanes::{LaneSpan, Lanes};
use crate::metrics::TransferMetrics;
use crate::pages::Pages;
use crate::pending_copies::PendingCopy;
use crate::processes::{LandedPart, QuietReport};
use crate::quiet::Quiet;
use crate::reshard::{Heads, Lane};
use crate::runs::Runs;

/// A proof of quiet that takes longer than this is logged as a warning, because an operator must act.
const PROOF_IS_LATE_AFTER: Duration = Duration::from_secs(10);

/// One landing. Shared by its [`Arrival`](crate::Arrival), its timer, and the code that fills it.
#[derive(Debug)]
pub struct OpenLanding {
    landing: Landing,
    demands: ExpectedSummaries,
    /// The page shapes of one rank, by group and layer.
    shapes: Vec<Vec<PageShape>>,
    /// The lanes from the sender. Set when a sender is admitted.
    lanes: OnceLock<Lanes>,
    memory: KvMemory,
    /// Whether the head of this node has the lease, and gets the handoff.
    is_of_follower: bool,
    /// Whether spans must have digests.
    verifies: bool,
    since: Instant,
    lease: LeaseGate,
    /// The bookkeeping of pages and outcome. The lock is never held across an await.
    progress: Mutex<Progress>,
    changed: Notify,
    gate: Gate,
    runtime: Handle,
    metrics: TransferMetrics,
}

/// Returns the wanted pages whose layers and ranks the memory has.
fn pages_in(memory: &KvMemory, landing: &Landing, lanes: Lanes) -> Pages {
    Pages::of_process(landing, lanes, &memory.ranks(), |group, layer_pos| memory.has_layer(group, layer_pos))
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
    /// Makes a landing over leased blocks. Must be called within a runtime.
    pub(crate) fn new(landing: Landing, lease: BlockLease, parts: &ConnectorParts) -> Self {
        let n_others = parts.processes.as_ref().map_or(0, |processes| processes.n_processes());
        Self::of(landing, LandingBlocks::Leased(lease), parts, n_others)
    }

    /// Makes a follower's landing, for the pages of its layers. Its end is reported to `opener`, and after it, when
    /// nothing is written any more, `quiet` is dropped. Must be called within a runtime.
    pub(crate) fn of_follower(
        landing: Landing,
        lanes: Lanes,
        opener: Arc<dyn Opener>,
        quiet: QuietReport,
        parts: &ConnectorParts,
    ) -> Self {
        let open = Self::of(landing, LandingBlocks::OfHead(quiet), parts, 0);
        let mut progress = open.progress();
        progress.opener = Some(opener);
        progress.pages = open.pages(open.lanes.get_or_init(|| lanes).clone());
        drop(progress);
        open
    }

    fn of(landing: Landing, blocks: LandingBlocks, parts: &ConnectorParts, n_others: usize) -> Self {
        let memory = parts.memory.clone();
        let pages = pages_in(&memory, &landing, Lanes::only());
        Self {
            demands: ExpectedSummaries::of(&landing),
            shapes: shapes(&landing),
            lanes: OnceLock::new(),
            landing,
            memory,
            is_of_follower: matches!(blocks, LandingBlocks::OfHead(_)),
            verifies: parts.settings.digests,
            since: parts.world.now(),
            lease: LeaseGate::new(blocks),
            progress: Mutex::new(Progress::new(pages, n_others)),
            changed: Notify::new(),
            gate: parts.gate.clone(),
            runtime: Handle::current(),
            metrics: parts.metrics.clone(),
        }
    }

    fn pages(&self, lanes: Lanes) -> Pages {
        pages_in(&self.memory, &self.landing, lanes)
    }

    pub(crate) fn landing(&self) -> &Landing {
        &self.landing
    }

    pub(crate) fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// Returns the shape of one rank's page.
    pub(crate) fn shape(&self, group: GroupIdx, layer_pos: u16) -> PageShape {
        self.shapes[usize::from(group.0)][usize::from(layer_pos)]
    }

    /// Returns the lanes between the sender's ranks and this side's.
    ///
    /// # Panics
    /// If no sender was admitted yet.
    pub(crate) fn lanes(&self) -> &Lanes {
        self.lanes.get().expect("a landing is filled by a sender that it let in")
    }

    /// Returns the heads that a lane fills in a page of this side.
    pub(crate) fn heads(&self, lane: Lane, group: GroupIdx, layer_pos: u16) -> Heads {
        let shape = self.landing.layout.group(group).layers[usize::from(layer_pos)];
        self.lanes().heads(shape.n_kv_heads, lane).to
    }

    /// Returns the place of a part of a span in this side's memory.
    pub(crate) fn runs(&self, span: &LaneSpan) -> Runs {
        let table = &self.landing.tables[usize::from(span.group.0)];
        Runs::wanted(&self.landing.layout, self.lanes(), table, span)
    }

    /// Admits one sender, once, if its credentials are right.
    pub(crate) fn admit(&self, shown: &Credentials, opener: Arc<dyn Opener>) -> Result<(), TransferError> {
        self.demands.check(shown, &self.landing)?;
        let lanes = Lanes::between(shown.tp_size, &self.landing.layout);
        let lanes = lanes.map_err(|error| TransferError::Mismatch(error.to_string()))?;
        let mut progress = self.progress();
        progress.let_in(opener)?;
        progress.pages = self.pages(self.lanes.get_or_init(|| lanes).clone());
        Ok(())
    }

    /// Marks a span's pages as being written by the caller, who must then call [`arrived`](Self::arrived).
    pub(crate) fn claim(&self, span: &LaneSpan, n_digests: usize) -> Result<Claim, TransferError> {
        let mut progress = self.progress();
        let may_be_bare = n_digests == 0 && !self.verifies;
        if !progress.pages.contains(span) || !(may_be_bare || n_digests == self.n_digests(span)) {
            return Err(TransferError::Mismatch(format!("{span:?} is not part of the transfer")));
        }
        Ok(progress.claim(span))
    }

    /// Like [`claim`](Self::claim), for a span whose digests are sent later.
    pub(crate) fn claim_promised(&self, span: &LaneSpan) -> Result<Claim, TransferError> {
        // The span is checked first, because digests can be counted only for a span that is part of the
        // transfer.
        let is_part = self.progress().pages.contains(span);
        self.claim(span, if is_part { self.n_digests(span) } else { 0 })
    }

    fn n_digests(&self, span: &LaneSpan) -> usize {
        let heads = |layer_pos| self.heads(span.lane, span.group, layer_pos).range().len();
        span.layers.clone().map(heads).sum::<usize>() * span.blocks.len()
    }

    /// Runs `attempt` on the memory while the landing is open; returns `None` once it is closed.
    ///
    /// A wire may touch the landing's pages only here. `attempt` borrows pages, returns them before it ends, and
    /// never waits. So a closed landing has no borrowed page, and none can be borrowed later.
    pub(crate) fn while_open<T>(&self, attempt: impl FnOnce(&KvMemory) -> T) -> Option<T> {
        let attempt = || attempt(&self.memory);
        match self.lanes.get().is_some_and(Lanes::share_pages) {
            true => self.lease.in_turn(attempt),
            false => self.lease.while_open(attempt),
        }
    }

    /// Like [`while_open`](Self::while_open), for an attempt that starts copies which continue after it. A device makes such
    /// copies, and so do the other processes of this node.
    ///
    /// The landing's blocks are not reused before the copies are done, whatever ends the landing.
    pub(crate) fn begin_copy<T>(&self, attempt: impl FnOnce(&KvMemory) -> T) -> Option<(T, PendingCopy)> {
        self.while_open(|memory| {
            let pending_copy = self.lease.begin_copy();
            (attempt(memory), pending_copy)
        })
    }

    /// Returns whether a lane's part of one page matches its digests. Call it within
    /// [`while_open`](Self::while_open).
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

    /// Records that a claimed span is written. The pages in `wrong` failed verification. If this returns `Ok`, the
    /// caller requests them again.
    pub(crate) fn arrived(
        &self,
        span: &LaneSpan,
        bytes: usize,
        wrong: &[KvSpan],
    ) -> Result<(), TransferError> {
        trace!(target: "walk", transfer = %self.landing.transfer, layers = ?span.layers, bytes, "KV pages are in place");
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

    /// Notes the sender's handoff, and ends the landing if nothing is missing. KV may still be in flight on
    /// other streams.
    pub(crate) fn handed_off(&self, handoff: Handoff) -> Result<(), TransferError> {
        if (handoff.transfer, handoff.n_tokens) != (self.landing.transfer, self.landing.n_tokens) {
            return Err(TransferError::Mismatch("the handoff is for another sequence".to_owned()));
        }
        trace!(target: "walk", transfer = %self.landing.transfer, "handoff received");
        self.progress().handoff = Some(handoff);
        self.complete();
        Ok(())
    }

    /// Notes that another process of this node has verified all pages of its layers.
    pub(crate) fn landed_elsewhere(&self, process: usize, landed: &LandedPart) {
        self.progress().landed_elsewhere(process, landed);
        self.complete();
        self.changed.notify_waiters();
    }

    pub(crate) fn has_landed(&self, process: usize) -> bool {
        self.progress().has_landed(process)
    }

    /// Ends the landing with success if nothing is missing.
    pub(crate) fn complete(&self) {
        if !self.is_whole() {
            return;
        }
        let Some(blocks) = self.lease.close() else { return };
        let mut progress = self.progress();
        trace!(target: "walk", transfer = %self.landing.transfer, "landing is complete");
        let quiet = match blocks {
            LandingBlocks::Leased(lease) => {
                let arrived = self.arrived_kv(&mut progress, lease);
                progress.outcome = Some(Outcome::Arrived(arrived));
                None
            }
            LandingBlocks::OfHead(quiet) => {
                progress.outcome = Some(Outcome::Taken);
                Some(quiet)
            }
        };
        self.tell(progress, Ok(()));
        drop(quiet);
    }

    /// Returns whether nothing is missing. The handoff goes to the head.
    fn is_whole(&self) -> bool {
        let progress = self.progress();
        progress.all_verified() && (progress.handoff.is_some() || self.is_of_follower)
    }

    fn arrived_kv(&self, progress: &mut Progress, lease: BlockLease) -> ArrivedKv {
        let handoff = progress.handoff.take().expect("a landing is whole with its handoff, and ends once");
        let scheme = self.landing.wire.scheme.clone();
        let (bytes, moved) = progress.moved();
        self.metrics.arrived(&scheme, bytes, progress.first_byte.map(|_| moved));
        ArrivedKv { lease, handoff, bytes, scheme, waited: self.since.elapsed(), moved }
    }

    /// Returns the received part, for the head.
    pub(crate) fn landed(&self) -> LandedPart {
        let progress = self.progress();
        let (bytes, moved) = progress.moved();
        LandedPart { pages: progress.n_verified() as u32, bytes, moved }
    }

    /// Ends the landing without success. Only the first end takes effect.
    pub(crate) fn fail(&self, error: TransferError) {
        // The blocks return to the pool before the failure is reported. A head gets the failure before the report
        // that nothing is written any more.
        let quiet = match self.lease.close() {
            None => return,
            Some(LandingBlocks::Leased(lease)) => {
                self.metrics.failed(&self.landing.wire.scheme, &error);
                self.retire(lease);
                None
            }
            Some(LandingBlocks::OfHead(quiet)) => Some(quiet),
        };
        let mut progress = self.progress();
        progress.outcome = Some(Outcome::Failed(error.clone()));
        self.tell(progress, Err(&error));
        if let Some(quiet) = quiet {
            self.report_when_quiet(quiet);
        }
    }

    fn tell(&self, mut progress: MutexGuard<'_, Progress>, outcome: Result<(), &TransferError>) {
        let opener = progress.opener.take();
        drop(progress);
        self.changed.notify_waiters();
        if let Some(opener) = opener {
            opener.ended(self.landing.transfer, outcome);
        }
    }

    /// Returns the blocks to the pool: at once if the wire is quiet, otherwise after the proof.
    fn retire(&self, lease: BlockLease) {
        let Some(quiet) = self.lease.unproven() else { return drop(lease) };
        let n_blocks = lease.n_blocks();
        let transfer = self.landing.transfer;
        info!(%transfer, blocks = n_blocks, awaited = quiet.awaited(), "blocks of a failed landing are quarantined");
        let quarantine = lease.quarantine(quiet.awaited());
        let counted = self.metrics.quarantined(n_blocks);
        let _entered = self.runtime.enter();
        let release = async move {
            if timeout(PROOF_IS_LATE_AFTER, quiet.proven()).await.is_err() {
                warn!(%transfer, blocks = n_blocks, awaited = quiet.awaited(), "blocks of a failed landing are still quarantined");
                quiet.proven().await;
            }
            quarantine.release();
            drop(counted);
        };
        spawn_guarded(&self.gate, "quarantine", release).detach();
    }

    /// Drops the report when nothing is written any more.
    fn report_when_quiet(&self, report: QuietReport) {
        let Some(quiet) = self.lease.unproven() else { return };
        let _entered = self.runtime.enter();
        let report = async move {
            quiet.proven().await;
            drop(report);
        };
        spawn_guarded(&self.gate, "quiet report", report).detach();
    }

    pub(crate) fn needs_proof(&self, quiet: Arc<dyn Quiet>) {
        self.lease.needs_proof(quiet);
    }

    /// Waits until `is_over` is true; checks it after each change of the landing. May also return early.
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

    /// Returns the numbers of verified pages and of wanted pages.
    pub(crate) fn received(&self) -> (usize, usize) {
        let progress = self.progress();
        let n_lanes = self.lanes.get().map_or(1, Lanes::len);
        (progress.n_verified(), self.landing.wanted_pages() * n_lanes)
    }

    /// Returns the result, if the landing has ended. `Arrived` is returned once.
    pub(crate) fn take_outcome(&self) -> Option<Outcome> {
        self.progress().take_outcome()
    }

    /// Ends the landing because its arrival is dropped.
    pub(crate) fn leave(&self) {
        self.fail(TransferError::Cancelled);
        // KV that arrived but was not taken is released now, so that it does not wait for the last wire's
        // reference.
        drop(self.take_outcome());
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
    /// The block's ordinal in the sequence.
    pub block: u32,
}

impl PageAt {
    /// Returns all pages of a span, in the order in which the wire sends them.
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
