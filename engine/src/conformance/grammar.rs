//! The conformance checks of rows that follow a grammar.

use grammar::{Compiler, Vocabulary, sources};
use types::{ModelInfo, Sampling, TokenId};

use super::sequence::{Blocks, Sequence, generate_in_flight, step_together};
use super::{N_STEPS, Open, prompt};
use crate::backend::Backend;

/// Tokens with an even and an odd number in turn. A token's text is its number and a comma.
const IN_TURN: &str = "([0-9]*[02468],[0-9]*[13579],){40}";
/// Tokens with an odd number.
const ODD: &str = "([0-9]*[13579],){80}";

/// Runs every check.
pub fn suite(open: Open<'_>) {
    tokens_follow_their_grammars(open);
}

/// Checks "a row's token depends on that row's tokens, sampling and positions alone" for rows with a grammar: their
/// masks are those of the tokens before, whether the caller knows them or they are in flight.
fn tokens_follow_their_grammars(open: Open<'_>) {
    let mut backend = open();
    let known = known_one_by_one(backend.as_mut(), None);
    for (nth, remainders) in [(0, [0, 1]), (1, [1, 1]), (3, [0, 1])] {
        let generated = known[nth].iter().map(|token| token.0 % 2);
        let expected = remainders.into_iter().cycle().take(N_STEPS);
        assert!(generated.eq(expected), "sequence {nth} follows its grammar: {:?}", known[nth]);
    }
    assert_eq!(in_flight(open().as_mut()), known, "with the token before in flight");
    // More than 20 log-probabilities are computed in another way on GPUs. The draws of sequence 3 are left out, because
    // their sums have another order there.
    let told = known_one_by_one(open().as_mut(), Some(21));
    assert_eq!(told[..3], known[..3], "with log-probabilities");
}

/// Makes sequences: two with a grammar, one without, and one with a grammar and random draws.
fn sequences(model: &ModelInfo, logprobs: Option<u8>) -> Vec<Sequence> {
    let end = TokenId(model.vocab - 1);
    let words = (0..model.vocab).map(|id| format!("{id},").into_bytes()).collect();
    let vocabulary = Vocabulary::of_words(words, &[end]).expect("a token that ends");
    let compiler = Compiler::new(&vocabulary).expect("a vocabulary for grammars");
    let mut blocks = Blocks::default();
    let mut sequence = |nth: u32, pattern: Option<&str>| {
        let mut sequence = Sequence::new(&prompt(9 + 7 * nth, 20 + nth), &mut blocks, model, N_STEPS);
        let compiled = |pattern| compiler.constraint(&sources::regex(pattern)).expect("a grammar");
        sequence.constraint = pattern.map(compiled);
        sequence.sampling.logprobs = logprobs;
        sequence
    };
    let mut all = vec![
        sequence(0, Some(IN_TURN)),
        sequence(1, Some(ODD)),
        sequence(2, None),
        sequence(3, Some(IN_TURN)),
    ];
    all[3].sampling = Sampling {
        temperature: 1.0,
        seed: 5,
        presence_penalty: 0.5,
        top_p: 0.9,
        logprobs,
        ..Sampling::default()
    };
    all
}

/// Returns the sequences' tokens. Each step is collected before the next one is launched.
fn known_one_by_one(backend: &mut dyn Backend, logprobs: Option<u8>) -> Vec<Vec<TokenId>> {
    let mut sequences = sequences(backend.model(), logprobs);
    for _ in 0..N_STEPS {
        step_together(backend, &mut sequences);
    }
    tokens_of(&sequences)
}

/// Returns the sequences' tokens. Each step is launched before the one before it is collected.
fn in_flight(backend: &mut dyn Backend) -> Vec<Vec<TokenId>> {
    let mut sequences = sequences(backend.model(), None);
    generate_in_flight(backend, &mut sequences, N_STEPS);
    tokens_of(&sequences)
}

fn tokens_of(sequences: &[Sequence]) -> Vec<Vec<TokenId>> {
    sequences.iter().map(|sequence| sequence.generated().to_vec()).collect()
}
