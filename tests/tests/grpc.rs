//! The gRPC endpoint, and peers with other protocol versions.

use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::PACED;
use baton_tests::{Ask, Up, eventually, in_time};
use futures::future::join_all;
use proto::v1;
use proto::v1::answer_grammar::Grammar;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use proto::v1::node_status_client::NodeStatusClient;
use serde_json::{Value, json};
use tonic::metadata::MetadataValue;
use types::layout::KvDtype;
use types::node::PROTOCOL;
use types::{BlockHashKey, Epoch, Fingerprint, KvLayout, ModelInfo, NodeId, NodeInfo, ProtocolRange, Role};

/// The protocol version before this one.
const PREVIOUS: u16 = PROTOCOL.min - 1;
const PREVIOUS_IS_REFUSED: &str = "no common protocol version: this side speaks 3..7, the peer 2..2";

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
        stop: Some(v1::StopParams { max_tokens: Some(max_tokens), ..v1::StopParams::default() }),
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
            Event::PromptLogprobs(_) => panic!("the call does not ask for log-probabilities"),
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

// === chats ===

/// The mock with set answers that contain tool calls.
const TOOLS: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/tools.toml");
const QUESTION: &str = "What is the weather in Paris?";

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content: Some(content.to_owned()), ..Default::default() }
}

fn chat_request(messages: Vec<v1::ChatMessage>, tools: Vec<v1::Tool>) -> v1::GenerateRequest {
    let input = Some(Input::Chat(v1::Chat { messages, tools, ..Default::default() }));
    v1::GenerateRequest { input, ..Default::default() }
}

/// An answer that a stream has brought.
#[derive(Debug, Default)]
struct Whole {
    text: String,
    reasoning: String,
    calls: Vec<v1::ToolCall>,
    /// The number of pieces in which the calls came.
    n_pieces: usize,
    tokens: Vec<u32>,
    end: Option<v1::GenerateEnd>,
}

impl Whole {
    fn add(&mut self, token: v1::GeneratedToken) {
        assert_eq!(self.end, None, "the end comes last");
        self.tokens.push(token.step.expect("a step").token);
        self.text += &token.text;
        self.reasoning += &token.reasoning;
        for delta in token.tool_calls {
            let at = delta.index as usize;
            self.calls.resize_with(self.calls.len().max(at + 1), v1::ToolCall::default);
            let call = &mut self.calls[at];
            call.id += &delta.id;
            call.name += &delta.name;
            call.arguments += &delta.arguments;
            self.n_pieces += 1;
        }
    }

    fn end(&self) -> &v1::GenerateEnd {
        self.end.as_ref().expect("the stream says how each answer ended")
    }
}

/// Sends a request and returns its answers.
async fn answers(up: &Up, request: v1::GenerateRequest) -> Vec<Whole> {
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    let mut events = client.generate(request).await.expect("accepted").into_inner();
    let mut wholes = Vec::new();
    while let Some(event) = in_time("an event", events.message()).await.expect("a good stream") {
        let at = event.choice as usize;
        wholes.resize_with(wholes.len().max(at + 1), Whole::default);
        match event.event.expect("an event") {
            Event::Token(token) => wholes[at].add(token),
            Event::End(end) => wholes[at].end = Some(end),
            Event::PromptLogprobs(_) => panic!("the call does not ask for log-probabilities"),
        }
    }
    wholes
}

