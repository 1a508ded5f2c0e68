//! Several cards of one machine that compute one model together: what each of them reaches of the others.
//!
//! Cards reach each other's memory by address. Who computes with which rows, and when, is the kernels' matter
//! (`kernels/cu/ranks.cuh`): they meet, and a rank that does not come within their time limit is lost, which is reported here.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::{CudaContext, result, sys};
use device::cuda::error::ensure;
use device::cuda::{Bf16, Buffer, CudaError, View};

use super::ComputeCard;
use super::ops::{number, two_in_one};

/// Cards that can be together, as in `ranks.cuh`.
pub const PEERS_MAX: usize = 8;
/// Words of flags: two kinds, each of every sender.
const FLAGS: usize = 2 * PEERS_MAX;
/// Words of 8 bytes of `Inboxes` in `ranks.cuh`.
pub(super) const INBOXES_WORDS: usize = PEERS_MAX + 6;
/// Words of `Turn` in `ranks.cu`.
const TURN: usize = 2;
/// Words that a packet of 4 numbers takes.
const PACKET_WORDS: usize = 4;

/// The same thing on each rank's card, as `OfRanks` in `ranks.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct OfRanks {
    pub(super) at: [u64; PEERS_MAX],
}

/// The same as `Ranks` in `ranks.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Ranks {
    lost: u64,
    known: u64,
    patience_ns: u64,
    pub(super) n: u32,
    pub(super) me: u32,
}

/// What one rank computes in that the others reach.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// Its parts of sums.
    pub part: View<'a, Bf16>,
    /// What all of them make of the sums.
    pub out: View<'a, Bf16>,
    /// Rows that the ranks share by columns.
    pub whole: View<'a, f32>,
}

/// What the ranks agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    /// Rows up to which parts are thrown into inboxes rather than fetched.
    pub few_rows: usize,
    /// The width of each row of a sum.
    pub width: usize,
    /// How long a card waits for the others.
    pub patience: Duration,
}

/// One rank among the cards of a model.
///
/// The memory that was shown must outlive all work that any of the cards is given with these values. Where it does not,
/// cards fault or overwrite other numbers of a card; nothing of this machine's is reached.
pub struct Peers {
    pub(super) ranks: Ranks,
    pub(super) together: Together,
    /// How often each packet was thrown; counted by the card.
    rounds: Buffer<u32>,
    /// The round of the flags, and whether the card knows of a lost rank.
    pub(super) turn: Buffer<u32>,
    inboxes: OfRanks,
    pub(super) flags: OfRanks,
    pub(super) parts: OfRanks,
    pub(super) outs: OfRanks,
    pub(super) wholes: OfRanks,
    /// Numbers of what was shown, the same on all ranks.
    pub(super) shown: [usize; 3],
    lost: Arc<Lost>,
    /// What the addresses above name is kept for as long as any rank is there.
    _all: Arc<[Inbox]>,
}

/// Raised once a card has waited for another in vain. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LostFlag(Arc<Lost>);

/// What others write on a rank's card.
#[derive(Debug)]
struct Inbox {
    packets: Buffer<u32>,
    flags: Buffer<u32>,
}

/// A word of this machine's memory that all cards reach: not zero once a card did not come.
struct Lost {
    context: Arc<CudaContext>,
    word: NonNull<AtomicU32>,
}

// JUSTIFICATION: the pointer makes the type neither Send nor Sync by itself.
// SAFETY: it owns its memory, which is only ever reached as an atomic.
unsafe impl Send for Lost {}
// SAFETY: as above.
unsafe impl Sync for Lost {}

// === impl Together ===

impl Together {
    /// Bytes that each card keeps for what is thrown to it.
    pub fn inbox_bytes(&self, n_ranks: usize) -> usize {
        (self.inbox_words(n_ranks) + self.n_packets()) * size_of::<u32>()
    }

    /// Two rounds, each of every sender.
    fn inbox_words(&self, n_ranks: usize) -> usize {
        2 * n_ranks * self.n_packets() * PACKET_WORDS
    }

    /// Packets of all rows, whose rounds are counted.
    fn n_packets(&self) -> usize {
        self.few_rows * (self.width / 4)
    }
}

// === impl Peers ===

