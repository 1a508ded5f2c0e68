//! Nodes of several processes that decode, with the KV of prefill nodes or alone. The tokens are those of one process, also
//! if a process is lost meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, Settings, round_robin};
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL, NO_TOKENIZER};
use baton_tests::{Answer, Ask, Client, Stopwatch, Up, eventually, in_time};
use futures::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::processes::{A_PROCESS_DIES, Group, GroupPlan, on_one_thread, stages};
use super::{folder, up};

/// The transfers that have arrived at a decode node.
const ARRIVED: &str =
    "baton_node_kv_transfers_total{connector=\"tcp\",direction=\"in\",outcome=\"arrived\",role=\"decode\"}";
/// The number of requests at one time.
const N_CLIENTS: usize = 8;
/// The deadline of requests to a node that is lost, and how long after it a request may end.
const DEADLINE: Duration = Duration::from_secs(4);
const LATE_MAX: Duration = Duration::from_secs(1);
/// So little KV memory that prompts are not found in the decode nodes' caches.
const SOME: &str = "192KiB";
/// So little KV memory that sequences are preempted.
const LITTLE: &str = "72KiB";

fn plan(role: &'static str, n_processes: usize, tp: u16) -> GroupPlan {
    GroupPlan { role, n_processes, tp, more: Vec::new() }
}

/// Returns long answers, greedy and drawn with a seed, of many requests at one time. Some prompts share a beginning.
async fn long_answers(client: &Client, model: &str) -> Vec<Value> {
    let answer = async |(nth, prompt): (usize, Vec<u32>)| {
        let prompt: Vec<u32> = prompt.iter().map(|token| 2 + token % 90).collect();
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": 100, "ignore_eos": true, "logprobs": 5,
            "return_token_ids": true, "temperature": if nth % 2 == 0 { 0.0 } else { 0.9 }, "seed": nth,
        });
        choices(client, body).await[0].clone()
    };
    join_all(prompts(11, 24, 90).into_iter().enumerate().map(answer)).await
}

/// Returns the choices of a completion.
async fn choices(client: &Client, body: Value) -> Value {
    let (status, _, body) = client.post("/v1/completions", body.to_string()).await;
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    answer["choices"].clone()
}

async fn empty_fleet(model: &str, of_router: Settings) -> Fleet {
    Fleet::start_all(model, &[], of_router, |_| Vec::new()).await
}

/// Returns the number of transfers that have arrived at a node.
async fn arrived(fleet: &Fleet, nth: usize) -> u64 {
    Client::new(fleet.nodes[nth].admin).counter(ARRIVED).await
}

