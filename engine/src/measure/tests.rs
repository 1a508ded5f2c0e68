use std::path::Path;

use super::*;
use crate::backend::cpu::{CpuBackend, CpuSettings};
use crate::backend::mock::{Mock, MockSettings, Pace};

fn mock() -> Mock {
    Mock::new("mock", MockSettings::default(), 512, Pace::Modelled).expect("the plain mock")
}

#[test]
fn everything_that_is_asked_for_is_measured() {
    let workload = Workload {
        batches: vec![1, 3],
        draws: vec![SamplingMode::Greedy, SamplingMode::Penalties],
        context_tokens: 40,
        prompts: vec![30, 100],
        offline: Some(Offline {
            n_requests: 7,
            prompt_tokens: 20,
            output_tokens: 5,
            rows_max: 3,
            step_tokens: 16,
        }),
        step_tokens: 64,
    };
    let mut lines = 0;
    let measured = measure(&mut mock(), &workload, &mut |_| lines += 1).expect("it is measured");
    assert_eq!(lines, 7);
    assert_eq!(measured.decode.iter().map(|times| times.rows).collect::<Vec<_>>(), [1, 3, 1, 3]);
    assert_eq!(measured.prompts.iter().map(|times| times.prompt_tokens).collect::<Vec<_>>(), [30, 100]);
    let offline = measured.offline.expect("it was asked for");
    // The bounds follow from three sequences of 24 tokens each, two and a third turns, and at most 16 tokens
    // a step.
    assert!(offline.steps >= 7 * 24 / 16 && offline.steps < 100, "{}", offline.steps);
}

#[test]
fn steps_with_a_grammar_are_measured() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let mut cpu = CpuBackend::open(&folder, 16 << 20, &CpuSettings::default()).expect("it opens");
    let workload = Workload {
        batches: vec![2],
        draws: vec![SamplingMode::Grammar, SamplingMode::Greedy],
        context_tokens: 8,
        prompts: vec![],
        offline: None,
        step_tokens: 64,
    };
    let measured = measure(&mut cpu, &workload, &mut |_| {}).expect("no row fails");
    assert_eq!(measured.decode.iter().map(|times| times.step_ms.n).collect::<Vec<_>>(), [40, 40]);
}

#[test]
fn tokens_are_compared_after_each_sleep() {
    let mut lines = Vec::new();
    let cycles = sleep_cycles::measure(Box::new(mock()), 2, &mut |line| lines.push(line.to_owned()))
        .expect("it sleeps");
    assert_eq!((cycles.len(), lines.len()), (2, 2));
    assert!(cycles.iter().all(|cycle| cycle.are_equal && cycle.n_tokens == 4 * 32), "{cycles:?}");
    assert!(lines[0].ends_with("128 tokens equal"), "{lines:?}");
}

#[test]
fn too_little_memory_is_said_in_blocks() {
    let workload = Workload {
        batches: vec![1 << 20],
        draws: vec![SamplingMode::Greedy],
        context_tokens: 40,
        prompts: vec![],
        offline: None,
        step_tokens: 64,
    };
    let error = measure(&mut mock(), &workload, &mut |_| {}).expect_err("a million rows");
    assert!(error.to_string().contains("blocks of KV are needed"), "{error}");
    // The last measurement needs too much memory, which must be found before any measurement starts.
    let of = Offline { n_requests: 900, prompt_tokens: 20, output_tokens: 5, rows_max: 800, step_tokens: 16 };
    let workload = Workload { batches: vec![1], prompts: vec![30], offline: Some(of), ..workload };
    let mut lines = 0;
    let error = measure(&mut mock(), &workload, &mut |_| lines += 1).expect_err("800 sequences");
    assert_eq!((error.to_string().contains("blocks of KV are needed"), lines), (true, 0), "{error}");
}

#[test]
fn times_are_of_the_middle_and_the_least() {
    let times = Times::of([30, 10, 20].map(Duration::from_millis).to_vec());
    assert_eq!((times.median, times.least, times.n), (20.0, 10.0, 3));
}
