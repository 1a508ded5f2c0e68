//! Tests: values survive encoding and decoding, and invalid messages are refused with the field's name.

use std::time::{Duration, Instant};

use types::FingerprintDigest;
use types::layout::{Attention, KvDtype, LayerGroup, LayerShape, Shard};
use types::prompt::{Priority, RequestedModel};
use types::step::{Logprobs, PromptLogprob};
use types::*;

use crate::{ConvertError, prompt_from_wire, prompt_to_wire, v1};

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn prompt(now: Instant) -> Prompt {
    Prompt {
        id: RequestId::new("r-1"),
        tenant: TenantId::new("t"),
        cache_salt: types::CacheSalt::new("salt"),
        model: RequestedModel { name: "m".into(), fingerprint: Some(FingerprintDigest(u64::MAX)) },
        tokens: vec![TokenId(1), TokenId(2), TokenId(3)].into(),
        n_generated: 1,
        sampling: Sampling {
            temperature: 0.7,
            logit_bias: vec![(TokenId(4), -1.0), (TokenId(9), 2.0)],
            logprobs: Some(5),
            seed: 42,
            grammar: Some(Grammar::new(GrammarKind::Regex, "a+")),
            ..Sampling::default()
        },
        stop: StopRules { max_tokens: 9, min_tokens: 1, stop_tokens: vec![TokenId(7)], ignore_eos: true },
        priority: Priority(-3),
        deadline: Deadline::at(now + Duration::from_secs(5)),
    }
}

fn landing() -> Landing {
    let shape = |layer| LayerShape { layer, n_kv_heads: 2, head_dim: 4 };
    let layout = KvLayout {
        block_tokens: 16,
        dtype: KvDtype::Bf16,
        groups: vec![
            LayerGroup { attention: Attention::Full, layers: vec![shape(0), shape(2)] },
            LayerGroup { attention: Attention::SlidingWindow { tokens: 128 }, layers: vec![shape(1)] },
        ],
        shard: Shard { stage: 0, n_stages: 2, tp_size: 2 },
    };
    Landing {
        transfer: TransferId(u128::MAX - 1),
        node: NodeId::new("d0"),
        epoch: Epoch(7),
        grant: Grant::from_bytes([3; 16]),
        bound: false,
        wire: WireAddress {
            scheme: Scheme::new("tcp"),
            endpoint: "127.0.0.1:1".to_owned(),
            within_host: true,
        },
        n_tokens: 40,
        held_tokens: 16,
        tables: vec![
            vec![BlockIdx(5), BlockIdx(6), BlockIdx(9)],
            vec![BlockIdx(1), BlockIdx(2), BlockIdx(3)],
        ],
        layout,
        fingerprint: Fingerprint::new([("weights".to_owned(), "abc".to_owned())]),
    }
}

#[test]
fn a_prompt_comes_back_the_same() {
    let now = now();
    let prompt = prompt(now);
    assert_eq!(prompt_from_wire(prompt_to_wire(&prompt, now), now), Ok(prompt));
}

#[test]
fn a_deadline_crosses_as_the_time_that_is_left() {
    let now = now();
    let wire = prompt_to_wire(&prompt(now), now + Duration::from_secs(2));
    assert_eq!(wire.timeout_ms, 3000);
    let late = prompt_to_wire(&prompt(now), now + Duration::from_secs(60));
    assert_eq!(late.timeout_ms, 0, "a passed deadline leaves nothing");
}

#[test]
fn malformed_fields_of_a_prompt_are_refused_by_name() {
    type Spoil = fn(&mut v1::Prompt);
    let table: &[(&str, Spoil)] = &[
        ("prompt.tokens is missing", |p| p.tokens.clear()),
        ("prompt.n_generated is out of range: 3", |p| p.n_generated = 3),
        ("prompt.request_id is missing", |p| p.request_id.clear()),
        ("prompt.request_id is out of range: 300 bytes", |p| p.request_id = "x".repeat(300)),
        ("prompt.priority is out of range: 200", |p| p.priority = 200),
        ("prompt.timeout_ms is out of range: 18446744073709551615", |p| p.timeout_ms = u64::MAX),
        ("prompt.sampling is missing", |p| p.sampling = None),
        ("prompt.stop is missing", |p| p.stop = None),
        ("sampling.top_p is out of range: 2", |p| p.sampling.as_mut().expect("set").top_p = 2.0),
        ("sampling.temperature is out of range: NaN", |p| {
            p.sampling.as_mut().expect("set").temperature = f32::NAN
        }),
        ("sampling.logprobs is out of range: 256", |p| {
            p.sampling.as_mut().expect("set").logprobs = Some(256)
        }),
    ];
    for (expected, spoil) in table {
        let now = now();
        let mut wire = prompt_to_wire(&prompt(now), now);
        spoil(&mut wire);
        assert_eq!(prompt_from_wire(wire, now).expect_err(expected).to_string(), *expected);
    }
}

