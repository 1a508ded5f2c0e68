//! The gRPC endpoint, and peers with other protocol versions.

use std::time::Duration;

use baton_tests::{Ask, Up, eventually, in_time};
use proto::v1;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use tonic::metadata::MetadataValue;
use types::layout::KvDtype;
use types::{BlockHashKey, Epoch, Fingerprint, KvLayout, ModelInfo, NodeId, NodeInfo, ProtocolRange, Role};

fn request(tokens: &[u32], max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: "mock".to_owned(),
        input: Some(Input::Tokens(v1::Tokens { ids: tokens.to_vec() })),
        stop: Some(v1::StopRules { max_tokens, ..v1::StopRules::default() }),
        ..v1::GenerateRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_doors_give_the_same_tokens() {
    let up = Up::start(&[]).await;
    let prompt: Vec<u32> = (0..50).collect();
    let http = up.client().ask(&Ask::new(prompt.clone(), 20)).await.expect("an answer");
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    let mut events = client.generate(request(&prompt, 20)).await.expect("accepted").into_inner();
    let (mut tokens, mut end) = (Vec::new(), None);
    while let Some(event) = in_time("an event", events.message()).await.expect("a good stream") {
        match event.event.expect("an event") {
            Event::Token(token) => tokens.push(token.step.expect("a step").token),
            Event::End(last) => end = Some(last),
        }
    }
    assert_eq!(tokens, http.tokens);
    let end = end.expect("the stream says how it ended");
    assert_eq!(end.completion_tokens as usize, tokens.len());
    assert_eq!(end.usage.expect("usage").prompt_tokens, 50);

    let refused = client.generate(request(&[], 20)).await.expect_err("no tokens");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("tokens"), "{refused}");
}

/// Describes a node that only announces itself, with a range of protocol versions.
fn puppet(id: &str, min: u16, max: u16) -> NodeInfo {
    NodeInfo {
        id: NodeId::new(id),
        epoch: Epoch(1),
        role: Role::Decode,
        pid: std::process::id(),
        host: "puppet".to_owned(),
        address: "127.0.0.1:1".to_owned(),
        admin: "127.0.0.1:1".to_owned(),
        wires: vec![],
        without: vec![],
        model: ModelInfo {
            name: "puppet".to_owned(),
            context_tokens: 64,
            vocab: 300,
            eos_tokens: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: Fingerprint::new([("tokenizer".to_owned(), "bytes".to_owned())])
                .hashed_with(&BlockHashKey::default()),
        },
        protocol: ProtocolRange { min, max },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_protocol_is_refused_with_both_ranges_named() {
    let up = Up::start(&[]).await;
    up.expect_log(&["node refused by the router", "status stream from node lost"]);
    let mut registry = BootstrapClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    for (id, min, max) in [("old", 0, 0), ("newer", 3, 4)] {
        let node = Some((&puppet(id, min, max)).into());
        registry.announce(v1::AnnounceRequest { node }).await.expect("announced");
    }
    let node = async |id: &str| {
        let cluster = up.client().get_json("/debug/cluster").await;
        cluster["nodes"].as_array().expect("nodes").iter().find(|node| node["id"] == id).cloned()
    };
    let old = eventually("the old node to be seen", async || node("old").await).await;
    assert_eq!(old["state"], "refused");
    assert_eq!(old["reason"], "no common protocol version: this side speaks 3..4, the peer 0..0");
    // The node's state is `connecting`: one common version is enough for the router to try, and no server
    // listens there.
    let newer = eventually("the newer node to be seen", async || node("newer").await).await;
    assert_eq!(newer["state"], "connecting");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_of_another_protocol_is_refused_and_one_that_overlaps_is_served() {
    let up = Up::start(&[]).await;
    up.expect_log(&["incoming gRPC call refused"]);
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    let mut call = async |range: &'static str| {
        let mut request = tonic::Request::new(request(&[1, 2, 3], 2));
        request.set_timeout(Duration::from_secs(10));
        request.metadata_mut().insert("baton-protocol", MetadataValue::from_static(range));
        client.generate(request).await.map(drop)
    };
    let refused = call("0-0").await.expect_err("0 is not spoken");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert_eq!(refused.message(), "no common protocol version: this side speaks 3..4, the peer 0..0");
    call("2-3").await.expect("3 is spoken");
}
