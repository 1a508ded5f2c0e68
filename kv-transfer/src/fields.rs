//! The fields of a frame, or of an order to another process of the node, read and written in the same order.

use types::node::ProtocolRange;
use types::prompt::TokenId;
use types::step::{FinishReason, Logprobs, Step};
use types::{GroupIdx, KvSpan, NodeId};

use crate::digest::Digest;
use crate::error::FrameError;
use crate::runs::Piece;

/// Limit of pieces in one KV frame.
pub(super) const PIECES_MAX: usize = 1024;
/// Limit of a text in a frame; longer texts are cut.
const TEXT_BYTES_MAX: usize = 1024;
/// Limit of a node id, in bytes.
const NODE_BYTES_MAX: usize = 255;
/// Limit of alternatives to a chosen token.
const LOGPROBS_MAX: usize = 128;

/// Reads fields from the front of a slice, and never past its end.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Checks that no bytes are left.
    pub(crate) fn end(&self) -> Result<(), FrameError> {
        if self.rest.is_empty() { Ok(()) } else { Err(FrameError::Body("it is too long")) }
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or(FrameError::Body("it is too short"))?;
        self.rest = rest;
        Ok(*array)
    }

    fn slice(&mut self, len: usize) -> Result<&'a [u8], FrameError> {
        let (slice, rest) = self.rest.split_at_checked(len).ok_or(FrameError::Body("it is too short"))?;
        self.rest = rest;
        Ok(slice)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FrameError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FrameError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn u128(&mut self) -> Result<u128, FrameError> {
        Ok(u128::from_le_bytes(self.array()?))
    }

    fn f32(&mut self) -> Result<f32, FrameError> {
        Ok(f32::from_le_bytes(self.array()?))
    }

    pub(crate) fn protocol(&mut self) -> Result<ProtocolRange, FrameError> {
        Ok(ProtocolRange { min: self.u16()?, max: self.u16()? })
    }

    pub(crate) fn node(&mut self) -> Result<NodeId, FrameError> {
        let len = usize::from(self.u8()?);
        let text =
            std::str::from_utf8(self.slice(len)?).map_err(|_| FrameError::Body("a node id is not text"))?;
        Ok(NodeId::new(text))
    }

    pub(crate) fn text(&mut self) -> Result<String, FrameError> {
        let len = usize::from(self.u16()?);
        if len > TEXT_BYTES_MAX {
            return Err(FrameError::Body("a text is too long"));
        }
        Ok(String::from_utf8_lossy(self.slice(len)?).into_owned())
    }

    pub(crate) fn span(&mut self) -> Result<KvSpan, FrameError> {
        let group = GroupIdx(self.u16()?);
        let (layers, blocks) = (self.u16()?..self.u16()?, self.u32()?..self.u32()?);
        if layers.is_empty() || blocks.is_empty() {
            return Err(FrameError::Body("a span is empty"));
        }
        Ok(KvSpan { group, blocks, layers })
    }

    pub(crate) fn spans(&mut self, n_max: usize) -> Result<Vec<KvSpan>, FrameError> {
        let n_spans = usize::from(self.u16()?);
        if n_spans > n_max {
            return Err(FrameError::Body("too many spans"));
        }
        (0..n_spans).map(|_| self.span()).collect()
    }

    pub(crate) fn pieces(&mut self) -> Result<Vec<Piece>, FrameError> {
        let n_pieces = usize::from(self.u16()?);
        if n_pieces > PIECES_MAX {
            return Err(FrameError::Body("too many pieces"));
        }
        (0..n_pieces).map(|_| self.piece()).collect()
    }

    pub(crate) fn piece(&mut self) -> Result<Piece, FrameError> {
        let piece = Piece { offset: self.u64()?, bytes: self.u32()? };
        match piece.bytes == 0 || piece.offset.checked_add(piece.bytes.into()).is_none() {
            true => Err(FrameError::Body("a piece is empty or out of range")),
            false => Ok(piece),
        }
    }

    /// Reads all remaining bytes as digests.
    pub(crate) fn digests(&mut self) -> Result<Vec<Digest>, FrameError> {
        let (digests, rest) = self.rest.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(FrameError::Body("a digest is cut off"));
        }
        self.rest = rest;
        Ok(digests.iter().map(|bytes| Digest(u64::from_le_bytes(*bytes))).collect())
    }

    pub(crate) fn step(&mut self) -> Result<Step, FrameError> {
        let (token, index) = (TokenId(self.u32()?), self.u32()?);
        let finish = match self.u8()? {
            0 => None,
            1 => Some(FinishReason::Stop),
            2 => Some(FinishReason::Length),
            _ => return Err(FrameError::Body("unknown finish reason")),
        };
        Ok(Step { token, index, logprobs: self.logprobs()?, finish })
    }

    fn logprobs(&mut self) -> Result<Option<Logprobs>, FrameError> {
        match self.u8()? {
            0 => Ok(None),
            1 => {
                let chosen = self.f32()?;
                let n_top = usize::from(self.u8()?);
                if n_top > LOGPROBS_MAX {
                    return Err(FrameError::Body("too many alternatives"));
                }
                let top =
                    (0..n_top).map(|_| Ok((TokenId(self.u32()?), self.f32()?))).collect::<Result<_, _>>()?;
                Ok(Some(Logprobs { chosen, top }))
            }
            _ => Err(FrameError::Body("the logprobs flag is invalid")),
        }
    }
}