#[test]
fn a_landing_comes_back_the_same() {
    assert_eq!(Landing::try_from(v1::Landing::from(&landing())), Ok(landing()));
}

#[test]
fn a_landing_that_contradicts_itself_is_refused() {
    type Spoil = fn(&mut v1::Landing);
    let table: &[(&str, Spoil)] = &[
        ("landing.transfer has 3 bytes instead of 16", |l| l.transfer = vec![1, 2, 3].into()),
        ("landing.grant has 0 bytes instead of 16", |l| l.grant = bytes::Bytes::new()),
        ("landing.n_tokens is out of range: 0", |l| l.n_tokens = 0),
        ("landing.held_tokens is out of range: 17", |l| l.held_tokens = 17),
        ("landing.held_tokens is out of range: 48", |l| l.held_tokens = 48),
        ("landing.tables is out of range: 1", |l| l.tables.truncate(1)),
        ("landing.tables is out of range: 2 blocks", |l| l.tables[0].blocks.truncate(2)),
        ("landing.wire is missing", |l| l.wire = None),
        ("layout.dtype is not known here: int3", |l| {
            l.layout.as_mut().expect("set").dtype = "int3".to_owned();
        }),
        ("layout.block_tokens is out of range: 0", |l| l.layout.as_mut().expect("set").block_tokens = 0),
        ("layout.groups is out of range: 0", |l| l.layout.as_mut().expect("set").groups.clear()),
        ("shard.tp_size is out of range: 0", |l| {
            l.layout.as_mut().expect("set").shard.as_mut().expect("set").tp_size = 0;
        }),
    ];
    for (expected, spoil) in table {
        let mut wire = v1::Landing::from(&landing());
        spoil(&mut wire);
        assert_eq!(Landing::try_from(wire).expect_err(expected).to_string(), *expected);
    }
}

#[test]
fn a_node_comes_back_the_same() {
    let node = NodeInfo {
        id: NodeId::new("p0"),
        epoch: Epoch(1),
        role: Role::Both,
        pid: 12,
        host: "h".to_owned(),
        address: "127.0.0.1:5".to_owned(),
        admin: "127.0.0.1:6".to_owned(),
        wires: vec![landing().wire],
        without: vec![MissingWire { scheme: types::Scheme::new("cuda-ipc"), why: "no GPU".to_owned() }],
        model: ModelInfo {
            name: "m".to_owned(),
            context_tokens: 2048,
            vocab: 300,
            eos_tokens: vec![TokenId(256)],
            layout: landing().layout,
            fingerprint: landing().fingerprint,
        },
        protocol: ProtocolRange { min: 1, max: 2 },
        keeps_role: true,
    };
    let mut wire = v1::NodeInfo::from(&node);
    assert_eq!(NodeInfo::try_from(wire.clone()), Ok(node));
    wire.role = 99;
    let refused = NodeInfo::try_from(wire);
    assert_eq!(refused, Err(ConvertError::Unknown { field: "node.role", value: "99".to_owned() }));
}

#[test]
fn steps_and_answers_come_back_the_same() {
    let step = Step {
        token: TokenId(5),
        index: 3,
        logprobs: Some(Logprobs { chosen: -0.5, top: vec![(TokenId(5), -0.5), (TokenId(6), -1.5)] }),
        finish: Some(FinishReason::Length),
    };
    assert_eq!(Step::try_from(v1::Step::from(&step)), Ok(step.clone()));
    let top = |nth: u32| vec![(TokenId(nth), -0.25), (TokenId(6), -1.5)];
    let of_prompt = |nth| PromptLogprob { logprobs: Logprobs { chosen: -2.5, top: top(nth) }, rank: nth };
    let prefilled = ComputedPrompt {
        first: step,
        prompt_logprobs: (1..9).map(of_prompt).collect(),
        usage: Usage { prompt_tokens: 9, cached_tokens: 4 },
        room: Duration::from_micros(7),
        queued: Duration::from_micros(12),
        computed: Duration::from_micros(34),
    };
    assert_eq!(ComputedPrompt::try_from(v1::Prefilled::from(&prefilled)), Ok(prefilled));
}

