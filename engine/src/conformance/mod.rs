//! The conformance suite of backends. Each check quotes the sentence of [`Backend`]'s contract that it tests.
//!
//! A check panics if the contract is broken. It compares tokens with each other, not with expected ones,
//! because a model may sample any token.

pub mod alone;
pub mod grammar;
mod sequence;
pub mod sleep;

use types::{Sampling, StopRules, TokenId};

use crate::backend::Backend;
use crate::step::StepBatch;
use sequence::{
    Blocks, Sequence, SequenceInput, SequenceKv, collect, generate_in_flight, generate_in_parts, launch,
    step_together,
};

/// The number of blocks that a backend under test needs.
pub const BLOCKS_MIN: u32 = 64;
const N_STEPS: usize = 24;

/// Makes a new backend, always with the same model.
pub type Open<'a> = &'a dyn Fn() -> Box<dyn Backend>;

/// Runs every check that each backend passes. Those of [`grammar`] are for backends that follow grammars.
pub fn suite(open: Open<'_>) {
    tokens_do_not_depend_on_the_batch(open);
    tokens_do_not_depend_on_chunks(open);
    previous_is_the_token_in_flight(open);
    previous_is_that_of_the_latest_sampling_row(open);
    recomputed_is_as_decoded(open);
    moved_kv_is_as_good(open);
    draws_are_keyed_by_seed_and_position(open);
    forbidden_tokens_are_not_drawn(open);
    fences_open_for_every_layer(open);
    no_more_steps_are_launched_than_allowed(open);
    sleep::suite(open);
}

/// Checks "a row's token and KV depend on that row's tokens, sampling and positions alone".
pub fn tokens_do_not_depend_on_the_batch(open: Open<'_>) {
    let prompts = [prompt(5, 1), prompt(33, 2), prompt(16, 3)];
    let alone: Vec<_> = prompts.iter().map(|prompt| generate_alone(open, prompt, prompt.len())).collect();
    let mut backend = open();
    let mut blocks = Blocks::default();
    let mut sequences: Vec<Sequence> =
        prompts.iter().map(|prompt| Sequence::new(prompt, &mut blocks, backend.model(), N_STEPS)).collect();
    for _ in 0..N_STEPS {
        step_together(backend.as_mut(), &mut sequences);
    }
    for (sequence, alone) in sequences.iter().zip(alone) {
        assert_eq!(sequence.generated(), alone, "batched against alone");
    }
}

/// Checks "the same alone, batched, in chunks": a prompt gets the same tokens however it is cut.
pub fn tokens_do_not_depend_on_chunks(open: Open<'_>) {
    let prompt = prompt(57, 4);
    let whole = generate_alone(open, &prompt, prompt.len());
    let block_tokens = usize::from(open().model().layout.block_tokens);
    for chunk in [block_tokens, 2 * block_tokens, 1] {
        assert_eq!(generate_alone(open, &prompt, chunk), whole, "chunks of {chunk}");
    }
}

/// Checks "a row may use KV that the steps in flight write, and the token that one of them samples".
pub fn previous_is_the_token_in_flight(open: Open<'_>) {
    let prompt = prompt(19, 5);
    let expected = generate_alone(open, &prompt, prompt.len());
    let mut backend = open();
    let mut sequence = Sequence::new(&prompt, &mut Blocks::default(), backend.model(), N_STEPS);
    generate_in_flight(backend.as_mut(), std::slice::from_mut(&mut sequence), N_STEPS);
    assert_eq!(sequence.generated(), expected);
}

/// Checks "`Previous` means the token that this slot samples in the latest launched step in which it has a sampling row":
/// as many steps are in flight as allowed, and a sequence is in one of them.
pub fn previous_is_that_of_the_latest_sampling_row(open: Open<'_>) {
    let mut backend = open();
    let n_parts = backend.steps_in_flight_max() - 1;
    let mut blocks = Blocks::default();
    let prompts: Vec<_> = (0..2 * n_parts as u32).map(|nth| prompt(5 + 3 * nth, 30 + nth)).collect();
    let sequence = |prompt: &Vec<TokenId>| Sequence::new(prompt, &mut blocks, backend.model(), N_STEPS);
    let mut sequences: Vec<Sequence> = prompts.iter().map(sequence).collect();
    generate_in_parts(backend.as_mut(), &mut sequences, n_parts, N_STEPS);
    for (sequence, prompt) in sequences.iter().zip(&prompts) {
        let expected = generate_alone(open, prompt, prompt.len());
        assert_eq!(sequence.generated(), expected, "{n_parts} parts in flight");
    }
}

/// Checks "recomputed": KV of tokens that were decoded one by one is recomputed as a prompt.
pub fn recomputed_is_as_decoded(open: Open<'_>) {
    let prompt = prompt(11, 6);
    let expected = generate_alone(open, &prompt, prompt.len());
    let half = N_STEPS / 2;
    let mut backend = open();
    let mut sequence = continued(&prompt, &expected[..half], backend.as_ref());
    for _ in half..N_STEPS {
        step_together(backend.as_mut(), std::slice::from_mut(&mut sequence));
    }
    assert_eq!(sequence.generated(), expected);
}

