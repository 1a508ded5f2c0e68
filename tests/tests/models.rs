//! Tests of real models: their folders, their names in requests, and their text.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use axum::extract::Path as UrlPath;
use axum::http::{StatusCode, header};
use axum::routing::get;
use axum::{Json, Router};
use baton_tests::{Client, Process, Up, eventually, free_addr};
use serde_json::{Value, json};

/// The beginning of a text that the demo model was trained on.
const PREFILL: &str = "Prefill is the first phase of a request. The model reads the whole prompt in parallel";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

async fn served(client: &Client) -> Vec<String> {
    let models = client.get_json("/v1/models").await;
    let models = models["data"].as_array().expect("a list");
    models.iter().map(|model| model["id"].as_str().expect("a name").to_owned()).collect()
}

/// Sends the question what prefill is under this model name, and checks the answer.
async fn check_answer(client: &Client, model: &str) {
    let body = json!({"model": model, "messages": [{"role": "user", "content": "What is prefill?"}]});
    let (status, _, body) = client.post("/v1/chat/completions", body.to_string()).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert!(text.starts_with(PREFILL), "{text}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bundled_model_answers_without_a_checkout() {
    let cache = tempfile::tempdir().expect("a folder");
    let env = [("XDG_CACHE_HOME", cache.path().to_str().expect("UTF-8"))];
    let up = Up::start_with(&["--model", "demo"], &env).await;
    assert_eq!(served(&up.client()).await, ["demo"]);
    check_answer(&up.client(), "demo").await;
    assert_eq!(std::fs::read_dir(cache.path().join("baton")).expect("a folder").count(), 1);
}

/// Weights are quantized at load on both nodes, and KV in FP8 goes between them. The model is trained well
/// enough to give the same text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_in_8_bits_answers_alike() {
    let env = [("BATON_MODEL__QUANTIZE", "fp8"), ("BATON_MODEL__KV_DTYPE", "fp8")];
    let up = Up::start_with(&["--model", demo().to_str().expect("UTF-8")], &env).await;
    check_answer(&up.client(), "demo").await;
}

/// Returns the answer's text, and the tokens that it consists of.
async fn greedy_answer(client: &Client, model: &str) -> Value {
    let messages = json!([{"role": "user", "content": "What is decode?"}]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}});
    let plain =
        json!({"model": model, "messages": messages, "temperature": 0, "logprobs": true, "max_tokens": 40});
    let mut constrained = plain.clone();
    constrained["response_format"] = schema;
    let mut answers = Vec::new();
    for body in [plain, constrained] {
        let (status, _, body) = client.post("/v1/chat/completions", body.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let mut answer: Value = serde_json::from_str(&body).expect("JSON");
        answers.push(answer["choices"][0].take());
    }
    answers.into()
}

