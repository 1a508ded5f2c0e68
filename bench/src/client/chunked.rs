//! Hot path. Removes HTTP's chunked framing from a body, wherever the network cuts it.

/// The part of the framing that the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    Size {
        value: u64,
        n_digits: u8,
    },
    Extension {
        value: u64,
    },
    Data {
        left: u64,
    },
    /// The line end after a chunk's data.
    AfterData,
    /// A line of the trailer, or the empty line that ends the body.
    Trailer {
        is_empty: bool,
    },
    Done,
}

/// The error of a body whose framing violates RFC 9112.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadChunk;

impl ChunkState {
    pub const START: ChunkState = ChunkState::Size { value: 0, n_digits: 0 };

    /// Calls `on_body` with every run of body bytes. Returns the number of bytes that belong to this body.
    pub fn take(&mut self, bytes: &[u8], on_body: &mut dyn FnMut(&[u8])) -> Result<usize, BadChunk> {
        let mut at = 0;
        while at < bytes.len() && *self != ChunkState::Done {
            if let ChunkState::Data { left } = *self {
                let n = usize::try_from(left).map_or(bytes.len() - at, |left| left.min(bytes.len() - at));
                on_body(&bytes[at..at + n]);
                at += n;
                let left = left - n as u64;
                *self = if left == 0 { ChunkState::AfterData } else { ChunkState::Data { left } };
            } else {
                *self = self.step(bytes[at])?;
                at += 1;
            }
        }
        Ok(at)
    }

    fn step(self, byte: u8) -> Result<ChunkState, BadChunk> {
        match (self, byte) {
            (ChunkState::Size { value, n_digits: 1.. }, b'\n') | (ChunkState::Extension { value }, b'\n') => {
                Ok(if value == 0 {
                    ChunkState::Trailer { is_empty: true }
                } else {
                    ChunkState::Data { left: value }
                })
            }
            (ChunkState::Size { value, n_digits }, _) => size_step(value, n_digits, byte),
            (ChunkState::AfterData, b'\n') => Ok(ChunkState::START),
            (ChunkState::Trailer { is_empty: true }, b'\n') => Ok(ChunkState::Done),
            (ChunkState::Trailer { .. }, b'\n') => Ok(ChunkState::Trailer { is_empty: true }),
            (ChunkState::Trailer { is_empty: true }, b'\r') => Ok(self),
            (ChunkState::Trailer { .. }, _) => Ok(ChunkState::Trailer { is_empty: false }),
            (ChunkState::Extension { .. }, _) | (ChunkState::AfterData, b'\r') => Ok(self),
            _ => Err(BadChunk),
        }
    }
}

fn size_step(value: u64, n_digits: u8, byte: u8) -> Result<ChunkState, BadChunk> {
    match (char::from(byte).to_digit(16), byte) {
        (Some(digit), _) if n_digits < 15 => {
            Ok(ChunkState::Size { value: value << 4 | u64::from(digit), n_digits: n_digits + 1 })
        }
        (None, b'\r' | b';' | b' ' | b'\t') if n_digits > 0 => Ok(ChunkState::Extension { value }),
        _ => Err(BadChunk),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRE: &[u8] = b"5\r\nhello\r\n1;x=y\r\n \r\nC \r\nwide\r\nworld!\r\n0\r\nx: y\r\n\r\nnext";

    fn decode(pieces: &[&[u8]]) -> (Vec<u8>, ChunkState, usize) {
        let (mut state, mut body, mut taken) = (ChunkState::START, Vec::new(), 0);
        for piece in pieces {
            taken += state.take(piece, &mut |bytes| body.extend_from_slice(bytes)).expect("well framed");
        }
        (body, state, taken)
    }

    #[test]
    fn bodies_come_out_wherever_the_bytes_are_cut() {
        for cut in 0..WIRE.len() {
            let (body, state, taken) = decode(&[&WIRE[..cut], &WIRE[cut..]]);
            assert_eq!(body, b"hello wide\r\nworld!", "cut at {cut}");
            assert_eq!((state, taken), (ChunkState::Done, WIRE.len() - 4), "cut at {cut}");
        }
    }

    #[test]
    fn malformed_bytes_are_refused() {
        for wire in [&b"\r\n"[..], b"xyz\r\n", b"1\r\nab", b"ffffffffffffffff1\r\n"] {
            let mut state = ChunkState::START;
            assert_eq!(state.take(wire, &mut |_| ()), Err(BadChunk), "{wire:?}");
        }
    }
}
