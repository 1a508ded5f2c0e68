//! Tests of whole requests over rdma: real processes and real verbs, in the VM of `tests/rdma-vm`, over
//! Soft-RoCE.
//!
//! Prefill nodes have the device on one end of a cable, decode nodes the device on the other end. Only KV goes over
//! that cable. `TEST_RDMA_PORTS` names the devices, as `rxe1 rxe2`; the ends of the cable are the network devices
//! below them. Elsewhere these tests are ignored.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, FleetNode, PACED, Settings};
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL, NO_TOKENIZER};
use baton_tests::sim::reference::Alone;
use baton_tests::{Answer, Ask, Client, Failed, PATIENCE, Up, eventually, in_time};
use engine::MockSettings;
use futures::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use types::prompt::Priority;
use types::{Deadline, Prompt, RequestId, Sampling, StopRules, TenantId, TokenId};

/// The stall time of a wire: longer than any pause of an emulated processor.
const STALL: Duration = Duration::from_secs(5);
/// The length of an answer, in tokens: long enough to be unfinished when a fault occurs.
const TOKENS: u32 = 40;

/// Returns the devices of prefill nodes and of decode nodes.
fn ports() -> [String; 2] {
    let named = std::env::var("TEST_RDMA_PORTS").expect("tests/rdma-vm names the ports in TEST_RDMA_PORTS");
    let (first, second) = named.split_once(' ').expect("the two ends of a cable");
    [first.to_owned(), second.to_owned()]
}

/// Starts nodes of each kind with rdma as their only connector. `more` returns further settings of a role.
async fn fleet(
    ports: &[String; 2],
    model: &str,
    (n_prefill, n_decode): (usize, usize),
    order: &str,
    more: impl Fn(&'static str) -> Settings,
) -> Fleet {
    let of_role = |role: &'static str| {
        let port = &ports[usize::from(role == "decode")];
        let ours = [
            ("BATON_TRANSFER__CONNECTORS", "[\"rdma\"]".to_owned()),
            ("BATON_EXPERT__TRANSFER__RDMA_DEVICE", port.clone()),
            ("BATON_EXPERT__TRANSFER__STALL_MS", STALL.as_millis().to_string()),
            ("BATON_MODEL__KV_MEMORY", "16MiB".to_owned()),
        ];
        ours.into_iter().chain(more(role)).collect()
    };
    let of_router = vec![("BATON_ROUTER__ORDER", order.to_owned())];
    let fleet = Fleet::start_each(model, n_prefill, n_decode, of_router, of_role).await;
    fleet.expect_log(A_NODE_DIES);
    // Warnings about a stopped node are expected, because a busy emulated processor looks like a stopped one.
    fleet.expect_log(A_NODE_STANDS_STILL);
    fleet
}

/// Returns requests whose prompts no node has seen, so their KV must be sent.
fn asks() -> Vec<Ask> {
    static ROUND: AtomicU64 = AtomicU64::new(0);
    let ask = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(31 + ROUND.fetch_add(1, Ordering::Relaxed), 16, 150).into_iter().map(ask).collect()
}

/// Computes the answers of the model alone.
fn alone(asks: &[Ask]) -> Vec<Vec<u32>> {
    let settings = MockSettings::named(PACED.strip_prefix("mock:")).expect("right settings");
    let mut alone = Alone::new("mock", settings, 64);
    let answer = |ask: &Ask| alone.answer(&prompt(ask)).tokens.iter().map(|token| token.0).collect();
    asks.iter().map(answer).collect()
}

fn prompt(ask: &Ask) -> Prompt {
    Prompt {
        id: RequestId::new("alone"),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: types::RequestedModel::default(),
        tokens: ask.prompt.iter().copied().map(TokenId).collect(),
        n_generated: 0,
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        stop: StopRules { max_tokens: ask.max_tokens, ignore_eos: true, ..StopRules::default() },
        priority: Priority::default(),
        deadline: Deadline::at((Instant::now() + PATIENCE).into_std()),
    }
}

async fn all(client: &Client, asks: &[Ask]) -> Vec<Result<Answer, Failed>> {
    in_time("all answers", join_all(asks.iter().map(|ask| client.ask(ask)))).await
}