impl Peers {
    /// Makes cards reach each other, and gives each its place, in their order.
    ///
    /// # Panics
    /// If there is not one thing shown for each card, of equal sizes on all of them.
    pub fn all(
        cards: &[&ComputeCard],
        shown: &[Shown<'_>],
        together: Together,
    ) -> Result<Vec<Self>, CudaError> {
        let sizes = |shown: &Shown<'_>| [shown.part.len(), shown.out.len(), shown.whole.len()];
        assert!(cards.len() == shown.len() && cards.len() <= PEERS_MAX, "one thing shown for each card");
        assert!(shown.iter().all(|one| sizes(one) == sizes(&shown[0])), "equal sizes on all cards");
        assert!(
            cards.iter().zip(shown).all(|(card, shown)| shown.part.ordinal() == card.ordinal()),
            "on its card"
        );
        reach_each_other(cards)?;
        let inbox = |card: &&ComputeCard| Inbox::new(card, together.inbox_words(cards.len()));
        let inboxes: Arc<[Inbox]> = cards.iter().map(inbox).collect::<Result<_, _>>()?;
        let Some(first) = cards.first() else { return Ok(Vec::new()) };
        let lost = Arc::new(Lost::new(first.context())?);
        let rank = |(me, card): (usize, &&ComputeCard)| {
            let turn = zeroed(card, TURN + 1)?;
            let known = turn.slice(TURN..TURN + 1).address();
            Ok(Self {
                ranks: lost.ranks(together, cards.len(), me, known),
                together,
                rounds: zeroed(card, together.n_packets())?,
                turn,
                inboxes: of_all(&inboxes, |inbox| inbox.packets.view().address()),
                flags: of_all(&inboxes, |inbox| inbox.flags.view().address()),
                parts: of_all(shown, |shown| shown.part.address()),
                outs: of_all(shown, |shown| shown.out.address()),
                wholes: of_all(shown, |shown| shown.whole.address()),
                shown: sizes(&shown[me]),
                lost: Arc::clone(&lost),
                _all: Arc::clone(&inboxes),
            })
        };
        cards.iter().enumerate().map(rank).collect()
    }

    pub fn n_ranks(&self) -> usize {
        self.ranks.n as usize
    }

    pub fn me(&self) -> usize {
        self.ranks.me as usize
    }

    /// Rows up to which [`ComputeCard::sum_few_rows`] can be used, and [`Ending::Joined`](super::Ending::Joined).
    pub fn few_rows(&self) -> usize {
        self.together.few_rows
    }

    /// The fields of `Inboxes` in `ranks.cuh`, in words: for one kernel that throws, after another.
    pub(super) fn inboxes(&self, kernel: &'static str) -> Result<[u64; INBOXES_WORDS], CudaError> {
        let Together { few_rows, width, .. } = self.together;
        let Ranks { lost, known, patience_ns, n, me } = self.ranks;
        let mut words = [0; INBOXES_WORDS];
        let (at, rest) = words.split_at_mut(PEERS_MAX);
        at.copy_from_slice(&self.inboxes.at);
        rest.copy_from_slice(&[
            self.rounds.view().address(),
            two_in_one(number(kernel, few_rows)?, number(kernel, width / 4)?),
            lost,
            known,
            patience_ns,
            two_in_one(n, me),
        ]);
        Ok(words)
    }

    pub(super) fn check_place(&self, card: &ComputeCard, kernel: &'static str) -> Result<(), CudaError> {
        ensure(kernel, self.rounds.view().ordinal() == card.ordinal(), "another card's place")
    }

    /// Whether rows that this card throws find room in the others' inboxes.
    pub(super) fn check_thrown(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        (n_rows, width): (usize, usize),
    ) -> Result<(), CudaError> {
        self.check_place(card, kernel)?;
        ensure(kernel, width == self.together.width, "rows of another width than inboxes have")?;
        ensure(kernel, n_rows <= self.together.few_rows, "more rows than inboxes have")
    }

    pub fn lost_flag(&self) -> LostFlag {
        LostFlag(Arc::clone(&self.lost))
    }
}

impl LostFlag {
    /// Whether a card did not come. What was computed since is nothing, on all of them.
    pub fn is_raised(&self) -> bool {
        self.0.word().load(Ordering::Acquire) != 0
    }

