//! Room for a prompt's KV: the truth about whether a prompt fits here, asked and answered in one call.

use std::sync::Arc;

use kv_cache::{Holder, Holding};
use kv_transfer::{Arrival, KvConnector, LandRequest, Source};
use node::{Counted, DecodeSection, NodeParts, PeerWires};
use tracing::warn;
use types::{BlockHasher, Landing, Prompt, Refusal, RefusalKind};

/// Where a prompt's KV may come from.
#[derive(Clone, Debug)]
pub enum PrefillOffer {
    /// This prefill node would compute it.
    Offered(PeerWires),
    /// This prefill node has computed it.
    HeldBy(PeerWires),
    /// There is none.
    None,
}

/// What a prompt got.
#[derive(Debug)]
pub enum Reservation {
    /// It is computed here.
    Local { held_tokens: u32 },
    /// Its KV comes over a wire into leased blocks.
    Landing { landing: Box<Landing>, arrival: Arrival, arriving: Counted },
}

/// Gives room to prompts.
#[derive(Clone, Debug)]
pub struct Reservations {
    node: NodeParts,
    settings: DecodeSection,
}

impl Reservations {
    pub fn new(node: NodeParts, settings: DecodeSection) -> Self {
        Self { node, settings }
    }

    /// Reserves room for `prompt`, or says why there is none.
    pub fn reserve(&self, prompt: &Prompt, offer: &PrefillOffer) -> Result<Reservation, Refusal> {
        self.refuse_what_never_fits(prompt)?;
        let (peer, must_land) = match offer {
            PrefillOffer::None => return Ok(Reservation::Local { held_tokens: self.held_tokens(prompt) }),
            PrefillOffer::Offered(peer) => (peer, false),
            PrefillOffer::HeldBy(peer) => (peer, true),
        };
        let held_tokens = self.held_tokens(prompt);
        if !must_land && prompt.tokens.len() as u32 - held_tokens <= self.settings.local_tokens_max {
            return Ok(Reservation::Local { held_tokens });
        }
        match self.node.connectors.shared_with(peer) {
            Some(connector) => self.land(prompt, &connector),
            None if must_land => {
                Err(Refusal::new(RefusalKind::Mismatch, format!("no wire in common with {}", peer.node)))
            }
            None => {
                warn!(peer = %peer.node, "no wire in common, computing locally");
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

    /// Prompt tokens, from the front, whose KV is cached here.
    fn held_tokens(&self, prompt: &Prompt) -> u32 {
        let lease = self.node.pool.adopt(&self.hashes(prompt), self.holder(prompt));
        (lease.n_blocks() * usize::from(self.node.model.layout.block_tokens)) as u32
    }

    /// Leases the prompt's blocks, what is cached first, and grants the right to fill the rest.
    fn land(&self, prompt: &Prompt, connector: &Arc<dyn KvConnector>) -> Result<Reservation, Refusal> {
        let arriving = self.node.arriving.enter(self.settings.landings_max).ok_or_else(|| {
            Refusal::new(RefusalKind::Full, format!("{} landings are open", self.settings.landings_max))
        })?;
        let n_tokens = prompt.tokens.len();
        let held = self.node.pool.adopt(&self.hashes(prompt), self.holder(prompt));
        let held_blocks = held.n_blocks();
        let fresh = self.node.model.layout.blocks_for(n_tokens) - held_blocks;
        self.leave_room_to_grow(fresh)?;
        let fresh = self.node.pool.reserve(fresh, self.holder(prompt)).map_err(|no_room| full(&no_room))?;
        let request = LandRequest {
            transfer: self.node.world.transfer_id(),
            lease: held.join(fresh),
            n_tokens: n_tokens as u32,
            held_tokens: (held_blocks * usize::from(self.node.model.layout.block_tokens)) as u32,
            source: Source::Peer,
            deadline: prompt.deadline,
        };
        let (landing, arrival) = connector.land(request).map_err(|error| Refusal::from(&error))?;
        Ok(Reservation::Landing { landing: Box::new(landing), arrival, arriving })
    }

    /// Refuses a landing that would take the blocks into which running sequences are about to grow. `fresh`: of each group.
    fn leave_room_to_grow(&self, fresh: usize) -> Result<(), Refusal> {
        let fresh = fresh * self.node.model.layout.groups.len();
        let kept = self.node.worker.load().borrow().growth_reserve_blocks;
        let available = self.node.pool.counts().available();
        if fresh as u32 + kept > available {
            let reason =
                format!("{available} blocks are available, {fresh} asked for, {kept} kept for growth");
            return Err(Refusal::new(RefusalKind::Full, reason));
        }
        Ok(())
    }

    /// The hashes of the blocks that may be taken from the cache: all full ones but the last token's, because the
    /// last token must be computed for the first one to be sampled.
    fn hashes(&self, prompt: &Prompt) -> Vec<types::BlockHash> {
        let reusable = &prompt.tokens[..prompt.tokens.len() - 1];
        BlockHasher::hashes(&prompt.tenant, usize::from(self.node.model.layout.block_tokens), reusable)
    }

    fn holder(&self, prompt: &Prompt) -> Holder {
        Holder { what: Holding::Landing, request: prompt.id.clone() }
    }
}

fn full(no_room: &kv_cache::NoRoom) -> Refusal {
    Refusal::new(RefusalKind::Full, no_room.to_string())
}
