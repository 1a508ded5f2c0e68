//! The two nodes of a measurement with their own memory, and the blocks between which KV moves.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use chassis::identity::{CertName, Identity, Tls};
use chassis::{Gate, World};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use kv_transfer::{ConnectorParts, Faults, KvConnector, LandRequest, TransferMetrics, TransferSettings};
use types::prompt::TokenId;
use types::step::Step;
use types::{Destination, Fingerprint, GroupIdx, Handoff, KvSpan, NodeId, RequestId};

use crate::bench_transfer::cards::{self, Side};
use crate::bench_transfer::case::{Blocks, Case, Digests, Layers, Memory, Shape};
use crate::bench_transfer::contents;
use crate::certs::Authority;
use crate::exit::CommandError;

/// The only layer group: all layers have the same shape.
pub(super) const GROUP: GroupIdx = GroupIdx(0);
const LANDING_FOR: Duration = Duration::from_secs(120);
/// The longest time that the connectors' tasks and threads may take to end.
const CLOSES_WITHIN: Duration = Duration::from_secs(20);

#[derive(Debug)]
struct End {
    memory: KvMemory,
    pool: BlockPool,
    connector: Arc<dyn KvConnector>,
    /// Blocks that stay leased, so that the blocks of the sequence are no neighbours.
    #[expect(dead_code, reason = "held for its Drop")]
    between: Vec<BlockLease>,
}

/// Two nodes, and one sequence on the near one.
#[derive(Debug)]
pub struct Ends {
    shape: Shape,
    layers: Layers,
    world: World,
    gate: Gate,
    near: End,
    far: End,
    from: Arc<BlockLease>,
}

/// Neighbouring blocks of one layer, with their places on both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub layer: u16,
    pub near: Range<u32>,
    pub far: Range<u32>,
}

impl Ends {
    pub async fn new(case: &Case) -> Result<Self, CommandError> {
        let shape = Shape::of(case.bytes).ok_or_else(|| {
            CommandError::usage(format!("{} bytes are no whole number of pages", case.bytes))
        })?;
        let world = World::real();
        let gate = Gate::new("bench");
        let [of_near, of_far] = if case.tls { secured(&world)? } else { [world.clone(), world.clone()] };
        let near = End::new(Side::Near, case, &shape, &of_near, &gate).await?;
        let far = End::new(Side::Far, case, &shape, &of_far, &gate).await?;
        let from = Arc::new(near.room(shape.n_blocks)?);
        Ok(Self { shape, layers: case.layers, world, gate, near, far, from })
    }

    /// Runs one transfer, from the request for a landing to the report that all KV has arrived.
    ///
    /// Returns the lease of the blocks on the far side.
    pub async fn transfer(&self) -> Result<BlockLease, CommandError> {
        let request = LandRequest {
            transfer: self.world.transfer_id(),
            lease: self.far.room(self.shape.n_blocks)?,
            n_tokens: self.shape.n_tokens(),
            held_tokens: 0,
            deadline: self.world.deadline_in(LANDING_FOR),
        };
        let (landing, arrival) = self.far.connector.land(request).map_err(failed)?;
        let transfer = landing.transfer;
        let mut sender = self.near.connector.open(&Destination::Landing(landing)).await.map_err(failed)?;
        for layers in self.sends() {
            let span = KvSpan { group: GROUP, blocks: 0..self.shape.n_blocks, layers };
            sender.send(span, Arc::clone(&self.from), LayerFence::open()).await.map_err(failed)?;
        }
        let first = Step { token: TokenId(0), index: 0, logprobs: None, finish: None };
        sender.finish(Handoff { transfer, n_tokens: self.shape.n_tokens(), first }).await.map_err(failed)?;
        arrival.settle().await.map(|arrived| arrived.lease).map_err(failed)
    }

    /// Waits until the connectors' tasks and threads have ended. A thread that still runs when the process
    /// exits would use a GPU whose driver is unloaded.
    pub async fn close(self) -> Result<(), CommandError> {
        let gate = self.gate.clone();
        drop(self);
        gate.close(CLOSES_WITHIN).await.map_err(failed)
    }

    fn sends(&self) -> Vec<Range<u16>> {
        let n_layers = self.shape.layout.group(GROUP).layers.len() as u16;
        match self.layers {
            Layers::AtOnce => std::iter::once(0..n_layers).collect(),
            Layers::Streamed => (0..n_layers).map(|layer| layer..layer + 1).collect(),
        }
    }

    /// Returns the runs of a plain copy of the same bytes, to the far blocks that a transfer would get, and
    /// the lease of these blocks.
    pub fn runs(&self) -> Result<(Vec<Run>, BlockLease), CommandError> {
        let room = self.far.room(self.shape.n_blocks)?;
        Ok((self.runs_to(&room), room))
    }

