//! Prefill nodes of several processes are restarted, one node at a time, while requests run. No request fails, and no
//! answer changes. Processes of a node get SIGTERM in any order: a node drains as a whole.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::Fleet;
use baton_tests::logs::{A_NODE_DIES, NO_TOKENIZER};
use baton_tests::{Answer, Ask, Client, eventually};
use rustix::process::Signal;

use super::folder;
use super::processes::{Group, fleet};

const MODEL: &str = "llama";
/// The number of requests at one time.
const N_CLIENTS: usize = 8;
/// The time between the signals to two processes of a node.
const APART: Duration = Duration::from_millis(200);

/// Which process of a node gets SIGTERM first.
#[derive(Clone, Copy, Debug)]
enum First {
    Head,
    Follower,
    Both,
}

fn asks() -> Vec<Ask> {
    let ask = |prompt: Vec<u32>| {
        let prompt = prompt.iter().map(|token| 2 + token % 90).collect();
        Ask::new(prompt, 20).with("ignore_eos", true.into()).with("model", MODEL.into())
    };
    prompts(37, 60, 90).into_iter().map(ask).collect()
}

async fn answers(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    let mut answers = Vec::new();
    for ask in asks {
        answers.push(client.ask(ask).await.expect("an answer"));
    }
    answers
}

/// Stops all processes of a node, and starts them again when all have ended.
async fn restart(fleet: &mut Fleet, group: &mut Group, first: First) {
    let pause = || tokio::time::sleep(APART);
    match first {
        First::Head => {
            fleet.nodes[group.head].process.signal(Signal::TERM);
            pause().await;
            group.ranks[0].signal(Signal::TERM);
        }
        First::Follower => {
            group.ranks[0].signal(Signal::TERM);
            pause().await;
            fleet.nodes[group.head].process.signal(Signal::TERM);
        }
        First::Both => {
            group.ranks[0].signal(Signal::TERM);
            fleet.nodes[group.head].process.signal(Signal::TERM);
        }
    }
    eventually("the end of the node", async || {
        let head = fleet.nodes[group.head].process.is_alive();
        (!head && !group.ranks[0].is_alive()).then_some(())
    })
    .await;
    group.revive(fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_groups_loses_no_request() {
    let path = folder(MODEL);
    let little = vec![("BATON_MODEL__KV_MEMORY", "512KiB".to_owned())];
    let mut fleet = fleet(&path, little).await;
    let (asks, client) = (asks(), fleet.client());
    let expected = answers(&client, &asks).await;
    let mut groups =
        [Group::start(&mut fleet, &path, 2, 1).await, Group::start(&mut fleet, &path, 2, 1).await];
    fleet.expect_log(NO_TOKENIZER);
    // The end of a node's status stream. A node that loses a process while it works would warn of that, too.
    fleet.expect_log(&A_NODE_DIES[1..2]);
    let rolling = async |next: &AtomicUsize| {
        for first in [First::Head, First::Follower, First::Both] {
            for group in &mut groups {
                let before = next.load(Ordering::Relaxed);
                restart(&mut fleet, group, first).await;
                // A restart takes a tenth of a second. The requests that ran meanwhile must have ended before the next one.
                let is_over = async || (next.load(Ordering::Relaxed) > before + N_CLIENTS).then_some(());
                eventually(&format!("the requests of the restart, {first:?} first"), is_over).await;
            }
        }
    };
    client.ask_while(N_CLIENTS, (&asks, &expected), rolling).await;
    for group in &groups {
        let log = fleet.nodes[group.head].process.log();
        assert!(log.contains("process of this node is asked to stop, the node drains"), "{log}");
    }
    assert!(client.kv_arrived("tcp").await > 0, "no KV travelled");
    fleet.baseline().await;
    drop(fleet);
    drop(groups);
}
