//! Tests of the endpoints whose answers are lists of blocks: Anthropic's messages and OpenAI's responses.

use serde_json::{Value, json};
use types::FinishReason;

use super::fake_serve::*;
use crate::http::BodyLimits;
use crate::text::tokenizer::HuggingFace;
use crate::text::{ChatTemplate, ServedModel, Tokenizer};

const CALL: &str =
    "I look.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>";

fn messages(extra: Value) -> String {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({
        "model": "org/mock",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"name": "weather", "description": "d", "input_schema": schema}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

fn response(extra: Value) -> String {
    let mut body = json!({
        "model": "org/mock",
        "input": "Weather?",
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

/// Returns the names and data of a stream's events.
fn events(answer: &Answer) -> Vec<(String, Value)> {
    let event = |text: &str| {
        let (name, data) = text.split_once("\ndata: ").expect("a name and data");
        (name.strip_prefix("event: ").unwrap().to_owned(), serde_json::from_str(data).unwrap())
    };
    answer.body.split_terminator("\n\n").map(event).collect()
}

#[tokio::test(start_paused = true)]
async fn a_message_has_blocks() {
    let answer = post(&FakeServe::saying(CALL), "/v1/messages", messages(json!({}))).await.json();
    let id = answer["content"][1]["id"].clone();
    let call = json!({"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Paris"}});
    assert_eq!(answer["content"], json!([{"type": "text", "text": "I look."}, call]));
    assert_eq!(
        (&answer["stop_reason"], &answer["type"], &answer["id"]),
        (&json!("tool_use"), &json!("message"), &json!("msg_r1"))
    );
    assert_eq!(answer["usage"]["output_tokens"], CALL.len() + 1);
    assert_eq!(answer["usage"]["cache_read_input_tokens"], 1);
}

#[tokio::test(start_paused = true)]
async fn the_conversation_is_in_the_prompt() {
    let fake_serve = FakeServe::saying("Sunny.");
    let history = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "So?"},
        ]},
    ]);
    post(&fake_serve, "/v1/messages", messages(json!({"messages": history}))).await;
    let prompt = fake_serve.prompt_text();
    let turns = "Be brief.Weather?I look.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>sunnySo?";
    assert!(prompt.ends_with(turns), "{prompt}");
    let fake_serve = FakeServe::saying("Sunny.");
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Rome\"}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "So?"},
    ]);
    let fields = json!({"input": input, "instructions": "Be brief."});
    post(&fake_serve, "/v1/responses", response(fields)).await;
    let prompt = fake_serve.prompt_text();
    assert!(prompt.ends_with(turns), "{prompt}");
}

