//! Runs the fuzz entry points over the corpus and mutations of it, without a fuzzing toolchain.
//!
//! `UPDATE_CORPUS=1` writes the valid inputs into `tests/fuzz/corpus`; the fuzzer finds the rest.

#[path = "../fuzz/src/lib.rs"]
mod entries;

use std::path::PathBuf;
use std::time::Duration;

use chassis::identity::{ClusterSecret, Identity};
use kv_transfer::connectors::tcp::frame::{Body, Frame, Hello, KvPlace};
use kv_transfer::landing::Credentials;
use prost::Message as _;
use proto::v1;
use tokio::time::Instant;
use types::layout::KvDtype;
use types::node::PROTOCOL;
use types::{
    BlockChange, BlockEvent, BlockIdx, Deadline, Destination, Epoch, Fingerprint, Grant, GroupIdx, Handoff,
    KvLayout, KvSpan, Landing, ModelInfo, NodeId, NodeInfo, NodeLoad, Prompt, RequestId, Role, Sampling,
    Scheme, Step, StopRules, TenantId, TokenId, TransferId, WireAddress,
};

/// The time for which mutations of one entry's inputs are tried.
const BENT_FOR: Duration = Duration::from_secs(2);

fn corpus(entry: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus")).join(entry)
}

fn words(entry: &str) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(corpus(entry))
        .unwrap_or_else(|error| panic!("the corpus of {entry}: {error}"))
        .map(|file| file.expect("a folder").path())
        .collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).expect("a file")).collect()
}

/// Draws a number for mutations, the same in every run.
fn draw(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state as usize
}

/// Mutates an input: truncates it, flips a bit, repeats a piece, or inserts a piece of another input.
fn bend(word: &[u8], other: &[u8], state: &mut u64) -> Vec<u8> {
    let mut bent = word.to_vec();
    if bent.is_empty() {
        return other.to_vec();
    }
    let at = draw(state) % bent.len();
    match draw(state) % 4 {
        0 => bent.truncate(at),
        1 => bent[at] ^= 1 << (draw(state) % 8),
        2 => bent.extend_from_within(at..),
        _ => bent.splice(at..at, other.iter().copied().take(64)).for_each(drop),
    }
    bent
}

/// Runs every input of the corpus, and mutations until the time is up.
fn run(entry: &str, call: fn(&[u8])) {
    let words = words(entry);
    assert!(words.len() >= 3, "the corpus of {entry} has {} words", words.len());
    words.iter().for_each(|word| call(word));
    let (began, mut state, mut n_bent) = (Instant::now(), 0x9e37_79b9_7f4a_7c15, 0);
    while began.elapsed() < BENT_FOR {
        let (one, other) = (draw(&mut state) % words.len(), draw(&mut state) % words.len());
        let mut bent = words[one].clone();
        for _ in 0..=draw(&mut state) % 3 {
            bent = bend(&bent, &words[other], &mut state);
        }
        call(&bent);
        n_bent += 1;
    }
    eprintln!("{entry}: {} words, {n_bent} bent ones", words.len());
}

#[test]
fn frames_of_the_kv_wire() {
    run("kv_frame", entries::kv_frame);
}

#[test]
fn a_receiver_of_the_kv_wire() {
    run("kv_receiver", entries::kv_receiver);
}

#[test]
fn landings_and_grants() {
    run("landing", entries::landing);
}

#[test]
fn the_http_door_and_its_events() {
    run("http", entries::http);
}

#[test]
fn conversions_from_the_wire() {
    run("proto", entries::proto);
}

#[test]
fn proofs_of_an_identity() {
    run("identity", entries::identity);
}

#[test]
fn configurations() {
    run("config", entries::config);
}

// === valid inputs ===

fn layout() -> KvLayout {
    KvLayout::uniform(4, KvDtype::F32, 2, 1, 2)
}

