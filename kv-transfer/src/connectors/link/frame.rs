//! The format of a frame: a fixed header, a small body, and for an inline [`Body::Kv`] the KV itself.
//!
//! This file only parses and writes bytes: it does no I/O and has no landings, and it knows one version. Every length
//! is checked against its limit before anything is allocated. A checksum covers header and body; the KV after them
//! has its own digests.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic, `BTKV` |
//! | 4 | 1 | kind |
//! | 5 | 1 | the sender's rank of this KV, in KV, digests and refetches; zero elsewhere |
//! | 6 | 1 | the receiver's rank of this KV, in KV, digests and refetches; zero elsewhere |
//! | 7 | 1 | zero |
//! | 8 | 4 | length of the body |
//! | 12 | 4 | length of the payload: inline KV |
//! | 16 | 16 | transfer, or zero if there is none |
//! | 32 | 8 | XXH3-64 of the preceding 32 bytes and the body |
//!
//! All numbers are little-endian.

use std::ops::Range;

use twox_hash::XxHash3_64;
use types::node::ProtocolRange;
use types::{Epoch, Grant, Handoff, KvSpan, NodeId, TransferId};

use crate::digest::Digest;
pub use crate::error::FrameError;
use crate::fields::{Reader, Writer};
use crate::landing::Credentials;
use crate::reshard::Lane;
pub use crate::runs::Piece;

pub const HEADER_BYTES: usize = 40;
/// Bytes of a header that its checksum covers.
const CHECKED_BYTES: usize = 32;
const MAGIC: [u8; 4] = *b"BTKV";

/// The longest body of KV: its span, its place, and 8 bytes per digest. A body of digests may have the same length.
pub const KV_BODY_BYTES_MAX: usize = (64 << 10) + (16 << 10) + 64;
/// The longest body of a frame without KV and digests.
pub const SMALL_BODY_BYTES_MAX: usize = 16 << 10;
/// The longest payload. A page must fit into it.
pub const PAYLOAD_BYTES_MAX: usize = 16 << 20;
/// Limit of spans in one `Refetch`.
pub const REFETCH_SPANS_MAX: usize = 512;

/// One frame, without its payload.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    pub transfer: TransferId,
    /// The pair of ranks that the KV moves between.
    pub lane: Lane,
    pub body: Body,
    /// Bytes of KV after the frame: zero unless KV is inline.
    pub payload_bytes: usize,
}

/// The content of a frame. The arrow shows its direction.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// sender → receiver: the first frame of every stream.
    Hello(Hello),
    /// receiver → sender: the stream is accepted. On stream 0 it names the other processes of the receiver, which take the
    /// KV of their layers.
    Welcome { version: u16, node: NodeId, epoch: Epoch, others: Vec<ProcessAddress> },
    /// receiver → sender: there is no version in common. The last frame of its stream.
    Incompatible { protocol: ProtocolRange },
    /// sender → receiver: a request to open a landing.
    Open(Credentials),
    /// receiver → sender: the landing is open for this sender.
    Accepted,
    /// sender → receiver: some pages, or a lane's heads of them, and the place of their KV, layer by layer and block
    /// by block. If `digests` is `None`, they follow on the same stream as [`Body::Digests`].
    Kv { span: KvSpan, digests: Option<Vec<Digest>>, place: KvPlace },
    /// sender → receiver: every wanted page was sent.
    Handoff(Handoff),
    /// receiver → sender: these pages of this lane arrived wrong; send them again.
    Refetch { spans: Vec<KvSpan> },
    /// receiver → sender: all pages are in place and verified.
    Done,
    /// both ways: the transfer has ended without success.
    Failed { code: u8, detail: String },
    /// sender → receiver: the digests of the oldest frame of this stream whose digests are outstanding.
    Digests { span: KvSpan, digests: Vec<Digest> },
    /// receiver → sender: the KV in this slot of the stage is no longer needed.
    Taken { slot: u16 },
    /// sender → receiver: the transfer has ended without success, and the sender's device no longer writes.
    Quiet,
    /// both ways: a heartbeat. Each side sends it on its own, because an answer could be stuck behind much KV.
    Alive,
}

/// The location of a frame's KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvPlace {
    /// The KV is on the stream, after the frame.
    Inline,
    /// The KV is in pieces of the memory that the sender's rank shares with the receiver.
    Pieces(Vec<Piece>),
    /// The KV is in a slot of the sender's stage. The sender reuses the slot after a [`Body::Taken`].
    Slot { slot: u16, piece: Piece },
    /// The KV is in a message of the queue between the two ranks. The messages of a queue are numbered from 0
    /// without gaps.
    Message { number: u64, bytes: u32 },
    /// The KV is in the receiver's pages, written by the sender's device. The last write carries `number`;
    /// once the receiver's device has received it, the KV is in place.
    Written { number: u32 },
}

