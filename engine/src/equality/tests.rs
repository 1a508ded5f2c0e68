use std::path::Path;

use types::KvDtype;

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
        let comparison =
            compare(&mut reference, &mut subject, &prompts(), 6, Tolerance::NONE).expect("it is compared");
        assert!(comparison.is_equal(), "{model}: {:?}", comparison.wrong);
        assert_eq!(comparison.n_tokens, 3 * (6 * 4 + 3 + 6) + 3 * 6, "{model}");
    }
}

#[test]
fn the_processor_gives_equal_results_in_large_batches() {
    let comparison =
        compare_with_itself(&mut opened("qwen2", KvDtype::Bf16), &prompts(), 3).expect("it is compared");
    assert!(comparison.is_equal(), "{:?}", comparison.wrong);
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
    assert!(!exact.is_equal());
    let near = Tolerance { epsilon: 0.1, logprob: 0.1, logprob_share: 0.0, routing: 0.0 };
    let near = compare(&mut reference, &mut subject, &prompts(), 4, near).expect("it is compared");
    assert!(near.is_equal(), "{:?}", near.wrong);
    assert!(near.worst_logprob > 0.0);
}

#[test]
fn kv_in_8_bits_is_the_same_in_any_company_and_near_what_it_stands_for() {
    let mut subject = opened("qwen3", KvDtype::Fp8E4m3);
    let comparison = compare_with_itself(&mut subject, &prompts(), 3).expect("it is compared");
    assert!(comparison.is_equal(), "{:?}", comparison.wrong.first());
    let near = Tolerance { epsilon: 1.0, logprob: 1.0, logprob_share: 0.1, routing: 0.0 };
    let near = compare(&mut opened("qwen3", KvDtype::F32), &mut subject, &prompts(), 4, near);
    let near = near.expect("it is compared");
    assert!(near.is_equal() && near.worst_logprob > 0.01, "{} {:?}", near.worst_logprob, near.wrong.first());
}

#[test]
fn another_model_is_told_apart() {
    let (mut reference, mut subject) = (opened("qwen2", KvDtype::F32), opened("llama3", KvDtype::F32));
    let near = Tolerance { epsilon: 0.1, logprob: 0.1, logprob_share: 0.0, routing: 0.0 };
    let comparison = compare(&mut reference, &mut subject, &prompts(), 4, near).expect("it is compared");
    assert!(!comparison.is_equal());
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
