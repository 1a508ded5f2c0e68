//! `/debug/requests`: the stages of a request add up to the time that its client waits, through faults too.

use baton_tests::check::prompts;
use baton_tests::fleet::{PACED, round_robin};
use baton_tests::logs::{A_NODE_DIES, THE_POOL_FAILS};
use baton_tests::{Ask, Client, Fleet, eventually, in_time};
use futures::StreamExt as _;
use futures::stream::iter;
use serde_json::Value;
use tokio::time::Instant;

#[path = "requests/explained.rs"]
mod explained;

/// Requests of one fleet, and how many are sent at one time.
const REQUESTS: usize = 100;
const AT_ONCE: usize = 12;
/// Tokens of an answer, for about a second of steps.
const TOKENS: u32 = 150;
/// The requests of a hundred that may differ more than the bound: the client's process may have to wait for a
/// processor. `./test.sh long` overrides it with 0, for a machine that does nothing else.
fn late_percent_max() -> usize {
    std::env::var("TEST_LATE_PERCENT").map_or(10, |percent| percent.parse().expect("a number"))
}

/// A request as its client and the router saw it.
struct Seen {
    waited_ms: f64,
    record: Value,
}

impl Seen {
    fn stages_ms(&self) -> f64 {
        self.record["stages_ms"].as_object().expect("stages").values().filter_map(Value::as_f64).sum()
    }

    fn events(&self, of: &str) -> usize {
        let events = self.record["events"].as_array().expect("a list");
        events.iter().filter(|event| event["event"] == of).count()
    }

    fn has(&self, what: &str) -> bool {
        self.record[what].as_u64().expect("a number") > 0
    }

    /// Returns whether the stages add up to what the client waited, within 2 % or 2 ms.
    fn adds_up(&self) -> bool {
        (self.waited_ms - self.stages_ms()).abs() <= (self.waited_ms * 0.02).max(2.0)
    }
}

/// Returns the only record of a request.
async fn record(client: &Client, id: &str) -> Value {
    let page = client.get_json(&format!("/debug/requests/{id}")).await;
    let records = page["requests"].as_array().expect("a list");
    assert_eq!(records.len(), 1, "{page}");
    records[0].clone()
}

async fn ask(client: &Client, nth: usize, prompt: Vec<u32>) -> (String, f64) {
    let id = format!("seen-{nth}x");
    let ask = Ask::new(prompt, TOKENS).with("ignore_eos", true.into()).header("x-request-id", &id);
    let began = Instant::now();
    client.ask(&ask).await.expect("faults do not reach the client");
    (id, began.elapsed().as_secs_f64() * 1000.0)
}

/// Sends all requests, and lets `disturb` happen meanwhile.
async fn seen(fleet: &Fleet, disturb: impl AsyncFnOnce()) -> Vec<Seen> {
    let client = fleet.client();
    let asks = iter(prompts(17, REQUESTS, 400).into_iter().enumerate())
        .map(|(nth, prompt)| ask(&client, nth, prompt))
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>();
    let (waited, ()) = in_time("all answers", async { tokio::join!(asks, disturb()) }).await;
    let mut all = Vec::new();
    for (id, waited_ms) in waited {
        let ended = async || record(&client, &id).await["outcome"].is_string().then_some(());
        eventually("the record to end", ended).await;
        all.push(Seen { waited_ms, record: record(&client, &id).await });
    }
    all
}

/// Waits until `count` requests under way fit.
async fn until(client: &Client, count: usize, fits: impl Fn(&Value) -> bool) {
    eventually("requests to be under way", async || {
        let page = client.get_json("/debug/requests").await;
        let under_way = page["under_way"].as_array().expect("a list");
        (under_way.iter().filter(|request| fits(request)).count() >= count).then_some(())
    })
    .await;
}