/// An assistant's text at the end is the beginning of the answer, as in Anthropic's API.
#[tokio::test(start_paused = true)]
async fn an_answer_continues_the_assistants_text() {
    let call = json!({"type": "tool_use", "id": "c1", "name": "weather", "input": {}});
    for (content, continued) in [
        (json!("It is"), Some("Weather?It is")),
        (json!([{"type": "text", "text": "It is "}]), Some("Weather?It is ")),
        (json!([{"type": "text", "text": "I look."}, call]), None),
        (json!(""), None),
    ] {
        let fake_serve = FakeServe::saying(" sunny.");
        let history =
            json!([{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": content}]);
        let answer = post(&fake_serve, "/v1/messages", messages(json!({"messages": history}))).await;
        assert_eq!(answer.json()["content"], json!([{"type": "text", "text": " sunny."}]));
        let (prompt, last) = (fake_serve.prompt_text(), fake_serve.seen()[0].tokens.last().copied());
        let is_text = last.is_some_and(|token| token.0 < 256);
        assert_eq!(is_text, continued.is_some(), "{content}: {prompt}");
        assert!(continued.is_none_or(|text| prompt.ends_with(text)), "{prompt}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_is_streamed_block_by_block() {
    let fake_serve = FakeServe::saying(CALL);
    let answer = post(&fake_serve, "/v1/messages", messages(json!({"stream": true}))).await;
    let events = events(&answer);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected = [&["message_start"], &block[..], &block[..], &["message_delta", "message_stop"]].concat();
    assert_eq!(names, expected);
    assert!(events.iter().all(|(name, data)| data["type"] == *name));
    let input: String =
        events.iter().filter_map(|(_, data)| data["delta"]["partial_json"].as_str()).collect();
    assert_eq!(input, "{\"city\": \"Paris\"}");
    assert_eq!(events[0].1["message"]["content"], json!([]));
    let (_, last) = &events[events.len() - 2];
    assert_eq!(last["delta"]["stop_reason"], "tool_use");
    assert_eq!(last["usage"]["output_tokens"], CALL.len() + 1);
}

#[tokio::test(start_paused = true)]
async fn a_message_says_which_stop_string_ended_it() {
    let answer = post(
        &FakeServe::saying("one two"),
        "/v1/messages",
        messages(json!({"stop_sequences": ["x", " two"]})),
    )
    .await;
    let answer = answer.json();
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!(" two")));
    assert_eq!(answer["content"], json!([{"type": "text", "text": "one"}]));
}

#[tokio::test(start_paused = true)]
async fn thinking_is_a_block_where_it_is_wanted() {
    let template = ChatTemplate::new("{{ messages[0].content }}</think>", Vec::new()).unwrap();
    let content = async |thinking: Value| {
        let model = ServedModel { template: Some(template.clone()), ..ServedModel::mock("org/mock", 512) };
        let app = app_of(&FakeServe::saying("<think>Hm.</think>Yes."), BodyLimits::default(), model);
        let body = messages(json!({"tools": null, "thinking": thinking}));
        let request = http::Request::post("/v1/messages").body(body.into()).unwrap();
        send(app, request).await.json()["content"].clone()
    };
    let text = json!({"type": "text", "text": "Yes."});
    let thought = json!({"type": "thinking", "thinking": "Hm.", "signature": ""});
    assert_eq!(content(json!({"type": "adaptive"})).await, json!([thought, text]));
    assert_eq!(content(json!(null)).await, json!([text]));
}

#[tokio::test(start_paused = true)]
async fn a_response_has_items() {
    let answer =
        post(&FakeServe::saying(CALL), "/v1/responses", response(json!({"temperature": 0.5}))).await.json();
    assert_eq!(
        (&answer["status"], &answer["object"], &answer["temperature"]),
        (&json!("completed"), &json!("response"), &json!(0.5))
    );
    let part = json!({"type": "output_text", "text": "I look.", "annotations": []});
    assert_eq!(
        (&answer["output"][0]["type"], &answer["output"][0]["content"]),
        (&json!("message"), &json!([part]))
    );
    let call = &answer["output"][1];
    assert_eq!((&call["name"], &call["arguments"]), (&json!("weather"), &json!("{\"city\": \"Paris\"}")));
    assert_eq!(answer["usage"]["output_tokens"], CALL.len() + 1);
    let cut_off = FakeServe::new(|_| {
        let mut steps = steps_of("ab");
        steps.truncate(2);
        steps[1].finish = Some(FinishReason::Length);
        plays(steps)
    });
    let answer = post(&cut_off, "/v1/responses", response(json!({}))).await.json();
    let reason = json!({"reason": "max_output_tokens"});
    assert_eq!((&answer["status"], &answer["incomplete_details"]), (&json!("incomplete"), &reason));
    assert_eq!(answer["output"][0]["status"], "incomplete");
}

/// An answer that is cut after `n_bytes` of [`CALL`].
fn cut_call(n_bytes: usize) -> std::sync::Arc<FakeServe> {
    FakeServe::new(move |_| {
        let mut steps = steps_of(&CALL[..n_bytes]);
        steps.pop();
        steps.last_mut().unwrap().finish = Some(FinishReason::Length);
        plays(steps)
    })
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_cut_is_incomplete() {
    for (n_bytes, status) in
        [(CALL.len() - "is\"}}</tool_call>".len(), "incomplete"), (CALL.len(), "completed")]
    {
        let answer = post(&cut_call(n_bytes), "/v1/responses", response(json!({}))).await.json();
        let statuses: Vec<&Value> =
            answer["output"].as_array().unwrap().iter().map(|one| &one["status"]).collect();
        assert_eq!(statuses, ["completed", status]);
        let answer = post(&cut_call(n_bytes), "/v1/responses", response(json!({"stream": true}))).await;
        let events = events(&answer);
        let done = events.iter().rev().find(|(name, _)| name == "response.output_item.done").unwrap();
        assert_eq!(done.1["item"]["status"], status);
        let (_, last) = &events[events.len() - 1];
        assert_eq!(last["response"]["output"][1]["status"], status);
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_counts_the_tokens_of_reasoning() {
    let usage = async |says: &'static str| {
        let template = ChatTemplate::new("{{ messages[0].content }}</think>", Vec::new()).unwrap();
        let model = ServedModel { template: Some(template), ..ServedModel::mock("org/mock", 512) };
        let app = app_of(&FakeServe::saying(says), BodyLimits::default(), model);
        let request =
            http::Request::post("/v1/responses").body(response(json!({"tools": null})).into()).unwrap();
        send(app, request).await.json()["usage"].clone()
    };
    let thought = "<think>Hm.</think>";
    let details = |n: usize| json!({"reasoning_tokens": n});
    assert_eq!(usage("<think>Hm.</think>Yes.").await["output_tokens_details"], details(thought.len()));
    let plain = usage("Yes.").await;
    assert_eq!(plain["output_tokens_details"], details(0));
    assert_eq!(plain["input_tokens_details"], json!({"cached_tokens": 1, "cache_write_tokens": 0}));
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_blocks_is_explained() {
    for (path, body) in [("/v1/messages", messages(json!({}))), ("/v1/responses", response(json!({})))] {
        let mut body: Value = serde_json::from_str(&body).unwrap();
        for stream in [false, true] {
            body["stream"] = stream.into();
            let request = http::Request::post(path).header("x-baton-explain", "1");
            let request = request.body(body.to_string().into()).unwrap();
            let answer = send(app(&FakeServe::saying("Yes.")), request).await;
            let explained = if stream { events(&answer).pop().unwrap().1 } else { answer.json() };
            assert_eq!(explained["explanations"][0]["index"], 0, "{path}: {}", answer.body);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_is_streamed_item_by_item() {
    let answer = post(&FakeServe::saying(CALL), "/v1/responses", response(json!({"stream": true}))).await;
    let events = events(&answer);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
    names.dedup();
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(names, expected);
    for (nth, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(nth)));
    }
    let (_, last) = &events[events.len() - 1];
    assert_eq!(last["response"]["output"][1]["arguments"], "{\"city\": \"Paris\"}");
}

/// Clients keep the items of several responses, and merge those with the same id.
#[tokio::test(start_paused = true)]
async fn items_of_other_responses_have_other_ids() {
    let app = app(&FakeServe::saying("Yes."));
    let ask = async |fields| {
        let request = http::Request::post("/v1/responses").body(response(fields).into()).unwrap();
        send(app.clone(), request).await
    };
    let whole = ask(json!({})).await.json();
    let streamed = events(&ask(json!({"stream": true})).await);
    let (_, last) = &streamed[streamed.len() - 1];
    let ids = [&whole, &last["response"]].map(|response| response["output"][0]["id"].as_str().unwrap());
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.starts_with("msg_")), "{ids:?}");
    let mut of_events = streamed.iter().filter_map(|(_, data)| data.get("item_id"));
    assert!(of_events.all(|id| id == ids[1]), "{streamed:?}");
}

#[tokio::test(start_paused = true)]
async fn refusals_name_the_field() {
    for (fields, place) in [
        (json!({"max_tokens": null}), "max_tokens is required"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content is required"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"tools": [{"type": "web_search_20250305", "name": "w"}]}), "tools[0].type"),
        (json!({"messages": [{"role": "user", "content": []}]}), "messages[0].content: a user message needs"),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            "messages[0].content: expected a string or a list",
        ),
        (json!({"system": 5}), "system: expected a string or a list"),
        (json!({"tool_choice": "auto"}), "tool_choice: expected an object"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "maybe"}}), "tool_choice.type"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), "thinking.budget_tokens"),
        (json!({"container": "c"}), "container"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"stop_sequences": [""]}), "stop_sequences: "),
        (json!({"tools": [{"name": "w", "input_schema": 5}]}), "tools[0].input_schema: "),
        (
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "input": {}}]}]}),
            "messages[0].content[0].name is required",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
            "messages[0].content[0].text: expected a string",
        ),
    ] {
        let answer = post(&FakeServe::saying(""), "/v1/messages", messages(fields.clone())).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["type"]), (400, &json!("error")), "{fields}");
        let error = answer.json()["error"].clone();
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(place), "{fields}: {error}");
    }
    for (fields, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": [{"type": "item_reference"}]}), "input[0].type"),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"text": {"format": {"type": "json_object"}}}), "text.format"),
        (json!({"text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format.schema"),
        (json!({"text": "json"}), "text"),
        (json!({"input": [{"role": "wizard", "content": "a"}], "instructions": "i"}), "input[0].role"),
        (json!({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}), "input[0].name"),
        (json!({"input": "a".repeat(600)}), "input"),
        (json!({"instructions": 5}), "instructions"),
        (json!({"max_output_tokens": 600}), "max_output_tokens"),
        (json!({"max_output_tokens": "x"}), "max_output_tokens"),
        (json!({"max_completion_tokens": 5}), "max_completion_tokens"),
        (json!({"tools": [{"type": "function", "name": "f", "parameters": 5}]}), "tools[0].parameters"),
        (json!({"reasoning": {"effort": "high"}}), "reasoning"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"include": ["message.output_text.logprobs"]}), "include[0]"),
        (json!({"include": "all"}), "include"),
    ] {
        let answer = post(&FakeServe::saying(""), "/v1/responses", response(fields.clone())).await;
        assert_eq!(answer.status, 400, "{fields}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{fields}");
        let message = error["message"].as_str().unwrap();
        assert!(!message.contains(" at line ") && !message.contains("of max_completion_tokens"), "{message}");
    }
    let effort = json!({"reasoning": {"effort": "none"}, "top_logprobs": 0, "max_tool_calls": 4});
    assert_eq!(post(&FakeServe::saying(""), "/v1/responses", response(effort)).await.status, 200);
    let neutral = json!({"include": ["reasoning.encrypted_content"], "store": true, "reasoning": {"effort": null}, "text": {"format": {"type": "text"}}, "truncation": "disabled"});
    assert_eq!(post(&FakeServe::saying(""), "/v1/responses", response(neutral)).await.status, 200);
    let speed = messages(json!({"speed": "fast", "service_tier": "auto"}));
    assert_eq!(post(&FakeServe::saying(""), "/v1/messages", speed).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn the_tokens_of_a_message_are_counted() {
    let fake_serve = FakeServe::saying("a");
    let message = messages(json!({"messages": [{"role": "user", "content": "Weather?"}]}));
    assert_eq!(post(&fake_serve, "/v1/messages", message.clone()).await.status, 200);
    let prompt = fake_serve.seen().remove(0);
    let count = async |body: String| post(&fake_serve, "/v1/messages/count_tokens", body).await;
    let mut fields: Value = serde_json::from_str(&message).unwrap();
    fields.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(count(fields.to_string()).await.json(), json!({"input_tokens": prompt.tokens.len()}));
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(20_000)}]});
    assert!(
        count(messages(long)).await.json()["input_tokens"].as_u64() > Some(20_000),
        "no context limits it"
    );
    let refused = count(r#"{"messages": [{"role": "user"}]}"#.to_owned()).await;
    let error = json!({"type": "invalid_request_error", "message": "messages[0].content is required"});
    assert_eq!((refused.status.as_u16(), refused.json()["error"].clone()), (400, error));
}

