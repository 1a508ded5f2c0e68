use super::*;

fn shape(n_running: usize, n_prefill_tokens: usize) -> StepShape {
    StepShape { n_running, n_prefill_tokens, n_before: 0, n_context_tokens: 0 }
}

fn tokens(n_tokens: u64) -> PromptWork {
    PromptWork { n_tokens, n_before: 0 }
}

/// Returns the predicted wait behind prompt tokens, in steps of up to 512 tokens.
fn queue_ms(costs: &StepCosts, n_tokens: u64, n_running: usize) -> f64 {
    costs.queue_ms(tokens(n_tokens), n_running, &costs.learned(512, 0.0))
}

/// Returns the time of a step: 5 ms, plus 0.1 ms per row and 0.05 ms per prompt token.
fn took(n_running: usize, n_prefill_tokens: usize) -> Duration {
    Duration::from_secs_f64((5.0 + 0.1 * n_running as f64 + 0.05 * n_prefill_tokens as f64) / 1e3)
}

fn taught(steps: impl Iterator<Item = (usize, usize)>) -> StepCosts {
    let mut costs = StepCosts::default();
    for (n_running, n_prefill_tokens) in steps {
        let shape = shape(n_running, n_prefill_tokens);
        costs.observe(shape, took(n_running, n_prefill_tokens));
    }
    costs
}

fn about(value: f64, expected: f64) {
    assert!((value - expected).abs() <= 0.02 * expected.max(0.01), "{value} is not about {expected}");
}

#[test]
fn nothing_is_known_at_first() {
    let costs = StepCosts::default();
    assert_eq!((costs.running_ms(8), queue_ms(&costs, 1000, 8)), (0.0, 0.0));
}

#[test]
fn rows_are_told_from_steps() {
    let costs = taught((0..400).map(|nth| (1 + nth % 20, 0)));
    about(costs.running_ms(1), 5.1);
    about(costs.running_ms(20), 7.0);
    about(costs.running_ms(40), 9.0);
}

#[test]
fn steps_that_are_all_alike_say_nothing_of_one_row_more() {
    let costs = taught((0..100).map(|_| (10, 0)));
    about(costs.running_ms(11), 6.0);
}

#[test]
fn prompts_cost_what_running_sequences_do_not() {
    let costs = taught((0..800).map(|nth| (1 + nth % 20, if nth % 2 == 0 { 0 } else { 200 })));
    about(queue_ms(&costs, 1000, 0), 1000.0 * 0.05 + 2.0 * 5.0);
    about(queue_ms(&costs, 1000, 12), 1000.0 * 0.05 + 2.0 * 6.2);
}

/// A decode node computes what its cache lacks of a prompt, often while nothing else runs.
#[test]
fn short_remainders_do_not_make_a_decode_node_look_slow() {
    let steps = (0..800).map(|nth| match nth % 4 {
        0 => (0, 4 + nth % 9),
        _ => (1 + nth % 20, 0),
    });
    let costs = taught(steps);
    let token_ms = costs.learned(512, 0.0).prompt_token_ms;
    assert!((0.04..0.06).contains(&token_ms), "{token_ms} ms for each token");
    about(queue_ms(&costs, 8, 0), 5.0 + 8.0 * 0.05);
}

/// The first step of a decode node may be a short prompt: nothing tells its time from a step's fixed time yet.
#[test]
fn a_first_short_prompt_does_not_make_a_decode_node_look_slow() {
    for (first, token_ms) in [(8, 0.0..0.06), (512, 0.045..0.055)] {
        let costs = taught([(0, first), (1, 0), (1, 0)].into_iter());
        let known_ms = costs.learned(512, 0.0).prompt_token_ms;
        assert!(token_ms.contains(&known_ms), "{known_ms} ms for each token after {first}");
    }
    // A node that computes only prompts counts the fixed time of its steps.
    about(queue_ms(&taught([(0, 8)].into_iter()), 8, 0), 5.4);
}

#[test]
fn prompts_get_the_tokens_that_fit_into_a_gap() {
    let mut costs = taught((0..800).map(|nth| (1 + nth % 20, if nth % 2 == 0 { 0 } else { 200 })));
    for (gap_ms, n_running, expected) in
        [(20.0, 10, 280), (16.0, 40, 140), (50.0, 10, 400), (9.0, 40, 0), (2.0, 10, 0)]
    {
        let n_tokens = costs.prompt_tokens_within(gap_ms, n_running, 0);
        assert!(n_tokens.abs_diff(expected) <= 12, "{gap_ms} ms beside {n_running}: {n_tokens} tokens");
    }
    // Tokens late in a long prompt take twice the time.
    costs.observe(shape(10, 200), took(10, 400));
    assert!((110..170).contains(&costs.prompt_tokens_within(20.0, 10, 0)), "{costs:?}");
    for _ in 0..300 {
        costs.observe(shape(10, 200), took(10, 200));
    }
    assert!((260..300).contains(&costs.prompt_tokens_within(20.0, 10, 0)), "it falls again: {costs:?}");
    let unknown = StepCosts::default().prompt_tokens_within(20.0, 10, 0);
    assert_eq!(unknown, PROMPT_TOKENS_FIRST, "the first prompt tells its time");
}

