//! KV goes through the pool, and answers equal those of one node. Pool nodes die, stop, fill up and come back while
//! streams run. No request hangs, and no token or block is lost.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL, THE_POOL_FAILS};
use baton_tests::up::Node;
use baton_tests::{
    Answer, Ask, Client, Failed, Fleet, Stopwatch, Up, eventually, in_time, python, undisturbed,
};
use futures::future::join_all;
use rustix::process::Signal;

/// The length of an answer, in tokens: long enough to be unfinished when a fault occurs.
const TOKENS: u32 = 200;
/// A mock whose steps take time.
const PACED: &str = baton_tests::fleet::PACED;

fn asks(n: usize) -> Vec<Ask> {
    let ask = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(31, n, 300).into_iter().map(ask).collect()
}

async fn answers(client: &Client, asks: &[Ask]) -> Vec<Result<Answer, Failed>> {
    in_time("all answers", join_all(asks.iter().map(|ask| client.ask(ask)))).await
}

fn all_equal(seen: Vec<Result<Answer, Failed>>, expected: &[Answer]) {
    for (idx, (seen, expected)) in seen.into_iter().zip(expected).enumerate() {
        let seen = seen.unwrap_or_else(|failed| panic!("request {idx}: {failed:?}"));
        assert_eq!((seen.tokens, seen.finish), (expected.tokens.clone(), expected.finish.clone()), "{idx}");
    }
}

/// Sends all requests at once, and calls `disturb` after a while. Returns the answers.
async fn disturbed(
    client: &Client,
    asks: &[Ask],
    after: Duration,
    disturb: impl FnOnce(),
) -> Vec<Result<Answer, Failed>> {
    let disturb = async {
        tokio::time::sleep(after).await;
        disturb();
    };
    tokio::join!(answers(client, asks), disturb).0
}

/// Returns the sum of a counter over all processes of a role.
async fn sum(up: &Up, role: &str, metric: &str) -> u64 {
    let mut sum = 0;
    let cluster = up.client().get_json("/debug/cluster").await;
    for node in cluster["nodes"].as_array().expect("nodes").iter().filter(|node| node["role"] == role) {
        let admin = node["admin"].as_str().expect("an address").parse().expect("an address");
        sum += counted(&Client::new(admin).get("/metrics").await.1, metric);
    }
    sum
}

fn counted(page: &str, metric: &str) -> u64 {
    let values = page.lines().filter_map(|line| line.strip_prefix(metric)?.trim().parse::<u64>().ok());
    values.sum()
}

async fn fallbacks(client: &Client) -> bool {
    client.get("/metrics").await.1.contains("baton_router_pool_fallbacks_total{")
}

async fn a_pool_node(up: &Up) -> Node {
    up.of_role("pool").await.swap_remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_the_pool_equals_one_node() {
    let lengths = [1, 2, 5, 16, 33, 64];
    let prompts = prompts(7, 120, 600).into_iter().enumerate();
    let asks: Vec<Ask> = prompts.map(|(idx, prompt)| Ask::new(prompt, lengths[idx % 6])).collect();
    let expected = undisturbed(&asks).await;
    for connector in ["tcp", "shm"] {
        let up = Up::start_over(connector, &["--prefill", "1", "--decode", "1", "--pool", "2"]).await;
        let watch = Stopwatch::start();
        all_equal(answers(&up.client(), &asks).await, &expected);
        up.baseline().await;
        // The router waits two seconds for a pool node.
        let stopped = watch.longest_stop() > Duration::from_secs(1);
        assert!(stopped || !fallbacks(&up.client()).await, "all of it went through the pool");
        for node in up.of_role("pool").await {
            assert_eq!(node.state, "ready");
        }
        assert!(sum(&up, "pool", "baton_node_puts_total{outcome=\"stored\",role=\"pool\"}").await > 60);
        assert!(
            sum(&up, "pool", "baton_node_deliveries_total{outcome=\"delivered\",role=\"pool\"}").await > 60
        );
        let page = up.client().get("/metrics").await.1;
        assert!(counted(&page, "baton_router_stage_seconds_count{stage=\"store\"}") > 60, "{page}");
    }
}

/// A second prompt with the same beginning sends only the rest to the pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_in_the_pool_is_not_put_again() {
    let up = Up::start_over("tcp", &["--prefill", "2", "--decode", "2", "--pool", "2"]).await;
    let common: Vec<u32> = (0..160).map(|nth| nth * 7 % 256).collect();
    let ask = |own: u32| Ask::new(common.iter().copied().chain([own; 20]).collect(), 8);
    for own in 0..6 {
        up.client().ask(&ask(own)).await.expect("an answer");
    }
    up.baseline().await;
    let (put, held) = (
        sum(&up, "pool", "baton_node_put_tokens_total{role=\"pool\"}").await,
        sum(&up, "pool", "baton_node_held_tokens_total{role=\"pool\"}").await,
    );
    let router = up.client().get("/metrics").await.1;
    let fallbacks: Vec<&str> = router.lines().filter(|line| line.contains("pool_fallbacks")).collect();
    let outcomes = sum(&up, "pool", "baton_node_puts_total{outcome=\"stored\",role=\"pool\"}").await;
    assert_eq!(
        (put, held),
        (6 * 180, 5 * 160),
        "the common beginning was sent once; {outcomes} stored, {fallbacks:?}, {}",
        up.client().get("/debug/cluster").await.1
    );
}

