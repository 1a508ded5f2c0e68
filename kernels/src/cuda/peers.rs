//! Several GPUs of one machine that compute one model together: the memory that each can access on the
//! others.
//!
//! GPUs access each other's memory by address. The kernels (`kernels/cu/ranks.cuh`) synchronize and decide
//! which rank computes which rows. A rank that misses their time limit is lost, and [`LostFlag`] reports it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use device::cuda::error::ensure;
use device::cuda::{Bf16, Buffer, CudaError, HostWords, View, reach};

use super::ComputeCard;
use super::ops::{nanoseconds, number, two_in_one};

/// The maximum number of GPUs, as in `ranks.cuh`.
pub const PEERS_MAX: usize = 8;
/// The number of words of flags: two kinds for each sender.
const FLAGS: usize = 2 * PEERS_MAX;
/// The size of `Inboxes` in `ranks.cuh`, in words of 8 bytes.
pub(super) const INBOXES_WORDS: usize = PEERS_MAX + 6;
/// The number of words of `Turn` in `ranks.cu`.
const TURN: usize = 2;
/// The number of words of a packet of 4 numbers.
const PACKET_WORDS: usize = 4;

/// The addresses of the same object on all ranks' GPUs, as `OfRanks` in `ranks.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct OfRanks {
    pub(super) at: [u64; PEERS_MAX],
}

/// The fields of `Ranks` in `ranks.cuh`, in the same order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Ranks {
    lost: u64,
    known: u64,
    patience_ns: u64,
    pub(super) n: u32,
    pub(super) me: u32,
}

/// The memory of one rank that the others access.
#[derive(Clone, Copy, Debug)]
pub struct RankMemory<'a> {
    /// This rank's partial sums.
    pub part: View<'a, Bf16>,
    /// The complete sums, written by all ranks.
    pub out: View<'a, Bf16>,
    /// Rows in which each rank writes its columns.
    pub whole: View<'a, f32>,
}

/// Parameters that are equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonParams {
    /// The largest number of rows for which partial sums are pushed into inboxes. More rows are fetched.
    pub few_rows: usize,
    /// The width of a row of a sum.
    pub width: usize,
    /// The time for which a GPU waits for the others.
    pub patience: Duration,
}

/// One rank of a model that runs on several GPUs.
///
/// The memory in `Shown` must outlive all work that any GPU gets with these values. Otherwise GPUs fault or
/// overwrite other numbers in GPU memory. Host memory is not affected.
pub struct Peers {
    pub(super) ranks: Ranks,
    pub(super) together: CommonParams,
    /// The number of pushes of each packet, counted by the GPU.
    rounds: Buffer<u32>,
    /// The current round of the flags, and whether this GPU has found a lost rank.
    pub(super) turn: Buffer<u32>,
    inboxes: OfRanks,
    pub(super) flags: OfRanks,
    pub(super) parts: OfRanks,
    pub(super) outs: OfRanks,
    pub(super) wholes: OfRanks,
    /// The lengths of the three shared buffers, equal on all ranks.
    pub(super) shown: [usize; 3],
    /// A word that is not zero after a GPU missed the time limit.
    lost: Arc<HostWords>,
    /// Keeps the memory of all ranks' inboxes until the last rank is dropped.
    _all: Arc<[Inbox]>,
}

/// Reports whether a GPU has waited for another one until the time limit. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LostFlag(Arc<HostWords>);

/// The memory on a rank's GPU that the other ranks write.
#[derive(Debug)]
struct Inbox {
    packets: Buffer<u32>,
    flags: Buffer<u32>,
}

// === impl Together ===

impl CommonParams {
    /// Returns the bytes that each GPU reserves for packets from the others.
    pub fn inbox_bytes(&self, n_ranks: usize) -> usize {
        (self.inbox_words(n_ranks) + self.n_packets()) * size_of::<u32>()
    }

    /// Returns the words of packets in an inbox: two rounds for each sender.
    fn inbox_words(&self, n_ranks: usize) -> usize {
        2 * n_ranks * self.n_packets() * PACKET_WORDS
    }

