//! A process is stopped, or all nodes of a kind restart at once, while streams are unfinished. All streams
//! continue.

use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{PACED, Settings};
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL};
use baton_tests::{Answer, Ask, Etcd, Fleet, in_time, undisturbed};
use futures::future::join_all;
use rustix::process::Signal;

/// The number of streams at one time.
const STREAMS: usize = 32;
/// The length of an answer, in tokens: long enough to be in mid-stream when a fault occurs.
const TOKENS: u32 = 200;

fn asks() -> Vec<Ask> {
    let prompt = |prompt| Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
    prompts(29, STREAMS, 120).into_iter().map(prompt).collect()
}

/// Runs all streams, and `trouble` meanwhile. Each must end as it does without the trouble.
async fn go_on(fleet: &mut Fleet, asks: &[Ask], expected: &[Answer], trouble: impl AsyncFnOnce(&mut Fleet)) {
    let client = fleet.client();
    let streams = join_all(asks.iter().map(|ask| client.ask(ask)));
    let trouble = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        trouble(fleet).await;
    };
    let (seen, ()) = in_time("all streams", async { tokio::join!(streams, trouble) }).await;
    for (nth, (seen, expected)) in seen.into_iter().zip(expected).enumerate() {
        let seen = seen.unwrap_or_else(|failed| panic!("stream {nth}: {failed:?}"));
        assert_eq!(seen.tokens, expected.tokens, "stream {nth}");
    }
    fleet.all_ready().await;
    fleet.baseline().await;
}

/// Stops the router for 4, 6, 10 and 15 s: its peers close their connections to it, or it takes them for
/// dead.
async fn router_stands_still(registry: Settings) {
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let mut fleet = Fleet::start_each(PACED, 2, 2, registry.clone(), |_| registry.clone()).await;
    fleet.expect_log(A_NODE_STANDS_STILL);
    for seconds in [4, 6, 10, 15] {
        let stand_still = async |fleet: &mut Fleet| {
            fleet.router.signal(Signal::STOP);
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            fleet.router.signal(Signal::CONT);
        };
        go_on(&mut fleet, &asks, &expected, stand_still).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_router_that_stands_still() {
    router_stands_still(Settings::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_router_that_stands_still_beside_etcd() {
    let etcd = Etcd::start();
    router_stands_still(vec![("BATON_REGISTRY__URL", etcd.url("pauses"))]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_a_restart_of_all_decode_nodes() {
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let mut fleet = Fleet::start(PACED, 2, 2).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(A_NODE_STANDS_STILL);
    for away in [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(10)] {
        let restart = async |fleet: &mut Fleet| {
            let decode = || (0..4).filter(|nth| *nth >= 2);
            decode().for_each(|nth| fleet.nodes[nth].process.kill());
            tokio::time::sleep(away).await;
            decode().for_each(|nth| fleet.nodes[nth].process.revive());
        };
        go_on(&mut fleet, &asks, &expected, restart).await;
    }
}
