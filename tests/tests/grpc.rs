//! The gRPC endpoint, and peers with other protocol versions.

use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::PACED;
use baton_tests::{Ask, Up, eventually, in_time};
use futures::future::join_all;
use proto::v1;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use proto::v1::node_status_client::NodeStatusClient;
use tonic::metadata::MetadataValue;
use types::layout::KvDtype;
use types::node::PROTOCOL;
use types::{BlockHashKey, Epoch, Fingerprint, KvLayout, ModelInfo, NodeId, NodeInfo, ProtocolRange, Role};

/// The protocol version before this one.
const PREVIOUS: u16 = PROTOCOL.min - 1;
const PREVIOUS_IS_REFUSED: &str = "no common protocol version: this side speaks 3..4, the peer 2..2";

/// Makes a call of a process that speaks these protocol versions.
fn with_range<T>(message: T, range: &'static str) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(Duration::from_secs(10));
    request.metadata_mut().insert("baton-protocol", MetadataValue::from_static(range));
    request
}

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
    for (id, min, max) in [("old", PREVIOUS, PREVIOUS), ("newer", PROTOCOL.max, PROTOCOL.max + 1)] {
        let node = Some((&puppet(id, min, max)).into());
        registry.announce(v1::AnnounceRequest { node }).await.expect("announced");
    }
    let node = async |id: &str| {
        let cluster = up.client().get_json("/debug/cluster").await;
        cluster["nodes"].as_array().expect("nodes").iter().find(|node| node["id"] == id).cloned()
    };
    let old = eventually("the old node to be seen", async || node("old").await).await;
    assert_eq!(old["state"], "refused");
    assert_eq!(old["reason"], PREVIOUS_IS_REFUSED);
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
        client.generate(with_range(request(&[1, 2, 3], 2), range)).await.map(drop)
    };
    let refused = call("2-2").await.expect_err("2 is not spoken");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert_eq!(refused.message(), PREVIOUS_IS_REFUSED);
    call("2-3").await.expect("3 is spoken");
    // A router of the previous version that calls a node of this one.
    for node in up.nodes().await {
        let mut status =
            NodeStatusClient::connect(format!("http://{}", node.address)).await.expect("it listens");
        let refused = status.watch(with_range(v1::StatusRequest::default(), "2-2")).await;
        let refused = refused.expect_err("2 is not spoken");
        assert_eq!(
            (refused.code(), refused.message()),
            (tonic::Code::FailedPrecondition, PREVIOUS_IS_REFUSED),
            "{}",
            node.id
        );
    }
}

/// The order of docs/operating.md for a version that does not speak the previous one: the new cluster runs
/// beside the old one, new requests go to it, then the old one stops. Both are of this version here, because
/// they have no call in common.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_is_replaced_by_another_without_a_lost_request() {
    let mut old = Up::start(&["--model", PACED]).await;
    let new = Up::start(&["--model", PACED]).await;
    let asks: Vec<Ask> = prompts(3, 8, 60)
        .into_iter()
        .map(|prompt| Ask::new(prompt, 100).with("ignore_eos", true.into()))
        .collect();
    let (to_old, to_new) = (old.client(), new.client());
    let before = join_all(asks.iter().map(|ask| to_old.ask(ask)));
    let after = async {
        // The streams of the old cluster begin first, so that they run when it is asked to stop.
        eventually("the streams", async || {
            let page = to_old.get("/metrics").await.1;
            let running = |line: &&str| line.starts_with("baton_router_requests_running{");
            let counts = page.lines().filter(running).filter_map(|line| line.rsplit(' ').next());
            counts.filter_map(|count| count.parse::<u64>().ok()).any(|count| count > 0).then_some(())
        })
        .await;
        tokio::join!(join_all(asks.iter().map(|ask| to_new.ask(ask))), old.stop())
    };
    let (before, (after, code)) =
        in_time("the replacement", Box::pin(async { tokio::join!(before, after) })).await;
    assert_eq!(code, Some(0));
    for (before, after) in before.into_iter().zip(after) {
        let (before, after) = (before.expect("the old cluster ends it"), after.expect("the new one serves"));
        assert_eq!(before.tokens.len(), 100);
        assert_eq!(before.tokens, after.tokens);
    }
}