#[test]
fn lists_of_log_probabilities_that_do_not_match_are_refused() {
    let lists = |n: usize, n_ranks, n_top: usize, n_logprobs| v1::PromptLogprobs {
        chosen: vec![-1.0; n],
        ranks: vec![1; n_ranks],
        top_tokens: vec![1; n_top],
        top_logprobs: vec![-1.0; n_logprobs],
    };
    let read = |wire| crate::prompt_logprobs_from_wire(Some(wire));
    assert_eq!(read(lists(2, 2, 4, 4)).expect("they match").len(), 2);
    for (n, n_ranks, n_top, n_logprobs) in [(2, 1, 4, 4), (2, 2, 3, 3), (2, 2, 4, 3), (0, 0, 1, 1)] {
        read(lists(n, n_ranks, n_top, n_logprobs)).expect_err("lists of other lengths");
    }
}

#[test]
fn a_refusal_without_a_name_here_is_a_failure_of_the_peer() {
    let known = Refusal::new(RefusalKind::Full, "no room");
    assert_eq!(Refusal::from(v1::Refusal::from(&known)), known);
    let newer = v1::Refusal { code: "moon_phase".to_owned(), reason: "waning".to_owned() };
    assert_eq!(Refusal::from(newer), Refusal::new(RefusalKind::Failed, "moon_phase: waning"));
}

#[test]
fn block_events_come_back_the_same() {
    for (change, is_complete) in [
        (BlockChange::Snapshot(vec![]), true),
        (BlockChange::Snapshot(vec![BlockHash(7)]), false),
        (BlockChange::Stored(vec![BlockHash(1), BlockHash(u128::MAX)]), true),
        (BlockChange::Evicted(vec![BlockHash(9)]), false),
    ] {
        let event = BlockEvent { change, is_complete };
        let wire = v1::BlockEvents::new(4, &event);
        assert_eq!(<(u64, BlockEvent)>::try_from(wire), Ok((4, event)));
    }
    let mut torn = v1::BlockEvents::new(4, &BlockEvent::complete(BlockChange::Stored(vec![BlockHash(1)])));
    torn.change = Some(v1::block_events::Change::Stored(v1::BlockHashes { hashes: vec![0; 15].into() }));
    assert!(<(u64, BlockEvent)>::try_from(torn).is_err());
}

#[test]
fn a_load_comes_back_the_same_and_a_duration_that_is_none_is_refused() {
    let costs = LearnedCosts {
        prompt_token_ms: 0.05,
        prompt_context_ms: 0.001,
        prompt_step_ms: 1.5,
        step_ms: 5.0,
        row_ms: 0.1,
        context_ms: 0.2,
        step_tokens: 512,
        gap_ms_max: 20.0,
    };
    let load = NodeLoad { queued_tokens: 9, queue_ms: 3.0, age_ms: 40.0, costs, ..NodeLoad::default() };
    let wire = v1::NodeLoad::from(load);
    assert_eq!(NodeLoad::try_from(wire), Ok(load));
    let without = v1::NodeLoad { costs: None, ..wire };
    assert_eq!(NodeLoad::try_from(without).map(|load| load.costs), Ok(LearnedCosts::default()));
    for change in [
        |costs: &mut v1::LearnedCosts| costs.prompt_token_ms = f32::NAN,
        |costs: &mut v1::LearnedCosts| costs.prompt_context_ms = -0.1,
        |costs: &mut v1::LearnedCosts| costs.prompt_step_ms = f32::NAN,
        |costs: &mut v1::LearnedCosts| costs.step_ms = -1.0,
        |costs: &mut v1::LearnedCosts| costs.row_ms = f32::INFINITY,
        |costs: &mut v1::LearnedCosts| costs.context_ms = -0.1,
        |costs: &mut v1::LearnedCosts| costs.gap_ms_max = f32::NAN,
    ] {
        let mut wire = wire;
        change(wire.costs.as_mut().expect("it has costs"));
        NodeLoad::try_from(wire).expect_err("no duration");
    }
}