/// Late tokens of a long prompt take longer, so fewer tokens may take as long as more.
#[test]
fn a_step_has_no_end_of_tokens_because_none_seemed_to_cost_time() {
    let mut costs = StepCosts::default();
    for nth in 0..800 {
        let (n_prefill_tokens, ms) = [(0, 5.0), (752, 20.0), (0, 5.0), (496, 21.0)][nth % 4];
        let shape = shape(2, n_prefill_tokens);
        costs.observe(shape, Duration::from_secs_f64(ms / 1e3));
    }
    let n_tokens = costs.prompt_tokens_within(20.0, 2, 0);
    assert!((300..800).contains(&n_tokens), "{n_tokens} tokens: {costs:?}");
}

#[test]
fn without_running_sequences_prompts_cost_everything() {
    let costs = taught((0..100).map(|_| (0, 500)));
    about(queue_ms(&costs, 1000, 0), 2.0 * 30.0);
}

/// The steps of a prefill node have no running sequences: their fixed time shows in prompts of several
/// lengths.
#[test]
fn a_prefill_node_reports_tokens_and_steps_apart() {
    let costs = taught((0..400).map(|nth| (0, 32 + nth % 7 * 64))).learned(512, 0.0);
    about(costs.prompt_token_ms.into(), 0.05);
    about(costs.step_ms.into(), 5.0);
    about(costs.prompt_ms(tokens(1024)), 1024.0 * 0.05 + 2.0 * 5.0);
    assert_eq!(LearnedCosts::default().prompt_ms(tokens(1024)), 0.0, "nothing is known");
}

/// On a node that decodes, chunks may cost more than their tokens: the report has it too.
#[test]
fn what_chunks_add_to_a_step_is_reported() {
    let mut costs = StepCosts::default();
    for nth in 0..400 {
        let n_prefill_tokens = [0, 500, 0, 250][nth % 4];
        let added = if n_prefill_tokens > 0 { 2.5 } else { 0.0 };
        let ms = 4.0 + added + 0.015 * n_prefill_tokens as f64;
        costs.observe(shape(4, n_prefill_tokens), Duration::from_secs_f64(ms / 1e3));
    }
    let learned = costs.learned(500, 25.0);
    about(learned.prompt_ms(tokens(5_000)), 10.0 * (4.0 + 2.5 + 7.5));
    about(learned.step_ms.into(), 4.0);
    about(learned.prompt_step_ms.into(), 2.5);
    about(learned.prompt_ms(tokens(100)), 4.0 + 2.5 + 1.5);
}

/// A router refuses a report with a negative duration, even one from rounding.
#[test]
fn no_reported_duration_is_negative() {
    for n_tokens in 1..600 {
        let learned = taught((0..40).map(|_| (0, n_tokens))).learned(512, 0.0);
        let LearnedCosts {
            prompt_token_ms,
            prompt_context_ms,
            prompt_step_ms,
            step_ms,
            row_ms,
            context_ms,
            ..
        } = learned;
        let all = [prompt_token_ms, prompt_context_ms, prompt_step_ms, step_ms, row_ms, context_ms];
        assert!(all.iter().all(|ms| *ms >= 0.0), "{n_tokens} tokens: {learned:?}");
    }
}

#[test]
fn context_is_told_from_rows() {
    let mut costs = StepCosts::default();
    for nth in 0..2000 {
        let (n_running, n_context_tokens) = (1 + nth % 20, nth % 13 * 4_000);
        let took = took(n_running, 0) + Duration::from_micros(50 * n_context_tokens as u64 / 1_000);
        costs.observe(StepShape { n_context_tokens, ..shape(n_running, 0) }, took);
    }
    let learned = costs.learned(512, 0.0);
    about(learned.row_ms.into(), 0.1);
    about(learned.context_ms.into(), 0.05);
    about(learned.step_ms.into(), 5.0);
}

/// Returns the time of prompts on an H200: 21.5 us for a token, and 1.05 us more for each 1,000 tokens before it.
fn long_prompts_ms(work: PromptWork) -> f64 {
    0.0215 * work.n_tokens as f64 + 0.00105 * work.n_before as f64 / 1e3
}

