//! The sender's end of KV that other processes of this node have: for each process a queue of frames, and a task that
//! orders them.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use types::{Epoch, NodeId};

use super::connect::STREAMS_MAX;
use super::endpoints::Endpoints;
use super::span_out::SpanOut;
use super::stream::within;
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::processes::{OtherProcesses, PutOrder};

/// Limit of orders that a process has at once: enough that its stream is not idle while an order travels.
const PUTS_MAX: u32 = 4;
/// Limit of queued frames for each process.
const FRAMES_QUEUED_MAX: usize = 4;

/// The queues of one link's frames whose KV other processes have.
#[derive(Debug)]
pub(super) struct OtherQueues {
    processes: Arc<dyn OtherProcesses>,
    queues: Box<[Queue]>,
    endpoints: Arc<Endpoints>,
    link: u64,
    node: NodeId,
    epoch: Epoch,
    /// The number of this process's streams. The other processes have the next ones.
    n_streams: u16,
    stall: Duration,
}

/// Both ends of one queue. It is closed with the link.
#[derive(Debug)]
struct Queue {
    spans: async_channel::Sender<SpanOut>,
    to_order: async_channel::Receiver<SpanOut>,
}

/// Returns the number of streams that this process has of a link, if the settings want `wanted`.
pub(super) fn n_streams(parts: &ConnectorParts) -> u16 {
    let n_others = parts.processes.as_ref().map_or(0, |processes| processes.n_processes());
    let n_max = STREAMS_MAX.saturating_sub(n_others.try_into().unwrap_or(STREAMS_MAX)).max(1);
    parts.settings.streams.clamp(1, n_max)
}

impl OtherQueues {
    /// Makes the queues of a link; `None` if the node has one process.
    pub(super) fn of(parts: &ConnectorParts, endpoints: &Arc<Endpoints>, link: u64) -> Option<Self> {
        let processes = Arc::clone(parts.processes.as_ref()?);
        let queue = |_| {
            let (spans, to_order) = async_channel::bounded(FRAMES_QUEUED_MAX);
            Queue { spans, to_order }
        };
        Some(Self {
            queues: (0..processes.n_processes()).map(queue).collect(),
            processes,
            endpoints: Arc::clone(endpoints),
            link,
            node: parts.node.clone(),
            epoch: parts.epoch,
            n_streams: n_streams(parts),
            stall: parts.settings.stall(),
        })
    }

    pub(super) fn n_processes(&self) -> usize {
        self.queues.len()
    }

    /// Returns the queue of the process that has the pages of a span; `None` if this process has them.
    pub(super) fn queue_of(&self, span: &SpanOut) -> Option<&async_channel::Sender<SpanOut>> {
        let process = self.processes.process_of(span.first_layer(), span.piece.lane.from)?;
        Some(&self.queues[process].spans)
    }

    /// Orders the frames of one process, until the link is lost. Each frame keeps its lease until its put has returned.
    ///
    /// After a failure `lose` is called, which closes the queue. The puts that are under way then end by themselves.
    pub(super) async fn order_all(&self, process: usize, lose: impl Fn(TransferError)) {
        let spans = self.queues[process].to_order.clone();
        let mut puts = pin!(spans.map(|span| self.put(process, span)).buffer_unordered(PUTS_MAX as usize));
        while let Some(put) = puts.next().await {
            put.unwrap_or_else(&lose);
        }
    }

    async fn put(&self, process: usize, span: SpanOut) -> Result<(), TransferError> {
        if span.out.is_over() {
            return Ok(());
        }
        // A process whose stream makes no progress fails by itself. The deadline here is for a process that is stuck,
        // and includes the time of the frames before this one.
        let put = self.processes.put(process, self.order(process, &span));
        within((PUTS_MAX + 1) * self.stall, "another process of this node", put).await
    }

    fn order(&self, process: usize, span: &SpanOut) -> PutOrder {
        let pages = span.pages();
        PutOrder {
            endpoint: self.endpoints.endpoint_of(span.first_layer(), span.piece.lane.to).to_owned(),
            link: self.link,
            stream: self.n_streams + process as u16,
            node: self.node.clone(),
            epoch: self.epoch,
            transfer: pages.transfer,
            piece: span.piece.clone(),
            peer_tp_size: span.out.landing.layout.shard.tp_size,
            n_tokens: pages.n_tokens,
            blocks: pages.blocks.to_vec(),
        }
    }

    /// Empties the queues, and makes the processes close their streams of the link.
    pub(super) fn close(&self) {
        for Queue { spans, to_order } in &self.queues {
            spans.close();
            while to_order.try_recv().is_ok() {}
        }
        self.processes.close_link(self.link);
    }
}
