//! A landing on the node that granted it: from the grant to the arrival, or to the failure.
//!
//! Every wire fills an [`OpenLanding`] the same way: it is opened once, spans are claimed, written and verified, and the handoff ends it. However it ends, it ends once, and the
//! lease moves: into [`ArrivedKv`], or back to the pool.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use chassis::guards::{Guard, stands};
use chassis::{Gate, spawn_guarded};
use kv_cache::{BlockLease, KvMemory, PageBusy};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tracing::{info, trace, warn};
use types::{Epoch, Fingerprint, Grant, GroupIdx, Handoff, KvLayout, KvSpan, Landing, TransferId};

use crate::arrival::ArrivedKv;
use crate::connector::ConnectorParts;
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::flights::{Flight, Flights};
use crate::landings::Table;
use crate::lanes::{LaneSpan, Lanes};
use crate::metrics::TransferMetrics;
use crate::pages::Pages;
use crate::quiet::Quiet;
use crate::reshard::{Heads, Lane};
use crate::runs::Runs;

/// A proof of quiet that takes longer than this is a matter for a human.
const PROOF_IS_LATE_AFTER: Duration = Duration::from_secs(10);

/// Who filled, or wanted to fill, a landing: told once how it ended.
pub trait Opener: Debug + Send + Sync {
    /// Called from wherever the landing ended, also from a drop: must not wait.
    fn ended(&self, transfer: TransferId, outcome: Result<(), &TransferError>);
}

/// What a sender shows to be let in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Credentials {
    pub grant: Grant,
    pub epoch: Epoch,
    pub n_tokens: u32,
    pub held_tokens: u32,
    /// The ranks that share the sender's heads.
    pub tp_size: u16,
    /// Summaries of the sender's own layout and fingerprint.
    pub layout: u64,
    pub fingerprint: u64,
}

impl Credentials {
    /// What a node with this layout and fingerprint shows. They are its own, and not those that the landing claims.
    pub fn new(landing: &Landing, layout: &KvLayout, fingerprint: &Fingerprint) -> Self {
        Self {
            grant: landing.grant,
            epoch: landing.epoch,
            n_tokens: landing.n_tokens,
            held_tokens: landing.held_tokens,
            tp_size: layout.shard.tp_size,
            layout: summary::layout(layout),
            fingerprint: summary::fingerprint(fingerprint),
        }
    }
}

/// One landing. Shared by its [`Arrival`](crate::Arrival), its timer, and whoever fills it.
#[derive(Debug)]
pub struct OpenLanding {
    landing: Landing,
    summaries: (u64, u64),
    /// Of the pages of one rank.
    shapes: Vec<Vec<PageShape>>,
    /// Known once a sender is let in.
    lanes: OnceLock<Lanes>,
    memory: KvMemory,
    /// Whether spans must bring digests.
    verifies: bool,
    since: Instant,
    /// The proof of quiet: whoever writes holds it shared and finds the lease in it; whoever ends the landing takes
    /// the lease out. Held for one attempt to copy, never across an await.
    lease: RwLock<Option<BlockLease>>,
    /// Held for one attempt to copy where several lanes lead into the same pages, which are borrowed whole.
    turn: Mutex<()>,
    /// Held for bookkeeping, never across an await.
    progress: Mutex<Progress>,
    changed: Notify,
    quiet: OnceLock<Arc<dyn Quiet>>,
    /// Copies that a card of this node makes outside of the lock.
    flights: Arc<Flights>,
    gate: Gate,
    runtime: Handle,
    metrics: TransferMetrics,
    table: Weak<Table>,
}

#[derive(Debug)]
struct Progress {
    pages: Pages,
    first_byte: Option<Instant>,
    bytes: u64,
    handoff: Option<Handoff>,
    opener: Option<Arc<dyn Opener>>,
    outcome: Option<Outcome>,
}

/// How a landing ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Arrived(ArrivedKv),
    /// The arrival has been handed out.
    Taken,
    Failed(TransferError),
}

