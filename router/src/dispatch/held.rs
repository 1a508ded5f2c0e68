//! Prefill first: KV that is computed before a decode node is chosen, and the node that keeps it until then.
//!
//! A pool node keeps it, if there is one for it; otherwise, and wherever the pool does not, the prefill node itself.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::{info, warn};
use types::{BlockHash, BlockHasher, Destination, Landing, NodeInfo, Prompt, RefusalKind, TransferId};

use super::{Attempts, Dispatch, Progress, Started, StepSource};
use crate::error::ServeError;
use crate::metrics::Stage;
use crate::policy::Route;
use crate::rpc::{DecodeCall, Failure, NodeClient, Opening, PrefillCall, PrefillOffer, PutCall};
use crate::watchdog::WaitStage;

/// KV that waits for a landing. Dropping it releases it where it is.
#[derive(Debug)]
pub(crate) struct HeldKv {
    by: Arc<NodeInfo>,
    /// The way to it, which is there for as long as the node is: one that has withdrawn gives out what it has.
    client: NodeClient,
    transfer: TransferId,
    /// What it is the KV of. A continuation's is longer than the one that the client asked with.
    prompt: Prompt,
    how: KvHolder,
}

/// Which call keeps it where it is.
#[derive(Debug)]
enum KvHolder {
    /// In a prefill node's outbox.
    AtPrefill(PrefillCall),
    /// On a pool node, or on its way there from a prefill node.
    InPool { put: Box<PutCall>, sender: PrefillCall },
}

impl HeldKv {
    /// A prefill node may still be sending, and says if that fails; a pool node has sent.
    fn with_sender(self, mut decode: DecodeCall) -> DecodeCall {
        if let KvHolder::AtPrefill(call) = self.how {
            decode.kv_from(call);
        }
        decode
    }
}

/// Who is to keep a prompt's KV, and by which hashes.
struct PoolTarget {
    node: Arc<NodeInfo>,
    hashes: Vec<BlockHash>,
}

impl Dispatch {
    /// The prompt is computed; [`Self::deliver`] finds it a decode node.
    pub(super) async fn prefill_first(
        &self,
        prompt: &Prompt,
        prefill: &Arc<NodeInfo>,
    ) -> Result<Started, Failure> {
        if let Some(keeper) = self.keeper(prompt, prefill) {
            match self.store(prompt, prefill, &keeper).await {
                Err(failure) if failure.node.id == keeper.node.id => self.fall_back(&failure),
                started => return started,
            }
        }
        self.hold(prompt, prefill).await
    }

    /// The pool cannot find a prompt again that fills no block: such KV stays with its prefill node.
    fn keeper(&self, prompt: &Prompt, prefill: &NodeInfo) -> Option<PoolTarget> {
        let block_tokens = usize::from(prefill.model.layout.block_tokens);
        let hashes_of = |tokens| BlockHasher::hashes(&prompt.tenant, block_tokens, tokens);
        let first = hashes_of(prompt.tokens.get(..block_tokens)?)[0];
        let node = self.parts.cluster.keeper(first, &prefill.model)?;
        Some(PoolTarget { node, hashes: hashes_of(&prompt.tokens) })
    }

    /// A pool node makes room, and the prefill node sends its KV there, layer by layer.
    async fn store(
        &self,
        prompt: &Prompt,
        prefill: &NodeInfo,
        keeper: &PoolTarget,
    ) -> Result<Started, Failure> {
        let client = self.client(&keeper.node)?;
        let mut put = client.put(prompt, &keeper.hashes, prefill).await?;
        let landing = put.opening().await?;
        let (transfer, to) = (landing.transfer, Destination::Landing(landing));
        let computing = self.client(prefill)?;
        let (prefilled, sender) = tokio::select! {
            biased;
            prefilled = computing.prefill(prompt, &to) => {
                prefilled.map_err(|failure| blame_receiver(failure, &keeper.node))?
            }
            failure = put.failure() => return Err(failure),
        };
        let (by, how) = (keeper.node.clone(), KvHolder::InPool { put: Box::new(put), sender });
        let held = HeldKv { by, client, transfer, prompt: prompt.clone(), how };
        Ok(self.started(prompt, prefilled, StepSource::Held(Box::new(held))))
    }

