//! Tests of a backend with several pipeline stages: more steps are in flight, running sequences go in parts, and the tokens
//! are those of one stage.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::Path;

use engine::{CpuBackend, CpuSettings};
use types::{Prompt, StageSplit, TokenId};

use super::endless;
use crate::settings::SchedulerSettings;
use crate::testing::{Recording, Rig, roomy};

/// The lengths of the prompts, in tokens.
const PROMPTS: [usize; 6] = [30, 70, 5, 100, 17, 1];
const N_STEPS: u32 = 20;

fn rig(n_stages: u16, settings: SchedulerSettings) -> Rig {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models/qwen3-moe");
    let n_stages = NonZero::new(n_stages).expect("some");
    let stages = StageSplit { n_stages, layers: Vec::new() };
    let cpu = CpuSettings { stages, block_tokens: 8, threads: NonZero::new(1), ..CpuSettings::default() };
    Rig::with_backend(Box::new(CpuBackend::open(&folder, 1 << 20, &cpu).expect("it opens")), settings)
}

fn submitted(rig: &mut Rig) -> Vec<Recording> {
    let submit = |(nth, n_tokens): (usize, usize)| {
        let token = |at| TokenId((2 + (at * 7 + nth * 5) % 60) as u32);
        let tokens: Vec<TokenId> = (0..n_tokens).map(token).collect();
        let prompt = Prompt { tokens: tokens.into(), ..endless(&format!("{nth}"), 1, N_STEPS) };
        rig.stream(prompt).1
    };
    PROMPTS.into_iter().enumerate().map(submit).collect()
}

fn answers(n_stages: u16, settings: SchedulerSettings) -> Vec<Vec<TokenId>> {
    let mut rig = rig(n_stages, settings);
    let recorded = submitted(&mut rig);
    rig.settle();
    rig.assert_at_baseline();
    recorded.iter().map(Recording::tokens).collect()
}

#[test]
fn stages_give_the_tokens_that_one_gives() {
    let chunks = SchedulerSettings { step_tokens_max: 24, sequences_max: 8, ..roomy() };
    let expected = answers(1, roomy());
    assert!(expected.iter().all(|tokens| tokens.len() == N_STEPS as usize));
    for n_stages in [1, 2, 3, 4] {
        for steps_in_flight_max in [1, 2, usize::MAX] {
            let settings = SchedulerSettings { steps_in_flight_max, ..chunks };
            let seen = answers(n_stages, settings);
            assert_eq!(seen, expected, "{n_stages} stages, {steps_in_flight_max} steps in flight");
        }
    }
}

#[test]
fn running_sequences_are_in_one_of_the_steps_in_flight() {
    for n_stages in [1, 2, 3] {
        let mut rig = rig(n_stages, roomy());
        let recorded = submitted(&mut rig);
        while recorded.iter().any(|recorded| recorded.tokens().len() < 4) {
            rig.turn();
        }
        for _ in 0..4 {
            assert!(rig.launch());
            let steps: Vec<Vec<u64>> = rig.worker.ids_in_flight();
            assert_eq!(steps.len(), usize::from(n_stages) + 1, "{steps:?}");
            for part in steps.windows(n_stages.into()) {
                let together: Vec<u64> = part.iter().flatten().copied().collect();
                let apart: BTreeSet<u64> = together.iter().copied().collect();
                assert_eq!((together.len(), apart.len()), (PROMPTS.len(), PROMPTS.len()), "{steps:?}");
            }
            rig.turn();
        }
        rig.settle();
        rig.assert_at_baseline();
    }
}

/// Chunks of one prompt are in steps that follow each other.
#[test]
fn a_prompt_is_on_all_stages() {
    let mut rig = rig(2, SchedulerSettings { step_tokens_max: 24, sequences_max: 8, ..roomy() });
    let (_, recorded) = rig.stream(endless("long", 70, 3));
    rig.launch();
    assert_eq!(rig.worker.ids_in_flight(), [[1], [1], [1]]);
    rig.settle();
    assert_eq!(recorded.tokens().len(), 3);
    rig.assert_at_baseline();
}
