//! Random operations on a pool, compared with the model.

use proptest::collection::vec;
use proptest::prelude::*;

use super::model::{Model, ModelHold};
use super::*;
use crate::events::tests::Mirror;
use crate::lease::Quarantine;

/// The number of kept events: few, so that readers lag.
const EVENTS_KEPT: usize = 3;
/// The longest prompt. Prompts have two letters and two tenants, so some share much, and some must not share.
const TOKENS_MAX: usize = 6;

/// One operation on a pool. Its numbers select among the model's holds.
#[derive(Clone, Debug)]
enum Op {
    /// Adopts the cached part of a prompt and reserves the rest.
    Start {
        tenant: bool,
        tokens: Vec<bool>,
    },
    Grow {
        nth: usize,
        n_blocks: usize,
    },
    /// Publishes the next blocks of a lease.
    Publish {
        nth: usize,
        n_blocks: usize,
    },
    Drop {
        nth: usize,
    },
    Quarantine {
        nth: usize,
    },
    Release {
        nth: usize,
    },
    /// Lets the lazy reader of events read.
    Read,
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = vec(any::<bool>(), 0..=TOKENS_MAX);
    prop_oneof![
        4 => (any::<bool>(), tokens).prop_map(|(tenant, tokens)| Op::Start { tenant, tokens }),
        1 => (0..8usize, 0..3usize).prop_map(|(nth, n_blocks)| Op::Grow { nth, n_blocks }),
        6 => (0..8usize, 1..=TOKENS_MAX).prop_map(|(nth, n_blocks)| Op::Publish { nth, n_blocks }),
        3 => (0..8usize).prop_map(|nth| Op::Drop { nth }),
        1 => (0..8usize).prop_map(|nth| Op::Quarantine { nth }),
        1 => (0..8usize).prop_map(|nth| Op::Release { nth }),
        1 => Just(Op::Read),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_pool_does_as_the_model_does(n_blocks in 0..24u32, n_groups in 1..3u16, ops in vec(op(), 1..80)) {
        let mut pair = Pair::new(n_blocks, n_groups);
        for op in ops {
            pair.apply(op);
            pair.compare();
        }
        pair.end();
    }
}

/// The pool and the model, with the leases and quarantines of the model's holds, in the same order.
struct Pair {
    pool: BlockPool,
    model: Model,
    held: Vec<Held>,
    eager: (BlockEvents, Mirror),
    lazy: (BlockEvents, Mirror),
}

struct Held {
    /// All hashes of the prompt. Blocks beyond the prompt have none.
    prompt: Vec<BlockHash>,
    right: Right,
}

enum Right {
    Lease(BlockLease),
    Quarantine(Quarantine),
}

impl Pair {
    fn new(n_blocks: u32, n_groups: u16) -> Self {
        let pool = BlockPool::with_events_kept(&layout(n_groups), n_blocks, EVENTS_KEPT);
        let eager = (pool.events(), Mirror::default());
        let lazy = (pool.events(), Mirror::default());
        Self { pool, model: Model::new(n_blocks, n_groups.into()), held: Vec::new(), eager, lazy }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Start { tenant, tokens } => self.start(tenant, &tokens),
            Op::Grow { nth, n_blocks } => self.grow(nth, n_blocks),
            Op::Publish { nth, n_blocks } => self.publish(nth, n_blocks),
            Op::Drop { nth } => self.end_one(nth, false),
            Op::Quarantine { nth } => self.quarantine(nth),
            Op::Release { nth } => self.end_one(nth, true),
            Op::Read => self.lazy.1.catch_up(&mut self.lazy.0),
        }
    }

    fn start(&mut self, tenant: bool, tokens: &[bool]) {
        let letters: String = tokens.iter().map(|token| if *token { 'a' } else { 'b' }).collect();
        let prompt = prompt_of(if tenant { "one" } else { "two" }, &letters);
        let cached = self.pool.adopt(&prompt, holder());
        let predicted = self.model.cached_prefix(&prompt);
        assert_eq!(blocks_of(&cached), predicted.blocks, "the cached prefix");
        let missing = prompt.len() - cached.n_blocks();
        self.model.holds.push(predicted);
        self.held.push(Held { prompt, right: Right::Lease(cached) });
        self.grow_nth(self.held.len() - 1, missing);
    }

