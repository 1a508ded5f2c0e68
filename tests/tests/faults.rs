//! Nodes die, stop and come back while streams run. No request hangs, and no token is lost, doubled or
//! changed.

use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL};
use baton_tests::{Answer, Ask, Failed, Stopwatch, Up, eventually, in_time, undisturbed};
use futures::future::join_all;
use rustix::process::Signal;

/// The length of an answer, in tokens: long enough to be unfinished when a node is killed.
const TOKENS: u32 = 300;

/// A mock whose steps take time, so that a stream lasts for seconds.
const SLOW: &[&str] = &["--model", concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/paced.toml")];

fn asks(n: usize) -> Vec<Ask> {
    let prompt = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(11, n, 200).into_iter().map(prompt).collect()
}

/// Runs `asks` on `up`, and `disturb` once a third of the streams have tokens. Returns the answers.
async fn disturbed(up: &Up, asks: &[Ask], disturb: impl AsyncFnOnce()) -> Vec<Result<Answer, Failed>> {
    let client = up.client();
    let run = join_all(asks.iter().map(|ask| client.ask(ask)));
    let disturb = async {
        tokio::time::sleep(Duration::from_millis(700)).await;
        disturb().await;
    };
    in_time("the disturbed run", async { tokio::join!(run, disturb).0 }).await
}

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SLOW.iter().copied().chain(more.iter().copied()).collect()
}

fn all_equal(seen: &[Result<Answer, Failed>], expected: &[Answer]) {
    for (idx, (seen, expected)) in seen.iter().zip(expected).enumerate() {
        let seen = seen.as_ref().unwrap_or_else(|failed| panic!("request {idx}: {failed:?}"));
        assert_eq!(seen.tokens, expected.tokens, "request {idx}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_decode_node() {
    let asks = asks(50);
    let expected = undisturbed(&asks).await;
    let up = Up::start(&args(&["--prefill", "1", "--decode", "2"])).await;
    let victim = up.of_role("decode").await.swap_remove(0);
    up.expect_log(A_NODE_DIES);
    let seen = disturbed(&up, &asks, async || up.signal(victim.pid, Signal::KILL)).await;
    all_equal(&seen, &expected);
    up.baseline().await;
    let metrics = up.client().get("/metrics").await.1;
    let continued = metrics.lines().find_map(|line| line.strip_prefix("baton_router_continuations_total "));
    assert_ne!(continued, Some("0"), "the node was killed in mid-stream");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_do_not_notice_a_dead_prefill_node() {
    let asks = asks(50);
    let expected = undisturbed(&asks).await;
    for (order, connector) in [("decode-first", "tcp"), ("decode-first", "shm"), ("prefill-first", "shm")] {
        let args = args(&["--prefill", "2", "--decode", "1", "--order", order]);
        let up = Up::start_over(connector, &args).await;
        let victim = up.of_role("prefill").await.swap_remove(0);
        up.expect_log(A_NODE_DIES);
        // The kill comes at once, while prompts are being computed and their KV is being sent.
        let client = up.client();
        let run = join_all(asks.iter().map(|ask| client.ask(ask)));
        let kill = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            up.signal(victim.pid, Signal::KILL);
        };
        let seen = in_time("the disturbed run", async { tokio::join!(run, kill).0 }).await;
        all_equal(&seen, &expected);
        up.baseline().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_stopped_decode_node() {
    let asks = asks(20);
    let expected = undisturbed(&asks).await;
    let up = Up::start(&args(&["--prefill", "1", "--decode", "2"])).await;
    let victim = up.of_role("decode").await.swap_remove(0);
    up.expect_log(A_NODE_STANDS_STILL);
    let seen = disturbed(&up, &asks, async || up.signal(victim.pid, Signal::STOP)).await;
    all_equal(&seen, &expected);
    up.signal(victim.pid, Signal::CONT);
    up.baseline().await;
    up.client().ask(&asks[0]).await.expect("the cluster serves on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_pair_ends_requests_by_their_deadline() {
    for (role, connector) in [("prefill", "tcp"), ("decode", "tcp"), ("prefill", "shm"), ("decode", "shm")] {
        let up = Up::start_over(connector, &args(&["--prefill", "1", "--decode", "1"])).await;
        let victim = up.of_role(role).await.swap_remove(0);
        let deadline = Duration::from_secs(3);
        let asks: Vec<Ask> =
            asks(10).into_iter().map(|ask| ask.header("x-baton-timeout-ms", deadline.as_millis())).collect();
        up.expect_log(A_NODE_STANDS_STILL);
        up.signal(victim.pid, Signal::STOP);
        let watch = Stopwatch::start();
        let client = up.client();
        let seen = in_time("typed outcomes", join_all(asks.iter().map(|ask| client.ask(ask)))).await;
        let took = watch.elapsed();
        assert!(took < deadline + Duration::from_secs(1), "{role}: took {took:?}");
        for seen in seen {
            // An answer may succeed: without its prefill node, the decode node may still answer alone.
            if let Err(failed) = seen {
                assert!(
                    ["deadline", "failed", "no_nodes", "wire"].contains(&failed.code.as_str()),
                    "{role}: {failed:?}"
                );
            }
        }
        up.signal(victim.pid, Signal::CONT);
        // A node that does not answer yet has no counts.
        eventually("the cluster to serve again", async || client.ask(&Ask::new(vec![1, 2, 3], 4)).await.ok())
            .await;
        up.baseline().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_storm_leaves_nothing_behind() {
    for connector in ["tcp", "shm"] {
        let up = Up::start_over(connector, &args(&["--prefill", "1", "--decode", "1"])).await;
        cancel_storm(&up).await;
    }
}

async fn cancel_storm(up: &Up) {
    let client = up.client();
    let asks = asks(600);
    for round in 0..2u64 {
        let storm = join_all(asks.iter().enumerate().map(|(idx, ask)| {
            let client = client.clone();
            // Clients leave at every stage, from before the answer's head to the middle of the stream.
            let patience = Duration::from_millis((idx as u64 * 7 + round * 13) % 1500);
            async move {
                let _ = tokio::time::timeout(patience, async {
                    let Ok(mut stream) = client.stream(ask).await else { return };
                    while let Ok(Some(_)) = stream.next().await {}
                })
                .await;
            }
        }));
        in_time("the storm", storm).await;
        up.baseline().await;
        let watch = Stopwatch::start();
        client.ask(&Ask::new(vec![9; 20], 3)).await.expect("a probe is served");
        let took = watch.elapsed();
        assert!(took < Duration::from_secs(2), "the probe took {took:?}");
    }
}
