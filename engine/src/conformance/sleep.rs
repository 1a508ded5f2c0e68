//! The conformance checks of sleep and wake.

use kv_cache::KvMemory;
use types::GroupIdx;

use super::sequence::{Blocks, Sequence, SequenceInput, collect, launch, step_together};
use super::{N_STEPS, Open, prompt};
use crate::backend::Backend;
use crate::error::BackendError;

/// Runs every check.
pub fn suite(open: Open<'_>) {
    tokens_are_the_same_after_sleep(open);
    kv_is_gone_after_sleep(open);
    a_step_in_flight_keeps_it_awake(open);
    memory_that_others_hold_keeps_it_awake(open);
}

fn generate(backend: &mut dyn Backend) -> Sequence {
    let mut sequence = Sequence::new(&prompt(37, 12), &mut Blocks::default(), backend.model(), N_STEPS);
    for _ in 0..N_STEPS {
        step_together(backend, std::slice::from_mut(&mut sequence));
    }
    sequence
}

fn slept(backend: Box<dyn Backend>) -> Box<dyn Backend> {
    let asleep = backend.sleep().expect("nothing is under way");
    asleep.wake().expect("there is as much memory as before")
}

/// Checks "the backend that wakes is the same model".
fn tokens_are_the_same_after_sleep(open: Open<'_>) {
    let mut backend = open();
    let (model, n_blocks) = (backend.model().clone(), backend.memory().n_blocks());
    let before = generate(backend.as_mut());
    for _ in 0..2 {
        backend = slept(backend);
        assert_eq!((backend.model(), backend.memory().n_blocks()), (&model, n_blocks));
        assert_eq!(generate(backend.as_mut()).generated(), before.generated(), "after sleep");
    }
}

/// Checks "with empty KV": the pages are zero.
fn kv_is_gone_after_sleep(open: Open<'_>) {
    let mut backend = open();
    let sequence = generate(backend.as_mut());
    assert!(n_pages(backend.memory(), &sequence, |byte| byte != 0) > 0, "KV was written");
    let backend = slept(backend);
    assert_eq!(n_pages(backend.memory(), &sequence, |byte| byte != 0), 0, "pages that are not empty");
}

/// Checks that sleep "fails without effect while a launched step is not collected".
fn a_step_in_flight_keeps_it_awake(open: Open<'_>) {
    let mut backend = open();
    let sequence = Sequence::new(&prompt(8, 13), &mut Blocks::default(), backend.model(), N_STEPS);
    let launched = launch(backend.as_mut(), &[(&sequence, SequenceInput::Known(sequence.remaining()))]);
    let refused = backend.sleep().expect_err("a step is in flight");
    assert!(matches!(refused.why, BackendError::Order(_)), "{refused}");
    let mut backend = refused.backend;
    collect(backend.as_mut(), launched);
    drop(slept(backend));
}

/// Checks that sleep fails without effect while another clone of the memory exists.
fn memory_that_others_hold_keeps_it_awake(open: Open<'_>) {
    let backend = open();
    let held = backend.memory().clone();
    let refused = backend.sleep().expect_err("the memory is held");
    assert!(matches!(refused.why, BackendError::Held(_)), "{refused}");
    let mut backend = refused.backend;
    let before = generate(backend.as_mut());
    drop(held);
    let mut backend = slept(backend);
    assert_eq!(generate(backend.as_mut()).generated(), before.generated());
}

/// Counts the pages of a sequence's blocks in which at least one byte satisfies `is_such`.
fn n_pages(memory: &KvMemory, sequence: &Sequence, is_such: impl Fn(u8) -> bool) -> usize {
    let layers = |group: GroupIdx| 0..memory.layout().group(group).layers.len() as u16;
    let mut n_pages = 0;
    for (group, blocks) in memory.layout().group_indices().zip(sequence.tables()) {
        for (rank, layer_pos) in
            (0..memory.n_ranks()).flat_map(|rank| layers(group).map(move |pos| (rank, pos)))
        {
            for block in blocks {
                let page = memory
                    .rank(rank)
                    .read(group, layer_pos, block.0..block.0 + 1)
                    .expect("the page has no writer");
                n_pages += usize::from(page.iter().any(|byte| is_such(*byte)));
            }
        }
    }
    n_pages
}
