use std::path::Path;

use types::KvDtype;
use types::step::{Logprobs, PromptLogprob};

use super::prompts::TruthPlace;
use super::*;
use crate::{CpuBackend, CpuSettings};

fn opened(model: &str, kv_dtype: KvDtype) -> CpuBackend {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
    let settings = CpuSettings { kv_dtype, threads: std::num::NonZero::new(1), ..CpuSettings::default() };
    CpuBackend::open(&folder, 4 << 20, &settings).expect("it opens")
}

fn prompts() -> Vec<Vec<TokenId>> {
    let prompt = |n: u32| (0..n).map(|nth| TokenId((nth * 7 + n) % 90)).collect();
    vec![prompt(5), prompt(33), prompt(48)]
}

#[test]
fn the_processor_is_equal_to_itself_in_any_company() {
    for model in ["mistral", "qwen3"] {
        let (mut reference, mut subject) = (opened(model, KvDtype::Bf16), opened(model, KvDtype::Bf16));
        let Comparisons { sampled, prompts } =
            compare(&mut reference, &mut subject, &prompts(), 6, Tolerance::NONE).expect("it is compared");
        assert!(sampled.is_equal(), "{model}: {:?}", sampled.wrong);
        assert_eq!(sampled.n_tokens, 3 * (6 * 4 + 3 + 6) + 3 * 6, "{model}");
        assert!(prompts.is_equal(), "{model}: {:?}", prompts.wrong);
        // Each prompt alone and in chunks; together 500 tokens and more, and a sampled token for each prompt there.
        let targets = [5, 33, 48].map(|n| n + 6 - 1);
        let together = targets.iter().cycle().scan(0, |before, n| {
            let is_in = *before < 500;
            *before += n;
            is_in.then_some(n + 1)
        });
        let n_together: usize = together.sum();
        assert_eq!(prompts.n_tokens, 2 * targets.iter().sum::<usize>() + n_together, "{model}");
    }
}

#[test]
fn the_processor_gives_equal_results_in_large_batches() {
    let Comparisons { sampled: comparison, prompts } =
        compare_with_itself(&mut opened("qwen2", KvDtype::Bf16), &prompts(), 3).expect("it is compared");
    assert!(comparison.is_equal() && prompts.is_equal(), "{:?} {:?}", comparison.wrong, prompts.wrong);
    // The rest after the comparisons with the reference is the crowd's: each of its sequences samples three
    // tokens.
    let of_crowd = comparison.n_tokens - (3 * (3 * 4 + 2 + 3) + 3 * 3);
    assert!(of_crowd.is_multiple_of(3) && of_crowd >= 3 * 100, "{of_crowd}");
}

#[test]
fn kv_of_another_precision_is_near_and_not_the_same() {
    let (mut reference, mut subject) = (opened("qwen2", KvDtype::F32), opened("qwen2", KvDtype::Bf16));
    let exact =
        compare(&mut reference, &mut subject, &prompts(), 4, Tolerance::NONE).expect("it is compared");
    assert!(!exact.sampled.is_equal() && !exact.prompts.is_equal());
    let near = Tolerance { epsilon: 0.1, logprob: 0.1, logprob_share: 0.0, routing: 0.0 };
    let near = compare(&mut reference, &mut subject, &prompts(), 4, near).expect("it is compared");
    for near in [near.sampled, near.prompts] {
        assert!(near.is_equal(), "{:?}", near.wrong);
        assert!(near.worst_logprob > 0.0);
    }
}

#[test]
fn kv_in_8_bits_is_the_same_in_any_company_and_near_what_it_stands_for() {
    let mut subject = opened("qwen3", KvDtype::Fp8E4m3);
    let comparison = compare_with_itself(&mut subject, &prompts(), 3).expect("it is compared").sampled;
    assert!(comparison.is_equal(), "{:?}", comparison.wrong.first());
    let near = Tolerance { epsilon: 1.0, logprob: 1.0, logprob_share: 0.1, routing: 0.0 };
    let near = compare(&mut opened("qwen3", KvDtype::F32), &mut subject, &prompts(), 4, near);
    let near = near.expect("it is compared").sampled;
    assert!(near.is_equal() && near.worst_logprob > 0.01, "{} {:?}", near.worst_logprob, near.wrong.first());
}

#[test]
fn another_model_is_told_apart() {
    let (mut reference, mut subject) = (opened("qwen2", KvDtype::F32), opened("llama3", KvDtype::F32));
    let near = Tolerance { epsilon: 0.1, logprob: 0.1, logprob_share: 0.0, routing: 0.0 };
    let comparison = compare(&mut reference, &mut subject, &prompts(), 4, near).expect("it is compared");
    assert!(!comparison.sampled.is_equal() && !comparison.prompts.is_equal());
}

