//! Foreign clients: the official clients of OpenAI and Anthropic, and gRPC reflection.

use std::process::Command;

use axum::http::StatusCode;
use baton_tests::{Client, Up, executable};
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
async fn the_official_openai_client_works_unmodified() {
    run("openai_client.py", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_openai_client_calls_tools() {
    run("openai_tools.py", &["--model", TOOLS]).await;
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
    let router = services(&up.grpc.to_string()).await;
    for name in ["baton.v1.Inference", "baton.v1.Bootstrap", "grpc.health.v1.Health"] {
        assert!(router.iter().any(|service| service == name), "{name} in {router:?}");
    }
    for node in up.nodes().await {
        let services = services(&node.address).await;
        let own = if node.role == "prefill" { "baton.v1.Prefill" } else { "baton.v1.Decode" };
        for name in [own, "baton.v1.NodeStatus", "grpc.health.v1.Health"] {
            assert!(services.iter().any(|service| service == name), "{name} in {services:?}");
        }
    }
}
