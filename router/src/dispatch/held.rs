//! Prefill first: KV that is computed before a decode node is chosen, and the node that keeps it until then.
//!
//! A pool node keeps the KV if possible, and otherwise the prefill node does.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::{info, warn};
use types::{BlockHash, Deadline, Destination, Landing, NodeInfo, Prompt, RefusalKind, TransferId};

use super::{Attempts, Chosen, Dispatch, Progress, StartedRequest, StepSource};
use crate::breaker::Trial;
use crate::error::ServeError;
use crate::metrics::Stage;
use crate::policy::{AllowedArms, Ask, Route};
use crate::requests::{Part, RequestEvent, RequestRecord};
use crate::rpc::{DecodeCall, Failure, NodeClient, Opening, PrefillCall, PrefillOffer, PutCall};
use crate::watchdog::WaitStage;

/// KV that waits for a landing. Dropping it releases the KV on the node that keeps it.
#[derive(Debug)]
pub(crate) struct HeldKv {
    by: Arc<NodeInfo>,
    /// The client of that node. It works after the node has left the registry, because a draining node still
    /// delivers its KV.
    client: NodeClient,
    transfer: TransferId,
    /// The prompt whose KV is held. For a continuation it is longer than the client's prompt.
    prompt: Prompt,
    hashes: Arc<[BlockHash]>,
    how: KvHolder,
}

/// The call that keeps the KV on its node.
#[derive(Debug)]
enum KvHolder {
    /// The KV is in a prefill node's outbox.
    AtPrefill(PrefillCall),
    /// The KV is on a pool node, or on its way there from a prefill node.
    InPool { put: Box<PutCall>, sender: PrefillCall },
}

impl HeldKv {
    /// Attaches the prefill call to the decode call if a prefill node may still be sending and report a
    /// failure. A pool node has sent everything.
    fn with_sender(self, mut decode: DecodeCall) -> DecodeCall {
        if let KvHolder::AtPrefill(call) = self.how {
            decode.kv_from(call);
        }
        decode
    }
}

impl Dispatch {
    /// Computes a prompt and keeps its KV. [`Self::deliver`] chooses a decode node afterwards.
    pub(super) async fn prefill_first(
        &self,
        ask: Ask<'_>,
        prefill: &Arc<NodeInfo>,
        record: &RequestRecord,
    ) -> Result<StartedRequest, Failure> {
        if let Some(keeper) = self.keeper(ask.prompt, prefill) {
            record.note(RequestEvent::Store { pool: keeper.id.clone() });
            record.enter_part(Part::Store);
            match self.store(ask, prefill, &keeper, record).await {
                Err(failure) if failure.node.id == keeper.id => {
                    record.enter_part(Part::PrefillCall);
                    self.fall_back(&failure, ask.prompt.deadline, record);
                }
                started => return started,
            }
        }
        self.hold(ask, prefill, record).await
    }

    /// Returns the pool node for a prompt; `None` for a prompt that fills no block, because it has no hash.
    fn keeper(&self, prompt: &Prompt, prefill: &NodeInfo) -> Option<Arc<NodeInfo>> {
        let block_tokens = usize::from(prefill.model.layout.block_tokens);
        let key = self.parts.world.identity().block_hash_key();
        let first = prompt.hasher(&key, block_tokens).next(prompt.tokens.get(..block_tokens)?);
        self.parts.cluster.keeper(first, &prefill.model)
    }

    /// Reserves room on a pool node and computes the prompt; the prefill node sends its KV there layer by
    /// layer.
    async fn store(
        &self,
        ask: Ask<'_>,
        prefill: &NodeInfo,
        keeper: &Arc<NodeInfo>,
        record: &RequestRecord,
    ) -> Result<StartedRequest, Failure> {
        let (prompt, client) = (ask.prompt, self.client(keeper)?);
        let mut put = client.put(prompt, prefill).await?;
        let landing = put.opening().await?;
        record.enter_part(Part::PrefillCall);
        let (transfer, to) = (landing.transfer, Destination::Landing(landing));
        let computing = self.client(prefill)?;
        let (prefilled, sender) = tokio::select! {
            biased;
            prefilled = computing.prefill(prompt, &to) => {
                prefilled.map_err(|failure| blame_receiver(failure, keeper))?
            }
            failure = put.failure() => return Err(failure),
        };
        self.breakers.succeeded(&prefill.id);
        record.prefilled(&prefilled);
        let (by, how) = (keeper.clone(), KvHolder::InPool { put: Box::new(put), sender });
        let held = HeldKv { by, client, transfer, prompt: prompt.clone(), hashes: ask.hashes.into(), how };
        Ok(self.started(prompt, prefilled, StepSource::Held(Box::new(held))))
    }

