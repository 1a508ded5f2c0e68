//! Nodes are killed and started at the same address, repeatedly, while requests run.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, PACED};
use baton_tests::logs::A_NODE_DIES;
use baton_tests::{Answer, Ask, Client, Up, in_time};
use futures::future::join_all;

/// How often a node is killed and started again.
const KILLS: usize = 50;
/// The number of streams at one time.
const CLIENTS: usize = 6;
/// The number of short requests.
const SHORT_REQUESTS: u32 = 9_000;

async fn answers(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("all answers", all).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// Kills the second node of each kind in turn, and waits until the restarted node is usable.
async fn churn(fleet: &mut Fleet) {
    for nth in 0..KILLS {
        let victim = 1 + 2 * (nth % 2);
        fleet.nodes[victim].process.kill();
        if nth % 3 == 0 {
            // In some rounds the kill comes later, so that the router notices the end first.
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        fleet.nodes[victim].process.revive();
        fleet.all_ready().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_comes_and_goes_fifty_times_loses_nothing() {
    let ask = |prompt| Ask::new(prompt, 60).with("ignore_eos", true.into());
    let asks: Vec<Ask> = prompts(43, 20, 300).into_iter().map(ask).collect();
    let alone = Up::start(&["--colocated"]).await;
    let expected = answers(&alone.client(), &asks).await;
    drop(alone);
    let mut fleet = Fleet::start(PACED, 2, 2).await;
    fleet.expect_log(A_NODE_DIES);
    let client = fleet.client();
    let happens = async |next: &AtomicUsize| {
        churn(&mut fleet).await;
        next.load(Ordering::Relaxed)
    };
    let n_asked = client.ask_while(CLIENTS, (&asks, &expected), happens).await;
    assert!(n_asked > 2 * CLIENTS, "requests ran meanwhile");
    fleet.baseline().await;
}

/// Ends of calls come a moment after the last message that the router needs. HTTP/2 counts those of calls that the router
/// has reset, and closes the connection to the node at the 1,024th: after about 5,000 of these requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_short_requests_close_no_connection() {
    let up = Up::start(&[]).await;
    let client = up.client();
    let next = AtomicU32::new(0);
    let one = async || {
        while next.load(Ordering::Relaxed) < SHORT_REQUESTS {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            let prompt = (0..20).map(|at| nth.wrapping_mul(2_654_435_761).rotate_left(at) % 256).collect();
            client.ask(&Ask::new(prompt, 4)).await.expect("an answer");
        }
    };
    join_all((0..16).map(|_| one())).await;
    up.baseline().await;
}
