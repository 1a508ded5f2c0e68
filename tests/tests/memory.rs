//! Checks the memory of a node: its weights once, its KV, and little more.

use std::path::Path;

use baton_tests::logs::NO_TOKENIZER;
use baton_tests::up::LONG_STEPS;
use baton_tests::{Ask, Client, Up, eventually};
use serde_json::json;

/// The bytes of Qwen3-0.6B's weights: two for each number. Its output layer is its embedding.
const WEIGHT_BYTES: usize = 2 * 596_049_920;
const KV_BYTES: usize = 64 << 20;
const REST_BYTES: usize = 300_000_000;

/// Returns the peak memory of a process.
fn peak_bytes(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_holds_one_copy_of_its_weights() {
    let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-0.6b");
    let env = [
        ("BATON_EXPERT__MODEL__LOAD_FORMAT", "dummy"),
        ("BATON_MODEL__KV_MEMORY", "64MiB"),
        LONG_STEPS[0],
        LONG_STEPS[1],
    ];
    let up = Up::start_with(&["--colocated", "--model", shape.to_str().expect("UTF-8")], &env).await;
    up.expect_log(NO_TOKENIZER);
    let prompt: Vec<u32> = (0..200).map(|nth| 5 + nth * 37 % 1000).collect();
    let ask = Ask::new(prompt, 4).with("model", json!("qwen3-0.6b")).with("ignore_eos", json!(true));
    up.client().ask(&ask).await.expect("an answer");
    let node = &up.nodes().await[0];
    let (peak, most) = (peak_bytes(node.pid), WEIGHT_BYTES + KV_BYTES + REST_BYTES);
    assert!(peak > WEIGHT_BYTES, "{peak} bytes are less than the weights: this measures something else");
    assert!(peak <= most, "{peak} bytes, {most} at most");

    // The node must use little memory while asleep, and as much as before when awake.
    let admin = Client::new(node.admin.parse().expect("an address"));
    let answer = up.client().ask(&ask).await.expect("an answer");
    let asleep = admin.post("/sleep", "").await;
    assert_eq!(asleep.0.as_u16(), 200, "{}", asleep.2);
    let resident = baton_tests::process::resident_kib(node.pid).expect("it is there") as usize * 1024;
    assert!(resident < REST_BYTES, "{resident} bytes are left");
    let awake = admin.post("/wake", "").await;
    assert_eq!(awake.0.as_u16(), 200, "{}", awake.2);
    let again = eventually("it to serve again", async || up.client().ask(&ask).await.ok()).await;
    assert_eq!(again.tokens, answer.tokens);
}
