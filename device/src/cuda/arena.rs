//! Memory of a GPU that can be given back all at once and taken again later at the same addresses.
//!
//! The content is lost meanwhile, and the caller writes it again. The caller requests the same buffers in the
//! same order and gets the same addresses, so recorded graphs and tensor descriptors, which contain
//! addresses, stay valid.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::buffer::{Buffer, Element};
use super::mapped::MappedMemory;
use super::{Card, CudaError};

/// The size of a piece that small buffers share. A larger buffer has a piece of its own. GPU memory is mapped
/// in units of this size.
const SHARED_PIECE_BYTES: usize = 2 << 20;
/// The alignment of every buffer, equal to that of the driver's allocator.
const ALIGN_BYTES: usize = 256;

/// Buffers of one GPU whose memory is given back and taken again together.
pub struct Arena {
    context: Arc<CudaContext>,
    pieces: Vec<Arc<MappedMemory>>,
    places: BufferPlaces,
}

// === impl Arena ===

impl Card {
    /// Makes an arena without buffers.
    pub fn arena(&self) -> Arena {
        Arena { context: Arc::clone(self.context()), pieces: Vec::new(), places: BufferPlaces::default() }
    }
}

impl Arena {
    /// Takes memory with undefined content. After [`refill`](Self::refill), it returns the place that this
    /// buffer had before.
    ///
    /// # Panics
    /// If the size differs from the first time, after `refill`.
    pub fn buffer<T: Element>(&mut self, len: usize) -> Result<Buffer<T>, CudaError> {
        let place = self.places.next(len.saturating_mul(size_of::<T>()));
        if place.piece == self.pieces.len() {
            match MappedMemory::take(&self.context, place.piece_bytes()) {
                Ok(piece) => self.pieces.push(Arc::new(piece)),
                Err(refused) => {
                    self.places.forget_last();
                    return Err(refused);
                }
            }
        }
        Ok(Buffer::part(Arc::clone(&self.pieces[place.piece]), place.offset, len))
    }

    /// Gives the memory back and keeps the addresses. Waits for the GPU's running work.
    ///
    /// The caller must launch nothing that uses one of these buffers before [`refill`](Self::refill).
    pub fn give_back(&self) -> Result<(), CudaError> {
        self.pieces.iter().try_for_each(|piece| piece.give_back())
    }

    /// Takes all the memory again, or none of it. Afterwards [`buffer`](Self::buffer) returns the places in
    /// order, from the first.
    pub fn refill(&mut self) -> Result<(), CudaError> {
        if let Err(refused) = self.pieces.iter().try_for_each(|piece| piece.take_again()) {
            // The error of the refill is reported, because it has the cause.
            let _ = self.give_back();
            return Err(refused);
        }
        self.places.rewind();
        Ok(())
    }

    /// Returns the bytes of GPU memory that the arena holds, or holds again after a refill.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes()).sum()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("pieces", &self.pieces.len()).field("bytes", &self.bytes()).finish()
    }
}

// === places ===

/// The places of all buffers in the arena's pieces.
#[derive(Debug, Default)]
struct BufferPlaces {
    places: Vec<Place>,
    /// The number of places given out since the start or the last rewind.
    n_given: usize,
    n_pieces: usize,
    /// The piece that small buffers share at present, and its bytes in use.
    shared: Option<(usize, usize)>,
}

/// A buffer's place: its piece, and its range there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    piece: usize,
    offset: usize,
    bytes: usize,
}

impl Place {
    /// Returns the size of the buffer's piece, if this buffer is the first in it.
    fn piece_bytes(self) -> usize {
        self.bytes.max(SHARED_PIECE_BYTES)
    }
}

impl BufferPlaces {
    fn next(&mut self, bytes: usize) -> Place {
        let place = match self.places.get(self.n_given) {
            Some(place) => {
                assert_eq!(place.bytes, bytes, "buffer {} of an arena that is filled again", self.n_given);
                *place
            }
            None => self.new_place(bytes),
        };
        self.n_given += 1;
        place
    }

    fn new_place(&mut self, bytes: usize) -> Place {
        let place = match self.shared {
            Some((piece, taken)) if taken + bytes <= SHARED_PIECE_BYTES => {
                Place { piece, offset: taken, bytes }
            }
            _ => Place { piece: self.n_pieces, offset: 0, bytes },
        };
        self.n_pieces = self.n_pieces.max(place.piece + 1);
        if bytes < SHARED_PIECE_BYTES {
            self.shared = Some((place.piece, (place.offset + bytes).next_multiple_of(ALIGN_BYTES)));
        }
        self.places.push(place);
        place
    }

    /// Removes the last place, because its piece could not be allocated.
    fn forget_last(&mut self) {
        let Some(place) = self.places.pop() else { return };
        self.n_given -= 1;
        self.n_pieces = place.piece;
        self.shared = self.shared.filter(|(piece, _)| *piece != place.piece);
    }

    fn rewind(&mut self) {
        self.n_given = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn place(piece: usize, offset: usize, bytes: usize) -> Place {
        Place { piece, offset, bytes }
    }

    #[test]
    fn small_buffers_share_a_piece_and_large_ones_have_their_own() {
        let mut places = BufferPlaces::default();
        for (bytes, found) in [
            (1000, place(0, 0, 1000)),
            (48 * MIB, place(1, 0, 48 * MIB)),
            (24, place(0, 1024, 24)),
            (0, place(0, 1280, 0)),
            (2 * MIB, place(2, 0, 2 * MIB)),
            (2 * MIB - 4, place(3, 0, 2 * MIB - 4)),
            (MIB, place(4, 0, MIB)),
            (MIB, place(4, MIB, MIB)),
            (1, place(5, 0, 1)),
        ] {
            assert_eq!(places.next(bytes), found);
        }
        assert_eq!(
            (place(0, 0, 1000).piece_bytes(), place(1, 0, 48 * MIB).piece_bytes()),
            (2 * MIB, 48 * MIB)
        );
    }

    #[test]
    fn what_is_filled_again_lies_where_it_lay() {
        let mut places = BufferPlaces::default();
        let sizes = [10, 5 * MIB, 300, MIB, MIB + 1];
        let first = sizes.map(|bytes| places.next(bytes));
        places.rewind();
        assert_eq!(sizes.map(|bytes| places.next(bytes)), first);
        assert_eq!(places.next(7 * MIB), place(3, 0, 7 * MIB), "and what is new lies behind it");
    }

    #[test]
    #[should_panic(expected = "buffer 1 of an arena that is filled again")]
    fn another_order_is_a_bug() {
        let mut places = BufferPlaces::default();
        let _ = [1, 2].map(|bytes| places.next(bytes));
        places.rewind();
        let _ = [1, 3].map(|bytes| places.next(bytes));
    }

    #[test]
    fn a_place_that_could_not_be_had_is_nobodys() {
        let mut places = BufferPlaces::default();
        places.next(10);
        places.next(5 * MIB);
        places.forget_last();
        assert_eq!(places.next(3 * MIB), place(1, 0, 3 * MIB));
        assert_eq!(places.next(10), place(0, 256, 10));
        places.next(2 * MIB - 1);
        places.forget_last();
        assert_eq!(places.next(10), place(2, 0, 10), "the piece before it is not gone back to");
    }
}