/// A prefill node computes prompts of many lengths, some in several steps.
#[test]
fn tokens_before_are_told_from_tokens() {
    let mut costs = StepCosts::default();
    for nth in 0..300_u64 {
        let n_tokens = [900, 3_100, 1_500, 12_000, 2_500, 700, 5_200, 29_000][nth as usize % 8];
        for start in (0..n_tokens).step_by(8_192) {
            let work = PromptWork::of(start..n_tokens.min(start + 8_192));
            let took = Duration::from_secs_f64((2.0 + long_prompts_ms(work)) / 1e3);
            let PromptWork { n_tokens, n_before } = work;
            costs.observe(StepShape { n_before, ..shape(0, n_tokens as usize) }, took);
        }
    }
    let learned = costs.learned(8_192, 0.0);
    for n_tokens in [500, 2_000, 8_000, 21_000, 32_000] {
        let work = PromptWork::of(0..n_tokens);
        let expected = long_prompts_ms(work) + 2.0 * n_tokens.div_ceil(8_192) as f64;
        let found = [learned.prompt_ms(work), costs.queue_ms(work, 0, &learned)];
        assert!(
            found.iter().all(|ms| (ms / expected - 1.0).abs() < 0.1),
            "{n_tokens}: {found:?} for {expected}"
        );
    }
}

/// A decode node computes prompts in chunks. Late ones have fewer tokens, so that no step becomes longer.
#[test]
fn late_chunks_of_a_long_prompt_are_short() {
    let mut costs = StepCosts::default();
    for nth in 0..60 {
        let end = [2_000, 600, 16_000, 3_000][nth % 4];
        let mut start = 0;
        while start < end {
            let n_tokens = costs.prompt_tokens_within(18.75, 3, start as usize).max(16) as u64;
            let work = PromptWork::of(start..end.min(start + n_tokens));
            let took = 4.3 + 0.5 + long_prompts_ms(work);
            assert!(nth < 8 || took < 21.0, "{took} ms for {work:?} of {end}: {costs:?}");
            let PromptWork { n_tokens, n_before } = work;
            costs.observe(
                StepShape { n_before, ..shape(3, n_tokens as usize) },
                Duration::from_secs_f64(took / 1e3),
            );
            start += n_tokens;
            costs.observe(shape(3, 0), Duration::from_secs_f64(4.3 / 1e3));
        }
    }
    let [first, late] = [0, 16_000].map(|n_before| costs.prompt_tokens_within(18.75, 3, n_before));
    assert!((580..680).contains(&first) && (300..400).contains(&late), "{first} and {late}: {costs:?}");
    let learned = costs.learned(first + 3, 25.0);
    let work = PromptWork::of(0..21_000);
    let n_steps = learned.prompt_steps(work, 3);
    assert!((45.0..56.0).contains(&n_steps), "{n_steps} steps: {learned:?}");
}

#[test]
fn the_last_group_of_a_step_with_prompts_counts_whole() {
    for (n_running, n_prefill_tokens, expected) in
        [(3, 0, 0), (3, 200, 253), (0, 256, 256), (3, 254, 509), (16, 496, 496), (0, 513, 768), (300, 0, 0)]
    {
        let found = shape(n_running, n_prefill_tokens).filled_up(256);
        assert_eq!(found, shape(n_running, expected), "{n_prefill_tokens} beside {n_running}");
    }
}

/// The end of a prompt is a small group in a step of its own. It takes as long as a whole one, and says nothing of the next.
#[test]
fn the_end_of_a_prompt_makes_the_next_one_no_slower() {
    let mut costs = StepCosts::default();
    for nth in 0..200 {
        let n_prefill_tokens = [496, 496, 272, 496, 300][nth % 5];
        let taken = shape(4, n_prefill_tokens).filled_up(256);
        costs.observe(taken, Duration::from_secs_f64((4.0 + 0.0185 * taken.n_prefill_tokens as f64) / 1e3));
        costs.observe(shape(4, 0), Duration::from_millis(4));
    }
    let n_tokens = costs.prompt_tokens_within(18.75, 4, 0);
    assert!((740..820).contains(&n_tokens), "{n_tokens}: {costs:?}");
}

#[test]
fn the_work_in_a_step_is_its_own() {
    let mut done = WorkDone::default();
    done.add(shape(0, 900), Duration::from_millis(20));
    let before = done;
    done.add(shape(2, 100), Duration::from_millis(5));
    done.add(shape(3, 50), Duration::from_millis(4));
    let of = |work: StepWork| (work.steps, work.prefill_tokens, work.rows);
    assert_eq!(of(done.since(Some(before), 0)), (2, 150, 3), "all since then");
    assert_eq!(of(done.since(None, 0)), (1, 50, 3), "the last step");
    assert_eq!(of(WorkDone::default().since(None, 0)), (0, 0, 0));
}