/// The first version in which a welcome names the ranks of each process. In earlier ones each process has all ranks.
pub(super) const RANKS_VERSION: u16 = 7;

/// The layers of one process of the receiver (numbers in the model), its ranks, and the `host:port` that takes their KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessAddress {
    pub layers: Range<u16>,
    pub ranks: Range<u16>,
    pub endpoint: String,
}

/// The sender's node, and the number of this stream and link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub protocol: ProtocolRange,
    pub node: NodeId,
    pub epoch: Epoch,
    /// The random number of the link, shared by all its streams.
    pub link: u64,
    pub stream: u16,
}

/// The kinds on the wire. A number keeps its meaning for ever: 6, 12, 14, 16, 18 and 19 were KV before version 3.
mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const INCOMPATIBLE: u8 = 3;
    pub(super) const OPEN: u8 = 4;
    pub(super) const ACCEPTED: u8 = 5;
    pub(super) const HANDOFF: u8 = 7;
    pub(super) const REFETCH: u8 = 8;
    pub(super) const DONE: u8 = 9;
    pub(super) const FAILED: u8 = 10;
    pub(super) const ALIVE: u8 = 11;
    pub(super) const TAKEN: u8 = 13;
    pub(super) const QUIET: u8 = 15;
    pub(super) const DIGESTS: u8 = 17;
    pub(super) const KV: u8 = 20;
}

/// Parses one frame, header and body, from the front of `bytes`. Ignores all bytes after it.
pub fn parse(bytes: &[u8]) -> Result<Frame, FrameError> {
    let header = Header::parse(bytes)?;
    let whole = HEADER_BYTES + header.body_bytes;
    let body =
        bytes.get(HEADER_BYTES..whole).ok_or(FrameError::Incomplete { needed: whole, given: bytes.len() })?;
    header.frame(body)
}

/// A header with valid lengths. Its checksum can be checked only with the body.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    kind: u8,
    pub body_bytes: usize,
    pub payload_bytes: usize,
    lane: Lane,
    transfer: TransferId,
    checksum: u64,
    checked: [u8; CHECKED_BYTES],
}

impl Header {
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        let header: &[u8; HEADER_BYTES] =
            bytes.first_chunk().ok_or(FrameError::Incomplete { needed: HEADER_BYTES, given: bytes.len() })?;
        let mut fields = Reader::new(header);
        if fields.array::<4>()? != MAGIC {
            return Err(FrameError::Magic);
        }
        let kind = fields.u8()?;
        let [from, to, reserved] = fields.array::<3>()?;
        let lane = Lane { from: from.into(), to: to.into() };
        if reserved != 0 || (lane != Lane::ONLY && !goes_on_lanes(kind)) {
            return Err(FrameError::Reserved);
        }
        let body_bytes = bounded_body(kind, fields.u32()? as usize)?;
        let payload_bytes = bounded_payload(kind, fields.u32()? as usize)?;
        let transfer = TransferId(fields.u128()?);
        let checksum = fields.u64()?;
        let mut checked = [0; CHECKED_BYTES];
        checked.copy_from_slice(&header[..CHECKED_BYTES]);
        Ok(Self { kind, body_bytes, payload_bytes, lane, transfer, checksum, checked })
    }

    /// Returns the frame of this header and `body`.
    pub fn frame(&self, body: &[u8]) -> Result<Frame, FrameError> {
        if checksum(&self.checked, body) != self.checksum {
            return Err(FrameError::Checksum);
        }
        let mut fields = Reader::new(body);
        let body = parse_body(self.kind, self.transfer, &mut fields)?;
        fields.end()?;
        if self.payload_bytes > 0 && !matches!(body, Body::Kv { place: KvPlace::Inline, .. }) {
            return Err(FrameError::Body("a payload after KV that is not inline"));
        }
        Ok(Frame { transfer: self.transfer, lane: self.lane, body, payload_bytes: self.payload_bytes })
    }
}

fn goes_on_lanes(kind: u8) -> bool {
    matches!(kind, kind::KV | kind::DIGESTS | kind::REFETCH)
}