fn a_landing() -> Landing {
    Landing {
        transfer: TransferId(7),
        node: NodeId::new("decode-0"),
        epoch: Epoch(3),
        grant: Grant::from_bytes([5; 16]),
        bound: false,
        wire: WireAddress {
            scheme: Scheme::new("tcp"),
            endpoint: "10.0.0.2:7002".to_owned(),
            within_host: false,
        },
        n_tokens: 14,
        held_tokens: 4,
        tables: vec![(0..4).map(BlockIdx).collect()],
        layout: layout(),
        fingerprint: Fingerprint::new([("weights".to_owned(), "x".to_owned())]),
    }
}

fn a_step() -> Step {
    Step { token: TokenId(65), index: 0, logprobs: None, finish: None }
}

fn a_node() -> NodeInfo {
    let landing = a_landing();
    let model = ModelInfo {
        name: "mock".to_owned(),
        context_tokens: 512,
        vocab: 261,
        eos_tokens: vec![TokenId(256)],
        layout: landing.layout,
        fingerprint: landing.fingerprint,
    };
    NodeInfo {
        id: landing.node,
        epoch: landing.epoch,
        role: Role::Decode,
        pid: 7,
        host: "h".to_owned(),
        address: "10.0.0.2:7000".to_owned(),
        admin: "10.0.0.2:7001".to_owned(),
        wires: vec![landing.wire],
        without: vec![],
        keeps_role: false,
        model,
        protocol: PROTOCOL,
    }
}

fn a_prompt(now: Instant) -> Prompt {
    Prompt {
        id: RequestId::new("r"),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: types::RequestedModel::default(),
        tokens: (0..9).map(TokenId).collect(),
        n_generated: 1,
        sampling: Sampling::default(),
        stop: StopRules { max_tokens: 8, ..StopRules::default() },
        priority: Default::default(),
        deadline: Deadline::at((now + Duration::from_secs(9)).into_std()),
    }
}

fn frames() -> Vec<Vec<u8>> {
    let landing = a_landing();
    let span = KvSpan { group: GroupIdx(0), blocks: 1..3, layers: 0..2 };
    let hello = Hello { protocol: PROTOCOL, node: NodeId::new("p"), epoch: Epoch(1), link: 7, stream: 0 };
    let shown = Credentials::new(&landing, &landing.layout, &landing.fingerprint);
    let handoff = Handoff { transfer: landing.transfer, n_tokens: 14, first: a_step() };
    let bodies = [
        Body::Hello(hello),
        Body::Open(shown),
        Body::Kv { span: span.clone(), digests: Some(Vec::new()), place: KvPlace::Inline },
        Body::Handoff(handoff),
        Body::Refetch { spans: vec![span] },
        Body::Failed { code: 1, detail: "why".to_owned() },
        Body::Alive,
    ];
    let encoded = |body| {
        let mut bytes = Vec::new();
        Frame::new(landing.transfer, body).encode(&mut bytes);
        bytes
    };
    bodies.into_iter().map(encoded).collect()
}

/// Names in certificates, entries of a registry, and beginnings of KV links, none with this cluster's secret.
fn identities() -> Vec<Vec<u8>> {
    let entry: Vec<u8> = v1::NodeInfo::from(&a_node()).encode_to_vec();
    let elsewhere = Identity::of_cluster(ClusterSecret::new(b"the secret of another cluster"));
    let signed = elsewhere.sign_entry(b"key", entry.clone());
    let link: Vec<u8> = (0..64).collect();
    let names = ["baton://c/prefill/*", "baton://cluster/both/node-0"].map(|name| name.as_bytes().to_vec());
    let shown = names.map(|name| (0, name)).into_iter().chain([(1, entry), (1, signed), (2, link)]);
    shown.map(|(what, shown)| [vec![what], shown].concat()).collect()
}

/// Returns the script of a receiver's client: an opening, spans with and without KV, a handoff.
fn visits() -> Vec<Vec<u8>> {
    let frames = frames();
    let body = |nth: usize| &frames[nth][40..];
    let sealed = |kind: u8, payload: u8, body: &[u8]| [&[4, kind, payload, body.len() as u8], body].concat();
    let open = vec![1, 1, 7];
    let all = [open.clone(), sealed(20, 8, body(2)), vec![3, 8, 0], sealed(7, 0, body(3))].concat();
    let refused = [vec![1, 1, 0, 9], sealed(11, 0, &[])].concat();
    let twice = [open.clone(), vec![1, 7], vec![2], vec![0, 4, 1, 2, 3, 4]].concat();
    vec![all, refused, twice, [vec![0], frames[0].clone()].concat(), open]
}