    fn grow(&mut self, nth: usize, n_blocks: usize) {
        if let Some(nth) = self.pick(nth, false) {
            self.grow_nth(nth, n_blocks);
        }
    }

    /// Reserves more for a lease. The new blocks must have been free, or evicted as in the model.
    fn grow_nth(&mut self, nth: usize, n_blocks: usize) {
        let fresh = self.pool.reserve(n_blocks, holder());
        assert_eq!(fresh.is_ok(), self.model.make_room(n_blocks), "room for {n_blocks}");
        let Ok(fresh) = fresh else { return };
        for block in blocks_of(&fresh).into_iter().flatten() {
            assert_eq!(self.model.state(block), BlockState::Free, "block {block} is handed out");
        }
        self.model.holds[nth].blocks.extend(blocks_of(&fresh));
        self.replace(nth, |lease| Right::Lease(lease.join(fresh)));
    }

    fn publish(&mut self, nth: usize, n_blocks: usize) {
        let Some(nth) = self.pick(nth, false) else { return };
        let Held { prompt, right: Right::Lease(lease) } = &self.held[nth] else { return };
        let ModelHold { blocks, hashes, .. } = &self.model.holds[nth];
        let (from, until) = (hashes.len(), (hashes.len() + n_blocks).min(blocks.len()).min(prompt.len()));
        for (ordinal, hash) in prompt.iter().enumerate().take(until).skip(from) {
            lease.publish(ordinal, *hash);
            self.model.publish(nth, *hash);
        }
    }

    fn quarantine(&mut self, nth: usize) {
        let Some(nth) = self.pick(nth, false) else { return };
        self.replace(nth, |lease| Right::Quarantine(lease.quarantine("test")));
        self.model.quarantine(nth);
    }

    /// Drops a lease, or releases a quarantine.
    fn end_one(&mut self, nth: usize, quarantined: bool) {
        let Some(nth) = self.pick(nth, quarantined) else { return };
        self.model.release(nth);
        match self.held.remove(nth).right {
            Right::Lease(lease) => drop(lease),
            Right::Quarantine(quarantine) => quarantine.release(),
        }
    }

    /// Replaces a lease with another value.
    fn replace(&mut self, nth: usize, change: impl FnOnce(BlockLease) -> Right) {
        let Held { prompt, right } = self.held.remove(nth);
        let right = match right {
            Right::Lease(lease) => change(lease),
            quarantine => quarantine,
        };
        self.held.insert(nth, Held { prompt, right });
    }

    /// Selects one of the leases, or of the quarantines, if there are any.
    fn pick(&self, nth: usize, quarantined: bool) -> Option<usize> {
        let of_kind = |nth: &usize| self.model.holds[*nth].quarantined == quarantined;
        let candidates: Vec<usize> = (0..self.model.holds.len()).filter(of_kind).collect();
        (!candidates.is_empty()).then(|| candidates[nth % candidates.len()])
    }

    fn compare(&mut self) {
        assert_eq!(self.pool.integrity(), Ok(()));
        assert_eq!(self.pool.counts(), self.model.counts());
        for entry in self.pool.ledger() {
            assert_eq!(entry.state, self.model.state(entry.block.0), "{:?}", entry.block);
        }
        self.eager.1.catch_up(&mut self.eager.0);
        assert!(self.eager.1.hashes.iter().eq(self.model.index.keys()), "the index, by its events");
    }

    /// Ends all holds. Every block comes back, and a reader that lagged catches up.
    fn end(mut self) {
        while !self.held.is_empty() {
            self.end_one(0, self.model.holds[0].quarantined);
            self.compare();
        }
        let counts = self.pool.counts();
        assert_eq!(counts.available(), counts.total);
        self.lazy.1.catch_up(&mut self.lazy.0);
        assert_eq!(self.lazy.1.hashes, self.eager.1.hashes);
    }
}

/// Returns the blocks of all groups, place by place.
fn blocks_of(lease: &BlockLease) -> Vec<Vec<u32>> {
    (0..lease.n_blocks()).map(|ordinal| lease.blocks_at(ordinal)).collect()
}