#[tokio::test(start_paused = true)]
async fn the_tokens_of_a_response_are_counted() {
    let fake_serve = FakeServe::saying("a");
    let fields = response(json!({"input": "Weather?", "instructions": "Be brief."}));
    assert_eq!(post(&fake_serve, "/v1/responses", fields.clone()).await.status, 200);
    let n_tokens = fake_serve.seen().remove(0).tokens.len();
    let count = async |body: String| post(&fake_serve, "/v1/responses/input_tokens", body).await;
    let counted = json!({"object": "response.input_tokens", "input_tokens": n_tokens});
    assert_eq!(count(fields).await.json(), counted);
    let long = count(response(json!({"input": "a".repeat(20_000)}))).await.json();
    assert!(long["input_tokens"].as_u64() > Some(20_000), "no context limits it");
    let refused = count(response(json!({"input": [{"role": "user"}]}))).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["param"]),
        (400, &json!("input[0].content"))
    );
}

#[tokio::test]
async fn a_messages_format_is_a_schema_of_its_answer() {
    let send = async |config: Value| {
        let fake_serve = FakeServe::saying("{}");
        let json = include_bytes!("../../../../models/demo/tokenizer.json");
        let tokenizer = Tokenizer::HuggingFace(Box::new(HuggingFace::new(json).unwrap())).into();
        let model = ServedModel { tokenizer, vocab: 2048, ..ServedModel::mock("org/mock", 512) };
        let app = app_of(&fake_serve, BodyLimits::default(), model);
        let body = messages(json!({"output_config": config}));
        let answer = send(app, http::Request::post("/v1/messages").body(body.into()).unwrap()).await;
        (answer.status.as_u16(), answer.json()["error"]["message"].clone(), fake_serve.seen().pop())
    };
    let schema = json!({"type": "object", "required": ["a"]});
    let format = json!({"type": "json_schema", "schema": schema});
    let (status, _, prompt) = send(json!({"format": format, "effort": "high"})).await;
    let grammar = prompt.expect("it is served").sampling.grammar.expect("it has a grammar");
    assert_eq!((status, grammar.text()), (200, schema.to_string().as_str()));
    for (config, expected) in [
        (json!({"format": {"type": "json_schema"}}), "output_config.format.schema is required"),
        (json!({"format": {"type": "json_schema", "schema": {"type": "x"}}}), "output_config.format: "),
        (json!({"format": {"type": "text"}}), "output_config.format.type is not supported: only json_schema"),
        (json!({"effort": "low"}), "output_config.effort is not supported: "),
        (json!({"task_budget": 1}), "task_budget is not supported: "),
        (json!(5), "output_config: expected an object"),
    ] {
        let (status, message, _) = send(config.clone()).await;
        let message = message.as_str().unwrap_or_default();
        assert!(status == 400 && message.starts_with(expected), "{config}: {message}");
    }
}

