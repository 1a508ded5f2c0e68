//! The results of one process for the prompts of all runs.

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
/// The most decode steps of a prompt. Their KV is in one block after those of the prompt.
pub const ANSWER_MAX: usize = 8;
/// Room for the prompts and answers of one wave, so that the next wave uses the same blocks.
const KV_MEMORY: ByteSize = ByteSize(33 << 10);
/// The most followers of a model of three layers: each process has a layer.
const FOLLOWERS_OF_THREE_LAYERS_MAX: usize = 2;
/// The address where the head waits for its followers.
pub const JOIN: &str = "10.0.0.1:7411";
/// How long the processes wait for each other.
pub const JOIN_MS: u64 = 60_000;

static STOP: StopRules =
    StopRules { max_tokens: 16, min_tokens: 0, stop_tokens: Vec::new(), ignore_eos: true };

/// The models of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SmallModel {
    ThreeLayers,
    /// Has random weights.
    FiveLayers,
}

/// The model, and the results of one process.
#[derive(Debug)]
pub struct Reference {
    small: SmallModel,
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
    /// The tokens of its decode steps.
    pub answer: Vec<SampledToken>,
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

/// A decode step of a prompt, for a row.
#[derive(Clone, Copy, Debug)]
pub struct DecodeToken<'a> {
    pub slot: SlotId,
    pub prompt: &'a [TokenId],
    /// The number of decode steps before it.
    pub nth: usize,
    pub tables: &'a [&'a [BlockIdx]],
}

/// Returns the results of one process for the model of nodes with these followers. They are computed once.
pub fn reference(n_followers: usize) -> &'static Reference {
    static THREE_LAYERS: OnceLock<Reference> = OnceLock::new();
    static FIVE_LAYERS: OnceLock<Reference> = OnceLock::new();
    let (small, computed) = match n_followers <= FOLLOWERS_OF_THREE_LAYERS_MAX {
        true => (SmallModel::ThreeLayers, &THREE_LAYERS),
        false => (SmallModel::FiveLayers, &FIVE_LAYERS),
    };
    computed.get_or_init(|| Reference::compute(small))
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

impl SmallModel {
    fn write_into(self, raw: &mut RawNodeConfig) {
        let (folder, load_format) = match self {
            Self::ThreeLayers => ("../engine/tests/models/qwen2-window", "safetensors"),
            Self::FiveLayers => ("src/sim/group/five-layers", "dummy"),
        };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        raw.model.path = folder.to_str().expect("UTF-8").to_owned();
        raw.expert.model.load_format = load_format.to_owned();
    }

    /// Returns the settings of a node with this model.
    fn config(self, n_processes: u16, host: &str) -> NodeConfig {
        let mut raw = RawNodeConfig::default();
        self.write_into(&mut raw);
        raw.node.advertise = host.to_owned();
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
}

impl Reference {
    fn compute(small: SmallModel) -> Self {
        let mut backend = engine::open(&small.config(1, "alone").engine).expect("the model opens");
        let model = backend.model().clone();
        let mut all = Self { small, model, prompts: Vec::new(), sampling: sampling() };
        for nth in 0..N_PROMPTS {
            let prompt = all.computed(&mut *backend, nth);
            all.prompts.push(prompt);
        }
        all
    }

    /// Returns the settings of a node with the model.
    pub fn config(&self, n_processes: u16, host: &str) -> NodeConfig {
        self.small.config(n_processes, host)
    }

    fn computed(&self, backend: &mut dyn Backend, nth: usize) -> PromptReference {
        let layout = &self.model.layout;
        let (n_blocks, block_tokens) = (PROMPT_BLOCKS[nth], usize::from(layout.block_tokens));
        let tokens: Vec<TokenId> =
            (0..n_blocks * block_tokens).map(|at| TokenId((2 + (at * 7 + nth * 31) % 90) as u32)).collect();
        // Groups share the blocks. The last block is that of the answer.
        let blocks: Vec<BlockIdx> =
            (0..((n_blocks + 1) * layout.groups.len()) as u32).map(BlockIdx).collect();
        let tables: Vec<&[BlockIdx]> = blocks.chunks(n_blocks + 1).collect();
        let slot = SlotId(nth as u64);
        let row = self.row(PromptChunk { slot, prompt: &tokens, tokens: 0..tokens.len(), tables: &tables });
        let launched = backend.launch(StepBatch { rows: &[row] }).expect("nothing is in launched");
        let mut output = backend.collect(launched).expect("the step is computed");
        let first = output.rows.remove(0).expect("the row is right").expect("a token was asked for");
        let logprobs = output.prompt_logprobs.remove(0);
        let of_prompt: Vec<&[BlockIdx]> = tables.iter().map(|table| &table[..n_blocks]).collect();
        let pages = self.pages(backend.memory(), &of_prompt);
        let answer =
            self.answer(backend, DecodeToken { slot, prompt: &tokens, nth: 0, tables: &tables }, &first);
        PromptReference { tokens, logprobs, first, answer, pages }
    }

    /// Computes all decode steps of a prompt, one after the other.
    fn answer(
        &self,
        backend: &mut dyn Backend,
        of: DecodeToken<'_>,
        first: &SampledToken,
    ) -> Vec<SampledToken> {
        let mut known = first.token;
        let step = |nth: usize| {
            let token = [known];
            let row = Row { input: RowInput::Tokens(&token), ..self.decode_row(DecodeToken { nth, ..of }) };
            let launched = backend.launch(StepBatch { rows: &[row] }).expect("nothing is launched");
            let mut output = backend.collect(launched).expect("the step is computed");
            let sampled = output.rows.remove(0).expect("the row is right").expect("a token was asked for");
            known = sampled.token;
            sampled
        };
        (0..ANSWER_MAX).map(step).collect()
    }

    /// Makes the row of a decode step, which continues the token that the step before samples.
    pub fn decode_row<'a>(&'a self, token: DecodeToken<'a>) -> Row<'a> {
        let DecodeToken { slot, prompt, nth, tables } = token;
        Row {
            slot,
            input: RowInput::Previous,
            start: prompt.len() + nth,
            tables,
            prompt_logprobs: None,
            sample: Some(self.sample(prompt, nth as u32 + 1)),
        }
    }

    fn sample<'a>(&'a self, prompt: &'a [TokenId], index: u32) -> SampleSpec<'a> {
        SampleSpec {
            sampling: &self.sampling,
            stop: &STOP,
            history: prompt,
            n_prompt: prompt.len(),
            index,
            constraint: None,
        }
    }

    /// Makes the row of a chunk. The last chunk samples the first token of the answer.
    pub fn row<'a>(&'a self, chunk: PromptChunk<'a>) -> Row<'a> {
        let PromptChunk { slot, prompt, tokens: Range { start, end }, tables } = chunk;
        let targets = &prompt[start + 1..(end + 1).min(prompt.len())];
        Row {
            slot,
            input: RowInput::Tokens(&prompt[start..end]),
            start,
            tables,
            prompt_logprobs: (!targets.is_empty()).then_some(PromptTargets { tokens: targets, n_top: 2 }),
            sample: (end == prompt.len()).then(|| self.sample(prompt, 0)),
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
