//! Tests of nodes with several tensor-parallel ranks or pipeline stages, with equal or different numbers on the two
//! sides. The tokens are those of one rank and one stage.

#[path = "ranks/decoding.rs"]
mod decoding;
#[path = "ranks/hosts.rs"]
mod hosts;
#[path = "ranks/processes.rs"]
mod processes;
#[path = "ranks/refusals.rs"]
mod refusals;
#[path = "ranks/rolling.rs"]
mod rolling;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::logs::{A_NODE_DIES, NO_TOKENIZER};
use baton_tests::{Ask, Client, Failed, Up, executable, in_time};
use futures::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};

/// The numbers of ranks of prefill nodes and of decode nodes.
const SIZES: &[(&str, &str)] = &[("2", "1"), ("1", "2"), ("2", "2"), ("4", "2"), ("2", "4")];
/// A mock with eight heads, whose steps take time.
const PACED: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/paced-heads.toml");

fn folder(model: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models").join(model);
    path.to_str().expect("UTF-8").to_owned()
}

async fn up(connector: &str, model: &str, (prefill_tp, decode_tp): (&str, &str), more: &[&str]) -> Up {
    let ranks = ["--model", model, "--prefill-tp", prefill_tp, "--decode-tp", decode_tp];
    Up::start_over(connector, &[&ranks[..], more].concat()).await
}

/// Returns whole answers of a real model: tokens, and the log-probabilities of the best few of each step.
async fn completions(client: &Client, model: &str) -> Vec<Value> {
    let prompts = prompts(5, 8, 90);
    let answers = prompts.iter().map(|prompt| {
        let prompt: Vec<u32> = prompt.iter().map(|token| 2 + token % 90).collect();
        completion(client, json!({ "model": model, "prompt": prompt }))
    });
    join_all(answers).await
}

async fn completion(client: &Client, mut body: Value) -> Value {
    let more = json!({
        "max_tokens": 20, "temperature": 0, "ignore_eos": true, "logprobs": 5, "return_token_ids": true,
    });
    body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
    let (status, _, body) = client.post("/v1/completions", body.to_string()).await;
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    answer["choices"][0].clone()
}

/// Checks that every bit of every log-probability, and therefore every token, is that of one rank.
async fn answers_as_one_rank_does(model: &str, connector: &str, sizes: &[(&str, &str)]) {
    let path = folder(model);
    let one = up(connector, &path, ("1", "1"), &[]).await;
    one.expect_log(NO_TOKENIZER);
    let expected = completions(&one.client(), model).await;
    for sizes in sizes {
        let several = up(connector, &path, *sizes, &[]).await;
        several.expect_log(NO_TOKENIZER);
        let seen = completions(&several.client(), model).await;
        assert_eq!(seen, expected, "{model} over {connector}, {sizes:?} ranks");
        assert!(several.client().kv_arrived(connector).await > 0, "no KV travelled, {sizes:?} ranks");
        several.baseline().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_answer_as_one_does_over_tcp() {
    answers_as_one_rank_does("llama", "tcp", SIZES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_answer_as_one_does_over_shm() {
    answers_as_one_rank_does("llama", "shm", SIZES).await;
}

/// The model has two KV heads and two groups of layers, so two of four ranks hold each head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_may_outnumber_the_heads() {
    answers_as_one_rank_does("qwen2-window", "tcp", &[("4", "1"), ("1", "4")]).await;
}

/// Every rank holds all latents, so one of several ranks sends them, and each rank gets them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_share_no_latents() {
    answers_as_one_rank_does("deepseek-v2", "tcp", &[("2", "1"), ("1", "2"), ("2", "4")]).await;
    answers_as_one_rank_does("deepseek-v3", "shm", &[("2", "1"), ("1", "2"), ("4", "2")]).await;
}

/// The ranks and the stages of the two sides.
#[derive(Clone, Copy, Debug)]
struct Division {
    ranks: (&'static str, &'static str),
    stages: (&'static str, &'static str),
}

const DIVISIONS: &[Division] = &[
    Division { ranks: ("1", "1"), stages: ("2", "1") },
    Division { ranks: ("1", "2"), stages: ("1", "2") },
    Division { ranks: ("2", "1"), stages: ("2", "1") },
    Division { ranks: ("1", "1"), stages: ("3", "2") },
];

/// Checks that every bit of every log-probability is that of one stage.
async fn answers_as_one_stage_does(model: &str, connector: &str) {
    let path = folder(model);
    let one = up(connector, &path, ("1", "1"), &[]).await;
    one.expect_log(NO_TOKENIZER);
    let expected = completions(&one.client(), model).await;
    drop(one);
    for division in DIVISIONS {
        let (prefill, decode) = division.stages;
        let stages = ["--prefill-stages", prefill, "--decode-stages", decode];
        let several = up(connector, &path, division.ranks, &stages).await;
        several.expect_log(NO_TOKENIZER);
        let seen = completions(&several.client(), model).await;
        assert_eq!(seen, expected, "{model} over {connector}, {division:?}");
        assert!(several.client().kv_arrived(connector).await > 0, "no KV travelled, {division:?}");
        several.baseline().await;
    }
}

/// The model has two groups of layers, which share memory within a stage only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stages_answer_as_one_does_over_tcp() {
    answers_as_one_stage_does("qwen2-window", "tcp").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stages_answer_as_one_does_over_shm() {
    answers_as_one_stage_does("deepseek-v3", "shm").await;
}

/// The mock checks every bit of each head's KV.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_head_of_a_mock_finds_its_rank() {
    let asks: Vec<Ask> = prompts(3, 24, 120).into_iter().map(|prompt| Ask::new(prompt, 30)).collect();
    let one = Up::start(&["--colocated"]).await;
    let expected = all(&one.client(), &asks).await;
    for (connector, sizes) in
        [("tcp", ("8", "1")), ("shm", ("1", "8")), ("tcp", ("4", "8")), ("shm", ("8", "2"))]
    {
        let several = up(connector, PACED, sizes, &[]).await;
        let seen = all(&several.client(), &asks).await;
        assert_eq!(seen, expected, "{connector}, {sizes:?} ranks");
        several.baseline().await;
    }
}

/// A pool node keeps KV in the layout of one rank, whatever the layouts of the other nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unequal_ranks_share_a_pool() {
    let asks: Vec<Ask> = prompts(9, 16, 120).into_iter().map(|prompt| Ask::new(prompt, 20)).collect();
    let one = Up::start(&["--colocated"]).await;
    let expected = all(&one.client(), &asks).await;
    let several = up("tcp", PACED, ("4", "2"), &["--pool", "1"]).await;
    assert_eq!(all(&several.client(), &asks).await, expected);
    several.baseline().await;
}

