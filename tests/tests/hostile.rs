//! Sends invalid input to every port of every process: garbage, pieces, huge and repeated messages, and slow
//! bytes. All of it is refused and costs little memory and one log line each, and the cluster serves on.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use baton_tests::fleet::{Fleet, PACED};
use baton_tests::logs::A_NODE_DIES;
use baton_tests::process::resident_kib;
use baton_tests::{Ask, Process, in_time};
use futures::StreamExt as _;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use kv_transfer::connectors::tcp::frame::{Body, Frame, Hello};
use kv_transfer::landing::Credentials;
use proto::v1;
use proto::v1::decode_client::DecodeClient;
use proto::v1::decode_event::Event;
use proto::v1::decode_request::Prefill;
use proto::v1::prefill_answer::Answer;
use proto::v1::prefill_client::PrefillClient;
use proto::v1::prefill_request::Destination;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use types::node::PROTOCOL;
use types::prompt::Priority;
use types::{
    Deadline, Epoch, Grant, NodeId, Prompt, RequestId, Sampling, StopRules, TenantId, TokenId, TransferId,
};

/// The number of attackers of each kind at each port.
const STRANGERS: usize = 5;
/// The memory in KiB that all attackers together may cost one process.
const GROWTH_KIB_MAX: u64 = 48 << 10;

/// Returns random bytes, the same in every run.
fn garbage(n: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..n).map(step).collect()
}

/// Sends `bytes` as far as the other side accepts them, and reads until it closes the connection.
async fn intrude(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = in_time("a connection", TcpStream::connect(addr)).await.expect("it listens");
    let _ = timeout(Duration::from_secs(10), stream.write_all(bytes)).await;
    let _ = stream.shutdown().await;
    let mut heard = Vec::new();
    let _ = timeout(Duration::from_secs(10), stream.read_to_end(&mut heard)).await;
    heard
}

// === inputs ===

fn http_giants() -> Vec<Vec<u8>> {
    let long_path = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(2 << 20));
    let many_headers = format!("GET /ready HTTP/1.1\r\n{}\r\n", "x-more: and more\r\n".repeat(50_000));
    let mut long_body =
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n".to_vec();
    long_body.extend(vec![b'['; 32 << 20]);
    let nested = "[".repeat(1 << 20);
    let nested = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{nested}",
        nested.len()
    );
    vec![long_path.into_bytes(), many_headers.into_bytes(), long_body, nested.into_bytes()]
}

/// Returns HTTP/2 bytes up to a message that claims four gigabytes.
fn grpc_giant() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    // The frames are HEADERS with a block that is no valid HPACK, then DATA.
    bytes.extend([0, 0, 4, 1, 4, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]);
    bytes.extend([0, 0, 5, 0, 0, 0, 0, 0, 1, 0, 0xff, 0xff, 0xff, 0xff]);
    bytes.extend(garbage(1 << 20));
    bytes
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
}

fn hello(link: u64) -> Vec<u8> {
    let node = NodeId::new("stranger");
    encoded(&Frame::of_link(Body::Hello(Hello {
        protocol: PROTOCOL,
        node,
        epoch: Epoch(1),
        link,
        stream: 0,
    })))
}

/// Returns a frame that requests a landing with a made-up grant.
fn open(link: u64) -> Vec<u8> {
    let shown = Credentials {
        grant: Grant::from_bytes([7; 16]),
        epoch: Epoch(1),
        n_tokens: 64,
        held_tokens: 0,
        tp_size: 1,
        layout: 0,
        fingerprint: 0,
    };
    [hello(link), encoded(&Frame::new(TransferId(u128::from(link)), Body::Open(shown)))].concat()
}