/// What to do with a span that comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Its pages are nobody else's: write them.
    Write,
    /// It is a repetition, or the landing has ended: read it off the wire and forget it.
    Skip,
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
            summaries: (summary::layout(&landing.layout), summary::fingerprint(&landing.fingerprint)),
            shapes: shapes(&landing),
            lanes: OnceLock::new(),
            landing,
            memory: parts.memory.clone(),
            verifies: parts.settings.digests,
            since: parts.world.now(),
            lease: RwLock::new(Some(lease)),
            turn: Mutex::default(),
            progress: Mutex::new(Progress {
                pages,
                first_byte: None,
                bytes: 0,
                handoff: None,
                opener: None,
                outcome: None,
            }),
            changed: Notify::new(),
            quiet: OnceLock::new(),
            flights: Arc::default(),
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

    /// Of a page of one rank.
    pub(crate) fn shape(&self, group: GroupIdx, layer_pos: u16) -> PageShape {
        self.shapes[usize::from(group.0)][usize::from(layer_pos)]
    }

    /// The lanes between the sender's ranks and this side's.
    ///
    /// # Panics
    /// If no sender was let in yet.
    pub(crate) fn lanes(&self) -> &Lanes {
        self.lanes.get().expect("a landing is filled by whom it let in")
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
        if shown.grant != self.landing.grant && stands(Guard::Grant) {
            return Err(TransferError::WrongGrant);
        }
        if shown.epoch != self.landing.epoch && stands(Guard::Epoch) {
            return Err(TransferError::WrongEpoch);
        }
        self.agree(shown)?;
        let lanes = Lanes::between(shown.tp_size, &self.landing.layout);
        let lanes = lanes.map_err(|error| TransferError::Mismatch(error.to_string()))?;
        let mut progress = self.progress();
        match &progress.outcome {
            Some(Outcome::Failed(error)) => return Err(error.clone()),
            Some(Outcome::Arrived(_) | Outcome::Taken) => return Err(TransferError::AlreadyOpened),
            None if progress.opener.is_some() => return Err(TransferError::AlreadyOpened),
            None => progress.opener = Some(opener),
        }
        progress.pages = Pages::of(&self.landing, self.lanes.get_or_init(|| lanes).clone());
        Ok(())
    }

    fn agree(&self, shown: &Credentials) -> Result<(), TransferError> {
        let refuse = |what: &str| Err(TransferError::Mismatch(format!("the two sides' {what} differ")));
        if shown.layout != self.summaries.0 {
            return refuse("layouts");
        }
        if shown.fingerprint != self.summaries.1 {
            return refuse("models");
        }
        if (shown.n_tokens, shown.held_tokens) != (self.landing.n_tokens, self.landing.held_tokens) {
            return refuse("lengths");
        }
        Ok(())
    }

    /// Marks a span's pages as being written by the caller, who must then say [`arrived`](Self::arrived).
    pub(crate) fn claim(&self, span: &LaneSpan, n_digests: usize) -> Result<Claim, TransferError> {
        let mut progress = self.progress();
        let may_be_bare = n_digests == 0 && !self.verifies;
        if !progress.pages.contains(span) || !(may_be_bare || n_digests == self.n_digests(span)) {
            return Err(TransferError::Mismatch(format!("{span:?} is not part of the transfer")));
        }
        if progress.outcome.is_some() || !progress.pages.claim(span) {
            return Ok(Claim::Skip);
        }
        progress.first_byte.get_or_insert_with(Instant::now);
        Ok(Claim::Write)
    }

    /// As [`claim`](Self::claim), for a span whose digests follow.
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
    /// and never waits; so when the landing is closed, nobody holds a page of it and nobody will take one.
    pub(crate) fn while_open<T>(&self, attempt: impl FnOnce(&KvMemory) -> T) -> Option<T> {
        let take_turns = self.lanes.get().is_some_and(Lanes::share_pages);
        let _turn = take_turns.then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner));
        let lease = self.lease.read().unwrap_or_else(PoisonError::into_inner);
        (lease.is_some() || !stands(Guard::Quiet)).then(|| attempt(&self.memory))
    }

    /// As [`while_open`](Self::while_open), for an attempt that starts a card on copies which outlast it.
    ///
    /// The landing's blocks are given to nobody before the flight has landed, whatever becomes of the landing.
    pub(crate) fn take_off<T>(&self, attempt: impl FnOnce(&KvMemory) -> T) -> Option<(T, Flight)> {
        self.while_open(|memory| {
            let flight = self.flights.begin();
            (attempt(memory), flight)
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
        if !self.is_whole() {
            return;
        }
        let Some(lease) = self.close() else { return };
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

    fn is_whole(&self) -> bool {
        let progress = self.progress();
        progress.pages.all_verified() && progress.handoff.is_some()
    }

    /// Ends the landing without success. The first end counts; later ones change nothing.
    pub(crate) fn fail(&self, error: TransferError) {
        let Some(lease) = self.close() else { return };
        self.metrics.failed(&self.landing.wire.scheme, &error);
        self.retire(lease);
        let mut progress = self.progress();
        progress.outcome = Some(Outcome::Failed(error.clone()));
        self.tell(progress, Err(&error));
    }

    /// From here on nobody writes. Waits for whoever is in the middle of one attempt.
    fn close(&self) -> Option<BlockLease> {
        self.lease.write().unwrap_or_else(PoisonError::into_inner).take()
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
        let Some(quiet) = self.unproven() else { return drop(lease) };
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

    /// Whose proof is still to come. A wire has one of the two: a peer that writes, or a card of this node.
    fn unproven(&self) -> Option<Arc<dyn Quiet>> {
        let ours: Arc<dyn Quiet> = Arc::clone(&self.flights) as _;
        let of_wire = self.quiet.get().map_or(ours, Arc::clone);
        (!of_wire.revoke()).then_some(of_wire)
    }

    pub(crate) fn needs_proof(&self, quiet: Arc<dyn Quiet>) {
        assert!(self.quiet.set(quiet).is_ok(), "a landing has one proof of quiet");
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
        let mut progress = self.progress();
        match &progress.outcome {
            None => None,
            Some(Outcome::Failed(error)) => Some(Outcome::Failed(error.clone())),
            Some(_) => progress.outcome.replace(Outcome::Taken),
        }
    }

    /// Nobody waits for this landing any more.
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

mod summary;