/// Sends all requests at once, calls `disturb` when KV moves, and compares the answers with those of the
/// model alone.
///
/// If the machine has no time for the VM, its router may find that all nodes have stopped, and refuse
/// requests. Refused requests are sent again, but at most a few.
async fn equal(fleet: &Fleet, disturb: impl AsyncFnOnce()) {
    let (asks, client) = (asks(), fleet.client());
    let expected = alone(&asks);
    let before = arrived(fleet).await;
    let disturb = async {
        eventually("KV to move", async || (arrived(fleet).await > before).then_some(())).await;
        disturb().await;
    };
    let seen = tokio::join!(all(&client, &asks), disturb).0;
    let mut n_refused = 0;
    for ((seen, expected), ask) in seen.into_iter().zip(&expected).zip(&asks) {
        let answer = match seen {
            Err(failed) if failed.code == "no_nodes" => {
                n_refused += 1;
                eventually("nodes to be there again", async || client.ask(ask).await.ok()).await
            }
            seen => seen.expect("an answer"),
        };
        assert_eq!(answer.tokens, *expected, "{ask:?}");
    }
    assert!(n_refused * 4 <= asks.len(), "{n_refused} were refused");
}

async fn arrived(fleet: &Fleet) -> u64 {
    fleet.client().kv_arrived("rdma").await
}

/// Waits until more KV has arrived over rdma. Sends requests meanwhile.
async fn carries(fleet: &Fleet) {
    let before = arrived(fleet).await;
    eventually("KV by rdma", async || {
        let _ = all(&fleet.client(), &asks()[..4]).await;
        (arrived(fleet).await > before).then_some(())
    })
    .await;
}

/// All tests share one cluster, because an emulated processor starts one slowly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
async fn two_and_two_answer_as_the_model_alone_over_rdma() {
    let ports = ports();
    let mut fleet = fleet(&ports, PACED, (2, 2), "decode-first", |_| Vec::new()).await;
    equal(&fleet, async || {}).await;
    fleet.baseline().await;
    a_cancel_storm(&fleet).await;
    a_bad_cable_changes_no_token(&fleet, &DevicePair::between(&ports)).await;
    for victim in ["prefill-0", "decode-0"] {
        a_node_stands_still(&fleet, victim).await;
        a_node_dies(&mut fleet, victim).await;
    }
}

/// Clients leave at every stage, from before the answer's head to the middle of the stream. Then one client stays.
async fn a_cancel_storm(fleet: &Fleet) {
    let (client, asks) = (fleet.client(), asks());
    let storm = (0..100).map(|idx| {
        let (client, ask) = (client.clone(), &asks[idx % asks.len()]);
        let patience = Duration::from_millis((idx as u64 * 37) % 4000);
        async move { drop(tokio::time::timeout(patience, client.ask(ask)).await) }
    });
    in_time("the storm", join_all(storm)).await;
    fleet.baseline().await;
    client.ask(&Ask::new(vec![9; 100], 3)).await.expect("a probe is served");
}

// === killed and stopped nodes ===

/// Stops a node for longer than the stall time.
async fn a_node_stands_still(fleet: &Fleet, name: &str) {
    eprintln!("{name} stands still");
    let signal = |signal| node(fleet, name).process.signal(signal);
    equal(fleet, async || signal(Signal::STOP)).await;
    // The node's device is not stopped. Blocks that it may still write to are reused only after its right to
    // write has ended, which does not wait for its process.
    sleep(STALL).await;
    others_at_baseline(fleet, name).await;
    signal(Signal::CONT);
    fleet.all_ready().await;
    fleet.baseline().await;
    carries(fleet).await;
}

async fn a_node_dies(fleet: &mut Fleet, name: &str) {
    eprintln!("{name} is killed");
    equal(fleet, async || node(fleet, name).process.signal(Signal::KILL)).await;
    others_at_baseline(fleet, name).await;
    let dead = fleet.nodes.iter_mut().find(|node| node.name == name);
    dead.expect("a node of this name").process.revive();
    fleet.all_ready().await;
    carries(fleet).await;
    fleet.baseline().await;
}

