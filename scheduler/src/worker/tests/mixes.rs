//! Tests random mixes of sequences: each produces the same tokens as alone, and all blocks are returned.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use proptest::prelude::*;
use types::prompt::Priority;
use types::{Prompt, Sampling, TokenId};

use crate::precedence::SequenceId;
use crate::settings::SchedulerSettings;
use crate::sink::SINK_SLACK;
use crate::submission::{NewSequence, Source};
use crate::testing::{BLOCK_TOKENS, Recorder, Recording, Rig, alone, arrived, prompt};

/// The size of the pool and the scheduler's settings in one case.
#[derive(Clone, Debug)]
struct Node {
    n_blocks: u32,
    step_blocks: usize,
    sequences_max: usize,
    growth_blocks: usize,
    steps_in_flight_max: usize,
}

/// One sequence of a case.
#[derive(Clone, Debug)]
struct One {
    /// The family of the prompt. Prompts of one family have a common prefix.
    family: u8,
    n_tokens: usize,
    max_tokens: u32,
    priority: i8,
    seed: Option<u64>,
    origin: Origin,
    /// The turn before which the sequence is submitted.
    at: usize,
    /// The number of turns after which the sequence is cancelled.
    cancelled_after: Option<usize>,
    /// The range of turns after the submission in which the sequence's sink is full.
    full: Option<(usize, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Fresh,
    Arrived,
    /// The sequence wants one step, and its sink keeps the KV for `keeps` turns.
    Outbox {
        keeps: usize,
    },
}

fn node() -> impl Strategy<Value = Node> {
    (12u32..40, 1usize..6, 1usize..8, 0usize..3, 1usize..=2).prop_map(
        |(n_blocks, step_blocks, sequences_max, growth_blocks, steps_in_flight_max)| Node {
            n_blocks,
            step_blocks,
            sequences_max,
            growth_blocks,
            steps_in_flight_max,
        },
    )
}

fn one() -> impl Strategy<Value = One> {
    let origin = prop_oneof![
        4 => Just(Origin::Fresh),
        2 => Just(Origin::Arrived),
        2 => (0usize..40).prop_map(|keeps| Origin::Outbox { keeps }),
    ];
    let shape = (0u8..3, 1usize..26, 1u32..22, -1i8..2);
    let fate = (
        0usize..30,
        proptest::option::weighted(0.2, 0usize..25),
        proptest::option::weighted(0.2, (0usize..9, 1usize..20)),
    );
    (shape, proptest::option::of(0u64..4), origin, fate).prop_map(|(shape, seed, origin, fate)| One {
        family: shape.0,
        n_tokens: shape.1,
        max_tokens: shape.2,
        priority: shape.3,
        seed,
        origin,
        at: fate.0,
        cancelled_after: fate.1,
        full: fate.2.map(|(from, turns)| (from, from + turns)),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tokens_are_as_alone_and_blocks_come_back(node in node(), ones in proptest::collection::vec(one(), 1..12)) {
        Case::new(&node, &ones).run();
    }
}

struct Case<'a> {
    rig: Rig,
    ones: &'a [One],
    running: Vec<Option<Running>>,
}

struct Running {
    id: SequenceId,
    recorded: Recording,
    is_cancelled: bool,
}

impl<'a> Case<'a> {
    fn new(node: &Node, ones: &'a [One]) -> Self {
        let settings = SchedulerSettings {
            step_tokens_max: node.sequences_max + node.step_blocks * BLOCK_TOKENS,
            sequences_max: node.sequences_max,
            growth_blocks: node.growth_blocks,
            steps_in_flight_max: node.steps_in_flight_max,
            ..SchedulerSettings::default()
        };
        Self { rig: Rig::new(node.n_blocks, settings), ones, running: ones.iter().map(|_| None).collect() }
    }

    /// Runs until the worker is idle, for more turns than any sink is full or keeps a lease.
    fn run(mut self) {
        for turn in 0..80 {
            self.play(turn);
            match turn % 3 {
                0 => self.rig.turn_with_intruder(),
                _ => _ = self.rig.turn(),
            }
            assert_eq!(self.rig.pool.integrity(), Ok(()));
        }
        self.rig.settle();
        for (one, running) in self.ones.iter().zip(&self.running) {
            if let Some(running) = running {
                check(one, running);
            }
        }
        self.rig.assert_at_baseline();
    }

    /// Makes the submissions, cancellations and sink changes that come before this turn.
    fn play(&mut self, turn: usize) {
        for (one, running) in self.ones.iter().zip(&mut self.running) {
            if one.at == turn {
                *running = submit(&mut self.rig, one);
            }
            if let (Some(running), Some(age)) = (running, turn.checked_sub(one.at)) {
                running.age(one, age, &mut self.rig);
            }
        }
    }
}

impl Running {
    fn age(&mut self, one: &One, age: usize, rig: &mut Rig) {
        if one.cancelled_after == Some(age) {
            self.is_cancelled = true;
            rig.cancel(self.id);
        }
        let mut record = self.recorded.get();
        record.is_full = one.full.is_some_and(|(from, until)| (from..until).contains(&age));
        let keeps = matches!(one.origin, Origin::Outbox { keeps } if age < keeps);
        if !keeps {
            record.is_stream = true;
            record.leases.clear();
        }
    }
}

fn prompt_of(one: &One) -> Prompt {
    let mut prompt = prompt(&format!("family {}", one.family), one.n_tokens, one.max_tokens);
    prompt.priority = Priority(one.priority);
    if let Some(seed) = one.seed {
        prompt.sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
    }
    prompt
}

/// Submits a sequence. Returns `None` if there is no room for its arrived KV.
fn submit(rig: &mut Rig, one: &One) -> Option<Running> {
    let prompt = prompt_of(one);
    let source = match one.origin {
        Origin::Fresh | Origin::Outbox { .. } => Source::Fresh,
        Origin::Arrived => arrived(rig, &prompt)?,
    };
    let is_outbox = matches!(one.origin, Origin::Outbox { .. });
    let (sink, recorded) = Recorder::new();
    recorded.get().is_stream = !is_outbox;
    let steps_wanted = if is_outbox { 1 } else { u32::MAX };
    let new = NewSequence { prompt, source, sink: Box::new(sink), steps_wanted, constraint: None };
    let id = rig.submit(new).ok()?;
    Some(Running { id, recorded, is_cancelled: false })
}

fn check(one: &One, running: &Running) {
    let recorded = &running.recorded;
    let expected = expected_of(one);
    let tokens = recorded.tokens();
    assert!(recorded.has_ended(), "{one:?} has no end");
    match running.is_cancelled && !recorded.is_finished() {
        true => assert!(
            expected.starts_with(&tokens),
            "{one:?}: {tokens:?} before the cancel, {expected:?} alone"
        ),
        false => assert_eq!(tokens, expected, "{one:?}: {:?}", recorded.get().end),
    }
    check_spans(one, recorded, running.is_cancelled);
}

/// Checks that an outbox has received every block once, in order.
fn check_spans(one: &One, recorded: &Recording, is_cancelled: bool) {
    let record = recorded.get();
    let mut next = 0;
    for (span, _) in &record.spans {
        assert_eq!(span.blocks.start, next, "{one:?}");
        next = span.blocks.end;
    }
    let n_blocks = one.n_tokens.div_ceil(BLOCK_TOKENS) as u32;
    if one.origin != Origin::Arrived && !is_cancelled {
        assert_eq!(next, n_blocks, "{one:?}");
        assert!(record.spans.iter().all(|(_, fence)| fence.is_open(2)), "{one:?}");
    }
    assert!(record.steps.len() <= one.max_tokens as usize + SINK_SLACK);
}

fn expected_of(one: &One) -> Vec<TokenId> {
    let all = alone_once(one);
    match one.origin {
        Origin::Fresh => all.to_vec(),
        Origin::Arrived => all[1..].to_vec(),
        Origin::Outbox { .. } => all[..1].to_vec(),
    }
}

/// Returns the tokens of a sequence that runs alone. They are cached, because cases repeat each other's
/// prompts, and running one alone takes most of the time.
fn alone_once(one: &One) -> Arc<[TokenId]> {
    type Key = (u8, usize, u32, Option<u64>);
    static KNOWN: LazyLock<Mutex<HashMap<Key, Arc<[TokenId]>>>> = LazyLock::new(Mutex::default);
    let key = (one.family, one.n_tokens, one.max_tokens, one.seed);
    let mut known = KNOWN.lock().expect("no other thread panics with it");
    Arc::clone(known.entry(key).or_insert_with(|| alone(&prompt_of(one)).into()))
}