    /// Returns the number of packets of all rows. Each packet has a round counter.
    fn n_packets(&self) -> usize {
        self.few_rows * (self.width / 4)
    }
}

// === impl Peers ===

impl Peers {
    /// Enables access between the GPUs and returns one value for each, in their order.
    ///
    /// # Panics
    /// If the number of `shown` differs from that of `cards`, or their sizes differ.
    pub fn all(
        cards: &[&ComputeCard],
        shown: &[RankMemory<'_>],
        together: CommonParams,
    ) -> Result<Vec<Self>, CudaError> {
        let sizes = |shown: &RankMemory<'_>| [shown.part.len(), shown.out.len(), shown.whole.len()];
        assert!(cards.len() == shown.len() && cards.len() <= PEERS_MAX, "one `Shown` for each GPU");
        assert!(shown.iter().all(|one| sizes(one) == sizes(&shown[0])), "equal sizes on all GPUs");
        assert!(
            cards.iter().zip(shown).all(|(card, shown)| shown.part.ordinal() == card.ordinal()),
            "the memory is on its GPU"
        );
        reach_each_other(cards)?;
        let inbox = |card: &&ComputeCard| Inbox::new(card, together.inbox_words(cards.len()));
        let inboxes: Arc<[Inbox]> = cards.iter().map(inbox).collect::<Result<_, _>>()?;
        let Some(first) = cards.first() else { return Ok(Vec::new()) };
        let lost = Arc::new(HostWords::new(first.context(), 1)?);
        let rank = |(me, card): (usize, &&ComputeCard)| {
            let turn = zeroed(card, TURN + 1)?;
            let known = turn.slice(TURN..TURN + 1).address();
            Ok(Self {
                ranks: Ranks {
                    lost: lost.address(),
                    known,
                    patience_ns: nanoseconds(together.patience),
                    n: cards.len() as u32,
                    me: me as u32,
                },
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

    /// Returns the maximum number of rows for [`ComputeCard::sum_few_rows`] and
    /// [`Ending::Joined`](super::Ending::Joined).
    pub fn few_rows(&self) -> usize {
        self.together.few_rows
    }

    /// Returns the fields of `Inboxes` in `ranks.cuh`, in words, for one kernel that pushes packets. Such
    /// kernels run one after the other.
    pub(super) fn inboxes(&self, kernel: &'static str) -> Result<[u64; INBOXES_WORDS], CudaError> {
        let CommonParams { few_rows, width, .. } = self.together;
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
        ensure(kernel, self.rounds.view().ordinal() == card.ordinal(), "the place of another GPU")
    }

    /// Checks that the rows that this GPU pushes fit into the others' inboxes.
    pub(super) fn check_thrown(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        n_rows: usize,
        width: usize,
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
    /// Returns whether a GPU missed the time limit. All results computed since then are invalid, on all
    /// ranks.
    pub fn is_raised(&self) -> bool {
        self.0.words()[0].load(Ordering::Acquire) != 0
    }

    /// Signals all GPUs that a rank is lost, so that they stop waiting.
    pub fn raise(&self) {
        self.0.words()[0].store(1, Ordering::Release);
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
    /// Allocates an inbox. All its words are zero, because no round has the number zero.
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

/// Lets the kernels of each GPU access the memory of every other one. Two ranks may be on one GPU, each with
/// its own stream; checks use this to test more ranks than GPUs.
fn reach_each_other(cards: &[&ComputeCard]) -> Result<(), CudaError> {
    for from in cards {
        for to in cards {
            if from.ordinal() != to.ordinal() {
                reach(from.context(), to.context())?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inbox_has_room_for_two_rounds_of_every_sender() {
        let together = CommonParams { few_rows: 256, width: 4096, patience: Duration::from_secs(10) };
        // Each packet of 16 bytes carries 8 bytes of numbers and has a 4-byte counter, so this is the size.
        assert_eq!(together.inbox_bytes(2), 2 * 2 * 256 * 4096 * 2 * 2 + 256 * 4096);
        assert_eq!(CommonParams { few_rows: 0, ..together }.inbox_bytes(4), 0);
    }
}
