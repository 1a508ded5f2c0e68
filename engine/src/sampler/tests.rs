use std::num::NonZero;

use kernels::cpu::Arithmetic;

use super::*;

const EOS: TokenId = TokenId(4);

fn processor() -> Processor {
    Processor::new(Arithmetic::F32, NonZero::new(1).unwrap()).unwrap()
}

fn spec(sampling: Sampling) -> OwnedSampleSpec {
    let stop = StopRules::default();
    OwnedSampleSpec { sampling, stop, history: Vec::new(), n_prompt: 0, index: 0, constrained: None }
}

fn drawn(spec: &OwnedSampleSpec, logits: &[f32], position: usize) -> u32 {
    spec.draw(&processor(), &mut logits.to_vec(), position, &[EOS]).expect("a token").token.0
}

/// Returns the share of each token in 4000 draws.
fn shares(sampling: &Sampling, logits: &[f32]) -> Vec<f32> {
    let (spec, mut counts) = (spec(sampling.clone()), vec![0; logits.len()]);
    for position in 0..4000 {
        counts[drawn(&spec, logits, position) as usize] += 1;
    }
    counts.into_iter().map(|count| count as f32 / 4000.0).collect()
}

fn check_shares(sampling: Sampling, logits: &[f32], expected: &[f32]) {
    let shares = shares(&sampling, logits);
    let near = shares.iter().zip(expected).all(|(share, expected)| (share - expected).abs() < 0.03);
    assert!(near && shares.len() == expected.len(), "{sampling:?} gives {shares:?}, not {expected:?}");
}

fn at_random() -> Sampling {
    Sampling { temperature: 1.0, seed: 3, ..Sampling::default() }
}

/// Returns logits whose softmax has these shares.
fn logits(shares: &[f32]) -> Vec<f32> {
    shares.iter().map(|share| share.ln() + 5.0).collect()
}

#[test]
fn zero_temperature_takes_the_best_and_of_two_the_lower() {
    let greedy = spec(Sampling::default());
    assert_eq!(drawn(&greedy, &[1.0, 3.0, 2.0], 0), 1);
    assert_eq!(drawn(&greedy, &[1.0, 3.0, 3.0], 9), 1);
}

#[test]
fn draws_follow_the_shares() {
    let shares = [0.5, 0.25, 0.15, 0.1];
    check_shares(at_random(), &logits(&shares), &shares);
}

#[test]
fn temperature_sharpens_and_flattens() {
    let cold = Sampling { temperature: 0.5, ..at_random() };
    check_shares(cold, &logits(&[0.75, 0.25]), &[0.9, 0.1]);
    let hot = Sampling { temperature: 100.0, ..at_random() };
    check_shares(hot, &logits(&[0.75, 0.25]), &[0.5, 0.5]);
}

#[test]
fn truncation_table() {
    let all = [0.4, 0.1, 0.2, 0.3];
    for (sampling, expected) in [
        (Sampling { top_k: 2, ..at_random() }, [0.571, 0.0, 0.0, 0.429]),
        (Sampling { top_k: 1, ..at_random() }, [1.0, 0.0, 0.0, 0.0]),
        (Sampling { top_k: 9, ..at_random() }, all),
        (Sampling { top_p: 0.5, ..at_random() }, [0.571, 0.0, 0.0, 0.429]),
        (Sampling { top_p: 0.0, ..at_random() }, [1.0, 0.0, 0.0, 0.0]),
        (Sampling { top_p: 0.95, ..at_random() }, all),
        (Sampling { min_p: 0.6, ..at_random() }, [0.571, 0.0, 0.0, 0.429]),
        (Sampling { min_p: 0.01, ..at_random() }, all),
        (Sampling { top_k: 3, top_p: 0.5, ..at_random() }, [0.571, 0.0, 0.0, 0.429]),
    ] {
        check_shares(sampling, &logits(&all), &expected);
    }
}

#[test]
fn top_p_of_many_keeps_what_a_full_sort_would() {
    let weights: Vec<f32> = (0..5000).map(|i| ((i * 7919 % 5003) as f32 / 1000.0).exp()).collect();
    for top_p in [0.1, 0.5, 0.9, 0.99] {
        let spec = spec(Sampling { top_p, ..at_random() });
        let kept = spec.kept(&weights);
        let mut sorted: Vec<f32> = weights.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        let share = |n: usize| sorted[..n].iter().map(|weight| f64::from(*weight)).sum::<f64>() / total;
        assert!(
            share(kept.len()) >= f64::from(top_p) - 1e-9 && share(kept.len() - 1) < f64::from(top_p) + 1e-9
        );
        assert!(kept.iter().zip(&sorted).all(|(kept, sorted)| kept.weight == *sorted));
    }
}

