//! A sequence gets the same tokens alone, batched, in chunks, on a cached prefix, preempted and recomputed,
//! and moved half-way to a node with another number of stages.

use std::num::NonZero;
use std::path::Path;

use baton_engine::{Backend, CpuBackend, CpuSettings, Row, RowInput, SampleSpec, SlotId, StepBatch};
use proptest::prelude::*;
use types::{BlockIdx, GroupIdx, KvDtype, Sampling, StageSplit, StopRules, TokenId};

const BLOCK_TOKENS: usize = 8;
const N_STEPS: usize = 6;
const KV_BYTES: usize = 4 << 20;
const MODELS: [&str; 8] =
    ["llama3", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"];

/// Opens a model with a stage for each thread.
fn opened(model: &str, threads: u16) -> CpuBackend {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
    let n_stages = NonZero::new(threads).expect("some");
    let settings = CpuSettings {
        threads: NonZero::new(threads.into()),
        stages: StageSplit { n_stages, layers: Vec::new() },
        kv_dtype: KvDtype::Bf16,
        block_tokens: BLOCK_TOKENS as u16,
        ..CpuSettings::default()
    };
    CpuBackend::open(&folder, KV_BYTES, &settings).expect("the model opens")
}

/// A node: a model and its free blocks.
struct Node {
    backend: CpuBackend,
    next_block: u32,
}

/// A sequence in progress. The tiny models have one layer group, so there is one table.
#[derive(Clone, Debug)]
struct Sequence {
    slot: u64,
    tokens: Vec<TokenId>,
    n_prompt: usize,
    n_computed: usize,
    table: Vec<BlockIdx>,
    sampling: Sampling,
    node: usize,
}

/// The action of a sequence in one step.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// The sequence computes at most this number of tokens.
    Chunk(usize),
    /// The sequence skips this step.
    Wait,
    /// The sequence loses its blocks.
    Preempted,
    /// The sequence continues on another node, with its KV.
    Moved,
}

impl Node {
    fn new(model: &str, threads: u16) -> Self {
        // Tables start at different blocks on each node, and not at the first block, so that block numbers
        // matter.
        Self { backend: opened(model, threads), next_block: threads.into() }
    }

    /// Takes unused blocks. They are not returned, because a test case needs few.
    fn blocks(&mut self, n: usize) -> Vec<BlockIdx> {
        let first = self.next_block;
        self.next_block += n as u32;
        assert!(self.next_block <= self.backend.memory().n_blocks(), "a case fits into memory");
        (first..self.next_block).map(BlockIdx).collect()
    }
}

impl Sequence {
    fn new(slot: u64, prompt: &[TokenId], sampling: Sampling, node: usize, nodes: &mut [Node]) -> Self {
        let n_blocks = (prompt.len() + N_STEPS).div_ceil(BLOCK_TOKENS);
        Self {
            slot,
            tokens: prompt.to_vec(),
            n_prompt: prompt.len(),
            n_computed: 0,
            table: nodes[node].blocks(n_blocks),
            sampling,
            node,
        }
    }

    fn is_done(&self) -> bool {
        self.tokens.len() == self.n_prompt + N_STEPS
    }

    fn generated(&self) -> &[TokenId] {
        &self.tokens[self.n_prompt..]
    }

    /// Restarts from the tokens, reusing full blocks that another sequence on the node has computed for the
    /// same tokens.
    fn restart(&mut self, others: &[Self], nodes: &mut [Node]) {
        let shared = |other: &&Self| {
            let same = self.tokens.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count();
            // The last token is never shared, because the next token is sampled from its computation.
            same.min(other.n_computed).min(self.tokens.len() - 1) / BLOCK_TOKENS
        };
        let donor = others
            .iter()
            .filter(|other| other.slot != self.slot && other.node == self.node)
            .max_by_key(shared);
        let n_shared = donor.as_ref().map_or(0, shared);
        let mut table: Vec<BlockIdx> = donor.map_or(&[][..], |donor| &donor.table[..n_shared]).to_vec();
        table.extend(nodes[self.node].blocks(self.table.len() - n_shared));
        (self.table, self.n_computed) = (table, n_shared * BLOCK_TOKENS);
    }

    fn move_to(&mut self, node: usize, nodes: &mut [Node]) {
        let table = nodes[node].blocks(self.table.len());
        let (from, to) = (nodes[self.node].backend.memory(), nodes[node].backend.memory());
        for layer_pos in 0..from.layout().groups[0].layers.len() as u16 {
            for (old, new) in self.table.iter().zip(&table) {
                let page =
                    from.read(GroupIdx(0), layer_pos, old.0..old.0 + 1).expect("the page has no writer");
                to.write(GroupIdx(0), layer_pos, new.0..new.0 + 1)
                    .expect("the block is unused")
                    .copy_from_slice(&page);
            }
        }
        (self.table, self.node) = (table, node);
    }
}

