//! Weights on their way to the card: while it copies one piece, the host reads the next.

use kernels::cuda::{Bf16, Card, CudaError, Pinned, ViewMut};
use tracing::info;

/// Numbers of one piece: large enough that a copy runs at full speed.
const PIECE_NUMBERS: usize = 32 << 20;
/// Progress is said this often.
const STEPS_SAID: usize = 10;

/// Two pieces that take turns.
#[derive(Debug)]
pub(super) struct Upload<'a> {
    card: &'a Card,
    pieces: [Pinned<Bf16>; 2],
    turn: usize,
    progress: Progress,
}

/// How much of all weights is on the card.
#[derive(Debug)]
struct Progress {
    total_bytes: usize,
    done_bytes: usize,
    n_said: usize,
}

impl<'a> Upload<'a> {
    /// `total_bytes` is what all of it will come to, for telling how far it is.
    pub(super) fn new(card: &'a Card, total_bytes: usize) -> Result<Self, CudaError> {
        let numbers = PIECE_NUMBERS.min(total_bytes / size_of::<Bf16>() + 1);
        let pieces = [card.pinned(numbers)?, card.pinned(numbers)?];
        Ok(Self { card, pieces, turn: 0, progress: Progress { total_bytes, done_bytes: 0, n_said: 0 } })
    }

    pub(super) fn card(&self) -> &'a Card {
        self.card
    }

    /// Numbers as a file has them, low byte first.
    pub(super) fn put_bytes(&mut self, to: ViewMut<'_, Bf16>, bytes: &[u8]) -> Result<(), CudaError> {
        let numbers = bytes.as_chunks::<2>().0;
        self.put_with(to, |nth, number| *number = Bf16(u16::from_le_bytes(numbers[nth])))
    }

    pub(super) fn put(&mut self, to: ViewMut<'_, Bf16>, numbers: &[Bf16]) -> Result<(), CudaError> {
        self.put_with(to, |nth, number| *number = numbers[nth])
    }

    /// Counts what came onto the card in another way.
    pub(super) fn count(&mut self, n_numbers: usize) {
        self.progress.add(n_numbers * size_of::<Bf16>());
    }

    fn put_with(
        &mut self,
        mut to: ViewMut<'_, Bf16>,
        fill: impl Fn(usize, &mut Bf16),
    ) -> Result<(), CudaError> {
        let mut start = 0;
        while start < to.len() {
            let piece = &mut self.pieces[self.turn];
            self.turn = (self.turn + 1) % 2;
            let end = (start + piece.len()).min(to.len());
            for (nth, number) in piece.numbers()?[..end - start].iter_mut().enumerate() {
                fill(start + nth, number);
            }
            self.card.send(piece, to.reborrow().slice(start..end))?;
            start = end;
        }
        self.progress.add(to.len() * size_of::<Bf16>());
        Ok(())
    }
}

impl Progress {
    fn add(&mut self, bytes: usize) {
        self.done_bytes += bytes;
        let steps = STEPS_SAID * self.done_bytes / self.total_bytes.max(1);
        if steps > self.n_said {
            self.n_said = steps;
            info!(mib = self.done_bytes >> 20, of_mib = self.total_bytes >> 20, "load weights onto the GPU");
        }
    }
}