/// Returns the tokens of all answers.
async fn all(client: &Client, asks: &[Ask]) -> Vec<Result<Vec<u32>, Failed>> {
    let tokens = async |ask| client.ask(ask).await.map(|answer| answer.tokens);
    in_time("all answers", join_all(asks.iter().map(tokens))).await
}

/// The load is 128 requests at once between nodes of four ranks and of two. One node of each kind is killed
/// meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unequal_ranks_stand_load_and_a_kill() {
    let ask = |prompt| Ask::new(prompt, 80).with("ignore_eos", true.into());
    // More streams would need more processor time than a busy machine has within the time limit of an answer: the mock
    // verifies all KV in each step.
    let asks: Vec<Ask> = prompts(7, 48, 100).into_iter().map(ask).collect();
    let one = Up::start(&["--colocated"]).await;
    let expected = all(&one.client(), &asks).await;
    drop(one);
    for connector in ["tcp", "shm"] {
        let several = up(connector, PACED, ("4", "2"), &["--prefill", "2", "--decode", "2"]).await;
        let (prefill, decode) = (several.of_role("prefill").await, several.of_role("decode").await);
        several.expect_log(A_NODE_DIES);
        let client = several.client();
        let kill = async {
            tokio::time::sleep(Duration::from_millis(150)).await;
            several.signal(prefill[0].pid, Signal::KILL);
            tokio::time::sleep(Duration::from_millis(300)).await;
            several.signal(decode[0].pid, Signal::KILL);
        };
        let seen = tokio::join!(all(&client, &asks), kill).0;
        assert_eq!(seen, expected, "{connector}");
        several.baseline().await;
    }
}

#[test]
fn ranks_that_cannot_share_the_heads_are_refused_at_the_start() {
    for (model, ranks, reason) in [
        (
            "mock",
            "3",
            "tensor parallel: 2 KV heads do not spread over 3 ranks: the one number must divide the other",
        ),
        (folder("llama").as_str(), "3", "tensor parallel: 4 heads do not spread over 3 ranks"),
        ("mock", "0", "model.tp: 0 ranks, 1 to 64 are allowed"),
    ] {
        let mut baton = Command::new(executable::baton());
        baton.arg("both").env("BATON_MODEL__PATH", model).env("BATON_MODEL__TP", ranks);
        let ended = baton.env("BATON_MODEL__DEVICE", "cpu").output().expect("baton runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && said.contains(reason), "{model}, {ranks} ranks: {said}");
    }
}

#[test]
fn stages_that_cannot_share_the_layers_are_refused_at_the_start() {
    let llama = folder("llama");
    for (model, device, stages, layers, reason) in [
        ("mock", "cpu", "2", "[]", "pipeline stages: 2 are set, and a mock has one"),
        (&llama, "cpu", "3", "[]", "pipeline stages: 3 stages for 2 layers: every stage needs a layer"),
        (&llama, "cpu", "2", "[2, 1]", "stage_layers adds up to 3 layers, and the model has 2"),
        (&llama, "cpu", "2", "[1, 0]", "stage_layers gives stage 1 no layer"),
        (&llama, "cpu", "2", "[2]", "stage_layers has 1 numbers for 2 stages"),
    ] {
        let mut baton = Command::new(executable::baton());
        baton.arg("both").env("BATON_MODEL__PATH", model).env("BATON_MODEL__DEVICE", device);
        baton.env("BATON_EXPERT__MODEL__STAGES", stages).env("BATON_EXPERT__MODEL__STAGE_LAYERS", layers);
        let ended = baton.output().expect("baton runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && said.contains(reason), "{model}, {stages} stages: {said}");
    }
}