    fn runs_to(&self, room: &BlockLease) -> Vec<Run> {
        let pairs: Vec<(u32, u32)> =
            self.from.table(GROUP).iter().zip(room.table(GROUP)).map(|(near, far)| (near.0, far.0)).collect();
        let mut runs = Vec::new();
        for layer in 0..self.shape.layout.group(GROUP).layers.len() as u16 {
            for run in pairs.chunk_by(|a, b| (a.0 + 1, a.1 + 1) == *b) {
                let (first, last) = (run[0], run[run.len() - 1]);
                runs.push(Run { layer, near: first.0..last.0 + 1, far: first.1..last.1 + 1 });
            }
        }
        runs
    }

    /// Returns the number of bytes of one transfer.
    pub fn bytes(&self) -> usize {
        self.shape.layout.block_bytes(GROUP) * self.shape.n_blocks as usize
    }

    pub fn memories(&self) -> (&KvMemory, &KvMemory) {
        (&self.near.memory, &self.far.memory)
    }

    /// Returns whether the far blocks in `room` have the content of the near ones.
    pub fn are_equal(&self, room: &BlockLease) -> Result<bool, CommandError> {
        contents::are_equal(&self.near.memory, &self.far.memory, &self.runs_to(room))
    }
}

impl End {
    async fn new(
        side: Side,
        case: &Case,
        shape: &Shape,
        world: &World,
        gate: &Gate,
    ) -> Result<Self, CommandError> {
        let name = match side {
            Side::Near => "near",
            Side::Far => "far",
        };
        let n_blocks = match case.blocks {
            Blocks::Contiguous => shape.n_blocks,
            Blocks::Scattered => 2 * shape.n_blocks,
        };
        let memory = match case.memory {
            Memory::Host => KvMemory::host(shape.layout.clone(), n_blocks).map_err(failed)?,
            Memory::Gpus => cards::memory(side, shape.layout.clone(), n_blocks)?,
        };
        let pool = BlockPool::new(&shape.layout, n_blocks);
        let between = match case.blocks {
            Blocks::Contiguous => Vec::new(),
            Blocks::Scattered => every_second(&pool, n_blocks)?,
        };
        let settings = TransferSettings {
            streams: case.streams,
            digests: case.digests == Digests::On,
            ..TransferSettings::default()
        };
        let parts = ConnectorParts {
            node: NodeId::new(name),
            epoch: world.epoch(),
            memory: memory.clone(),
            fingerprint: Fingerprint::default(),
            world: world.clone(),
            gate: gate.clone(),
            settings,
            metrics: TransferMetrics::default(),
            faults: Faults::none(),
            processes: None,
        };
        let connector = kv_transfer::build(&case.connector, parts).await.map_err(failed)?;
        match side {
            Side::Near => contents::fill(&memory)?,
            Side::Far => contents::touch(&memory)?,
        }
        Ok(Self { memory, pool, connector, between })
    }

    fn room(&self, n_blocks: u32) -> Result<BlockLease, CommandError> {
        room(&self.pool, n_blocks)
    }
}

/// The worlds of a prefill and a decode node with certificates of one CA.
fn secured(world: &World) -> Result<[World; 2], CommandError> {
    let authority = Authority::new("bench", world.unix_time()).map_err(failed)?;
    let with_role = |role| {
        let name = CertName::parse(role).ok_or_else(|| not_moved("a wrong name"))?;
        let pem = authority.issue(&name, &[], 1).map_err(failed)?;
        let tls = Tls::of_pem(&pem).map_err(failed)?;
        Ok(World::real().with_identity(Identity::default().with_tls(tls)))
    };
    Ok([with_role("baton://bench/prefill/near")?, with_role("baton://bench/decode/far")?])
}

/// Leases every second block of the pool, so that no two of the remaining blocks are neighbours.
fn every_second(pool: &BlockPool, n_blocks: u32) -> Result<Vec<BlockLease>, CommandError> {
    let all: Vec<BlockLease> = (0..n_blocks).map(|_| room(pool, 1)).collect::<Result<_, CommandError>>()?;
    Ok(all.into_iter().filter(|lease| lease.table(GROUP)[0].0.is_multiple_of(2)).collect())
}

fn room(pool: &BlockPool, n_blocks: u32) -> Result<BlockLease, CommandError> {
    let holder = Holder { what: Holding::Landing, request: RequestId::new("bench") };
    pool.reserve(n_blocks as usize, holder).map_err(failed)
}

/// Converts an error of a node or a connector.
pub(super) fn failed(error: impl std::error::Error) -> CommandError {
    not_moved(types::in_full(&error))
}

/// Makes the error of a transfer that failed for this reason.
pub(super) fn not_moved(reason: impl std::fmt::Display) -> CommandError {
    CommandError::work(format!("cannot move KV: {reason}"))
}
