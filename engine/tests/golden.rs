//! Compares real models with `transformers`: the demo model, and a tiny random one of every architecture.

use std::num::NonZero;
use std::path::{Path, PathBuf};

use baton_engine::conformance::alone::step;
use baton_engine::load::Activations;
use baton_engine::{Backend, CpuBackend, CpuSettings, PromptTargets, Row, RowInput, SlotId, StepBatch};
use serde::Deserialize;
use types::step::PromptLogprob;
use types::{BlockIdx, KvDtype, TokenId};

/// Results of `transformers` in float32, from a file.
#[derive(Deserialize)]
struct Golden {
    prompt: Vec<u32>,
    continuation: Vec<u32>,
    smallest_lead: f32,
    first_logits: Vec<f32>,
    last_logits: Vec<f32>,
}

#[derive(Deserialize)]
struct DemoGolden {
    prompts: Vec<DemoPrompt>,
}

#[derive(Deserialize)]
struct DemoPrompt {
    name: String,
    prompt_ids: Vec<u32>,
    continuation_ids: Vec<u32>,
    first_step_top5: Vec<(u32, f32)>,
    smallest_lead: f32,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn opened(folder: &Path, kv_dtype: KvDtype) -> CpuBackend {
    spread(folder, kv_dtype, 1)
}

fn spread(folder: &Path, kv_dtype: KvDtype, ranks: u16) -> CpuBackend {
    let (ranks, activations) = (NonZero::new(ranks).expect("some"), Activations::Full);
    let settings = CpuSettings { kv_dtype, ranks, activations, ..CpuSettings::default() };
    CpuBackend::open(folder, 16 << 20, &settings).expect("the model opens")
}

/// Continues a prompt greedily. Returns the tokens, and each step's log-probabilities.
fn continued(
    backend: &mut CpuBackend,
    prompt: &[u32],
    n_steps: usize,
) -> (Vec<u32>, Vec<Vec<(TokenId, f32)>>) {
    let mut input: Vec<TokenId> = prompt.iter().copied().map(TokenId).collect();
    let (mut tokens, mut logprobs, mut start) = (Vec::new(), Vec::new(), 0);
    for _ in 0..n_steps {
        let (token, top) = step(backend, &input, start, u8::MAX);
        start += input.len();
        input = vec![token];
        tokens.push(token.0);
        logprobs.push(top);
    }
    (tokens, logprobs)
}

/// Checks the differences to the best token, because log-probabilities differ from logits by a constant.
fn check_logits(what: &str, found: &[(TokenId, f32)], expected: impl Fn(u32) -> Option<f32>, tolerance: f32) {
    let best = found[0];
    let expected_best =
        expected(best.0.0).unwrap_or_else(|| panic!("{what}: {best:?} is not among the best"));
    for (token, logprob) in found {
        if let Some(expected) = expected(token.0) {
            let (found, expected) = (best.1 - logprob, expected_best - expected);
            let near = (found - expected).abs() <= tolerance * expected_best.abs().max(expected.abs());
            assert!(near, "{what}: {token:?} is {found} below the best, and {expected} in the reference");
        }
    }
}

fn check_architecture(name: &str) {
    let folder = root().join("tests/models").join(name);
    let golden: Golden = read(&folder.join("golden.json"));
    let mut backend = opened(&folder, KvDtype::F32);
    let (tokens, logprobs) = continued(&mut backend, &golden.prompt, golden.continuation.len());
    let first = |token: u32| golden.first_logits.get(token as usize).copied();
    check_logits(&format!("{name}, first step"), &logprobs[0], first, 1e-4);
    assert!(golden.smallest_lead > 1e-3, "{name}: the lead is too small to compare tokens");
    assert_eq!(tokens, golden.continuation, "{name}");
    let last = |token: u32| golden.last_logits.get(token as usize).copied();
    check_logits(&format!("{name}, last step"), &logprobs[tokens.len() - 1], last, 1e-4);
}

#[test]
fn llama_is_as_in_transformers() {
    check_architecture("llama");
}

#[test]
fn scaled_positions_and_several_files_are_as_in_transformers() {
    check_architecture("llama3");
}

#[test]
fn a_window_is_as_in_transformers() {
    check_architecture("mistral");
}

#[test]
fn layers_with_and_without_a_window_are_as_in_transformers() {
    check_architecture("qwen2-window");
}

#[test]
fn qwen2_is_as_in_transformers() {
    check_architecture("qwen2");
}

#[test]
fn qwen3_is_as_in_transformers() {
    check_architecture("qwen3");
}

#[test]
fn experts_whose_scores_add_up_to_one_are_as_in_transformers() {
    check_architecture("mixtral");
    check_architecture("qwen3-moe-stacked");
}

#[test]
fn dense_layers_among_those_with_experts_are_as_in_transformers() {
    check_architecture("qwen3-moe");
}

#[test]
fn deepseek_v2_is_as_in_transformers() {
    check_architecture("deepseek-v2");
}

#[test]
fn deepseek_v3_is_as_in_transformers() {
    check_architecture("deepseek-v3");
}

#[test]
fn yarn_is_as_in_transformers() {
    check_architecture("llama-yarn");
}

/// `transformers` has computed with the widened weights.
#[test]
fn block_scales_are_as_in_transformers() {
    check_architecture("qwen3-fp8");
    check_architecture("deepseek-v3-fp8");
}

/// The test models.
const MODELS: [&str; 12] = [
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-stacked",
    "deepseek-v2",
    "deepseek-v3",
    "llama-yarn",
];

/// Every bit of every log-probability is equal, not only the tokens. With one or two KV heads, several of
/// four ranks hold the same head.
#[test]
fn ranks_give_the_bits_that_one_gives() {
    let folders = MODELS.map(|name| root().join("tests/models").join(name));
    for folder in folders.iter().chain([&root().join("../models/demo")]) {
        let prompt: Vec<u32> = (0..37).map(|nth| 5 + nth * 7 % 80).collect();
        let one = continued(&mut spread(folder, KvDtype::Bf16, 1), &prompt, 8);
        for ranks in [2, 4] {
            let several = continued(&mut spread(folder, KvDtype::Bf16, ranks), &prompt, 8);
            assert!(several == one, "{} ranks of {}", ranks, folder.display());
        }
    }
}

/// Checks the demo model. With KV in f32, results are exact. With KV in bf16, its leads are large enough for
/// the same tokens.
fn check_demo(kv_dtype: KvDtype, tolerance: f32) {
    let folder = root().join("../models/demo");
    let golden: DemoGolden = read(&folder.join("golden.json"));
    assert_eq!(golden.prompts.len(), 8);
    for prompt in golden.prompts {
        let mut backend = opened(&folder, kv_dtype);
        let (tokens, logprobs) = continued(&mut backend, &prompt.prompt_ids, prompt.continuation_ids.len());
        let expected = |token: u32| prompt.first_step_top5.iter().find(|one| one.0 == token).map(|one| one.1);
        check_logits(&prompt.name, &logprobs[0][..5], expected, tolerance);
        if prompt.smallest_lead > 20.0 * tolerance {
            assert_eq!(tokens, prompt.continuation_ids, "{}", prompt.name);
        }
    }
}

#[test]
fn the_demo_model_reproduces_its_golden_file() {
    check_demo(KvDtype::F32, 1e-3);
}

#[test]
fn the_demo_model_says_the_same_with_kv_in_bf16() {
    check_demo(KvDtype::Bf16, 2e-2);
}

/// Computes the log-probabilities of a prompt with all alternatives, in rows of at most `chunk` tokens.
fn of_prompt(backend: &mut CpuBackend, prompt: &[TokenId], chunk: usize) -> Vec<PromptLogprob> {
    let n_groups = backend.model().layout.groups.len() as u32;
    let tables: Vec<Vec<BlockIdx>> =
        (0..n_groups).map(|group| (0..60).map(|nth| BlockIdx(nth * n_groups + group)).collect()).collect();
    let tables: Vec<&[BlockIdx]> = tables.iter().map(Vec::as_slice).collect();
    let mut all = Vec::new();
    for (nth, tokens) in prompt.chunks(chunk).enumerate() {
        let start = nth * chunk;
        let targets = &prompt[start + 1..(start + tokens.len() + 1).min(prompt.len())];
        let row = Row {
            slot: SlotId(1),
            input: RowInput::Tokens(tokens),
            start,
            tables: &tables,
            prompt_logprobs: Some(PromptTargets { tokens: targets, n_top: u8::MAX }),
            sample: None,
        };
        let launched = backend.launch(StepBatch { rows: &[row] }).expect("launched");
        let mut output = backend.collect(launched).expect("collected");
        output.rows[0].clone().expect("the row succeeds");
        all.append(&mut output.prompt_logprobs[0]);
    }
    all
}

/// Checks the log-probabilities of a prompt: the golden prompt with its greedy continuation. The golden file has the logits
/// of two positions. At the positions of the continuation, the prompt's token must be the likeliest one. All numbers must be
/// equal for every size of chunks and number of ranks.
fn check_prompt_logprobs(name: &str) {
    let folder = root().join("tests/models").join(name);
    let golden: Golden = read(&folder.join("golden.json"));
    let prompt: Vec<TokenId> =
        golden.prompt.iter().chain(&golden.continuation).copied().map(TokenId).collect();
    let found = of_prompt(&mut opened(&folder, KvDtype::F32), &prompt, prompt.len());
    assert_eq!(found.len(), prompt.len() - 1, "{name}");
    let (first, last) = (golden.prompt.len() - 1, prompt.len() - 2);
    for (at, logits) in [(first, &golden.first_logits), (last, &golden.last_logits)] {
        let expected = |token: u32| logits.get(token as usize).copied();
        check_logits(&format!("{name}, position {at}"), &found[at].logprobs.top, expected, 1e-4);
    }
    for (at, (token, PromptLogprob { logprobs, rank })) in prompt[1..].iter().zip(&found).enumerate() {
        let place = logprobs.top.iter().position(|(other, _)| other == token).expect("all are listed");
        assert_eq!((logprobs.top[place].1, place + 1), (logprobs.chosen, *rank as usize), "{name}, {at}");
        assert!(at < first || *rank == 1, "{name}: the continuation's token at {at} has rank {rank}");
        let sum: f64 = logprobs.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{name}: the probabilities at {at} add up to {sum}");
    }
    for (ranks, chunk) in [(1, 7), (2, 33)] {
        let again = of_prompt(&mut spread(&folder, KvDtype::F32, ranks), &prompt, chunk);
        assert!(again == found, "{name} with {ranks} ranks in chunks of {chunk}");
    }
}

#[test]
fn log_probabilities_of_prompts_are_as_in_transformers() {
    for name in MODELS {
        check_prompt_logprobs(name);
    }
}
