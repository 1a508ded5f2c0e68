//! Reserves KV room for prompts. A prompt without room waits in the worker's queue.

use std::sync::Arc;

use kv_cache::{Holder, Holding};
use kv_transfer::{Arrival, KvConnector, LandRequest};
use node::{CounterGuard, DecodeExpertSettings, NodeParts, PeerWires};
use scheduler::{GrantedRoom, RoomRequest};
use tracing::warn;
use types::{Landing, Prompt, Refusal, RefusalKind};

/// The source of a prompt's KV, as the router names it.
#[derive(Clone, Debug)]
pub enum PrefillOffer {
    /// The prefill node that can compute the KV.
    Offered(PeerWires),
    /// The node that has computed the KV and holds it.
    HeldBy(PeerWires),
    /// There is no prefill node: the decode node computes the KV.
    None,
}

/// Where the KV of a prompt comes from, once it is decided.
#[derive(Debug)]
pub enum Reservation {
    /// The decode node computes the prompt itself.
    Local { held_tokens: u32 },
    /// The KV arrives over a connector in leased blocks.
    Landing { landing: Box<Landing>, arrival: Arrival, arriving: CounterGuard },
}

/// Reserves KV room for prompts on one decode node.
#[derive(Clone, Debug)]
pub struct Reservations {
    node: NodeParts,
    settings: DecodeExpertSettings,
}

impl Reservations {
    pub fn new(node: NodeParts, settings: DecodeExpertSettings) -> Self {
        Self { node, settings }
    }

    /// Reserves room for `prompt`, and waits for it until the prompt's deadline. Dropping the future ends the
    /// wait.
    pub async fn reserve(&self, prompt: &Prompt, offer: &PrefillOffer) -> Result<Reservation, Refusal> {
        self.refuse_what_never_fits(prompt)?;
        let (peer, must_land) = match offer {
            PrefillOffer::Offered(peer) => (peer, false),
            PrefillOffer::HeldBy(peer) => (peer, true),
            PrefillOffer::None => return Ok(Reservation::Local { held_tokens: self.held_tokens(prompt) }),
        };
        let held_tokens = self.held_tokens(prompt);
        if !must_land && prompt.tokens.len() as u32 - held_tokens <= self.settings.local_tokens_max {
            return Ok(Reservation::Local { held_tokens });
        }
        match self.node.connectors.shared_with(peer) {
            Some(connector) => self.land(prompt, &connector).await,
            None if must_land => {
                Err(Refusal::new(RefusalKind::Mismatch, format!("no connector in common with {}", peer.node)))
            }
            None => {
                warn!(peer = %peer.node, "decode node and prefill node have no connector in common, the decode node computes the prompt");
                Ok(Reservation::Local { held_tokens })
            }
        }
    }

    fn refuse_what_never_fits(&self, prompt: &Prompt) -> Result<(), Refusal> {
        let layout = &self.node.model.layout;
        let needed = layout.blocks_of_all_groups(prompt.tokens_at_most());
        let total = self.node.pool.counts().total;
        if needed > total as usize {
            let reason = format!("prompt and answer need {needed} blocks of KV, this node has {total}");
            return Err(Refusal::new(RefusalKind::TooLong, reason));
        }
        Ok(())
    }

    /// Returns the number of leading prompt tokens whose KV is cached here and would not be computed.
    fn held_tokens(&self, prompt: &Prompt) -> u32 {
        if prompt.sampling.prompt_logprobs.is_some() {
            return 0;
        }
        let lease = self.node.pool.adopt(&self.hashes(prompt), self.holder(prompt));
        (lease.n_blocks() * usize::from(self.node.model.layout.block_tokens)) as u32
    }

    /// Waits for the prompt's blocks. Cached blocks are reused, and a landing is granted for the others.
    async fn land(&self, prompt: &Prompt, connector: &Arc<dyn KvConnector>) -> Result<Reservation, Refusal> {
        let n_tokens = prompt.tokens.len();
        let layout = &self.node.model.layout;
        let request = RoomRequest {
            holder: self.holder(prompt),
            priority: prompt.priority,
            deadline: prompt.deadline,
            hashes: self.hashes(prompt),
            n_blocks: layout.blocks_for(n_tokens),
            landings: self.node.arriving.clone(),
            landings_max: self.settings.landings_max,
        };
        let GrantedRoom { lease, cached_blocks, landing: arriving } = self.node.worker.room(request).await?;
        let request = LandRequest {
            transfer: self.node.world.transfer_id(),
            lease,
            n_tokens: n_tokens as u32,
            held_tokens: (cached_blocks * usize::from(layout.block_tokens)) as u32,
            deadline: prompt.deadline,
        };
        let (landing, arrival) = connector.land(request).map_err(|error| Refusal::from(&error))?;
        Ok(Reservation::Landing { landing: Box::new(landing), arrival, arriving })
    }

    /// Returns the hashes of the blocks that may come from the cache: the full blocks before the last token.
    /// The last token must be computed, because sampling the first output token needs its logits.
    fn hashes(&self, prompt: &Prompt) -> Vec<types::BlockHash> {
        let reusable = &prompt.tokens[..prompt.tokens.len() - 1];
        let key = self.node.world.identity().block_hash_key();
        prompt.hasher(&key, usize::from(self.node.model.layout.block_tokens)).hashes(reusable)
    }

    fn holder(&self, prompt: &Prompt) -> Holder {
        Holder { what: Holding::Landing, request: prompt.id.clone() }
    }
}