    /// Tells all cards that one will not come: they wait no longer.
    pub fn raise(&self) {
        self.0.word().store(1, Ordering::Release);
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers")
            .field("ranks", &self.ranks)
            .field("together", &self.together)
            .finish_non_exhaustive()
    }
}

impl Inbox {
    /// No round is the zeroth.
    fn new(card: &ComputeCard, n_words: usize) -> Result<Self, CudaError> {
        Ok(Self { packets: zeroed(card, n_words)?, flags: zeroed(card, FLAGS)? })
    }
}

fn zeroed(card: &ComputeCard, len: usize) -> Result<Buffer<u32>, CudaError> {
    let mut buffer = card.buffer(len)?;
    card.fill(buffer.view_mut(), 0)?;
    card.synchronize()?;
    Ok(buffer)
}

fn of_all<T>(all: &[T], address: impl Fn(&T) -> u64) -> OfRanks {
    let mut of_ranks = OfRanks::default();
    for (to, one) in of_ranks.at.iter_mut().zip(all) {
        *to = address(one);
    }
    of_ranks
}

/// Kernels of each card may use the memory of every other. Two ranks may be on one GPU, each with a stream of its own: for
/// checks of more ranks than there are GPUs.
fn reach_each_other(cards: &[&ComputeCard]) -> Result<(), CudaError> {
    for from in cards {
        for to in cards {
            if from.ordinal() != to.ordinal() {
                reach(from, to)?;
            }
        }
    }
    Ok(())
}

fn reach(from: &ComputeCard, to: &ComputeCard) -> Result<(), CudaError> {
    let not_reachable = CudaError::NotReachable { from: from.ordinal(), to: to.ordinal() };
    from.bind()?;
    let mut can = 0;
    let (here, there) = (from.context().cu_device(), to.context().cu_device());
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: both are cards of this machine, and the pointer is to a number that outlives the call.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, here, there) }
        .result()
        .map_err(CudaError::during("ask whether two GPUs reach each other"))?;
    if can == 0 {
        return Err(not_reachable);
    }
    // JUSTIFICATION: as above.
    // SAFETY: the context is alive, and stays so for as long as the card does.
    match unsafe { sys::cuCtxEnablePeerAccess(to.context().cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        outcome => outcome.result().map_err(CudaError::during("make one GPU's memory reachable for another")),
    }
}

// === impl Lost ===

impl Lost {
    fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        // JUSTIFICATION: only the driver can take memory that cards reach.
        // SAFETY: the pointer is kept by this value alone, and freed once.
        let start = unsafe { result::malloc_host(size_of::<AtomicU32>(), sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(CudaError::during("take memory that GPUs reach"))?;
        let word = NonNull::new(start.cast::<AtomicU32>()).expect("the driver gives memory or an error");
        // JUSTIFICATION: memory must hold a value before it is looked at.
        // SAFETY: it is as large, aligned to a memory page, and no other code knows it yet.
        unsafe { word.write(AtomicU32::new(0)) };
        Ok(Self { context: Arc::clone(context), word })
    }

    fn word(&self) -> &AtomicU32 {
        // JUSTIFICATION: cards write it too.
        // SAFETY: it is initialised and lives as long as this value; everybody reaches it as one word at once.
        unsafe { self.word.as_ref() }
    }

    fn ranks(&self, together: Together, n: usize, me: usize, known: u64) -> Ranks {
        let patience_ns = u64::try_from(together.patience.as_nanos()).unwrap_or(u64::MAX);
        Ranks { lost: self.word.as_ptr() as u64, known, patience_ns, n: n as u32, me: me as u32 }
    }
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lost({})", self.word().load(Ordering::Acquire))
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the pointer came from `malloc_host`, and no reference outlives this value.
        let _ = unsafe { result::free_host(self.word.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inbox_has_room_for_two_rounds_of_every_sender() {
        let together = Together { few_rows: 256, width: 4096, patience: Duration::from_secs(10) };
        // Each packet of 16 bytes carries 8, and is counted in 4.
        assert_eq!(together.inbox_bytes(2), 2 * 2 * 256 * 4096 * 2 * 2 + 256 * 4096);
        assert_eq!(Together { few_rows: 0, ..together }.inbox_bytes(4), 0);
    }
}