fn node<'a>(fleet: &'a Fleet, name: &str) -> &'a FleetNode {
    fleet.nodes.iter().find(|node| node.name == name).expect("a node of this name")
}

/// Waits until all other nodes have all their blocks back.
async fn others_at_baseline(fleet: &Fleet, but: &str) {
    eventually("the others' baseline", async || {
        let kv = fleet.client().get_json("/debug/kv").await;
        let nodes = kv["nodes"].as_array().expect("a list of nodes").clone();
        let others: Vec<&Value> = nodes.iter().filter(|node| node["id"] != but).collect();
        let is_quiet = |node: &&Value| node["leased"] == 0 && node["quarantined"] == 0;
        (others.len() >= fleet.nodes.len() - 1 && others.iter().all(is_quiet)).then_some(())
    })
    .await;
}

/// The cluster has one node of each kind, so no other node can take over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
async fn a_stopped_pair_ends_requests_by_their_deadline_over_rdma() {
    let ports = ports();
    let fleet = fleet(&ports, PACED, (1, 1), "prefill-first", |_| Vec::new()).await;
    equal(&fleet, async || {}).await;
    let deadline = Duration::from_secs(8);
    for node in &fleet.nodes {
        let asks: Vec<Ask> =
            asks().into_iter().map(|ask| ask.header("x-baton-timeout-ms", deadline.as_millis())).collect();
        let expected = alone(&asks);
        node.process.signal(Signal::STOP);
        let began = Instant::now();
        let seen = all(&fleet.client(), &asks).await;
        // Without an emulated processor the margin could be one second.
        assert!(began.elapsed() < deadline + Duration::from_secs(4), "{}: {:?}", node.name, began.elapsed());
        for (seen, expected) in seen.into_iter().zip(&expected) {
            match seen {
                Ok(answer) => assert_eq!(answer.tokens, *expected, "without {}", node.name),
                Err(failed) => assert!(
                    ["deadline", "failed", "no_nodes", "wire"].contains(&failed.code.as_str()),
                    "{}: {failed:?}",
                    node.name
                ),
            }
        }
        node.process.signal(Signal::CONT);
        fleet.all_ready().await;
        carries(&fleet).await;
        fleet.baseline().await;
    }
}

// === the cable ===

async fn a_bad_cable_changes_no_token(fleet: &Fleet, cable: &DevicePair) {
    // A corrupted packet counts as lost, because its checksum is wrong.
    for (flaw, loses) in
        [(Flaw::Netem("loss 10%"), true), (Flaw::Netem("delay 20ms"), false), (Flaw::Corrupts, true)]
    {
        let before = cable.n_sent_again();
        let flawed = cable.with(flaw);
        equal(fleet, async || {}).await;
        drop(flawed);
        let n_sent_again = cable.n_sent_again() - before;
        eprintln!("a cable with {flaw:?}: {n_sent_again} sent again");
        assert!(!loses || n_sent_again > 0, "{flaw:?}: nothing was lost");
        fleet.baseline().await;
    }
    eprintln!("a cable that is pulled, and put back");
    equal(fleet, async || cable.pull()).await;
    cable.put_back();
    carries(fleet).await;
    fleet.baseline().await;
}

#[derive(Clone, Copy, Debug)]
enum Flaw {
    /// A fault that netem makes, in netem's syntax.
    Netem(&'static str),
    /// A wrong byte in one RDMA packet of ten: in the address of a write, its data, or the checksum of an
    /// acknowledgement.
    Corrupts,
}

/// The byte is behind the header of all operations (20 bytes of IP, 8 of UDP, 12), unlike the random byte of netem.
/// One flipped bit in an acknowledgement can make an unknown operation. Then Soft-RoCE computes the size of the rest
/// as 0 - 12 bytes, which is 4 GiB, and the kernel panics.
const CORRUPTION: &str =
    "u32 match ip dport 4791 0xffff action ok random netrand pipe 10 action pedit munge offset 44 u8 invert";

/// The cable between the two RDMA devices.
struct DevicePair {
    /// The network devices below the two RDMA devices.
    ends: [String; 2],
    devices: [String; 2],
}

impl DevicePair {
    fn between(devices: &[String; 2]) -> Self {
        let end = |device: &String| {
            let parent = format!("/sys/class/infiniband/{device}/parent");
            std::fs::read_to_string(parent).expect("made on a network device").trim().to_owned()
        };
        Self { ends: [end(&devices[0]), end(&devices[1])], devices: devices.clone() }
    }