fn bounded_body(kind: u8, len: usize) -> Result<usize, FrameError> {
    let max = match kind {
        kind::KV | kind::DIGESTS => KV_BODY_BYTES_MAX,
        kind::HELLO..=kind::KV => SMALL_BODY_BYTES_MAX,
        unknown => return Err(FrameError::Kind(unknown)),
    };
    if len > max { Err(FrameError::BodyTooLong { len, max }) } else { Ok(len) }
}

fn bounded_payload(kind: u8, len: usize) -> Result<usize, FrameError> {
    let max = if kind == kind::KV { PAYLOAD_BYTES_MAX } else { 0 };
    if len > max { Err(FrameError::PayloadTooLong { len, max }) } else { Ok(len) }
}

fn checksum(checked: &[u8; CHECKED_BYTES], body: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(checked), body)
}

fn parse_body(kind: u8, transfer: TransferId, fields: &mut Reader<'_>) -> Result<Body, FrameError> {
    Ok(match kind {
        kind::HELLO => Body::Hello(parse_hello(fields)?),
        kind::WELCOME => {
            let (version, node, epoch) = (fields.u16()?, fields.node()?, Epoch(fields.u64()?));
            Body::Welcome { version, node, epoch, others: parse_others(fields, version)? }
        }
        kind::INCOMPATIBLE => Body::Incompatible { protocol: fields.protocol()? },
        kind::OPEN => Body::Open(parse_open(fields)?),
        kind::ACCEPTED => Body::Accepted,
        kind::HANDOFF => Body::Handoff(Handoff { transfer, n_tokens: fields.u32()?, first: fields.step()? }),
        kind::REFETCH => Body::Refetch { spans: fields.spans(REFETCH_SPANS_MAX)? },
        kind::DONE => Body::Done,
        kind::FAILED => Body::Failed { code: fields.u8()?, detail: fields.text()? },
        kind::ALIVE => Body::Alive,
        kind::TAKEN => Body::Taken { slot: fields.u16()? },
        kind::QUIET => Body::Quiet,
        kind::DIGESTS => Body::Digests { span: fields.span()?, digests: fields.digests()? },
        kind::KV => parse_kv(fields)?,
        unknown => return Err(FrameError::Kind(unknown)),
    })
}

fn parse_kv(fields: &mut Reader<'_>) -> Result<Body, FrameError> {
    let (span, place) = (fields.span()?, parse_place(fields)?);
    let digests = match fields.u8()? {
        0 => None,
        1 => Some(fields.digests()?),
        _ => return Err(FrameError::Body("the digest flag is invalid")),
    };
    Ok(Body::Kv { span, digests, place })
}

/// The places on the wire. A number keeps its meaning for ever.
mod place {
    pub(super) const INLINE: u8 = 0;
    pub(super) const PIECES: u8 = 1;
    pub(super) const SLOT: u8 = 2;
    pub(super) const MESSAGE: u8 = 3;
    pub(super) const WRITTEN: u8 = 4;
}

fn parse_place(fields: &mut Reader<'_>) -> Result<KvPlace, FrameError> {
    Ok(match fields.u8()? {
        place::INLINE => KvPlace::Inline,
        place::PIECES => KvPlace::Pieces(fields.pieces()?),
        place::SLOT => KvPlace::Slot { slot: fields.u16()?, piece: fields.piece()? },
        place::MESSAGE => KvPlace::Message { number: fields.u64()?, bytes: fields.u32()? },
        place::WRITTEN => KvPlace::Written { number: fields.u32()? },
        _ => return Err(FrameError::Body("KV in an unknown place")),
    })
}

fn parse_hello(fields: &mut Reader<'_>) -> Result<Hello, FrameError> {
    Ok(Hello {
        protocol: fields.protocol()?,
        node: fields.node()?,
        epoch: Epoch(fields.u64()?),
        link: fields.u64()?,
        stream: fields.u16()?,
    })
}

/// Reads to the end of the body. A node of one process writes nothing there.
fn parse_others(fields: &mut Reader<'_>, version: u16) -> Result<Vec<ProcessAddress>, FrameError> {
    let mut others = Vec::new();
    while fields.end().is_err() {
        let layers = fields.u16()?..fields.u16()?;
        let ranks = if version < RANKS_VERSION { 0..u16::MAX } else { fields.u16()?..fields.u16()? };
        others.push(ProcessAddress { layers, ranks, endpoint: fields.text()? });
    }
    Ok(others)
}