/// `bench/timeline.py` draws a request whose KV went through a pool node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_through_the_pool_can_be_drawn() {
    let env = [("BATON_LOG__FORMAT", "json"), ("BATON_LOG__LEVEL", "warn,walk=trace")];
    let up = Up::start_with(&["--model", PACED, "--pool", "1"], &env).await;
    for ask in asks(3) {
        up.client().ask(&ask).await.expect("an answer");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (log, svg) = (folder.path().join("log"), folder.path().join("one.svg"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/timeline.py");
    let drawn = eventually("all marks to be written", async || {
        std::fs::write(&log, up.log()).expect("written");
        let output = Command::new(python()).arg(&script).arg(&svg).arg(&log).output().expect("python runs");
        output.status.success().then(|| std::fs::read_to_string(&svg).expect("a picture"))
    })
    .await;
    for part in
        ["pool: KV in and out", "go to the decode node", " came (", "hand-over gap", "waits for prefill"]
    {
        assert!(drawn.contains(part), "{part} in\n{drawn}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_pool_node() {
    let asks = asks(40);
    let expected = undisturbed(&asks).await;
    // The kill comes while prompts are put, while they are fetched, and while all of them run.
    for after in [20, 120, 600] {
        let args = ["--model", PACED, "--prefill", "1", "--decode", "2", "--pool", "2"];
        let up = Up::start_over("tcp", &args).await;
        let victim = a_pool_node(&up).await;
        up.expect_log(A_NODE_DIES);
        up.expect_log(THE_POOL_FAILS);
        let kill = || up.signal(victim.pid, Signal::KILL);
        all_equal(disturbed(&up.client(), &asks, Duration::from_millis(after), kill).await, &expected);
        up.baseline().await;
        all_equal(answers(&up.client(), &asks[..8]).await, &expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_stopped_pool_node() {
    let asks = asks(30);
    let expected = undisturbed(&asks).await;
    for (connector, n_pool) in [("tcp", "2"), ("shm", "1")] {
        let args = ["--model", PACED, "--prefill", "1", "--decode", "2", "--pool", n_pool];
        let up = Up::start_over(connector, &args).await;
        let victim = a_pool_node(&up).await;
        up.expect_log(A_NODE_STANDS_STILL);
        up.expect_log(THE_POOL_FAILS);
        let stop = || up.signal(victim.pid, Signal::STOP);
        all_equal(disturbed(&up.client(), &asks, Duration::from_millis(60), stop).await, &expected);
        // The answers come soon, because the router knows that the node is gone and no request waits for it.
        let watch = Stopwatch::start();
        all_equal(answers(&up.client(), &asks[..8]).await, &expected);
        let took = watch.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
        up.signal(victim.pid, Signal::CONT);
        up.baseline().await;
        eventually("the pool to take part again", async || {
            up.client().ask(&Ask::new(vec![9; 40], 2)).await.expect("an answer");
            let all = up.of_role("pool").await;
            all.iter().all(|node| node.state == "ready").then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_pool_ends_requests_by_their_deadline() {
    let args = ["--model", PACED, "--prefill", "1", "--decode", "1", "--pool", "1"];
    let up = Up::start_over("tcp", &args).await;
    let victim = a_pool_node(&up).await;
    up.expect_log(A_NODE_STANDS_STILL);
    up.expect_log(THE_POOL_FAILS);
    let deadline = Duration::from_secs(3);
    let hurried = |ask: Ask| ask.header("x-baton-timeout-ms", deadline.as_millis());
    let asks: Vec<Ask> = asks(10).into_iter().map(hurried).collect();
    let watch = Stopwatch::start();
    let stop = || up.signal(victim.pid, Signal::STOP);
    let seen = disturbed(&up.client(), &asks, Duration::from_millis(20), stop).await;
    let took = watch.elapsed();
    assert!(took < deadline + Duration::from_secs(1), "{took:?}");
    for failed in seen.into_iter().filter_map(Result::err) {
        assert!(["deadline", "failed", "wire"].contains(&failed.code.as_str()), "{failed:?}");
    }
    up.signal(victim.pid, Signal::CONT);
    up.baseline().await;
}

/// The pool has room for two or three of forty prompts. The other prompts wait on their prefill nodes, and
/// blocks that are being read are not evicted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_is_done_without() {
    let asks = asks(40);
    let expected = undisturbed(&asks).await;
    let args = ["--model", PACED, "--prefill", "1", "--decode", "1", "--pool", "1", "--pool-memory", "64KiB"];
    let up = Up::start_over("tcp", &args).await;
    for _ in 0..2 {
        all_equal(answers(&up.client(), &asks).await, &expected);
        up.baseline().await;
    }
    assert!(sum(&up, "pool", "baton_node_puts_total{outcome=\"stored\",role=\"pool\"}").await > 0);
    assert!(sum(&up, "pool", "baton_node_puts_total{outcome=\"full\",role=\"pool\"}").await > 0);
    assert!(fallbacks(&up.client()).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_node_that_dies_costs_the_pool_nothing() {
    let asks = asks(40);
    let expected = undisturbed(&asks).await;
    let args = ["--model", PACED, "--prefill", "1", "--decode", "2", "--pool", "1"];
    let up = Up::start_over("shm", &args).await;
    let victim = up.of_role("decode").await.swap_remove(0);
    up.expect_log(A_NODE_DIES);
    let kill = || up.signal(victim.pid, Signal::KILL);
    all_equal(disturbed(&up.client(), &asks, Duration::from_millis(150), kill).await, &expected);
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_storm_leaves_the_pool_at_its_baseline() {
    let args = ["--model", PACED, "--prefill", "1", "--decode", "1", "--pool", "2"];
    let up = Up::start_over("tcp", &args).await;
    let asks = asks(400);
    // All links are opened before the storm: a request that is cancelled while its link is opened leaves a
    // stream of it, which the peer refuses with a warning.
    let met = answers(&up.client(), &asks[..20]).await;
    assert!(met.iter().all(Result::is_ok), "{met:?}");
    let storm = join_all(asks.iter().enumerate().map(|(idx, ask)| {
        let client = up.client();
        // Clients leave at every stage, from before the answer's head to the middle of the stream.
        let patience = Duration::from_millis((idx as u64 * 7) % 900);
        async move {
            let _ = tokio::time::timeout(patience, client.ask(ask)).await;
        }
    }));
    in_time("the storm", storm).await;
    up.baseline().await;
    up.client().ask(&Ask::new(vec![9; 40], 3)).await.expect("a probe is served");
    up.baseline().await;
}

/// The node is killed and started at once, on the same ports and under the same name. The KV of the old life
/// is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_node_comes_back_at_the_same_address() {
    let asks = asks(30);
    let expected = undisturbed(&asks).await;
    let mut fleet = Fleet::start_pooled(PACED, 1, 2, 1).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(THE_POOL_FAILS);
    let client = fleet.client();
    let revive = || fleet.nodes.last_mut().expect("the pool").process.revive();
    all_equal(disturbed(&client, &asks, Duration::from_millis(80), revive).await, &expected);
    fleet.all_ready().await;
    fleet.baseline().await;
    all_equal(answers(&client, &asks).await, &expected);
    fleet.baseline().await;
    let page = Client::new(fleet.nodes.last().expect("the pool").admin).get("/metrics").await.1;
    assert!(
        counted(&page, "baton_node_puts_total{outcome=\"stored\",role=\"pool\"}") > 0,
        "it keeps again:\n{page}"
    );
}

/// While the node drains, its KV can still be fetched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_node_drains() {
    let asks = asks(30);
    let expected = undisturbed(&asks).await;
    let mut fleet = Fleet::start_pooled(PACED, 1, 1, 2).await;
    let client = fleet.client();
    let victim = fleet.nodes.last().expect("the pool").process.pid();
    let term = || fleet.nodes.last().expect("the pool").process.signal(Signal::TERM);
    all_equal(disturbed(&client, &asks, Duration::from_millis(80), term).await, &expected);
    eventually("the node to end", async || (!baton_tests::up::is_alive(victim)).then_some(())).await;
    assert!(!fleet.nodes.last_mut().expect("the pool").process.is_alive());
    let page = client.get("/metrics").await.1;
    assert_eq!(counted(&page, "baton_router_continuations_total"), 0, "nothing was lost:\n{page}");
}
