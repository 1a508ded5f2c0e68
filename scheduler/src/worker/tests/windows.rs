//! Tests of real models with sliding windows: a sequence returns the blocks that its window has passed, and
//! its tokens do not change.

use std::path::Path;

use engine::{Backend, CpuBackend, CpuSettings};
use serde::Deserialize;
use types::layout::Attention;
use types::{KvDtype, KvLayout, Prompt, TokenId};

use super::endless;
use crate::settings::SchedulerSettings;
use crate::testing::{Recording, Rig, roomy};

const BLOCK_TOKENS: u16 = 8;
/// A number of blocks that is enough for any test of one sequence.
const PLENTY: usize = 128;

/// A prompt and the answer of `transformers`, computed in float32.
#[derive(Deserialize)]
struct Golden {
    prompt: Vec<u32>,
    continuation: Vec<u32>,
}

impl Golden {
    fn read(model: &str) -> Self {
        let path = folder(model).join("golden.json");
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_str(&text).expect("a golden file")
    }

    fn prompt(&self) -> Prompt {
        let tokens: Vec<TokenId> = self.prompt.iter().copied().map(TokenId).collect();
        Prompt { tokens: tokens.into(), ..endless("golden", 1, self.continuation.len() as u32) }
    }

    fn check(&self, recorded: &Recording) {
        let tokens: Vec<u32> = recorded.tokens().iter().map(|token| token.0).collect();
        assert_eq!(tokens, self.continuation);
    }
}

fn folder(model: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models").join(model)
}

fn opened(model: &str, kv_bytes: usize) -> CpuBackend {
    let settings =
        CpuSettings { kv_dtype: KvDtype::F32, block_tokens: BLOCK_TOKENS, ..CpuSettings::default() };
    CpuBackend::open(&folder(model), kv_bytes, &settings).expect("the model opens")
}

/// Makes a worker for a test model, with `n_blocks` blocks.
fn rig(model: &str, n_blocks: usize, settings: SchedulerSettings) -> Rig {
    let memory = opened(model, 1 << 20).memory().clone();
    let block_bytes = memory.bytes() / memory.n_blocks() as usize;
    Rig::with_backend(Box::new(opened(model, n_blocks * block_bytes)), settings)
}

fn layout(model: &str) -> KvLayout {
    opened(model, 1 << 20).memory().layout().clone()
}

/// Runs the golden prompt while another holder writes into every free block. Returns the largest number of
/// blocks that the sequence held.
fn most_held(model: &str, golden: &Golden, settings: SchedulerSettings) -> usize {
    let mut rig = rig(model, PLENTY, settings);
    let (_, recorded) = rig.stream(golden.prompt());
    let mut most = 0;
    while !recorded.has_ended() {
        rig.turn_with_intruder();
        most = most.max(rig.pool.counts().leased as usize);
    }
    golden.check(&recorded);
    rig.assert_at_baseline();
    most
}

#[test]
fn a_long_answer_holds_a_window_and_no_more() {
    let golden = Golden::read("mistral");
    let layout = layout("mistral");
    let whole = layout.blocks_for(golden.prompt.len() + golden.continuation.len());
    let bound = layout.blocks_held_at_most().expect("all of its layers see a window");
    assert!(2 * bound < whole, "{bound} of {whole} blocks would show nothing");
    for steps_in_flight_max in [1, 2] {
        let most = most_held("mistral", &golden, SchedulerSettings { steps_in_flight_max, ..roomy() });
        assert!(most <= bound, "{most} blocks of at most {bound}");
    }
}

#[test]
fn layers_that_see_everything_keep_theirs() {
    let golden = Golden::read("qwen2-window");
    let layout = layout("qwen2-window");
    let attentions: Vec<_> = layout.groups.iter().map(|group| group.attention).collect();
    assert_eq!(attentions, [Attention::Full, Attention::SlidingWindow { tokens: 21 }]);
    let whole = layout.blocks_for(golden.prompt.len() + golden.continuation.len());
    let most = most_held("qwen2-window", &golden, roomy());
    // The sequence holds all blocks of one group, and of the other group the published ones, a window, and
    // those being written.
    assert!((whole - 1..=whole + 2 + 3 + 2).contains(&most), "{most} blocks, {whole} for the whole of it");
}

#[test]
fn prompts_in_chunks_give_back_on_the_way() {
    let golden = Golden::read("mistral");
    let all: Vec<u32> = golden.prompt.iter().chain(&golden.continuation).copied().collect();
    let golden = Golden { prompt: all[..150].to_vec(), continuation: all[150..].to_vec() };
    let settings = SchedulerSettings { step_tokens_max: 72, sequences_max: 8, ..roomy() };
    let mut rig = rig("mistral", PLENTY, settings);
    let (_, recorded) = rig.stream(golden.prompt());
    rig.turn();
    let before = rig.pool.counts().leased;
    rig.turn();
    rig.turn();
    assert!(rig.pool.counts().leased < before, "the window is past the first chunk");
    rig.settle();
    golden.check(&recorded);
    rig.assert_at_baseline();
}

#[test]
fn windows_that_crowd_each_other_say_the_same() {
    for model in ["mistral", "qwen2-window"] {
        let golden = Golden::read(model);
        let one = layout(model).groups.len()
            * layout(model).blocks_for(golden.prompt.len() + golden.continuation.len());
        let mut rig = rig(model, one + 4, SchedulerSettings { growth_blocks: 0, ..roomy() });
        let recorded: Vec<Recording> = (0..8).map(|_| rig.stream(golden.prompt()).1).collect();
        rig.settle();
        recorded.iter().for_each(|recorded| golden.check(recorded));
        assert!(rig.metric("preemptions_total") > 0, "{model}: the pool was too small");
        assert!(rig.metric("cached_tokens_total") > 0, "{model}: prompts that begin alike");
        rig.assert_at_baseline();
    }
}
