//! KV room is given in order: a large prompt beside many small ones, and more requests than the nodes have room for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, PACED, Settings};
use baton_tests::{Answer, Ask, Client, Stopwatch, eventually, in_time};
use futures::future::join_all;
use tokio::time::sleep;

/// The KV memory of each node: 64 blocks of 16 tokens.
const KV_MEMORY: &str = "512KiB";
/// The length of a prompt that takes 80 % of a pool, in tokens.
const LARGE_TOKENS: usize = 64 * 16 * 8 / 10;
/// The time within which the large prompt must be answered.
const SERVED_WITHIN: Duration = Duration::from_secs(10);
/// The number of clients that send small requests beside it.
const LOOPS: usize = 24;
/// The number of requests in a burst.
const BURST: usize = 80;

/// Starts a prefill node and a decode node of 64 blocks each.
async fn narrow(order: &str) -> Fleet {
    let of_router: Settings = vec![("BATON_ROUTER__ORDER", order.to_owned())];
    let of_nodes = |_| vec![("BATON_MODEL__KV_MEMORY", KV_MEMORY.to_owned())];
    let fleet = Fleet::start_each(PACED, 1, 1, of_router, of_nodes).await;
    let kv = fleet.client().get_json("/debug/kv").await;
    let totals: Vec<_> = kv["nodes"].as_array().expect("nodes").iter().map(|node| &node["total"]).collect();
    assert_eq!(totals, [64, 64], "{kv}");
    fleet
}

fn ask(prompt: Vec<u32>, max_tokens: u32) -> Ask {
    Ask::new(prompt, max_tokens).with("ignore_eos", true.into())
}

/// Returns the number of attempts that a node refused because it was full, by the router's count.
async fn n_refused(client: &Client) -> u64 {
    let of =
        async |reason| client.counter(&format!("baton_router_retries_total{{reason=\"{reason}\"}}")).await;
    of("full").await + of("queue").await
}

/// Keeps the nodes' pools nearly full with small requests until the large one is answered. Returns its time.
async fn large_beside_small(client: &Client) -> Duration {
    let (over, n_small) = (AtomicBool::new(false), AtomicUsize::new(0));
    let small = async |nth: usize| {
        for round in 0.. {
            if over.load(Ordering::Relaxed) {
                return;
            }
            let prompt = (0..48).map(|at| ((nth * 31 + round * 7 + at * 13) % 256) as u32).collect();
            client.ask(&ask(prompt, 40)).await.expect("a small request is answered");
            n_small.fetch_add(1, Ordering::Relaxed);
        }
    };
    let large = async {
        while n_small.load(Ordering::Relaxed) < LOOPS {
            sleep(Duration::from_millis(10)).await;
        }
        let watch = Stopwatch::start();
        let prompt = (0..LARGE_TOKENS - 16).map(|at| ((at * 11) % 251) as u32).collect();
        let answer = client.ask(&ask(prompt, 16)).await;
        over.store(true, Ordering::Relaxed);
        assert_eq!(answer.expect("the large request is answered").tokens.len(), 16);
        watch.elapsed()
    };
    in_time("the large request", async { tokio::join!(large, join_all((0..LOOPS).map(small))).0 }).await
}

async fn a_large_prompt_is_served(order: &str) {
    let fleet = narrow(order).await;
    let took = large_beside_small(&fleet.client()).await;
    assert!(took < SERVED_WITHIN, "{order}: the large prompt was answered after {took:?}");
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_prompt_is_served_beside_small_ones_decode_first() {
    a_large_prompt_is_served("decode-first").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_prompt_is_served_beside_small_ones_prefill_first() {
    a_large_prompt_is_served("prefill-first").await;
}

/// A request waits in a node's line, so few attempts are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_for_full_nodes_is_refused_seldom() {
    for order in ["decode-first", "prefill-first"] {
        let fleet = narrow(order).await;
        let client = fleet.client();
        let asks: Vec<Ask> = prompts(47, BURST, 300).into_iter().map(|prompt| ask(prompt, 40)).collect();
        let answers = in_time("all answers", join_all(asks.iter().map(|ask| client.ask(ask)))).await;
        let answers: Vec<Answer> =
            answers.into_iter().map(|answer| answer.expect("every request is answered")).collect();
        assert!(answers.iter().all(|answer| answer.tokens.len() == 40));
        let n_refused = n_refused(&client).await;
        assert!(
            n_refused < 3 * BURST as u64,
            "{order}: {n_refused} attempts of {BURST} requests were refused"
        );
        fleet.baseline().await;
    }
}

/// A stopping prefill node keeps KV that has no room on a decode node until the KV is fetched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_node_stops_after_its_last_kv_was_fetched() {
    let mut fleet = narrow("prefill-first").await;
    let client = fleet.client();
    // The running request needs up to 56 blocks of 64, and runs for some seconds.
    let running = ask((0..96).collect(), 800);
    let waiting = ask((0..400).map(|at| at % 250).collect(), 40);
    let mut stream = client.stream(&running).await.expect("there is room");
    stream.next().await.expect("a token");
    let answered = Box::pin(client.ask(&waiting));
    let stopped = async {
        let waits = async || {
            let cluster = client.get_json("/debug/cluster").await;
            let nodes = cluster["nodes"].as_array().expect("nodes");
            nodes.iter().any(|node| node["role"] == "decode" && node["waiting"] == 1).then_some(())
        };
        eventually("the prompt to wait for decode room", waits).await;
        fleet.nodes[0].process.restart().await;
    };
    let ended = async { while stream.next().await.expect("the stream goes on").is_some() {} };
    let stopped = Box::pin(stopped);
    let (answer, (), ()) = in_time("both answers", async { tokio::join!(answered, stopped, ended) }).await;
    assert_eq!(answer.expect("an answer").tokens.len(), 40);
    assert_eq!(client.counter("baton_router_continuations_total").await, 0, "nothing was computed again");
    fleet.all_ready().await;
    fleet.baseline().await;
}