/// Runs one step of a node: `n` tokens of each of these sequences.
fn step(node: &mut Node, sequences: &mut [(&mut Sequence, usize)]) {
    let stop = StopRules { ignore_eos: true, ..StopRules::default() };
    let tables: Vec<[&[BlockIdx]; 1]> =
        sequences.iter().map(|(sequence, _)| [sequence.table.as_slice()]).collect();
    let rows: Vec<Row<'_>> = sequences
        .iter()
        .zip(&tables)
        .map(|((sequence, n), tables)| {
            let end = sequence.n_computed + n;
            let sample = SampleSpec {
                sampling: &sequence.sampling,
                stop: &stop,
                history: &sequence.tokens,
                n_prompt: sequence.n_prompt,
                index: sequence.generated().len() as u32,
                constraint: None,
            };
            Row {
                slot: SlotId(sequence.slot),
                input: RowInput::Tokens(&sequence.tokens[sequence.n_computed..end]),
                start: sequence.n_computed,
                tables,
                prompt_logprobs: None,
                sample: (end == sequence.tokens.len()).then_some(sample),
            }
        })
        .collect();
    let launched = node.backend.launch(StepBatch { rows: &rows }).expect("launched");
    let output = node.backend.collect(launched).expect("collected");
    for ((sequence, n), outcome) in sequences.iter_mut().zip(output.rows) {
        sequence.n_computed += *n;
        sequence.tokens.extend(outcome.expect("the row succeeds").map(|sampled| sampled.token));
    }
}

/// Computes a sequence that is alone on its node, with its prompt in one chunk. Returns its tokens.
fn alone(model: &str, prompt: &[TokenId], sampling: &Sampling) -> Vec<TokenId> {
    let mut nodes = [Node::new(model, 1)];
    let mut sequence = Sequence::new(1, prompt, sampling.clone(), 0, &mut nodes);
    while !sequence.is_done() {
        let n = sequence.tokens.len() - sequence.n_computed;
        step(&mut nodes[0], &mut [(&mut sequence, n)]);
    }
    sequence.generated().to_vec()
}

fn run(model: &str, prompts: &[(Vec<TokenId>, Sampling)], fates: &[Action]) -> Vec<Vec<TokenId>> {
    let mut nodes = [Node::new(model, 1), Node::new(model, 2)];
    let mut sequences: Vec<Sequence> = Vec::new();
    for (nth, (prompt, sampling)) in prompts.iter().enumerate() {
        sequences.push(Sequence::new(nth as u64, prompt, sampling.clone(), nth % 2, &mut nodes));
    }
    let all = Action::Chunk(usize::MAX);
    let mut fates = fates.iter().copied().chain(std::iter::repeat(all));
    while sequences.iter().any(|sequence| !sequence.is_done()) {
        let mut shares = Vec::new();
        for nth in 0..sequences.len() {
            shares.push(befall(nth, fates.next().expect("endless"), &mut sequences, &mut nodes));
        }
        for (at, node) in nodes.iter_mut().enumerate() {
            let here = sequences.iter_mut().zip(&shares).filter(|(one, n)| one.node == at && **n > 0);
            let mut batch: Vec<(&mut Sequence, usize)> = here.map(|(sequence, n)| (sequence, *n)).collect();
            step(node, &mut batch);
        }
    }
    sequences.iter().map(|sequence| sequence.generated().to_vec()).collect()
}

/// Applies an action. Returns the number of tokens that the sequence computes in the next step.
fn befall(nth: usize, fate: Action, sequences: &mut [Sequence], nodes: &mut [Node]) -> usize {
    if sequences[nth].is_done() {
        return 0;
    }
    match fate {
        Action::Chunk(most) => return most.min(sequences[nth].tokens.len() - sequences[nth].n_computed),
        Action::Wait => {}
        Action::Moved => sequences[nth].move_to(1 - sequences[nth].node, nodes),
        Action::Preempted => {
            let others = sequences.to_vec();
            sequences[nth].restart(&others, nodes);
        }
    }
    0
}

fn fate() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (1usize..30).prop_map(Action::Chunk),
        1 => Just(Action::Wait),
        1 => Just(Action::Preempted),
        1 => Just(Action::Moved),
    ]
}

/// Makes prompts, many with the same first tokens.
fn prompt() -> impl Strategy<Value = (Vec<TokenId>, Sampling)> {
    let tokens = (0usize..40, proptest::collection::vec(2u32..96, 1..20));
    (tokens, any::<bool>(), any::<u64>()).prop_map(|((n_alike, rest), at_random, seed)| {
        let alike = (0..n_alike as u32).map(|nth| 5 + nth * 7 % 80);
        let temperature = if at_random { 0.9 } else { 0.0 };
        let sampling = Sampling { temperature, seed, repetition_penalty: 1.1, ..Sampling::default() };
        (alike.chain(rest).map(TokenId).collect(), sampling)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_company_and_any_fate_give_the_same_tokens(
        model in proptest::sample::select(&MODELS),
        prompts in proptest::collection::vec(prompt(), 1..5),
        fates in proptest::collection::vec(fate(), 0..30),
    ) {
        let together = run(model, &prompts, &fates);
        for ((prompt, sampling), tokens) in prompts.iter().zip(together) {
            prop_assert_eq!(tokens, alone(model, prompt, sampling), "{} of {} tokens", model, prompt.len());
        }
    }
}
