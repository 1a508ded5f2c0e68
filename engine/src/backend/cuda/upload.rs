//! Uploads weights to the GPU. While one piece is copied, the host reads the next.
//!
//! Reading takes most of the time: the kernel maps a file's pages one by one, even if they are in memory
//! already. So several threads read parts of a piece.

use std::ops::Range;

use device::cuda::{Bf16, CudaError, PinnedNumbers, ViewMut};
use kernels::cpu::Processor;
use kernels::cuda::ComputeCard;

use crate::load::meter::Meter;

/// The number of numbers of one piece: enough for a copy at full speed.
const PIECE_NUMBERS: usize = 32 << 20;
/// The approximate number of numbers that one thread reads at a time, a part of a piece: also a small matrix, such as
/// an expert's, has a part for each thread.
const PART_NUMBERS: usize = 1 << 16;

/// Uploads weights through two pinned pieces, used in turn.
#[derive(Debug)]
pub(super) struct Upload<'a> {
    card: &'a ComputeCard,
    host: &'a Processor,
    pieces: [PinnedNumbers<Bf16>; 2],
    turn: usize,
    meter: Meter,
}

impl<'a> Upload<'a> {
    /// Allocates the pieces. `meter` shows the progress. The threads of `host` read.
    pub(super) fn new(card: &'a ComputeCard, host: &'a Processor, meter: Meter) -> Result<Self, CudaError> {
        let numbers = PIECE_NUMBERS.min(meter.total() / size_of::<Bf16>() + 1);
        let pieces = [card.pinned(numbers)?, card.pinned(numbers)?];
        Ok(Self { card, host, pieces, turn: 0, meter })
    }

    pub(super) fn card(&self) -> &'a ComputeCard {
        self.card
    }

    /// Returns the processor whose threads read.
    pub(super) fn host(&self) -> &'a Processor {
        self.host
    }

    /// Uploads numbers in a file's format, low byte first, and zeroes for the rest of `to`.
    pub(super) fn put_bytes(&mut self, mut to: ViewMut<'_, Bf16>, bytes: &[u8]) -> Result<(), CudaError> {
        let numbers = bytes.as_chunks::<2>().0;
        if numbers.len() < to.len() {
            let rest = numbers.len()..to.len();
            self.card.fill(to.reborrow().slice(rest), 0)?;
        }
        self.put_with(to.slice(0..numbers.len()), |start, piece| {
            for (number, bytes) in piece.iter_mut().zip(&numbers[start..]) {
                *number = Bf16(u16::from_le_bytes(*bytes));
            }
        })
    }

    /// Uploads some columns of rows of `cols` numbers, and zeroes up to `width` after each row.
    pub(super) fn put_columns(
        &mut self,
        to: ViewMut<'_, Bf16>,
        bytes: &[u8],
        cols: usize,
        columns: Range<usize>,
        width: usize,
    ) -> Result<(), CudaError> {
        let numbers = bytes.as_chunks::<2>().0;
        self.put_with(to, |start, piece| {
            let (mut row, mut column, mut rest) = (start / width, start % width, piece);
            while !rest.is_empty() {
                let (here, after) = rest.split_at_mut((width - column).min(rest.len()));
                let from = &numbers[row * cols..(row + 1) * cols][columns.clone()];
                let from = from.get(column..).unwrap_or_default();
                here.fill(Bf16::default());
                for (number, bytes) in here.iter_mut().zip(from) {
                    *number = Bf16(u16::from_le_bytes(*bytes));
                }
                (row, column, rest) = (row + 1, 0, after);
            }
        })
    }

    pub(super) fn put(&mut self, to: ViewMut<'_, Bf16>, numbers: &[Bf16]) -> Result<(), CudaError> {
        self.put_with(to, |start, piece| piece.copy_from_slice(&numbers[start..start + piece.len()]))
    }

    /// Counts numbers that reached the GPU without this upload.
    pub(super) fn count(&mut self, n_numbers: usize) {
        self.meter.add(n_numbers * size_of::<Bf16>());
    }

    /// Uploads part by part. `fill` gets the start of each part.
    pub(super) fn put_with(
        &mut self,
        to: ViewMut<'_, Bf16>,
        fill: impl Fn(usize, &mut [Bf16]) + Sync,
    ) -> Result<(), CudaError> {
        self.put_rows(to, 1, fill)
    }

    /// Like [`put_with`](Self::put_with), in whole rows of `width` numbers. `fill` gets the first row of each part.
    pub(super) fn put_rows(
        &mut self,
        mut to: ViewMut<'_, Bf16>,
        width: usize,
        fill: impl Fn(usize, &mut [Bf16]) + Sync,
    ) -> Result<(), CudaError> {
        let (width, mut start) = (width.max(1), 0);
        let rows_of_part = (PART_NUMBERS / width).max(1);
        while start < to.len() {
            let piece = &mut self.pieces[self.turn];
            self.turn = (self.turn + 1) % 2;
            let end = (start + piece.len() / width * width).min(to.len());
            assert!(start < end, "a piece has room for a row of {width} numbers");
            let numbers = &mut piece.numbers()?[..end - start];
            self.host.pool().run_on(numbers, rows_of_part * width, |nth, part| {
                fill(start / width + nth * rows_of_part, part);
            });
            self.card.send(piece, to.reborrow().slice(start..end))?;
            start = end;
        }
        self.meter.add(to.len() * size_of::<Bf16>());
        Ok(())
    }
}