/// Checks that every bit of every log-probability is that of one process. A node that only decodes gets KV from a prefill
/// node with this number of ranks.
async fn decodes_as_one_process_does(model: &str, prefill_tp: u16, plans: &[GroupPlan]) {
    let path = folder(model);
    let one = up("tcp", &path, ("1", "1"), &[]).await;
    one.expect_log(NO_TOKENIZER);
    let expected = long_answers(&one.client(), model).await;
    drop(one);
    for plan in plans {
        let roles: &[_] = if plan.role == "decode" { &[("prefill", 1)] } else { &[] };
        let of_prefill =
            |_| on_one_thread().into_iter().chain([("BATON_MODEL__TP", prefill_tp.to_string())]).collect();
        let mut fleet = Fleet::start_all(&path, roles, Vec::new(), of_prefill).await;
        let little = vec![("BATON_MODEL__KV_MEMORY", LITTLE.to_owned())];
        let more = [little, plan.more.clone()].concat();
        let group = Group::planned(&mut fleet, &path, GroupPlan { more, ..plan.clone() }).await;
        fleet.expect_log(NO_TOKENIZER);
        let client = fleet.client();
        for _ in 0..2 {
            let seen = in_time("all answers", long_answers(&client, model)).await;
            assert_eq!(seen, expected, "{model}, {plan:?}");
        }
        let preempted = format!("baton_node_preemptions_total{{role=\"{}\"}}", plan.role);
        let preempted = Client::new(fleet.nodes[group.head].admin).counter(&preempted).await;
        let arrived = client.kv_arrived("tcp").await;
        assert_eq!(arrived > 0, plan.role == "decode", "{plan:?}: {arrived} bytes of KV");
        let cached = client.counter("baton_router_cached_tokens_total").await;
        assert!(preempted > 0 && cached > 0, "{plan:?}: {preempted} preemptions, {cached} cached tokens");
        fleet.baseline().await;
        drop(fleet);
        drop(group);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_decode_as_one_does() {
    decodes_as_one_process_does("llama", 1, &[plan("both", 2, 1), plan("decode", 2, 2)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_decode_as_one_does() {
    decodes_as_one_process_does("qwen2-window", 2, &[plan("decode", 3, 1), plan("both", 3, 2)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_decode_from_latents() {
    decodes_as_one_process_does("deepseek-v3", 2, &[plan("both", 3, 1), plan("decode", 2, 2)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_share_experts_of_decode_steps() {
    decodes_as_one_process_does("mixtral", 1, &[plan("decode", 2, 1), plan("both", 2, 2)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_in_several_processes_decode_as_one_does() {
    let of_ranks =
        |role, n_processes, tp, n_stages| GroupPlan { more: stages(n_stages), ..plan(role, n_processes, tp) };
    let plans = [of_ranks("both", 2, 2, 1), of_ranks("decode", 2, 4, 1), of_ranks("decode", 4, 2, 2)];
    decodes_as_one_process_does("llama", 2, &plans).await;
}

// === lost processes ===

fn asks() -> Vec<Ask> {
    let ask = |prompt: Vec<u32>| {
        let prompt = prompt.iter().map(|token| 2 + token % 90).collect();
        Ask::new(prompt, 100).with("ignore_eos", true.into()).with("model", "llama".into())
    };
    prompts(41, 16, 90).into_iter().map(ask).collect()
}

async fn answers(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    let answers = join_all(asks.iter().map(|ask| client.ask(ask))).await;
    answers.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// Waits until the head has ended, and starts all processes again.
async fn revived(fleet: &mut Fleet, group: &mut Group) {
    let head = &mut fleet.nodes[group.head].process;
    eventually("the node's end", async || (!head.is_alive()).then_some(())).await;
    group.revive(fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_lost_process_go_on_at_another_node() {
    let path = folder("llama");
    let little = || [on_one_thread(), vec![("BATON_MODEL__KV_MEMORY", SOME.to_owned())]].concat();
    let mut fleet = Fleet::start_each(&path, 1, 1, round_robin(), |_| little()).await;
    fleet.expect_log(NO_TOKENIZER);
    let (asks, client) = (asks(), fleet.client());
    let expected = answers(&client, &asks).await;
    let plan = GroupPlan { more: little(), ..plan("decode", 2, 1) };
    let mut group = Group::planned(&mut fleet, &path, plan).await;
    for parts in [NO_TOKENIZER, A_NODE_DIES, A_NODE_STANDS_STILL, A_PROCESS_DIES] {
        fleet.expect_log(parts);
    }
    for fault in [Signal::KILL, Signal::STOP] {
        let fails = async |_: &_| {
            let before = arrived(&fleet, group.head).await;
            let is_used = async || (arrived(&fleet, group.head).await > before + 3).then_some(());
            eventually("KV to arrive at the node", is_used).await;
            group.ranks[0].signal(fault);
            revived(&mut fleet, &mut group).await;
        };
        client.ask_while(N_CLIENTS, (&asks, &expected), fails).await;
        fleet.baseline().await;
    }
    assert!(client.counter("baton_router_continuations_total").await > 0, "no stream was continued");
    drop(fleet);
    drop(group);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_another_node_requests_end_by_their_deadline() {
    let path = folder("llama");
    let mut fleet = empty_fleet(&path, Vec::new()).await;
    let mut group = Group::planned(&mut fleet, &path, plan("both", 2, 1)).await;
    for parts in [NO_TOKENIZER, A_NODE_DIES, A_NODE_STANDS_STILL, A_PROCESS_DIES] {
        fleet.expect_log(parts);
    }
    let (asks, client) = (asks(), fleet.client());
    let expected = answers(&client, &asks).await;
    for fault in [Signal::KILL, Signal::STOP] {
        let over = AtomicBool::new(false);
        let ask = async |nth: usize| {
            let mut n_errors = 0;
            while !over.load(Ordering::Relaxed) {
                let (ask, watch) = (&asks[nth % asks.len()], Stopwatch::start());
                let ended = client.ask(&ask.clone().header("x-baton-timeout-ms", DEADLINE.as_millis())).await;
                let took = watch.elapsed();
                assert!(took < DEADLINE + LATE_MAX, "{took:?}: {ended:?}");
                match ended {
                    Ok(answer) => assert_eq!(answer.tokens, expected[nth % asks.len()].tokens),
                    Err(failed) => {
                        assert!(!["", "broken"].contains(&failed.code.as_str()), "no error: {failed:?}");
                        n_errors += 1;
                        sleep(Duration::from_millis(20)).await;
                    }
                }
            }
            n_errors
        };
        let failing = async {
            sleep(Duration::from_millis(200)).await;
            group.ranks[0].signal(fault);
            sleep(DEADLINE + LATE_MAX).await;
            revived(&mut fleet, &mut group).await;
            over.store(true, Ordering::Relaxed);
        };
        let (n_errors, ()) = tokio::join!(join_all((0..N_CLIENTS).map(ask)), failing);
        assert!(n_errors.iter().sum::<u32>() > 0, "{fault:?}: no request has noticed");
        assert_eq!(answers(&client, &asks).await[0].tokens, expected[0].tokens);
        fleet.baseline().await;
    }
    drop(fleet);
    drop(group);
}

// === other nodes besides ===

fn order(order: &str) -> Settings {
    vec![("BATON_ROUTER__ORDER", order.to_owned())]
}

/// A sender that is killed, or stands still, leaves no block behind. Held KV and KV in the pool arrive too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_sender_costs_a_node_of_several_processes_nothing() {
    let path = folder("llama");
    let little = || [on_one_thread(), vec![("BATON_MODEL__KV_MEMORY", SOME.to_owned())]].concat();
    for (order, n_pools) in [("decode-first", 0), ("prefill-first", 0), ("prefill-first", 1)] {
        let roles = [("prefill", 2), ("pool", n_pools)];
        let of_role = |role| if role == "pool" { Vec::new() } else { little() };
        let mut fleet = Fleet::start_all(&path, &roles, self::order(order), of_role).await;
        let plan = GroupPlan { more: little(), ..plan("decode", 2, 2) };
        let group = Group::planned(&mut fleet, &path, plan).await;
        for parts in [NO_TOKENIZER, A_NODE_DIES, A_NODE_STANDS_STILL] {
            fleet.expect_log(parts);
        }
        let (asks, client) = (asks(), fleet.client());
        let expected = answers(&client, &asks).await;
        for fault in [Signal::KILL, Signal::STOP] {
            let fails = async |_: &_| {
                let before = arrived(&fleet, group.head).await;
                let is_used = async || (arrived(&fleet, group.head).await > before + 3).then_some(());
                eventually("KV to arrive at the node", is_used).await;
                let sender = &mut fleet.nodes[0].process;
                sender.signal(fault);
                sleep(Duration::from_secs(2)).await;
                match fault {
                    Signal::KILL => sender.revive(),
                    _ => sender.signal(Signal::CONT),
                }
                fleet.all_ready().await;
            };
            client.ask_while(N_CLIENTS, (&asks, &expected), fails).await;
            fleet.baseline().await;
        }
        drop(fleet);
        drop(group);
    }
}

// === the parts of the API ===

/// Grammars, several answers, log-probabilities of the prompt and stop strings give what one process gives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_all_kinds_are_those_of_one_process() {
    let one = Up::start(&["--model", "demo", "--colocated"]).await;
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo");
    let of_router = [("BATON_MODEL__PATH", path), ("BATON_MODEL__NAME", "demo")];
    let of_router = of_router.map(|(name, value)| (name, value.to_owned()));
    let mut fleet = empty_fleet(path, of_router.into()).await;
    let group = Group::planned(&mut fleet, path, plan("both", 2, 1)).await;
    let object = json!({ "type": "object", "properties": { "a": { "type": "boolean" } }, "required": ["a"] });
    for fields in [
        json!({ "guided_json": object, "max_tokens": 40 }),
        json!({ "guided_choice": ["prefill", "decode"] }),
        json!({ "guided_regex": "[ab]{3}" }),
        json!({ "n": 4, "temperature": 1.0, "seed": 5, "logprobs": 3 }),
        json!({ "prompt_logprobs": 2, "logprobs": 1 }),
        json!({ "stop": ["the", "a"], "max_tokens": 40 }),
        json!({ "min_tokens": 20, "max_tokens": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.5 }),
    ] {
        let mut body = json!({ "model": "demo", "prompt": "What is prefill?", "temperature": 0, "return_token_ids": true });
        body.as_object_mut().expect("fields").extend(fields.as_object().expect("fields").clone());
        let expected = choices(&one.client(), body.clone()).await;
        assert_eq!(choices(&fleet.client(), body).await, expected, "{fields}");
    }
    fleet.baseline().await;
    drop(fleet);
    drop(group);
}

// === refusals ===

/// The node keeps its role and does not sleep, and says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_decode_node_of_several_processes_cannot_do_is_refused() {
    let path = folder("llama");
    let mut fleet = empty_fleet(&path, Vec::new()).await;
    let group = Group::planned(&mut fleet, &path, plan("decode", 2, 1)).await;
    fleet.expect_log(NO_TOKENIZER);
    let expected = fleet.client().ask(&asks()[0]).await.expect("an answer");
    let node = &fleet.nodes[0];
    for (page, reason) in [
        ("role?role=prefill", "a node of several processes keeps its role"),
        ("sleep", "the other processes of this node do not sleep"),
    ] {
        let (status, body) = node.tell(page).await;
        assert!(status != 200 && body.to_string().contains(reason), "{status}: {body}");
    }
    fleet.all_ready().await;
    fleet.baseline().await;
    assert_eq!(fleet.client().ask(&asks()[0]).await.expect("an answer").tokens, expected.tokens);
    drop(fleet);
    drop(group);
}