    /// The prefill node keeps the KV in its outbox.
    async fn hold(&self, prompt: &Prompt, prefill: &Arc<NodeInfo>) -> Result<Started, Failure> {
        let transfer = self.parts.world.transfer_id();
        let client = self.client(prefill)?;
        let (prefilled, call) = client.prefill(prompt, &Destination::Held(transfer)).await?;
        let (by, how) = (prefill.clone(), KvHolder::AtPrefill(call));
        let held = HeldKv { by, client, transfer, prompt: prompt.clone(), how };
        Ok(self.started(prompt, prefilled, StepSource::Held(Box::new(held))))
    }

    /// The pool does without this prompt. A full one is no surprise; another failure is said once, until it speaks again.
    fn fall_back(&self, failure: &Failure) {
        let kind = failure.refusal.kind;
        self.parts.metrics.pool_fallbacks.with_label_values(&[kind.code()]).inc();
        let (node, refusal) = (&failure.node.id, &failure.refusal);
        match (self.parts.cluster.suspect(node), kind) {
            (true, RefusalKind::Full | RefusalKind::Draining) => {
                info!(%node, %refusal, "the pool takes no kv, prefill nodes hold it");
            }
            (true, _) => warn!(%node, %refusal, "the pool failed, prefill nodes hold kv"),
            (false, _) => {}
        }
    }

    /// Chooses a decode node for KV that is held, and has it sent there.
    pub(crate) async fn deliver(&self, mut held: HeldKv) -> Result<DecodeCall, ServeError> {
        let _waiting = self.stages.enter(WaitStage::Deliver);
        self.wait_until_stored(&mut held).await.map_err(|failure| self.lost(&held, failure))?;
        let mut tries = Attempts::new(&self.parts, Progress::Begun);
        loop {
            let route = tries.route(&held.prompt).await?;
            self.parts.cluster.assign(&Route { prefill: None, ..route.clone() }, held.prompt.tokens.len());
            match self.deliver_to(&held, &route.decode, tries.room_by()).await {
                Ok(decode) => return Ok(held.with_sender(decode)),
                Err(failure) if failure.node.id == held.by.id => return Err(self.lost(&held, failure)),
                Err(failure) => tries.failed(failure).await?,
            }
        }
    }

    /// A decode node is chosen when the KV is there, by the load of that moment.
    async fn wait_until_stored(&self, held: &mut HeldKv) -> Result<(), Failure> {
        let KvHolder::InPool { put, sender } = &mut held.how else { return Ok(()) };
        let took = tokio::select! {
            biased;
            took = put.stored() => took?,
            loss = sender.loss() => return Err(blame_receiver(loss, &held.by)),
        };
        self.parts.metrics.stage(Stage::Store, took);
        Ok(())
    }

    /// Without the KV there is nothing to deliver: the continuation computes it again.
    fn lost(&self, held: &HeldKv, failure: Failure) -> ServeError {
        let is_pools = matches!(held.how, KvHolder::InPool { .. }) && failure.node.id == held.by.id;
        if is_pools {
            self.fall_back(&failure);
        }
        failure.into()
    }

    async fn deliver_to(
        &self,
        held: &HeldKv,
        to: &NodeInfo,
        room_by: Instant,
    ) -> Result<DecodeCall, Failure> {
        let mut decode = self.client(to)?.decode(&held.prompt, PrefillOffer::HeldBy(&held.by)).await?;
        match decode.opening(room_by).await? {
            Opening::Landing(landing) => self.send(held, &landing, &mut decode, to).await?,
            Opening::Local { .. } => return Err(decode.unasked_local()),
        }
        Ok(decode)
    }

    /// A prefill node says that it sends; a pool node, that it has sent.
    async fn send(
        &self,
        held: &HeldKv,
        landing: &Landing,
        decode: &mut DecodeCall,
        to: &NodeInfo,
    ) -> Result<(), Failure> {
        if let KvHolder::AtPrefill(_) = held.how {
            return held.client.deliver(held.transfer, landing).await;
        }
        tokio::select! {
            biased;
            fetched = held.client.fetch(&held.prompt, held.transfer, landing) => {
                fetched.map_err(|failure| blame_receiver(failure, to))
            }
            failure = decode.failure() => Err(failure),
        }
    }
}

/// What a sender says of a wire or a landing is about the node at its other end.
fn blame_receiver(failure: Failure, receiver: &NodeInfo) -> Failure {
    match failure.refusal.kind {
        RefusalKind::Wire | RefusalKind::Landing | RefusalKind::Mismatch => {
            Failure { node: Arc::new(receiver.clone()), ..failure }
        }
        _ => failure,
    }
}