    /// Adds a fault in both directions, until the value is dropped.
    fn with(&self, flaw: Flaw) -> Flawed<'_> {
        for end in &self.ends {
            match flaw {
                Flaw::Netem(how) => {
                    run("/sbin/tc", &format!("qdisc add dev {end} root netem {how} limit 20000"))
                }
                Flaw::Corrupts => {
                    run("/sbin/tc", &format!("qdisc add dev {end} clsact"));
                    run("/sbin/tc", &format!("filter add dev {end} egress protocol ip {CORRUPTION}"));
                }
            }
        }
        Flawed { cable: self, flaw }
    }

    fn pull(&self) {
        run("/bin/ip", &format!("link set {} down", self.ends[0]));
    }

    fn put_back(&self) {
        run("/bin/ip", &format!("link set {} up", self.ends[0]));
    }

    /// Returns the number of packets that came out of order, because an earlier one was lost.
    fn n_sent_again(&self) -> u64 {
        let of = |device: &String| {
            let counter = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/out_of_seq_request");
            let count = std::fs::read_to_string(counter).expect("Soft-RoCE counts them");
            count.trim().parse::<u64>().expect("a number")
        };
        self.devices.iter().map(of).sum()
    }
}

struct Flawed<'a> {
    cable: &'a DevicePair,
    flaw: Flaw,
}

impl Drop for Flawed<'_> {
    fn drop(&mut self) {
        let made = match self.flaw {
            Flaw::Netem(_) => "root",
            Flaw::Corrupts => "clsact",
        };
        for end in &self.cable.ends {
            run("/sbin/tc", &format!("qdisc del dev {end} {made}"));
        }
    }
}

fn run(program: &str, args: &str) {
    let output = Command::new(program).args(args.split(' ')).output().expect("the VM has it");
    assert!(output.status.success(), "{program} {args}: {}", String::from_utf8_lossy(&output.stderr));
}

// === unequal ranks ===

/// Every bit of every log-probability, and therefore every token, is that of one rank.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
async fn ranks_answer_as_one_does_over_rdma() {
    let ports = ports();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/models/llama");
    let one = Up::start(&["--colocated", "--model", model]).await;
    one.expect_log(A_NODE_STANDS_STILL);
    one.expect_log(NO_TOKENIZER);
    let expected = in_time("answers", completions(&one.client())).await;
    drop(one);
    for (prefill, decode) in [("2", "1"), ("1", "2")] {
        let tp = |role| if role == "decode" { decode } else { prefill };
        let of_role =
            |role| vec![("BATON_MODEL__TP", tp(role).to_owned()), ("BATON_MODEL__NAME", "llama".to_owned())];
        let fleet = fleet(&ports, model, (1, 1), "decode-first", of_role).await;
        fleet.expect_log(NO_TOKENIZER);
        let seen = in_time("answers", completions(&fleet.client())).await;
        assert_eq!(seen, expected, "{prefill} to {decode} ranks");
        assert!(arrived(&fleet).await > 0, "no KV travelled, {prefill} to {decode} ranks");
        fleet.baseline().await;
    }
}

/// Returns the tokens, and the log-probabilities of the best few of each step.
async fn completions(client: &Client) -> Vec<Value> {
    let ask = async |prompt: Vec<u32>| {
        let prompt: Vec<u32> = prompt.iter().map(|token| 2 + token % 90).collect();
        let body = json!({
            "model": "llama", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
            "logprobs": 5, "return_token_ids": true,
        });
        let (status, _, body) = client.post("/v1/completions", body.to_string()).await;
        assert_eq!(status, 200, "{body}");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        answer["choices"][0].clone()
    };
    join_all(prompts(5, 6, 90).into_iter().map(ask)).await
}
