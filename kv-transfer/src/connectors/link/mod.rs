//! Links of frames between two nodes: the code that all wires over streams share.
//!
//! Suggested reading order: frames ([`frame`]), their reading and writing (`stream`), the traits that each
//! wire implements (`send_path` for the sender's end, `kv_path` for the receiver's), the connector
//! ([`connector`]), the sender's end (`links`, `link_out`, `connect`, `span_out`, and
//! `other_processes` for a node with several processes) and the receiver's end (`accept`, `receiver`, `link_in`,
//! `span_in`, and `elsewhere` for a node with several processes). The code of both ends is the same for all
//! wires.
//!
//! If the receiver writes, it can prove by itself that the wire is quiet: see
//! [`OpenLanding::while_open`](crate::landing::OpenLanding). If the sender's device writes, the proof is the sender's
//! report, or the end of its right to write.

pub mod frame;
pub(crate) mod code;
pub(super) mod stream;
pub(super) mod send_path;
pub(super) mod kv_path;
pub(super) mod pieces;
pub(super) mod frame_digests;
pub(in crate::connectors) mod connect;
pub(super) mod links;
mod endpoints;
mod link_out;
mod other_processes;
pub(super) mod span_out;
pub(super) mod accept;
mod answers;
mod elsewhere;
pub(super) mod link_in;
pub(super) mod receiver;
pub(super) mod span_in;
pub mod connector;

use self::frame::PAYLOAD_BYTES_MAX;
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::bad_request;

/// Returns the size of the largest page. Refuses pages and `frame_bytes` settings that do not fit into one frame.
pub(super) fn check_pages(parts: &ConnectorParts) -> Result<usize, TransferError> {
    let layout = parts.memory.layout();
    let shapes = layout.groups.iter().flat_map(|group| &group.layers);
    let largest = shapes.map(|shape| layout.rank_page_bytes(*shape)).max().unwrap_or(0);
    if largest > PAYLOAD_BYTES_MAX || parts.settings.frame_bytes > PAYLOAD_BYTES_MAX {
        return Err(bad_request("a page, or frame_bytes, is larger than a frame may be"));
    }
    Ok(largest)
}