fn kv_words(link: u64) -> Vec<Vec<u8>> {
    let mut giant = hello(link);
    // The header claims a body of four gigabytes.
    giant[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let whole = hello(link + 1);
    let half = whole[..whole.len() / 2].to_vec();
    let twice = [hello(link + 2), hello(link + 2)].concat();
    let flipped = {
        let mut bytes = hello(link + 3);
        bytes[20] ^= 1;
        bytes
    };
    vec![giant, half, twice, flipped, open(link + 4)]
}

// === the cost ===

/// The memory and the log lines of the processes before the attack.
struct Before {
    resident: Vec<u64>,
    lines: Vec<usize>,
}

/// Counts the log lines that an attack causes. A link that is accepted and then refused has a line for each;
/// only the refusal counts.
fn lines(process: &Process) -> usize {
    process.log().lines().filter(|line| !line.contains("KV link from peer accepted")).count()
}

impl Before {
    fn of(fleet: &Fleet) -> Self {
        let processes = fleet.processes();
        let resident =
            processes.iter().map(|(_, process)| resident_kib(process.pid()).expect("alive")).collect();
        Self { resident, lines: processes.iter().map(|(_, process)| lines(process)).collect() }
    }

    fn check(&self, fleet: &Fleet, what: &str, n_strangers: usize) {
        for (nth, (name, process)) in fleet.processes().into_iter().enumerate() {
            let now = resident_kib(process.pid()).unwrap_or_else(|| panic!("{name} is dead after {what}"));
            let grown = now.saturating_sub(self.resident[nth]);
            assert!(grown < GROWTH_KIB_MAX, "{name} has grown by {grown} KiB after {what}");
            let said = lines(process) - self.lines[nth];
            assert!(
                said <= n_strangers,
                "{name} said {said} lines about {n_strangers} strangers with {what}"
            );
        }
    }
}

/// Sends every input to `addr` several times at once, and checks that nothing has changed.
async fn attack(fleet: &Fleet, addr: SocketAddr, what: &str, words: &[Vec<u8>]) {
    let before = Before::of(fleet);
    let strangers = words.iter().flat_map(|word| std::iter::repeat_n(word, STRANGERS));
    let all: FuturesUnordered<_> = strangers.map(|word| intrude(addr, word)).collect();
    let n_strangers = all.len();
    all.collect::<Vec<_>>().await;
    before.check(fleet, what, n_strangers);
}

async fn serves_on(fleet: &Fleet, expected: &[u32]) {
    let answer = fleet.client().ask(&ask()).await.expect("the cluster serves on");
    assert_eq!(answer.tokens, expected);
}

fn ask() -> Ask {
    Ask::new((0..70).collect(), 12).with("ignore_eos", true.into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused_at_every_port() {
    let fleet = Fleet::start_pooled(PACED, 1, 1, 1).await;
    fleet.expect_log(&["KV stream from peer refused"]);
    let expected = fleet.client().ask(&ask()).await.expect("an answer").tokens;
    // No request is complete here, because a request's own log lines would not be expected.
    let (garbage, pieces) =
        (vec![garbage(64 << 10)], vec![b"POST /v1/compl".to_vec(), b"PRI * HTT".to_vec()]);
    let mut http = vec![("the router's http", fleet.http), ("the router's admin", fleet.admin)];
    let mut grpc = vec![("the router's grpc", fleet.grpc)];
    for node in &fleet.nodes {
        http.push((&node.name, node.admin));
        grpc.push((&node.name, node.grpc));
    }
    for (whose, addr) in http.iter().chain(&grpc) {
        attack(&fleet, *addr, &format!("garbage at {whose}"), &garbage).await;
        attack(&fleet, *addr, &format!("pieces at {whose}"), &pieces).await;
    }
    for (whose, addr) in &http {
        attack(&fleet, *addr, &format!("giants at {whose}"), &http_giants()).await;
    }
    for (whose, addr) in &grpc {
        attack(&fleet, *addr, &format!("giants at {whose}"), &[grpc_giant()]).await;
    }
    for (nth, node) in fleet.nodes.iter().enumerate() {
        let words: Vec<_> = garbage.iter().cloned().chain(kv_words(100 * nth as u64)).collect();
        attack(&fleet, node.kv, &format!("words at the kv port of {}", node.name), &words).await;
    }
    serves_on(&fleet, &expected).await;
    fleet.baseline().await;
    fleet.all_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_senders_delay_no_other_request() {
    let fleet = Fleet::start_pooled(PACED, 1, 1, 1).await;
    fleet.expect_log(&["KV stream from peer refused"]);
    let expected = fleet.client().ask(&ask()).await.expect("an answer").tokens;
    let ports = fleet.ports();
    let words = hello(7);
    let drip = async |addr: SocketAddr| {
        let mut stream = TcpStream::connect(addr).await.expect("it listens");
        let until = Instant::now() + Duration::from_secs(8);
        for byte in words.iter().cycle() {
            if Instant::now() > until {
                return false;
            }
            if stream.write_all(&[*byte]).await.is_err() {
                return true;
            }
            sleep(Duration::from_millis(250)).await;
        }
        false
    };
    let dripping =
        join_all(ports.iter().flat_map(|addr| std::iter::repeat_n(addr, 10)).map(|addr| drip(*addr)));
    let serving = async {
        for _ in 0..10 {
            serves_on(&fleet, &expected).await;
            sleep(Duration::from_millis(500)).await;
        }
    };
    let (closed, ()) = tokio::join!(dripping, serving);
    // The receiver closes KV streams this slow after the stall time, and has one line for each cause.
    let n_closed = closed.into_iter().filter(|is_closed| *is_closed).count();
    assert!(n_closed >= 10 * fleet.nodes.len(), "{n_closed} streams were closed");
    for node in &fleet.nodes {
        let log = node.process.log();
        let lost = log.lines().filter(|line| line.contains("KV stream from peer lost"));
        let causes: Vec<_> = lost.filter_map(|line| line.split('"').nth(1)).collect();
        let distinct: BTreeSet<_> = causes.iter().collect();
        assert!(!causes.is_empty() && distinct.len() == causes.len(), "{log}");
    }
    serves_on(&fleet, &expected).await;
}

fn prompt() -> Prompt {
    Prompt {
        id: RequestId::new("replayed"),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: types::RequestedModel::default(),
        tokens: (100..170).map(TokenId).collect(),
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules { max_tokens: 8, ..StopRules::default() },
        priority: Priority::default(),
        deadline: Deadline::at((Instant::now() + Duration::from_secs(20)).into_std()),
    }
}

/// A landing of an ended request, or of another life of the node, accepts no KV.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_landing_is_good_once() {
    let mut fleet = Fleet::start(PACED, 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    let expected = fleet.client().ask(&ask()).await.expect("an answer").tokens;
    let [prefill, decode] = &fleet.nodes[..] else { panic!("two nodes") };
    let prompt = proto::prompt_to_wire(&prompt(), Instant::now().into_std());
    let wires = vec![v1::WireAddress {
        scheme: "tcp".to_owned(),
        endpoint: prefill.kv.to_string(),
        within_host: false,
    }];
    let peer = v1::Peer { node: prefill.name.clone(), host: "elsewhere".to_owned(), wires };
    let prefill_offer = Some(Prefill::Offered(peer));
    let request = v1::DecodeRequest { prompt: Some(prompt.clone()), prefill: prefill_offer, explain: false };
    let mut at_decode = DecodeClient::connect(format!("http://{}", decode.grpc)).await.expect("it listens");
    let mut events = at_decode.run(request).await.expect("accepted").into_inner();
    let landing =
        match in_time("an event", events.message()).await.expect("a stream").and_then(|one| one.event) {
            Some(Event::Landing(landing)) => landing,
            other => panic!("{other:?} instead of a landing"),
        };
    let destination = Some(Destination::Landing(landing));
    let request = v1::PrefillRequest { prompt: Some(prompt), destination };
    let at_prefill = format!("http://{}", prefill.grpc);
    let mut at_prefill = PrefillClient::connect(at_prefill).await.expect("it listens");
    // The first request is correct, and is answered.
    let mut answers = at_prefill.run(request.clone()).await.expect("accepted").into_inner();
    let first = in_time("an answer", answers.message()).await.expect("a stream").and_then(|one| one.answer);
    assert!(matches!(first, Some(Answer::Prefilled(_))), "{first:?}");
    while let Some(event) = in_time("an event", events.message()).await.expect("a stream") {
        assert!(!matches!(event.event, Some(Event::Refused(_))), "{event:?}");
    }
    // The request is repeated after its end, and again after the node has begun another life.
    for _ in 0..2 {
        let answers = at_prefill.run(request.clone()).await.map(tonic::Response::into_inner);
        if let Ok(mut answers) = answers {
            // The node may compute, because it opens the landing at the same time. But nothing is delivered.
            while let Ok(Some(_)) = in_time("an answer", answers.message()).await {}
        }
        fleet.baseline().await;
        let decode = &mut fleet.nodes[1].process;
        decode.revive();
        fleet.all_ready().await;
        serves_on(&fleet, &expected).await;
    }
}
