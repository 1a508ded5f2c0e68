//! A sender: a node of one process that has the KV of all prompts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::{Gate, Shutdown, spawn_guarded};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use kv_transfer::{Chunk, ChunkQueue, ConnectorParts, Fault, FaultKind, Faults, KvConnector, TransferError};
use tokio::sync::mpsc;
use tokio::time::sleep;
use types::step::Step;
use types::{Destination, Handoff, KvSpan, Landing, RequestId};

use super::super::reference::Reference;
use super::plan::{Cancel, LandingPlan};

/// Limit of chunks of one prompt. All of them fit.
const CHUNKS_MAX: usize = 32;

/// A sender, until it dies.
#[derive(Debug)]
pub struct Sender {
    reference: &'static Reference,
    /// The blocks of each prompt.
    leases: Vec<Arc<BlockLease>>,
    pool: BlockPool,
    faults: Faults,
    /// The gate of the tasks that send. Those of the connector have another one.
    gate: Gate,
    /// `None` after the end. Never held across an await.
    connector: Mutex<Option<Arc<dyn KvConnector>>>,
    dead: Shutdown,
}

impl Sender {
    /// Starts a sender. The memory of `parts` has room for all prompts.
    pub async fn start(reference: &'static Reference, parts: ConnectorParts, gate: Gate) -> Self {
        let (memory, faults) = (parts.memory.clone(), parts.faults.clone());
        let pool = BlockPool::new(memory.layout(), memory.n_blocks());
        let leases = (0..reference.prompts.len()).map(|nth| {
            let prompt = &reference.prompts[nth];
            let holder = Holder { what: Holding::Sequence, request: RequestId::new("simulated") };
            let n_blocks = memory.layout().blocks_for(prompt.tokens.len());
            let lease = pool.reserve(n_blocks, holder).expect("there is room for all prompts");
            write(&memory, &lease, &prompt.pages);
            Arc::new(lease)
        });
        let leases = leases.collect();
        let connector = kv_transfer::build("tcp", parts).await.expect("the connector starts");
        let connector = Mutex::new(Some(connector));
        Self { reference, leases, pool, faults, gate, connector, dead: Shutdown::new() }
    }

    /// Sends the KV of a prompt, until the sender dies or gives it up.
    pub async fn send(&self, plan: &LandingPlan, landing: Landing) -> Result<(), TransferError> {
        let given_up = async {
            match plan.cancel {
                Some(Cancel::Sender(after)) => sleep(after).await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.dead.wait() => Err(TransferError::Closed),
            () = given_up => Err(TransferError::Cancelled),
            sent = self.send_all(plan, landing) => sent,
        }
    }

    async fn send_all(&self, plan: &LandingPlan, landing: Landing) -> Result<(), TransferError> {
        let connector = self.connector().clone().ok_or(TransferError::Closed)?;
        let (chunks, queue) = mpsc::channel(CHUNKS_MAX);
        let give = give(self.chunks(plan, &landing), chunks, plan.pace);
        let _giving = spawn_guarded(&self.gate, "chunks", give);
        let open = async move { connector.open(&Destination::Landing(landing)).await };
        // The connector may be dropped meanwhile.
        open.await?.feed(ChunkQueue::new(queue, || {})).await
    }

    /// Ends the process.
    pub fn die(&self) {
        self.connector().take();
        self.dead.trigger();
    }

    pub fn inject(&self, kind: FaultKind, n_frames: u32) {
        self.faults.inject(Fault::once(kind).times(n_frames));
    }

    /// Returns the number of frames that had an injected fault.
    pub fn n_frames_hit(&self) -> u64 {
        self.faults.n_hit()
    }

    /// Returns whether no transfer holds blocks.
    pub fn is_idle(&self) -> bool {
        self.leases.iter().all(|lease| Arc::strong_count(lease) == 1) && self.pool.counts().quarantined == 0
    }

    fn chunks(&self, plan: &LandingPlan, landing: &Landing) -> Vec<Chunk> {
        let (layout, prompt) = (&self.reference.model.layout, &self.reference.prompts[plan.prompt]);
        let n_blocks = layout.blocks_for(prompt.tokens.len()) as u32;
        let first_block = landing.held_tokens / u32::from(layout.block_tokens);
        let mut chunks = Vec::new();
        for begin in (first_block..n_blocks).step_by(plan.chunk_blocks as usize) {
            let blocks = begin..n_blocks.min(begin + plan.chunk_blocks);
            for group in layout.group_indices() {
                let layers = 0..layout.group(group).layers.len() as u16;
                let span = KvSpan { group, blocks: blocks.clone(), layers };
                let from = Arc::clone(&self.leases[plan.prompt]);
                chunks.push(Chunk::Kv { span, from, ready: LayerFence::open() });
            }
        }
        let first = Step { token: prompt.first.token, index: 0, logprobs: None, finish: None };
        let n_tokens = prompt.tokens.len() as u32;
        chunks.push(Chunk::Handoff(Handoff { transfer: landing.transfer, n_tokens, first }));
        chunks
    }

    fn connector(&self) -> MutexGuard<'_, Option<Arc<dyn KvConnector>>> {
        self.connector.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives the chunks to a transfer, one after the other.
async fn give(chunks: Vec<Chunk>, to: mpsc::Sender<Chunk>, pace: Duration) {
    for chunk in chunks {
        // If the transfer has failed, nothing takes chunks.
        if to.send(chunk).await.is_err() {
            return;
        }
        sleep(pace).await;
    }
}

/// Writes the pages of a sequence, for each layer of each group.
fn write(memory: &KvMemory, lease: &BlockLease, pages: &[Vec<u8>]) {
    let layout = memory.layout();
    let mut pages = pages.iter();
    for group in layout.group_indices() {
        for layer_pos in 0..layout.group(group).layers.len() as u16 {
            let bytes = pages.next().expect("a layer has pages");
            let table = lease.table(group);
            for (block, bytes) in table.iter().zip(bytes.chunks(bytes.len() / table.len())) {
                let mut page =
                    memory.write(group, layer_pos, block.0..block.0 + 1).expect("nothing reads the page");
                page.copy_from_slice(bytes);
            }
        }
    }
}
