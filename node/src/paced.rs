//! Slows a connector down to the speed of a modelled network, for load tests with a mock model.

use std::sync::Arc;

use async_trait::async_trait;
use engine::backend::mock::Costs;
use kv_cache::{BlockLease, LayerFence};
use kv_transfer::{Arrival, KvConnector, KvSender, LandRequest, TransferError};
use types::{Destination, Handoff, KvLayout, KvSpan, Landing, Scheme, WireAddress};

/// A connector with the modelled cost of sending over it.
#[derive(Debug)]
pub(crate) struct PacedConnector {
    pub(crate) inner: Arc<dyn KvConnector>,
    pub(crate) costs: Costs,
    pub(crate) layout: Arc<KvLayout>,
}

#[derive(Debug)]
struct PacedSender {
    inner: Box<dyn KvSender>,
    costs: Costs,
    layout: Arc<KvLayout>,
}

#[async_trait]
impl KvConnector for PacedConnector {
    fn scheme(&self) -> Scheme {
        self.inner.scheme()
    }

    fn address(&self) -> WireAddress {
        self.inner.address()
    }

    fn reaches(&self, wire: &WireAddress) -> bool {
        self.inner.reaches(wire)
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        self.inner.land(request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        let inner = self.inner.open(to).await?;
        Ok(Box::new(PacedSender { inner, costs: self.costs, layout: self.layout.clone() }))
    }
}

#[async_trait]
impl KvSender for PacedSender {
    async fn send(
        &mut self,
        span: KvSpan,
        from: Arc<BlockLease>,
        ready: LayerFence,
    ) -> Result<(), TransferError> {
        tokio::time::sleep(self.costs.of_sending(bytes_of(&self.layout, &span))).await;
        self.inner.send(span, from, ready).await
    }

    async fn finish(self: Box<Self>, handoff: Handoff) -> Result<(), TransferError> {
        self.inner.finish(handoff).await
    }
}

/// Returns the number of bytes of KV in a span.
fn bytes_of(layout: &KvLayout, span: &KvSpan) -> u64 {
    let layers =
        &layout.group(span.group).layers[usize::from(span.layers.start)..usize::from(span.layers.end)];
    let block_bytes: usize = layers.iter().map(|shape| layout.page_bytes(*shape)).sum();
    (span.blocks.len() * block_bytes) as u64
}

#[cfg(test)]
mod tests {
    use types::{GroupIdx, KvDtype};

    use super::*;

    #[test]
    fn a_span_weighs_its_layers_times_its_blocks() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 32, 8, 128);
        for (blocks, layers, expected) in [(0..1, 0..1, 64 << 10), (3..5, 0..32, 4 << 20), (2..2, 0..32, 0)] {
            let span = KvSpan { group: GroupIdx(0), blocks, layers };
            assert_eq!(bytes_of(&layout, &span), expected, "{span:?}");
        }
    }
}