/// Appends fields to a buffer. Each method mirrors the method of the same name of [`Reader`].
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    bytes: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(bytes: &'a mut Vec<u8>) -> Self {
        Self { bytes }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn f32(&mut self, value: f32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn protocol(&mut self, protocol: ProtocolRange) -> &mut Self {
        self.u16(protocol.min).u16(protocol.max)
    }

    pub(crate) fn node(&mut self, node: &NodeId) -> &mut Self {
        let name = cut(node.as_str(), NODE_BYTES_MAX);
        self.u8(name.len() as u8).bytes(name.as_bytes())
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        let text = cut(text, TEXT_BYTES_MAX);
        self.u16(text.len() as u16).bytes(text.as_bytes())
    }

    pub(crate) fn span(&mut self, span: &KvSpan) -> &mut Self {
        self.u16(span.group.0)
            .u16(span.layers.start)
            .u16(span.layers.end)
            .u32(span.blocks.start)
            .u32(span.blocks.end)
    }

    pub(crate) fn spans(&mut self, spans: &[KvSpan]) -> &mut Self {
        self.u16(spans.len() as u16);
        for span in spans {
            self.span(span);
        }
        self
    }

    pub(crate) fn digests(&mut self, digests: &[Digest]) -> &mut Self {
        let start = self.bytes.len();
        self.bytes.resize(start + size_of_val(digests), 0);
        for (bytes, digest) in self.bytes[start..].as_chunks_mut().0.iter_mut().zip(digests) {
            *bytes = digest.0.to_le_bytes();
        }
        self
    }

    pub(crate) fn step(&mut self, step: &Step) -> &mut Self {
        let finish = match step.finish {
            None => 0,
            Some(FinishReason::Stop) => 1,
            Some(FinishReason::Length) => 2,
        };
        self.u32(step.token.0).u32(step.index).u8(finish).logprobs(step.logprobs.as_ref())
    }

    pub(crate) fn pieces(&mut self, pieces: &[Piece]) -> &mut Self {
        self.u16(pieces.len() as u16);
        for piece in pieces {
            self.piece(piece);
        }
        self
    }

    pub(crate) fn piece(&mut self, piece: &Piece) -> &mut Self {
        self.u64(piece.offset).u32(piece.bytes)
    }

    fn logprobs(&mut self, logprobs: Option<&Logprobs>) -> &mut Self {
        let Some(logprobs) = logprobs else { return self.u8(0) };
        let top = &logprobs.top[..logprobs.top.len().min(LOGPROBS_MAX)];
        self.u8(1).f32(logprobs.chosen).u8(top.len() as u8);
        for (token, logprob) in top {
            self.u32(token.0).f32(*logprob);
        }
        self
    }
}

/// Returns the longest prefix of `text` that fits and ends at a character boundary.
fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}
