//! What one process computes for the prompts of all runs.

use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use chassis::byte_size::ByteSize;
use engine::{Backend, PromptTargets, Row, RowInput, SampleSpec, SampledToken, SlotId, StepBatch};
use kv_cache::KvMemory;
use node::kv_memory::ModelKvMemory;
use node::{KvMemorySize, NodeConfig, RawNodeConfig};
use types::step::PromptLogprob;
use types::{BlockIdx, ModelInfo, Sampling, StopRules, TokenId};

/// The lengths of the prompts in blocks.
const PROMPT_BLOCKS: [usize; N_PROMPTS] = [1, 2, 2, 3, 4];
pub const N_PROMPTS: usize = 5;
/// Room for the prompts of one wave, so that the next wave uses the same blocks.
const KV_MEMORY: ByteSize = ByteSize(26 << 10);
/// The address where the head waits for its followers.
pub const JOIN: &str = "10.0.0.1:7411";
/// How long the processes wait for each other.
pub const JOIN_MS: u64 = 60_000;

static STOP: StopRules =
    StopRules { max_tokens: 8, min_tokens: 0, stop_tokens: Vec::new(), ignore_eos: true };

/// The model, and the results of one process.
#[derive(Debug)]
pub struct Reference {
    pub model: ModelInfo,
    pub prompts: Vec<PromptReference>,
    sampling: Sampling,
}

/// A prompt and its results.
#[derive(Debug)]
pub struct PromptReference {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<PromptLogprob>,
    pub first: SampledToken,
    /// The pages of its blocks, for each layer of each group.
    pub pages: Vec<Vec<u8>>,
}

/// Some tokens of a prompt, for a row of a step.
#[derive(Clone, Debug)]
pub struct PromptChunk<'a> {
    pub slot: SlotId,
    pub prompt: &'a [TokenId],
    pub tokens: Range<usize>,
    pub tables: &'a [&'a [BlockIdx]],
}

/// Returns the settings of a node with the model of all runs.
pub fn config(n_processes: u16, host: &str) -> NodeConfig {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models/qwen2-window");
    let mut raw = RawNodeConfig::default();
    raw.node.advertise = host.to_owned();
    raw.model.path = folder.to_str().expect("UTF-8").to_owned();
    raw.model.device = "cpu".to_owned();
    raw.model.kv_memory = ModelKvMemory::Size(KvMemorySize::Bytes(KV_MEMORY));
    raw.cluster.insecure = true;
    raw.transfer.connectors = vec!["tcp".to_owned()];
    raw.transfer.listen = format!("{host}:7002");
    raw.expert.transfer.frame_bytes = 2 << 10;
    raw.expert.transfer.stall_ms = 2_000;
    raw.expert.model.threads = 1;
    raw.expert.model.processes = n_processes;
    raw.expert.model.join = JOIN.to_owned();
    raw.expert.model.join_ms = JOIN_MS;
    NodeConfig::resolve(raw).expect("right settings")
}

/// Returns the results of one process. They are computed once.
pub fn reference() -> &'static Reference {
    static REFERENCE: OnceLock<Reference> = OnceLock::new();
    REFERENCE.get_or_init(|| {
        let mut backend = engine::open(&config(1, "10.0.0.9").engine).expect("the model opens");
        let model = backend.model().clone();
        let mut all = Reference { model, prompts: Vec::new(), sampling: sampling() };
        for nth in 0..N_PROMPTS {
            let prompt = all.computed(&mut *backend, nth);
            all.prompts.push(prompt);
        }
        all
    })
}

fn sampling() -> Sampling {
    Sampling { temperature: 0.8, seed: 7, logprobs: Some(4), ..Sampling::default() }
}

impl PromptReference {
    /// Returns the log-probabilities of the tokens after `tokens`.
    pub fn logprobs_of(&self, tokens: &Range<usize>) -> &[PromptLogprob] {
        &self.logprobs[tokens.start..tokens.end.min(self.logprobs.len())]
    }
}

impl Reference {
    fn computed(&self, backend: &mut dyn Backend, nth: usize) -> PromptReference {
        let layout = &self.model.layout;
        let (n_blocks, block_tokens) = (PROMPT_BLOCKS[nth], usize::from(layout.block_tokens));
        let tokens: Vec<TokenId> =
            (0..n_blocks * block_tokens).map(|at| TokenId((2 + (at * 7 + nth * 31) % 90) as u32)).collect();
        // Groups share the blocks.
        let blocks: Vec<BlockIdx> = (0..(n_blocks * layout.groups.len()) as u32).map(BlockIdx).collect();
        let tables: Vec<&[BlockIdx]> = blocks.chunks(n_blocks).collect();
        let slot = SlotId(nth as u64);
        let row = self.row(PromptChunk { slot, prompt: &tokens, tokens: 0..tokens.len(), tables: &tables });
        let launched = backend.launch(StepBatch { rows: &[row] }).expect("nothing is in launched");
        let mut output = backend.collect(launched).expect("the step is computed");
        let first = output.rows.remove(0).expect("the row is right").expect("a token was asked for");
        let logprobs = output.prompt_logprobs.remove(0);
        let pages = self.pages(backend.memory(), &tables);
        PromptReference { tokens, logprobs, first, pages }
    }

    /// Makes the row of a chunk. The last chunk samples the first token of the answer.
    pub fn row<'a>(&'a self, chunk: PromptChunk<'a>) -> Row<'a> {
        let PromptChunk { slot, prompt, tokens: Range { start, end }, tables } = chunk;
        let targets = &prompt[start + 1..(end + 1).min(prompt.len())];
        let sample = SampleSpec {
            sampling: &self.sampling,
            stop: &STOP,
            history: prompt,
            n_prompt: prompt.len(),
            index: 0,
            constraint: None,
        };
        Row {
            slot,
            input: RowInput::Tokens(&prompt[start..end]),
            start,
            tables,
            prompt_logprobs: (!targets.is_empty()).then_some(PromptTargets { tokens: targets, n_top: 2 }),
            sample: (end == prompt.len()).then_some(sample),
        }
    }

    /// Reads the pages of a sequence, for each layer of each group.
    pub fn pages(&self, memory: &KvMemory, tables: &[&[BlockIdx]]) -> Vec<Vec<u8>> {
        let layout = &self.model.layout;
        let mut pages = Vec::new();
        for (group, table) in layout.group_indices().zip(tables) {
            for layer_pos in 0..layout.group(group).layers.len() as u16 {
                let page = |block: &BlockIdx| {
                    let page =
                        memory.read(group, layer_pos, block.0..block.0 + 1).expect("nothing is written");
                    page.to_vec()
                };
                pages.push(table.iter().flat_map(page).collect());
            }
        }
        pages
    }
}