fn parse_open(fields: &mut Reader<'_>) -> Result<Credentials, FrameError> {
    Ok(Credentials {
        grant: Grant::from_bytes(fields.array()?),
        epoch: Epoch(fields.u64()?),
        n_tokens: fields.u32()?,
        held_tokens: fields.u32()?,
        layout: fields.u64()?,
        fingerprint: fields.u64()?,
        tp_size: fields.u16()?,
    })
}

impl Frame {
    pub fn new(transfer: TransferId, body: Body) -> Self {
        Self { transfer, lane: Lane::ONLY, body, payload_bytes: 0 }
    }

    /// Sets the pair of ranks that the KV moves between.
    #[must_use]
    pub fn on(self, lane: Lane) -> Self {
        Self { lane, ..self }
    }

    /// Returns a frame that belongs to no transfer.
    pub fn of_link(body: Body) -> Self {
        Self::new(TransferId(0), body)
    }

    /// Replaces `bytes` with this frame's header and body.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.clear();
        bytes.resize(HEADER_BYTES, 0);
        let mut fields = Writer::new(bytes);
        let kind = encode_body(&self.body, &mut fields);
        let body_bytes = bytes.len() - HEADER_BYTES;
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = kind;
        bytes[5..7].copy_from_slice(&[self.lane.from as u8, self.lane.to as u8]);
        bytes[8..12].copy_from_slice(&(body_bytes as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.payload_bytes as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.transfer.0.to_le_bytes());
        let mut checked = [0; CHECKED_BYTES];
        checked.copy_from_slice(&bytes[..CHECKED_BYTES]);
        let checksum = checksum(&checked, &bytes[HEADER_BYTES..]);
        bytes[CHECKED_BYTES..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// Writes the body and returns its kind.
fn encode_body(body: &Body, fields: &mut Writer<'_>) -> u8 {
    match body {
        Body::Hello(hello) => encode_hello(hello, fields),
        Body::Welcome { version, node, epoch, others } => {
            fields.u16(*version).node(node).u64(epoch.0);
            for ProcessAddress { layers, ranks, endpoint } in others {
                fields.u16(layers.start).u16(layers.end);
                if *version >= RANKS_VERSION {
                    fields.u16(ranks.start).u16(ranks.end);
                }
                fields.text(endpoint);
            }
            kind::WELCOME
        }
        Body::Incompatible { protocol } => {
            fields.protocol(*protocol);
            kind::INCOMPATIBLE
        }
        Body::Open(open) => encode_open(open, fields),
        Body::Accepted => kind::ACCEPTED,
        Body::Kv { span, digests, place } => {
            fields.span(span);
            encode_place(place, fields);
            match digests {
                None => fields.u8(0),
                Some(digests) => fields.u8(1).digests(digests),
            };
            kind::KV
        }
        Body::Handoff(handoff) => {
            fields.u32(handoff.n_tokens).step(&handoff.first);
            kind::HANDOFF
        }
        Body::Refetch { spans } => {
            fields.spans(spans);
            kind::REFETCH
        }
        Body::Done => kind::DONE,
        Body::Failed { code, detail } => {
            fields.u8(*code).text(detail);
            kind::FAILED
        }
        Body::Alive => kind::ALIVE,
        Body::Taken { slot } => {
            fields.u16(*slot);
            kind::TAKEN
        }
        Body::Quiet => kind::QUIET,
        Body::Digests { span, digests } => {
            fields.span(span).digests(digests);
            kind::DIGESTS
        }
    }
}

fn encode_place(place: &KvPlace, fields: &mut Writer<'_>) {
    match place {
        KvPlace::Inline => fields.u8(place::INLINE),
        KvPlace::Pieces(pieces) => fields.u8(place::PIECES).pieces(pieces),
        KvPlace::Slot { slot, piece } => fields.u8(place::SLOT).u16(*slot).piece(piece),
        KvPlace::Message { number, bytes } => fields.u8(place::MESSAGE).u64(*number).u32(*bytes),
        KvPlace::Written { number } => fields.u8(place::WRITTEN).u32(*number),
    };
}

fn encode_hello(hello: &Hello, fields: &mut Writer<'_>) -> u8 {
    fields.protocol(hello.protocol).node(&hello.node).u64(hello.epoch.0).u64(hello.link).u16(hello.stream);
    kind::HELLO
}

fn encode_open(open: &Credentials, fields: &mut Writer<'_>) -> u8 {
    fields
        .bytes(&open.grant.to_bytes())
        .u64(open.epoch.0)
        .u32(open.n_tokens)
        .u32(open.held_tokens)
        .u64(open.layout)
        .u64(open.fingerprint)
        .u16(open.tp_size);
    kind::OPEN
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