#[test]
fn seed_and_position_are_the_draw() {
    let logits = logits(&[0.25; 4]);
    let tokens = |seed: u64| -> Vec<u32> {
        let spec = spec(Sampling { seed, ..at_random() });
        (0..50).map(|position| drawn(&spec, &logits, position)).collect()
    };
    assert_eq!(tokens(1), tokens(1));
    assert_ne!(tokens(1), tokens(2));
}

#[test]
fn penalties_count_what_was_said() {
    let history: Vec<TokenId> = [0, 1, 1, 1].map(TokenId).to_vec();
    for (sampling, logits, expected) in [
        (Sampling { repetition_penalty: 2.0, ..Sampling::default() }, [3.0, 1.0, 2.0], 2),
        (Sampling { repetition_penalty: 2.0, ..Sampling::default() }, [-1.0, -1.5, -1.9], 2),
        (Sampling { presence_penalty: 0.5, ..Sampling::default() }, [2.0, 2.4, 1.0], 0),
        (Sampling { frequency_penalty: 0.5, ..Sampling::default() }, [2.0, 3.4, 1.0], 0),
        // Token 0 is only in the prompt, so the presence penalty does not apply to it.
        (Sampling { presence_penalty: 5.0, ..Sampling::default() }, [2.0, 1.0, 1.5], 0),
    ] {
        let spec = OwnedSampleSpec { history: history.clone(), n_prompt: 1, ..spec(sampling.clone()) };
        assert_eq!(drawn(&spec, &logits, 0), expected, "{sampling:?}");
    }
}

#[test]
fn the_token_in_flight_is_remembered_where_it_matters() {
    let mut plain = spec(Sampling::default());
    plain.remember(TokenId(1));
    assert!(plain.history.is_empty());
    let mut penal = spec(Sampling { presence_penalty: 5.0, ..Sampling::default() });
    penal.remember(TokenId(1));
    assert_eq!(drawn(&penal, &[1.0, 2.0], 0), 0);
}

#[test]
fn bias_and_forbidden_tokens() {
    let biased =
        Sampling { logit_bias: vec![(TokenId(2), 10.0), (TokenId(999), 1.0)], ..Sampling::default() };
    assert_eq!(drawn(&spec(biased), &[1.0, 2.0, 0.0], 0), 2);
    let stop = StopRules { min_tokens: 3, stop_tokens: vec![TokenId(1)], ..StopRules::default() };
    let early = OwnedSampleSpec { stop, ..spec(Sampling::default()) };
    let logits = [1.0, 5.0, 2.0, 0.0, 9.0];
    assert_eq!(drawn(&early, &logits, 0), 2, "neither the stop token nor the end");
    assert_eq!(drawn(&OwnedSampleSpec { index: 3, ..early }, &logits, 0), 4);
}

#[test]
fn nothing_to_draw_is_said() {
    let greedy = spec(Sampling::default());
    let among_others = [[0.0, f32::NAN, 1.0], [0.0, 1.0, -f32::NAN], [f32::INFINITY, 0.0, 0.0]];
    for logits in [[f32::NAN; 3], [f32::NEG_INFINITY; 3]].into_iter().chain(among_others) {
        let error = greedy.draw(&processor(), &mut logits.to_vec(), 0, &[]).expect_err("no logit to take");
        assert_eq!(error, no_token());
    }
    // A NaN is an error even if its token is forbidden.
    let stop = StopRules { min_tokens: 3, stop_tokens: vec![TokenId(1)], ..StopRules::default() };
    let forbidding = OwnedSampleSpec { stop, ..spec(Sampling::default()) };
    forbidding.draw(&processor(), &mut [0.0, f32::NAN, 1.0], 0, &[]).expect_err("a row that is spoilt");
}

#[test]
fn logprobs_are_the_models_own() {
    let sampling =
        Sampling { logprobs: Some(2), logit_bias: vec![(TokenId(2), 50.0)], ..Sampling::default() };
    let sampled = spec(sampling).draw(&processor(), &mut logits(&[0.5, 0.3, 0.2]), 0, &[]).expect("a token");
    let logprobs = sampled.logprobs.expect("asked for");
    assert_eq!(sampled.token, TokenId(2));
    let near = |logprob: f32, share: f32| (logprob.exp() - share).abs() < 1e-5;
    assert!(near(logprobs.chosen, 0.2), "before the bias");
    assert_eq!(logprobs.top.iter().map(|(token, _)| token.0).collect::<Vec<_>>(), [0, 1]);
    assert!(near(logprobs.top[0].1, 0.5) && near(logprobs.top[1].1, 0.3));
}