/// Anthropic's clients look for these details, and go on without a thread.
#[tokio::test(start_paused = true)]
async fn a_thread_is_refused_as_clients_expect() {
    let thread = messages(json!({"thread": {"type": "create"}}));
    let answer = post(&FakeServe::saying("a"), "/v1/messages", thread).await;
    let error = json!({
        "type": "invalid_request_error",
        "message": "thread is not supported: nothing is stored: send all messages",
        "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    });
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]), (400, &error));
}

#[tokio::test(start_paused = true)]
async fn redacted_thinking_is_ignored() {
    let prompt = async |content: Value| {
        let fake_serve = FakeServe::saying("a");
        let talk = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "So?"},
        ]);
        let talk = messages(json!({"messages": talk}));
        assert_eq!(post(&fake_serve, "/v1/messages", talk).await.status, 200);
        fake_serve.seen().remove(0).tokens
    };
    let text = json!({"type": "text", "text": "Hello"});
    let redacted = json!({"type": "redacted_thinking", "data": "EmwKAhgB"});
    assert_eq!(prompt(json!([redacted, text])).await, prompt(json!([text])).await);
}

/// Also errors that no handler of the endpoint makes.
#[tokio::test(start_paused = true)]
async fn all_errors_of_anthropics_paths_have_its_form() {
    for (path, status, kind) in [
        ("/v1/messages", 405, "invalid_request_error"),
        ("/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("/v1/messages/batches", 404, "not_found_error"),
    ] {
        let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        let answer = send(app(&FakeServe::saying("a")), request).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["type"]), (status, &json!("error")), "{path}");
        assert_eq!(answer.json()["error"]["type"], kind, "{path}");
        assert_eq!(answer.header("request-id"), answer.header("x-request-id"), "{path}");
    }
    let request = http::Request::get("/v1/messages2").body(axum::body::Body::empty()).unwrap();
    assert_eq!(send(app(&FakeServe::saying("a")), request).await.json()["error"]["code"], "not_found");
}
