//! Log-probabilities of prompts: the same numbers on every path of the KV, whatever is cached, and a refusal by name from a
//! backend that has none.

use std::path::Path;

use baton_tests::logs::NO_TOKENIZER;
use baton_tests::{Client, Up, in_time};
use proto::v1;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use serde_json::{Value, json};

/// Steps of few tokens: prompts of 57 tokens are computed in several.
const SMALL_STEPS: [(&str, &str); 3] = [
    ("BATON_EXPERT__SCHEDULER__SEQUENCES_MAX", "4"),
    ("BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX", "20"),
    ("BATON_MODEL__KV_DTYPE", "f32"),
];

fn model() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models/qwen3").display().to_string()
}

/// The prompt of the reference and its greedy continuation.
fn prompt() -> (Vec<Value>, usize) {
    let text = std::fs::read_to_string(Path::new(&model()).join("golden.json")).expect("the reference");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let list = |name: &str| golden[name].as_array().expect("tokens").clone();
    let (prompt, continuation) = (list("prompt"), list("continuation"));
    let n_prompt = prompt.len();
    ([prompt, continuation].concat(), n_prompt)
}

async fn posted(up: &Up, body: Value) -> (u16, Value) {
    let (status, _, body) = up.client().post("/v1/completions", body.to_string()).await;
    (status.as_u16(), serde_json::from_str(&body).expect("JSON"))
}

/// Asks for the log-probabilities of a prompt twice. The second time it is in every cache.
async fn of_prompt(up: &Up, prompt: &[Value], max_tokens: usize) -> Value {
    let mut found = Vec::new();
    for _ in 0..2 {
        let body = json!({
            "model": "qwen3", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "prompt_logprobs": 2, "logprobs": 1,
            "echo": true, "ignore_eos": true,
        });
        let (status, answer) = posted(up, body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "the prompt is computed");
        found.push(answer["choices"][0].clone());
    }
    assert_eq!(found[0], found[1]);
    found.remove(0)
}

fn check(choice: &Value, prompt: &[Value], n_prompt: usize, max_tokens: usize) {
    let of_tokens = choice["prompt_logprobs"].as_array().expect("a list");
    assert_eq!((of_tokens.len(), &of_tokens[0]), (prompt.len(), &Value::Null));
    let echoed = choice["logprobs"]["token_logprobs"].as_array().expect("a list");
    assert_eq!(echoed.len(), prompt.len() + max_tokens);
    for (nth, (token, of_token)) in prompt.iter().zip(of_tokens).enumerate().skip(1) {
        let own = &of_token[token.to_string()];
        assert_eq!(own["logprob"], echoed[nth], "{nth}");
        assert!(
            nth < n_prompt || own["rank"] == 1,
            "the reference continues with the best token: {of_token}"
        );
    }
}

/// Checks that gRPC has the numbers of HTTP's answer.
async fn check_over_grpc(up: &Up, over_http: &Value, prompt: &[Value]) {
    let ids = prompt.iter().map(|token| token.as_u64().expect("an id") as u32).collect();
    let request = v1::GenerateRequest {
        model: "qwen3".to_owned(),
        input: Some(Input::Tokens(v1::Tokens { ids })),
        sampling: Some(v1::SamplingParams { prompt_logprobs: Some(2), ..v1::SamplingParams::default() }),
        stop: Some(v1::StopParams { max_tokens: Some(2), ..v1::StopParams::default() }),
        ..v1::GenerateRequest::default()
    };
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    let mut events = client.generate(request).await.expect("accepted").into_inner();
    let first = in_time("an event", events.message()).await.expect("a good stream").expect("an event");
    let Some(Event::PromptLogprobs(found)) = first.event else { panic!("{first:?}") };
    assert_eq!((found.chosen.len(), found.top_tokens.len()), (prompt.len() - 1, 2 * (prompt.len() - 1)));
    for (nth, token) in prompt.iter().enumerate().skip(1) {
        let expected = &over_http["prompt_logprobs"][nth][token.to_string()];
        let logprob = expected["logprob"].as_f64().expect("a number");
        assert_eq!(logprob as f32, found.chosen[nth - 1], "{nth}");
        assert_eq!(expected["rank"], json!(found.ranks[nth - 1]), "{nth}");
    }
    while in_time("an event", events.message()).await.expect("a good stream").is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_equal_on_every_path() {
    let ((prompt, n_prompt), model) = (prompt(), model());
    let two = ["--model", &model, "--prefill", "1", "--decode", "1"];
    let small_steps = SMALL_STEPS.as_slice();
    let local = [small_steps, &[("BATON_EXPERT__DECODE__LOCAL_TOKENS_MAX", "100")]].concat();
    let prefill_first = [small_steps, &[("BATON_ROUTER__ORDER", "prefill-first")]].concat();
    let pool = [&two[..], &["--pool", "1"]].concat();
    let colocated = ["--model", model.as_str(), "--colocated"];
    let mut all = Vec::new();
    for (args, env) in [
        (&two[..], &[("BATON_MODEL__KV_DTYPE", "f32")][..]),
        (&two, small_steps),
        (&two, &local),
        (&two, &prefill_first),
        (&pool, &prefill_first),
        (&colocated, small_steps),
    ] {
        let up = Up::start_with(args, env).await;
        up.expect_log(NO_TOKENIZER);
        let choice = of_prompt(&up, &prompt, 3).await;
        check(&choice, &prompt, n_prompt, 3);
        check_over_grpc(&up, &choice, &prompt).await;
        all.push((format!("{args:?} {env:?}"), choice));
        up.baseline().await;
    }
    let (_, first) = &all[0];
    for (path, choice) in &all {
        assert_eq!(choice, first, "{path}");
    }
}

/// Several prompts wait for each other in small KV room, and those that lose it are computed again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_equal_while_prompts_push_each_other_out() {
    let ((prompt, n_prompt), model) = (prompt(), model());
    let args = ["--model", model.as_str(), "--colocated", "--kv-memory", "200KiB"];
    let up = Up::start_with(&args, &SMALL_STEPS).await;
    up.expect_log(NO_TOKENIZER);
    let alone = of_prompt(&up, &prompt, 100).await;
    let several = (0..12).map(|_| of_prompt(&up, &prompt, 100));
    for choice in in_time("all answers", futures::future::join_all(several)).await {
        assert_eq!(choice, alone);
        check(&choice, &prompt, n_prompt, 100);
    }
    let admin = up.nodes().await[0].admin.parse().expect("an address");
    assert_ne!(Client::new(admin).counter("baton_node_preemptions_total{role=\"both\"}").await, 0);
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_without_them_refuses_by_name() {
    for args in [&["--colocated"][..], &["--prefill", "1", "--decode", "1"]] {
        let up = Up::start(args).await;
        let long = vec![65; 100];
        for fields in [json!({"prompt_logprobs": 1}), json!({"echo": true, "logprobs": 1})] {
            let mut body = json!({"model": "mock", "prompt": long, "max_tokens": 1});
            body.as_object_mut().expect("an object").extend(fields.as_object().expect("fields").clone());
            let (status, answer) = posted(&up, body).await;
            assert_eq!((status, &answer["error"]["code"]), (400, &json!("invalid")), "{answer}");
            let message = answer["error"]["message"].as_str().expect("a message");
            assert!(
                message.contains("the backend of this node has no log-probabilities of prompts"),
                "{message}"
            );
        }
        let (status, answer) = posted(&up, json!({"model": "mock", "prompt": long, "max_tokens": 1})).await;
        assert_eq!(status, 200, "{answer}");
        up.baseline().await;
    }
}