#[test]
fn a_token_may_be_out_of_bounds_at_a_near_tie_of_routing() {
    let tolerance = Tolerance { epsilon: 0.1, logprob: 0.1, logprob_share: 0.0, routing: 0.5 };
    let truth = |routing_lead| TruthStep { best: vec![(TokenId(1), -0.1), (TokenId(2), -3.0)], routing_lead };
    let seen = |routing_lead, found: &[(TokenId, f32)]| {
        let mut comparison = Comparison::default();
        let token = found.first().map(|(token, _)| *token);
        comparison.see("here", &truth(routing_lead), token, found, tolerance);
        comparison
    };
    let other = [(TokenId(2), -0.1), (TokenId(1), -3.0)];
    let tie = seen(0.4, &other);
    assert_eq!((tie.n_tokens, tie.n_routing_ties, tie.wrong.len(), tie.worst_lead), (1, 1, 0, 0.0));
    assert!(!tie.is_equal(), "all of its tokens are out of bounds");
    assert_eq!(seen(0.6, &other).wrong.len(), 3, "the token and two log-probabilities");
    assert_eq!(seen(f32::INFINITY, &other).n_routing_ties, 0, "a model without experts has no such ties");
    assert_eq!(seen(0.4, &[(TokenId(1), -0.1)]).n_routing_ties, 0, "it is within bounds");
    assert_eq!(seen(0.4, &[]).wrong, ["here: no token"]);

    let mut all = tie;
    (0..18).for_each(|_| all.merge(seen(0.4, &[(TokenId(1), -0.1)])));
    assert!(!all.is_equal(), "one of 19 is too many");
    all.merge(seen(0.4, &[(TokenId(1), -0.1)]));
    assert!(all.is_equal(), "one of 20");
}

#[test]
fn the_reference_knows_its_routing_leads() {
    let leads = |model| {
        let truths = truths(&mut opened(model, KvDtype::F32), &prompts(), 4).expect("they are computed");
        truths.iter().flat_map(|truth| &truth.steps).map(|step| step.routing_lead).collect::<Vec<_>>()
    };
    let of_experts = leads("mixtral");
    assert!(of_experts.iter().all(|lead| (0.0..100.0).contains(lead)), "{of_experts:?}");
    assert!(leads("qwen3").iter().all(|lead| lead.is_infinite()), "it has no experts");
}

#[test]
fn a_prompt_is_compared_by_its_log_probabilities_its_best_tokens_and_its_rank() {
    let [a, b, c] = [1, 2, 3].map(TokenId);
    let top = vec![(a, -0.2), (b, -1.8), (c, -4.0)];
    let own = PromptLogprob { logprobs: Logprobs { chosen: -1.8, top: top.clone() }, rank: 2 };
    let truth = TruthPlace { token: b, own, step: TruthStep { best: top, routing_lead: f32::INFINITY } };
    let near = Tolerance { epsilon: 0.1, logprob: 0.1, logprob_share: 0.0, routing: 0.0 };
    let seen = |n_top, chosen, rank, top: &[(TokenId, f32)], tolerance| {
        let found = PromptLogprob { logprobs: Logprobs { chosen, top: top.to_vec() }, rank };
        let mut comparison = Comparison::default();
        comparison.see_target("here", &truth, Some(&found), n_top, tolerance);
        assert_eq!(comparison.n_tokens, 1);
        comparison.wrong.len()
    };
    let two = [(a, -0.2), (b, -1.8)];
    assert_eq!(seen(2, -1.8, 2, &two, Tolerance::NONE), 0);
    assert_eq!(seen(0, -1.8, 2, &[], Tolerance::NONE), 0);
    assert_eq!(seen(9, -1.8, 2, &[(a, -0.2), (b, -1.8), (c, -4.0)], Tolerance::NONE), 0, "there are three");
    assert_eq!(seen(2, -1.75, 2, &two, near), 0);
    assert_eq!(seen(2, -1.5, 2, &two, near), 1, "its log-probability");
    assert_eq!(seen(2, f32::NAN, 2, &two, near), 1, "no number");
    assert_eq!(seen(2, -1.8, 1, &two, near), 1, "its rank");
    assert_eq!(seen(2, -1.8, 3, &two, near), 1, "its rank");
    assert_eq!(seen(2, -1.8, 2, &[(b, -1.8), (a, -0.2)], near), 2, "the best token, and the order");
    assert_eq!(seen(3, -1.8, 2, &two, near), 1, "one is missing");
    assert_eq!(seen(2, -1.8, 2, &[(a, -0.2), (c, -4.0)], near), 1, "not the second best");
    assert_eq!(seen(2, -1.8, 2, &[(a, -0.2), (TokenId(9), -1.9)], near), 1, "unknown to the reference");
    let wide = Tolerance { logprob: 1.0, ..near };
    assert_eq!(seen(2, -1.8, 1, &two, wide), 0, "rounding may exchange it with the best");
    assert_eq!(seen(2, -1.8, 3, &two, wide), 1, "the third is too far away");
    let wider = Tolerance { logprob: 1.2, ..near };
    assert_eq!(seen(2, -1.8, 4, &two, wider), 0, "the reference lists nothing that is surely worse");
    let mut comparison = Comparison::default();
    comparison.see_target("here", &truth, None, 2, near);
    assert_eq!(comparison.wrong, ["here: no log-probability"]);
}