fn check(all: &[Seen], order: &str) {
    let late: Vec<String> = all
        .iter()
        .filter(|seen| !seen.adds_up())
        .map(|seen| format!("{:.3} ms for the client, {}", seen.waited_ms, seen.record))
        .collect();
    assert!(late.len() * 100 <= late_percent_max() * all.len(), "{order}: {} late: {late:#?}", late.len());
    for seen in all {
        let (took, stages) = (seen.record["ms"].as_f64().expect("a number"), seen.stages_ms());
        assert!((took - stages).abs() < 0.1, "{order}: {stages} of {took} ms: {}", seen.record);
        assert!(took <= seen.waited_ms, "{order}: {} ms for the client, {}", seen.waited_ms, seen.record);
        assert_eq!(seen.record["outcome"], "finished", "{order}: {}", seen.record);
        assert_eq!(seen.record["output_tokens"], TOKENS, "{order}: {}", seen.record);
        assert_eq!(seen.events("first_token"), 1, "{order}: {}", seen.record);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stages_add_up_when_streams_continue() {
    let mut fleet = Fleet::start_with(PACED, 1, 2, round_robin()).await;
    fleet.expect_log(A_NODE_DIES);
    let mut victim = fleet.nodes.pop().expect("a decode node");
    let client = fleet.client();
    let all = seen(&fleet, async || {
        until(&client, AT_ONCE, |request| request["output_tokens"].as_u64() > Some(5)).await;
        victim.process.kill();
    })
    .await;
    check(&all, "decode-first");
    assert!(all.iter().any(|seen| seen.has("continuations") && seen.events("continue") > 0));
    // A prompt that a decode node computes alone brings no KV.
    let n_sent = all.iter().filter(|seen| seen.record["kv"]["tcp"].as_u64() > Some(0)).count();
    assert!(n_sent > REQUESTS / 2, "KV of {n_sent} prompts came over tcp");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stages_add_up_through_the_pool_and_after_a_retry() {
    let roles = [("decode", 1), ("pool", 1), ("prefill", 2)];
    let order = vec![("BATON_ROUTER__ORDER", "prefill-first".to_owned())];
    let mut fleet = Fleet::start_all(PACED, &roles, order, |_| Vec::new()).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(THE_POOL_FAILS);
    let mut victim = fleet.nodes.pop().expect("a prefill node");
    let client = fleet.client();
    let all = seen(&fleet, async || {
        until(&client, AT_ONCE / 2, |request| request["place"] == "prefill").await;
        victim.process.kill();
    })
    .await;
    check(&all, "prefill-first");
    let is_retried = |seen: &Seen| seen.record["tries"].as_u64() > Some(1) && seen.events("failed") > 0;
    assert!(all.iter().any(is_retried), "the node was killed while it computed prompts");
    // After a failure a prefill node holds the KV for a while.
    let n_stored = all.iter().filter(|seen| seen.events("store") > 0 && seen.events("deliver") > 0).count();
    assert!(n_stored > REQUESTS / 2, "KV of {n_stored} prompts went through the pool");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pages_show_no_prompt_and_no_key() {
    let fleet = Fleet::start("mock", 1, 1).await;
    let client = fleet.client();
    let (key, text) = ("a-key-that-is-secret", "a prompt that is secret");
    let body = serde_json::json!({ "model": "mock", "prompt": text, "max_tokens": 8, "n": 2, "user": text });
    let headers = [("authorization", format!("Bearer {key}")), ("x-request-id", "twice".to_owned())];
    let (status, _, answer) = client.post_with("/v1/completions", &headers, body.to_string()).await;
    assert_eq!(status.as_u16(), 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let answer = answer["choices"][0]["text"].as_str().expect("a text").to_owned();
    let (list, one) = (client.get("/debug/requests").await.1, client.get("/debug/requests/twice").await.1);
    let found: Value = serde_json::from_str(&one).expect("JSON");
    assert_eq!(found["requests"].as_array().map(Vec::len), Some(2), "one for each answer: {one}");
    assert!(list.contains("twice-0") && list.contains("twice-1"), "{list}");
    for page in [&list, &one] {
        assert!(!page.contains(key) && !page.contains(text), "{page}");
        assert!(answer.len() < 3 || !page.contains(&answer), "{page}");
    }
    assert_eq!(client.get("/debug/requests/none").await.0.as_u16(), 404);
}
