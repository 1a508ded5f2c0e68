//! Foreign clients: the official clients of OpenAI and Anthropic, LangChain's, and gRPC reflection.

use std::path::Path;
use std::process::Command;

use axum::http::StatusCode;
use baton_tests::{Client, Up, executable};
use serde_json::Value;
use tempfile::TempDir;
use tokio_stream::StreamExt as _;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

/// The mock with set answers that contain tool calls.
const TOOLS: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/tools.toml");

/// Starts a cluster with `args` and runs a script of `tests/python` with the API's base URL.
async fn run(script: &str, args: &[&str]) {
    let python = executable::python();
    let up = Up::start(args).await;
    // The test waits first: a router that has just started answers 503 to an unknown model, because its nodes
    // may not have announced themselves yet.
    let client = Client::new(up.http);
    baton_tests::eventually("the router to know its nodes", async || {
        let (status, _) = client.get("/v1/models/no-such-model").await;
        (status == StatusCode::NOT_FOUND).then_some(())
    })
    .await;
    let base_url = format!("http://{}/v1", up.http);
    let script = format!("{}/python/{script}", env!("CARGO_MANIFEST_DIR"));
    let run = tokio::task::spawn_blocking(move || Command::new(python).args([script, base_url]).output());
    let output = baton_tests::in_time("the client", run).await.expect("it ran").expect("python runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_clients_structured_output_is_valid_on_one_node_and_on_two() {
    for args in [&["--colocated"][..], &["--prefill", "1", "--decode", "1"]] {
        run("openai_structured.py", &[&["--model", "demo"], args].concat()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_gets_the_loglikelihoods_that_lm_eval_asks_for() {
    for args in [&["--colocated"][..], &["--prefill", "1", "--decode", "1"]] {
        run("openai_loglikelihood.py", &[&["--model", "demo"], args].concat()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_openai_client_works_unmodified() {
    run("openai_client.py", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_openai_client_calls_tools() {
    run("openai_tools.py", &["--model", TOOLS]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_of_langchain_calls_tools() {
    run("langchain_tools.py", &["--model", TOOLS]).await;
}

/// The chat template of a model that reads tools and calls them in the format of Hermes, before the demo model's own.
const TOOLS_TEMPLATE: &str = "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}\
    <tool_call>{\"name\": NAME, \"arguments\": OBJECT}</tool_call><|end|>{% endif %}";

/// Makes a folder with the demo model and a template with tools. Its weights obey no tools, so only a grammar can make
/// its calls valid.
fn model_with_tools() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo.join(file), folder.path().join(file)).expect("a file of the demo model");
    }
    let config = std::fs::read(demo.join("tokenizer_config.json")).expect("the demo model's");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    let template = config["chat_template"].as_str().expect("it has a template");
    config["chat_template"] = format!("{TOOLS_TEMPLATE}{template}").into();
    let text = config.to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), text).expect("a written file");
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_the_official_openai_client_demands_are_valid() {
    let model = model_with_tools();
    let model = model.path().to_str().expect("a plain path");
    run("openai_forced_tools.py", &["--model", model, "--prefill", "1", "--decode", "1"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_anthropic_client_works_unmodified() {
    run("anthropic_client.py", &["--model", TOOLS]).await;
}

async fn services(address: &str) -> Vec<String> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let mut client = ServerReflectionClient::new(endpoint.connect().await.expect("it listens"));
    let list = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = client
        .server_reflection_info(tokio_stream::once(list))
        .await
        .expect("reflection is served")
        .into_inner();
    match answers.next().await.expect("an answer").expect("a good one").message_response {
        Some(MessageResponse::ListServicesResponse(services)) => {
            services.service.into_iter().map(|service| service.name).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_process_describes_its_services() {
    let up = Up::start(&[]).await;
    let standard = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ];
    let with_standard = |own: [&'static str; 2]| [&standard[..], &own].concat();
    let router = services(&up.grpc.to_string()).await;
    assert_eq!(router, with_standard(["baton.v1.Inference", "baton.v1.Bootstrap"]));
    for node in up.nodes().await {
        let services = services(&node.address).await;
        let own = if node.role == "prefill" { "baton.v1.Prefill" } else { "baton.v1.Decode" };
        assert_eq!(services, with_standard(["baton.v1.NodeStatus", own]));
    }
}
