//! Links of frames between two nodes: what the wires have in common that speak over streams.
//!
//! Suggested reading order: what travels ([`frame`]), how it is read and written (`stream`), what such wires differ in
//! (`medium`, `said`), what a connector makes of it ([`wire`]), the sender's end (`links`, `link_out`, `span_out`) and the receiver's (`receiver`, `span_in`, `span_at`,
//! `span_written`).
//!
//! Where the receiver does the writing, proof of quiet is in its own hands: see
//! [`OpenLanding::while_open`](crate::landing::OpenLanding). Where the sender's device does, it is the sender's word
//! (`words`), or its right taken away.

pub mod frame;
mod fields;
mod code;
pub(super) mod stream;
pub(super) mod medium;
pub(super) mod said;
pub(super) mod links;
mod link_out;
pub(super) mod span_out;
pub(super) mod receiver;
mod span_in;
mod span_at;
mod span_written;
mod words;
pub mod wire;

use self::frame::PAYLOAD_BYTES_MAX;
use crate::connector::ConnectorParts;
use crate::error::TransferError;
use crate::landing::bad_request;

/// The largest page, which must fit into one frame as the setting for frames must.
pub(super) fn check_pages(parts: &ConnectorParts) -> Result<usize, TransferError> {
    let layout = parts.memory.layout();
    let shapes = layout.groups.iter().flat_map(|group| &group.layers);
    let largest = shapes.map(|shape| layout.rank_page_bytes(*shape)).max().unwrap_or(0);
    if largest > PAYLOAD_BYTES_MAX || parts.settings.frame_bytes > PAYLOAD_BYTES_MAX {
        return Err(bad_request("a page, or frame_bytes, is larger than a frame may be"));
    }
    Ok(largest)
}