/// Sends a chat over HTTP and returns its answer's JSON.
async fn over_http(up: &Up, body: Value) -> Value {
    let (status, _, answer) = up.client().post("/v1/chat/completions", body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    serde_json::from_str(&answer).expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_calls_tools_and_gets_their_results() {
    let up = Up::start(&["--model", TOOLS]).await;
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}}).to_string();
    let tool =
        v1::Tool { name: "get_weather".to_owned(), description: "The weather.".to_owned(), parameters };
    let request = chat_request(vec![message("user", QUESTION)], vec![tool.clone()]);
    let two = answers(&up, v1::GenerateRequest { n: Some(2), ..request }).await;
    assert_eq!(two.len(), 2);
    for whole in &two {
        assert_eq!((whole.text.as_str(), whole.calls.len()), ("I look.", 1), "{whole:?}");
        let call = &whole.calls[0];
        assert_eq!((call.name.as_str(), call.arguments.as_str()), ("get_weather", "{\"city\": \"Paris\"}"));
        assert!(whole.n_pieces > 2, "the arguments come in pieces: {whole:?}");
        assert_eq!(whole.end().reason(), v1::AnswerFinish::ToolCalls);
        assert_eq!(whole.end().completion_tokens as usize, whole.tokens.len());
    }
    assert_ne!(two[0].calls[0].id, two[1].calls[0].id);

    let call = two[0].calls[0].clone();
    let asked =
        v1::ChatMessage { tool_calls: vec![call.clone()], ..message("assistant", two[0].text.as_str()) };
    let result = v1::ChatMessage { tool_call_id: call.id.clone(), ..message("tool", "14 degrees") };
    let messages = vec![message("user", QUESTION), asked, result];
    let first = answers(&up, chat_request(messages.clone(), vec![tool.clone()])).await;
    assert_eq!(first[0].text, "It is mild in Paris: 14 degrees.");
    assert_eq!((first[0].calls.len(), first[0].end().reason()), (0, v1::AnswerFinish::Stop));

    // The same chat over HTTP has the same prompt and the same answer, and now its prompt is cached.
    let function = json!({
        "name": tool.name, "description": tool.description,
        "parameters": serde_json::from_str::<Value>(&tool.parameters).expect("JSON"),
    });
    let called = json!({"name": call.name, "arguments": call.arguments});
    let http = over_http(
        &up,
        json!({
            "tools": [{"type": "function", "function": function}],
            "return_token_ids": true,
            "messages": [
                {"role": "user", "content": QUESTION},
                {
                    "role": "assistant", "content": two[0].text,
                    "tool_calls": [{"id": call.id, "type": "function", "function": called}],
                },
                {"role": "tool", "content": "14 degrees", "tool_call_id": call.id},
            ],
        }),
    )
    .await;
    assert_eq!(http["choices"][0]["message"]["content"], first[0].text.as_str());
    assert_eq!(http["choices"][0]["token_ids"], json!(first[0].tokens));
    let again = answers(&up, chat_request(messages, vec![tool])).await;
    let usage = again[0].end().usage.expect("usage");
    assert_eq!(json!(usage.prompt_tokens), http["usage"]["prompt_tokens"]);
    assert!(usage.cached_tokens > 0, "{usage:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_follow_grammars_and_are_those_of_http() {
    let up = Up::start(&["--model", "demo", "--prefill", "1", "--decode", "1"]).await;
    let choice = v1::Texts { texts: ["prefill", "decode"].map(str::to_owned).to_vec() };
    let schema = r#"{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}"#;
    for (grammar, field, value) in [
        (Grammar::Choice(choice), "guided_choice", json!(["prefill", "decode"])),
        (Grammar::JsonSchema(schema.to_owned()), "guided_json", json!(schema)),
        (Grammar::Regex("[ab]{3}".to_owned()), "guided_regex", json!("[ab]{3}")),
    ] {
        let mut request = chat_request(vec![message("user", "Hi")], Vec::new());
        request.sampling = Some(v1::SamplingParams {
            temperature: Some(1.0),
            seed: Some(7),
            grammar: Some(v1::AnswerGrammar { grammar: Some(grammar) }),
            ..Default::default()
        });
        let answer = answers(&up, request).await;
        let mut body = json!({
            "messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0, "seed": 7,
            "return_token_ids": true,
        });
        body[field] = value;
        let http = over_http(&up, body).await;
        assert_eq!(json!(answer[0].tokens), http["choices"][0]["token_ids"], "{field}");
        assert_eq!(http["choices"][0]["message"]["content"], answer[0].text.as_str());
        let text = answer[0].text.as_str();
        let is_valid = match field {
            "guided_choice" => ["prefill", "decode"].contains(&text),
            "guided_json" => serde_json::from_str::<Value>(text).is_ok_and(|json| json["a"].is_boolean()),
            _ => text.len() == 3 && text.chars().all(|c| "ab".contains(c)),
        };
        assert!(is_valid, "{field}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_has_the_code_of_http() {
    let up = Up::start(&[]).await;
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    let request = chat_request(vec![message("bard", "Hi")], Vec::new());
    let refused = client.generate(request).await.expect_err("no such role");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert_eq!(refused.message(), "chat.messages[0].role: unknown role `bard`");
    assert_eq!(refused.metadata().get("baton-code").expect("a code"), "invalid_value");
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
        keeps_role: false,
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
        .map(|prompt| Ask::new(prompt, 400).with("ignore_eos", true.into()))
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
        assert_eq!(before.tokens.len(), 400);
        assert_eq!(before.tokens, after.tokens);
    }
}