/// Tokenizer, chat template, vocabulary for grammars and weights come out of one file, on the router and on the nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gguf_file_answers_as_its_folder_does() {
    let (files, cache) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let env = [("XDG_CACHE_HOME", cache.path().to_str().expect("UTF-8"))];
    let of_folder = {
        let up = Up::start_with(&["--model", demo().to_str().expect("UTF-8")], &env).await;
        greedy_answer(&up.client(), "demo").await
    };
    let (folder, file) = (files.path().join("small"), files.path().join("small/demo-BF16.gguf"));
    std::fs::create_dir(&folder).expect("a folder");
    engine::load::gguf::write::write(&demo(), &file, "BF16");
    for (path, name) in [(&file, "demo-BF16"), (&folder, "small")] {
        let up = Up::start_with(&["--model", path.to_str().expect("UTF-8")], &env).await;
        assert_eq!(served(&up.client()).await, [name]);
        assert_eq!(greedy_answer(&up.client(), name).await, of_folder, "{}", path.display());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_is_served_under_the_name_that_it_is_given() {
    let env = [("BATON_MODEL__NAME", "org/small")];
    let up = Up::start_with(&["--model", demo().to_str().expect("UTF-8")], &env).await;
    assert_eq!(served(&up.client()).await, ["org/small"]);
    check_answer(&up.client(), "org/small").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_on_a_hub_is_fetched_and_served() {
    let (hub, cache) = (start_hub().await, tempfile::tempdir().expect("a folder"));
    let endpoint = format!("http://{hub}");
    let env = [
        ("HF_ENDPOINT", endpoint.as_str()),
        ("HF_HUB_CACHE", cache.path().to_str().expect("UTF-8")),
        ("HF_TOKEN", ""),
        ("HF_HUB_OFFLINE", ""),
    ];
    let up = Up::start_with(&["--model", "org/small@main"], &env).await;
    assert_eq!(served(&up.client()).await, ["org/small"]);
    check_answer(&up.client(), "org/small").await;
    let snapshot = cache.path().join("models--org--small/snapshots").join(COMMIT);
    assert!(snapshot.join("model.safetensors").is_symlink());
}

/// Starts a hub with one model, `org/small`: the demo.
async fn start_hub() -> SocketAddr {
    let routes = Router::new()
        .route("/api/models/org/small/revision/main", get(revision))
        .route("/org/small/resolve/{commit}/{file}", get(file));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("it is bound");
    #[allow(clippy::disallowed_methods, reason = "a hub's server ends with its runtime")]
    tokio::spawn(async move { axum::serve(listener, routes).await });
    addr
}

async fn revision() -> Json<Value> {
    let entries = std::fs::read_dir(demo()).expect("the demo model").flatten();
    let siblings: Vec<Value> =
        entries.map(|entry| json!({"rfilename": entry.file_name().to_str().expect("UTF-8")})).collect();
    Json(json!({"sha": COMMIT, "siblings": siblings}))
}

async fn file(
    UrlPath((commit, file)): UrlPath<(String, String)>,
) -> ([(header::HeaderName, String); 1], Vec<u8>) {
    assert_eq!(commit, COMMIT);
    let etag = format!("\"{}\"", file.replace('.', "-"));
    ([(header::ETAG, etag)], std::fs::read(demo().join(file)).expect("it is there"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_another_tokenizer_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("demo");
    copy_with_other_tokenizer(&other);
    let (http, grpc) = (free_addr(), free_addr());
    let router = vec![
        ("BATON_ROUTER__HTTP", http.to_string()),
        ("BATON_ROUTER__GRPC", grpc.to_string()),
        ("BATON_MODEL__PATH", demo().display().to_string()),
    ];
    let router = Process::start(folder.path(), "router", "router", router);
    router.expect_log(&["node refused by the router"]);
    // The warnings of a dying node are expected: at the end of the test the node is stopped before the
    // router.
    router.expect_log(baton_tests::logs::A_NODE_DIES);
    let node = vec![
        ("BATON_NODE__ID", "other".to_owned()),
        ("BATON_REGISTRY__URL", format!("embedded://{grpc}")),
        ("BATON_MODEL__PATH", other.display().to_string()),
    ];
    // A node writes a warning if it announces itself before the router listens.
    for port in [http, grpc] {
        eventually("the router to listen", async || std::net::TcpStream::connect(port).ok()).await;
    }
    let _node = Process::start(folder.path(), "node", "both", node);
    let client = Client::new(http);
    let refused = eventually("the node to be refused", async || {
        let cluster = client.get_json("/debug/cluster").await;
        let node = cluster["nodes"].get(0)?.clone();
        (node["state"] == "refused").then_some(node)
    })
    .await;
    let reason = refused["reason"].as_str().expect("a reason");
    assert!(
        reason.starts_with("the node's model differs from the router's: models differ: tokenizer: blake3:"),
        "{reason}"
    );
    let (status, body) = client.get("/ready").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body.contains("other is refused"), "{body}");
}

/// Copies the demo model with one more line end in its `tokenizer.json`. Such a change could have any effect,
/// so it makes another model.
fn copy_with_other_tokenizer(folder: &Path) {
    std::fs::create_dir(folder).expect("made");
    for entry in std::fs::read_dir(demo()).expect("the demo model").flatten() {
        if entry.path().is_file() {
            std::fs::copy(entry.path(), folder.join(entry.file_name())).expect("copied");
        }
    }
    let tokenizer = folder.join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).expect("it is there");
    std::fs::write(&tokenizer, text + "\n").expect("written");
}