/// Checks "with KV from another node": KV is copied into another backend's memory, into other blocks.
pub fn moved_kv_is_as_good(open: Open<'_>) {
    let prompt = prompt(41, 7);
    let expected = generate_alone(open, &prompt, prompt.len());
    let (mut from, mut to) = (open(), open());
    let mut sender = Sequence::new(&prompt, &mut Blocks::default(), from.model(), N_STEPS);
    step_together(from.as_mut(), std::slice::from_mut(&mut sender));
    let mut receiver = Sequence::new(&prompt, &mut Blocks::starting_at(7), to.model(), N_STEPS);
    let sent = SequenceKv { memory: from.memory(), sequence: &sender };
    sequence::copy_kv(sent, SequenceKv { memory: to.memory(), sequence: &receiver });
    receiver.take_over(&sender);
    for _ in 1..N_STEPS {
        step_together(to.as_mut(), std::slice::from_mut(&mut receiver));
    }
    assert_eq!(receiver.generated(), expected);
}

/// Checks that a sequence that is continued on another backend draws the same numbers.
pub fn draws_are_keyed_by_seed_and_position(open: Open<'_>) {
    let once = draw_with_seed(open, 1, &[]);
    assert_eq!(draw_with_seed(open, 1, &[]), once, "the same seed");
    assert_eq!(draw_with_seed(open, 1, &once[..10]), once, "continued after ten tokens");
    assert_ne!(draw_with_seed(open, 2, &[]), once, "another seed");
}

fn draw_with_seed(open: Open<'_>, seed: u64, known: &[TokenId]) -> Vec<TokenId> {
    let mut backend = open();
    let mut sequence = continued(&prompt(9, 8), known, backend.as_ref());
    sequence.sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
    for _ in known.len()..N_STEPS {
        step_together(backend.as_mut(), std::slice::from_mut(&mut sequence));
    }
    sequence.generated().to_vec()
}

/// Checks "it does not sample forbidden tokens".
pub fn forbidden_tokens_are_not_drawn(open: Open<'_>) {
    let prompt = prompt(6, 9);
    let usual = generate_alone(open, &prompt, prompt.len());
    let mut backend = open();
    let mut sequence = Sequence::new(&prompt, &mut Blocks::default(), backend.model(), N_STEPS);
    sequence.stop = StopRules { min_tokens: 1, stop_tokens: vec![usual[0]], ..sequence.stop.clone() };
    step_together(backend.as_mut(), std::slice::from_mut(&mut sequence));
    assert_ne!(sequence.generated()[0], usual[0], "a stop token before min_tokens");
}

/// Checks "the step's fence opens for a layer when that layer's KV of all rows is written".
pub fn fences_open_for_every_layer(open: Open<'_>) {
    let mut backend = open();
    let sequence = Sequence::new(&prompt(20, 10), &mut Blocks::default(), backend.model(), N_STEPS);
    let launched = launch(backend.as_mut(), &[(&sequence, SequenceInput::Known(sequence.remaining()))]);
    let fence = launched.fence().clone();
    collect(backend.as_mut(), launched);
    let layers = backend.model().layout.groups.iter().flat_map(|group| &group.layers);
    let n_layers = layers.map(|shape| shape.layer + 1).max().unwrap_or(0);
    for n in 0..=n_layers {
        assert!(fence.is_open(n), "{n} layers of {n_layers}");
    }
}

/// Checks "at most `steps_in_flight_max` are in flight".
pub fn no_more_steps_are_launched_than_allowed(open: Open<'_>) {
    let mut backend = open();
    let mut blocks = Blocks::default();
    let mut launched = Vec::new();
    for nth in 0..backend.steps_in_flight_max() as u32 {
        let sequence = Sequence::new(&prompt(4, 11 + nth), &mut blocks, backend.model(), N_STEPS);
        let all = SequenceInput::Known(sequence.remaining());
        launched.push(launch(backend.as_mut(), &[(&sequence, all)]));
    }
    assert!(backend.launch(StepBatch { rows: &[] }).is_err(), "{} steps are in flight", launched.len());
    launched.into_iter().for_each(|step| drop(collect(backend.as_mut(), step)));
}

/// Returns the tokens after `prompt`, computed alone in chunks of `chunk` tokens.
fn generate_alone(open: Open<'_>, prompt: &[TokenId], chunk: usize) -> Vec<TokenId> {
    let mut backend = open();
    let mut sequence = Sequence::new(prompt, &mut Blocks::default(), backend.model(), N_STEPS);
    while sequence.generated().len() < N_STEPS {
        let n_tokens = sequence.remaining().min(chunk);
        let launched = launch(backend.as_mut(), &[(&sequence, SequenceInput::Known(n_tokens))]);
        let output = collect(backend.as_mut(), launched);
        sequence.accept(n_tokens, &output, 0);
    }
    sequence.generated().to_vec()
}

/// Makes a sequence that has `generated` after `prompt`, with nothing computed.
fn continued(prompt: &[TokenId], generated: &[TokenId], backend: &dyn Backend) -> Sequence {
    let tokens: Vec<TokenId> = prompt.iter().chain(generated).copied().collect();
    Sequence::new(&tokens, &mut Blocks::default(), backend.model(), N_STEPS).continuing(prompt.len())
}

/// Makes a prompt of letters that differ between prompts.
fn prompt(n_tokens: u32, which: u32) -> Vec<TokenId> {
    (0..n_tokens).map(|nth| TokenId(65 + (nth * 7 + which * 11) % 26)).collect()
}