fn messages() -> Vec<Vec<u8>> {
    let now = Instant::now();
    let node = a_node();
    let events = v1::BlockEvents::new(3, &BlockEvent::complete(BlockChange::Snapshot(Vec::new())));
    let to = v1::prefill_request::Destination::from(&Destination::Landing(a_landing()));
    let request = v1::PrefillRequest { prompt: None, destination: Some(to) };
    let coded = [
        (0, proto::prompt_to_wire(&a_prompt(now), now.into_std()).encode_to_vec()),
        (1, v1::NodeInfo::from(&node).encode_to_vec()),
        (2, v1::NodeLoad::from(NodeLoad::default()).encode_to_vec()),
        (3, v1::Step::from(&a_step()).encode_to_vec()),
        (5, v1::ModelInfo::from(&node.model).encode_to_vec()),
        (6, v1::KvLayout::from(&layout()).encode_to_vec()),
        (7, v1::Sampling::from(&Sampling::default()).encode_to_vec()),
        (8, events.encode_to_vec()),
        (12, request.encode_to_vec()),
    ];
    coded.into_iter().map(|(which, bytes)| [vec![which], bytes].concat()).collect()
}

fn requests() -> Vec<Vec<u8>> {
    let chat = r#"{"model":"mock","stream":true,"messages":[{"role":"user","content":"hi"}],"max_tokens":9,"stop":["b"]}"#;
    let text = r#"{"model":"mock","prompt":"hello","max_tokens":4,"n":2,"temperature":0.5,"seed":7,"logit_bias":{"7":1}}"#;
    let ids = r#"{"model":"mock","prompt":[1,2,3],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true,"echo":false}"#;
    let raw =
        format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{text}", text.len());
    let says = |how: u8, rest: &str| [&[how, 3, b'a', b'b', b'c'], rest.as_bytes()].concat();
    vec![
        says(1, chat),
        says(2, text),
        says(2, ids),
        says(0, &raw),
        says(3, "/v1/models/mock\nx-baton-tenant:a"),
    ]
}

fn files() -> Vec<Vec<u8>> {
    let router = "ROUTER__POLICY=random\nROUTER__WAIT_MS=7\n\n[router]\nhttp = \"0.0.0.0:80\"\nrequests_max = 3\n\n[log]\nformat = \"json\"\n";
    let node = "NODE__ID=a\n\n[node]\nlisten = \"0.0.0.0:7000\"\n\n[model]\nkv_memory = \"64MiB\"\nkv_dtype = \"f32\"\n\n[transfer]\nconnectors = [\"tcp\"]\n";
    let wrong = "[nodes]\nlissen = 3\n";
    let said = |whose: u8, text: &str| [&[whose], text.as_bytes()].concat();
    vec![said(0, router), said(1, node), said(1, wrong)]
}

#[test]
fn the_corpus_has_the_words_that_are_right() {
    let landing = vec![v1::Landing::from(&a_landing()).encode_to_vec(), Vec::new(), vec![0x0a, 0x10]];
    let all = [
        ("kv_frame", frames()),
        ("kv_receiver", visits()),
        ("landing", landing),
        ("http", requests()),
        ("proto", messages()),
        ("config", files()),
        ("identity", identities()),
    ];
    for (entry, right) in all {
        for (nth, word) in right.iter().enumerate() {
            let file = corpus(entry).join(format!("right-{nth}"));
            if std::env::var_os("UPDATE_CORPUS").is_some() {
                std::fs::create_dir_all(corpus(entry)).expect("a folder");
                std::fs::write(&file, word).expect("written");
            }
            assert!(file.exists(), "{} is missing: UPDATE_CORPUS=1 writes it", file.display());
        }
    }
}
