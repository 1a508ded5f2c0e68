//! The memory pieces that hold a frame's KV, read from the front.

use super::frame::Piece;

/// The pieces of one frame, and the number of bytes of the first piece that are taken.
#[derive(Debug)]
pub(in crate::connectors) struct Pieces<'a> {
    rest: &'a [Piece],
    done: usize,
}

impl<'a> Pieces<'a> {
    pub(in crate::connectors) fn new(pieces: &'a [Piece]) -> Self {
        Self { rest: pieces, done: 0 }
    }

    /// Returns the number of contiguous bytes from here on; `None` at the end.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "for wires that know both sides' pieces"))]
    pub(in crate::connectors) fn rest(&self) -> Option<usize> {
        Some(self.rest.first()?.bytes as usize - self.done)
    }

    /// Takes at most `bytes` contiguous bytes. Returns their offset and number.
    pub(in crate::connectors) fn next(&mut self, bytes: usize) -> Option<(u64, usize)> {
        let piece = self.rest.first()?;
        let (offset, n) = (piece.offset + self.done as u64, bytes.min(piece.bytes as usize - self.done));
        self.done += n;
        if self.done == piece.bytes as usize {
            (self.rest, self.done) = (&self.rest[1..], 0);
        }
        Some((offset, n))
    }
}