    /// Computes the prompt and keeps its KV on the prefill node.
    async fn hold(
        &self,
        ask: Ask<'_>,
        prefill: &Arc<NodeInfo>,
        record: &RequestRecord,
    ) -> Result<StartedRequest, Failure> {
        let (prompt, transfer) = (ask.prompt, self.parts.world.transfer_id());
        let client = self.client(prefill)?;
        let (prefilled, call) = client.prefill(prompt, &Destination::Held(transfer)).await?;
        self.breakers.succeeded(&prefill.id);
        record.prefilled(&prefilled);
        let (by, how) = (prefill.clone(), KvHolder::AtPrefill(call));
        let held = HeldKv { by, client, transfer, prompt: prompt.clone(), hashes: ask.hashes.into(), how };
        Ok(self.started(prompt, prefilled, StepSource::Held(Box::new(held))))
    }

    /// Counts a prompt that the pool did not accept. The first failure of a pool node since its last report
    /// is logged.
    fn fall_back(&self, failure: &Failure, deadline: Deadline, record: &RequestRecord) {
        let kind = failure.refusal.kind;
        record.note(RequestEvent::Failed { node: failure.node.id.clone(), code: kind.code() });
        self.parts.metrics.pool_fallbacks.with_label_values(&[kind.code()]).inc();
        if self.is_late(deadline) {
            return;
        }
        let (node, refusal) = (&failure.node.id, &failure.refusal);
        match (self.parts.cluster.suspect(node), kind) {
            (true, RefusalKind::Full | RefusalKind::Draining) => {
                info!(%node, %refusal, "pool node refused KV, prefill nodes hold it");
            }
            (true, _) => warn!(%node, %refusal, "pool node failed, prefill nodes hold KV"),
            (false, _) => {}
        }
    }

    /// Chooses a decode node for held KV and asks the KV's holder to send it there.
    pub(crate) async fn deliver(
        &self,
        mut held: HeldKv,
        record: &RequestRecord,
    ) -> Result<DecodeCall, ServeError> {
        let _waiting = self.stages.enter(WaitStage::Deliver, record);
        self.wait_until_stored(&mut held).await.map_err(|failure| self.lost(&held, failure, record))?;
        let mut tries = Attempts::new(self, Progress::Begun, held.prompt.deadline, record);
        let (prompt, hashes) = (held.prompt.clone(), Arc::clone(&held.hashes));
        let by = Arc::clone(&held.by);
        let ask = Ask {
            prompt: &prompt,
            hashes: &hashes,
            arms: AllowedArms::OnlyHeld { by: &by },
            objective: record.objective(),
        };
        loop {
            record.enter_part(Part::Route);
            let Chosen { decision, assigned, trials } = tries.route(&ask).await?;
            self.parts.metrics.predictions.decided(&decision);
            assigned.decode_called(self.parts.world.now());
            let to = &decision.route.decode;
            record.note(RequestEvent::Deliver { decode: to.id.clone() });
            match self.deliver_to(&held, to, tries.room_by(), record).await {
                Ok(mut decode) => {
                    if let KvHolder::InPool { .. } = held.how {
                        trials.iter().for_each(Trial::kv_arrived);
                    }
                    decode.tried_by(trials);
                    record.streams_on(assigned.into_stream());
                    return Ok(held.with_sender(decode));
                }
                Err(failure) if failure.node.id == held.by.id => {
                    return Err(self.lost(&held, failure, record));
                }
                Err(failure) => {
                    let route = Route { prefill: Some(Arc::clone(&by)), decode: Arc::clone(to) };
                    tries.failed(failure, Some(&route)).await?;
                }
            }
        }
    }

    /// Waits until a pool node has all KV, so that the decode node is chosen by its load at that moment.
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

    /// Makes the error for lost KV. The continuation computes the KV again.
    fn lost(&self, held: &HeldKv, failure: Failure, record: &RequestRecord) -> ServeError {
        let is_pools = matches!(held.how, KvHolder::InPool { .. }) && failure.node.id == held.by.id;
        if is_pools {
            self.fall_back(&failure, held.prompt.deadline, record);
        }
        failure.into()
    }

    async fn deliver_to(
        &self,
        held: &HeldKv,
        to: &NodeInfo,
        room_by: Instant,
        record: &RequestRecord,
    ) -> Result<DecodeCall, Failure> {
        record.enter_part(Part::Reserve);
        let offer = PrefillOffer::HeldBy(&held.by);
        let mut decode = self.client(to)?.decode(&held.prompt, offer, record.detail()).await?;
        let opening = decode.opening(room_by).await?;
        record.enter_part(Part::Transfer);
        match opening {
            Opening::Landing(landing) => self.send(held, &landing, &mut decode, to).await?,
            Opening::Local { .. } => return Err(decode.unasked_local()),
        }
        Ok(decode)
    }

    /// Asks the KV's holder to send it to the landing. A prefill node answers when it begins to send, a pool
    /// node when it has sent all KV.
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

/// Attributes a sender's failure of the connection or the landing to the receiver, so that another receiver
/// is chosen.
fn blame_receiver(failure: Failure, receiver: &NodeInfo) -> Failure {
    match failure.refusal.kind {
        RefusalKind::Wire | RefusalKind::Landing | RefusalKind::Mismatch => {
            Failure { node: Arc::new(receiver.clone()), ..failure }
        }
        _ => failure,
    }
}
