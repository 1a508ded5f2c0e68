//! Makes the streams of a link: the sender's hello, and the receiver's welcome.

use std::sync::Arc;

use types::node::{PROTOCOL, ProtocolMismatch};
use types::{Epoch, NodeId};

use super::frame::{Body, Frame, FrameError, Hello, ProcessAddress};
use super::send_path::KvSendPath;
use super::stream::{FrameHalves, FrameReader, FrameWriter, within};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;

/// Limit of streams of one link.
pub(in crate::connectors) const STREAMS_MAX: u16 = 64;

/// The node at the other end of a link, and its epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::connectors) struct Peer {
    pub(in crate::connectors) node: NodeId,
    pub(in crate::connectors) epoch: Epoch,
}

/// A peer's answer to a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::connectors) struct Met {
    pub(in crate::connectors) peer: Peer,
    /// The peer's other processes, on stream 0 of a node with several processes.
    pub(in crate::connectors) others: Vec<ProcessAddress>,
}

/// The parameters that all streams of one link have in common.
pub(in crate::connectors) struct StreamParams<'a> {
    pub(in crate::connectors) endpoint: &'a str,
    pub(in crate::connectors) parts: &'a ConnectorParts,
    pub(in crate::connectors) send_path: &'a dyn KvSendPath,
    pub(in crate::connectors) link: u64,
}

impl StreamParams<'_> {
    /// Makes one stream, and returns the peer's answer.
    pub(in crate::connectors) async fn stream(
        &self,
        stream: u16,
    ) -> Result<(Met, FrameHalves), TransferError> {
        let (parts, stall) = (self.parts, self.parts.settings.stall());
        let refused =
            |source| TransferError::Connect { addr: self.endpoint.to_owned(), source: Arc::new(source) };
        let connect = async { self.send_path.connect(self.endpoint, stream).await.map_err(refused) };
        let (reader, writer) = within(stall, "connecting", connect).await?.into_split();
        let (mut reader, mut writer) = (FrameReader::new(reader, stall), FrameWriter::new(writer, stall));
        let (node, epoch, link) = (parts.node.clone(), parts.epoch, self.link);
        let hello = Hello { protocol: PROTOCOL, node, epoch, link, stream };
        writer.write(&Frame::of_link(Body::Hello(hello))).await?;
        let met = welcomed(reader.next_in_time().await?)?;
        Ok((met, FrameHalves { reader, writer }))
    }
}

/// Returns the answer if it is in a version that this side supports.
fn welcomed(answer: Option<Frame>) -> Result<Met, TransferError> {
    match answer.map(|frame| frame.body) {
        Some(Body::Welcome { version, node, epoch, others })
            if (PROTOCOL.min..=PROTOCOL.max).contains(&version) =>
        {
            if others.len() > usize::from(STREAMS_MAX) {
                return Err(FrameError::Body("too many processes").into());
            }
            Ok(Met { peer: Peer { node, epoch }, others })
        }
        Some(Body::Incompatible { protocol }) => {
            Err(ProtocolMismatch { ours: PROTOCOL, theirs: protocol }.into())
        }
        Some(_) => Err(FrameError::Unexpected("an answer other than a welcome").into()),
        None => Err(TransferError::lost_because("the peer closed the connection instead of a welcome")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_welcome_in_an_unknown_version_is_refused() {
        let answer = |version: u16| {
            let (node, epoch) = (NodeId::new("d"), Epoch(7));
            Some(Frame::of_link(Body::Welcome { version, node, epoch, others: Vec::new() }))
        };
        let met = welcomed(answer(PROTOCOL.max)).expect("this side speaks it");
        assert_eq!(met.peer, Peer { node: NodeId::new("d"), epoch: Epoch(7) });
        for version in [PROTOCOL.min - 1, PROTOCOL.max + 1] {
            welcomed(answer(version)).expect_err("this side does not speak it");
        }
    }
}
