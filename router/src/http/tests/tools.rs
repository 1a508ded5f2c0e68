//! Tests of tool calls and reasoning in chats.

use serde_json::{Value, json};
use types::FinishReason;

use super::fake_serve::*;
use crate::http::BodyLimits;
use crate::text::tokenizer::HuggingFace;
use crate::text::{ChatTemplate, ServedModel, Tokenizer};

const CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}])
}

#[tokio::test(start_paused = true)]
async fn a_call_is_divided_from_the_text() {
    let answer = chat(&FakeServe::saying(CALL), json!({"tools": tools()})).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!((&message["content"], &message["role"]), (&json!("I look."), &json!("assistant")));
    let call = &message["tool_calls"][0];
    assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Paris\"}"});
    assert_eq!(call, &json!({"id": call["id"], "type": "function", "function": function}));
    let only_call = &CALL["I look.\n".len()..];
    let answer = chat(&FakeServe::saying(only_call), json!({"tools": tools(), "n": 2})).await.json();
    assert_eq!(answer["choices"][1]["message"]["content"], json!(null));
    let id = |choice: usize| answer["choices"][choice]["message"]["tool_calls"][0]["id"].clone();
    assert_ne!(id(0), id(1));
}

#[tokio::test(start_paused = true)]
async fn a_call_is_streamed_with_its_name_first() {
    let answer = chat(&FakeServe::saying(CALL), json!({"tools": tools(), "stream": true})).await;
    let events = answer.events();
    let (mut content, mut arguments, mut starts) = (String::new(), String::new(), Vec::new());
    for event in &events[..events.len() - 1] {
        let delta = &event["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or("");
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], 0);
            if let Some(name) = call["function"].get("name") {
                assert!(arguments.is_empty() && call["id"].is_string() && call["type"] == "function");
                starts.push(name.clone());
            }
            arguments += call["function"]["arguments"].as_str().expect("always a text");
        }
    }
    assert_eq!((content.as_str(), arguments.as_str()), ("I look.", "{\"city\": \"Paris\"}"));
    assert_eq!(starts, ["weather"]);
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_cut_off_in_a_call_ends_by_its_length() {
    let fake_serve = FakeServe::new(|_| {
        let mut steps = steps_of(&CALL[..CALL.len() - 18]);
        steps.pop();
        steps.last_mut().unwrap().finish = Some(FinishReason::Length);
        plays(steps)
    });
    let answer = chat(&fake_serve, json!({"tools": tools()})).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Par");
}

#[tokio::test(start_paused = true)]
async fn without_tools_a_call_is_text() {
    for fields in [json!({}), json!({"tools": []}), json!({"tools": tools(), "tool_choice": "none"})] {
        let fake_serve = FakeServe::saying(CALL);
        let answer = chat(&fake_serve, fields).await.json();
        let choice = &answer["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(CALL), &json!("stop")));
        assert_eq!(choice["message"].get("tool_calls"), None);
        assert!(!fake_serve.prompt_text().contains("weather"), "the tools are not in the prompt");
    }
}

#[tokio::test(start_paused = true)]
async fn tools_calls_and_results_are_in_the_prompt() {
    let fake_serve = FakeServe::saying("Sunny.");
    let call = json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}});
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]);
    let answer = chat(&fake_serve, json!({"tools": tools(), "messages": messages})).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "Sunny.");
    let prompt = fake_serve.prompt_text();
    assert!(prompt.contains("\"name\": \"weather\", \"parameters\""), "{prompt}");
    let turns =
        "Weather?<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>sunny";
    assert!(prompt.ends_with(turns), "{prompt}");
}

#[tokio::test(start_paused = true)]
async fn one_call_is_kept_where_calls_are_not_parallel() {
    let fake_serve = FakeServe::new(|_| says(&[CALL, CALL].concat()));
    let answer = chat(&fake_serve, json!({"tools": tools(), "parallel_tool_calls": false})).await.json();
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(1));
    let answer = chat(&fake_serve, json!({"tools": tools()})).await.json();
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(2));
}

#[tokio::test(start_paused = true)]
async fn wrong_tools_are_refused_with_their_place() {
    let nameless = json!([tools()[0], {"type": "function", "function": {}}]);
    for (fields, param) in [
        (json!({"tools": nameless}), "tools[1].function.name"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"function": {"name": "f"}}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
            "tools[0].function.parameters",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "time"}}}),
            "tool_choice.function.name",
        ),
        (json!({"tools": tools(), "tool_choice": {"type": "function"}}), "tool_choice.function.name"),
        (json!({"tools": tools(), "tool_choice": {"type": "allowed_tools"}}), "tool_choice.type"),
        // The mock has no tokenizer.json.
        (json!({"tools": tools(), "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": "required", "guided_regex": "a"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": 7}), "tool_choice"),
    ] {
        let answer = chat(&FakeServe::saying(""), fields.clone()).await;
        assert_eq!(answer.status, 400, "{fields}");
        assert_eq!(answer.json()["error"]["param"], param, "{fields}");
    }
}

// === reasoning, and templates without tools ===

async fn chat_with(template: &str, says: &'static str, fields: Value) -> Answer {
    let template = ChatTemplate::new(template, Vec::new()).unwrap();
    let model = ServedModel { template: Some(template), ..ServedModel::mock("org/mock", 512) };
    let mut body = json!({"model": "org/mock", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let app = app_of(&FakeServe::saying(says), BodyLimits::default(), model);
    let request = http::Request::post("/v1/chat/completions").body(body.to_string().into()).unwrap();
    send(app, request).await
}

const THINKS: &str = "{{ messages[0].content.split('</think>')[-1] }}<tool_call>";
const OPENS: &str = "{{ messages[0].content.split('</think>')[-1] }}<think>\n";
const THOUGHT: &str = "<think>\nHm, <tool_call>.\n</think>\n\nYes.";

#[tokio::test(start_paused = true)]
async fn reasoning_is_apart_from_the_text() {
    let message = async |template, says, fields| {
        chat_with(template, says, fields).await.json()["choices"][0]["message"].clone()
    };
    let whole = message(THINKS, THOUGHT, json!({"tools": tools()})).await;
    assert_eq!(
        (&whole["reasoning_content"], &whole["content"]),
        (&json!("Hm, <tool_call>."), &json!("Yes."))
    );
    let opened = message(OPENS, "Hm.</think>Yes.", json!({})).await;
    assert_eq!((&opened["reasoning_content"], &opened["content"]), (&json!("Hm."), &json!("Yes.")));
    let unsaid = message(THINKS, THOUGHT, json!({"include_reasoning": false})).await;
    assert_eq!((unsaid.get("reasoning_content"), &unsaid["content"]), (None, &json!("Yes.")));
    let joined = message(THINKS, THOUGHT, json!({"separate_reasoning": false})).await;
    assert_eq!((joined.get("reasoning_content"), &joined["content"]), (None, &json!(THOUGHT)));
    let cut = message(OPENS, "Hm.", json!({})).await;
    assert_eq!((&cut["reasoning_content"], &cut["content"]), (&json!("Hm."), &json!(null)));
}

#[tokio::test]
async fn a_grammar_begins_after_the_reasoning() {
    let json = include_bytes!("../../../../models/demo/tokenizer.json");
    let ask = async |fields: Value| {
        let tokenizer = Tokenizer::HuggingFace(Box::new(HuggingFace::new(json).unwrap())).into();
        let template = Some(ChatTemplate::new(OPENS, Vec::new()).unwrap());
        let model = ServedModel { template, tokenizer, vocab: 2048, ..ServedModel::mock("org/mock", 512) };
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let fake_serve = FakeServe::saying("x");
        let app = app_of(&fake_serve, BodyLimits::default(), model);
        let request = http::Request::post("/v1/chat/completions").body(body.to_string().into()).unwrap();
        (send(app, request).await, fake_serve.seen())
    };
    let (answer, seen) = ask(json!({"guided_choice": ["yes", "no"]})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let grammar = seen[0].sampling.grammar.as_ref().unwrap().text();
    assert!(grammar.contains("</think>") && grammar.contains("\"yes\" | \"no\""), "{grammar}");
    let schema = json!({"properties": {"a": {"type": "array", "uniqueItems": true}}});
    let error = ask(json!({"guided_json": schema})).await.0.json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("guided_json: at /properties/a: "), "the place in the schema: {message}");
}

#[tokio::test(start_paused = true)]
async fn reasoning_is_streamed() {
    let events = chat_with(THINKS, THOUGHT, json!({"stream": true})).await.events();
    let of = |name: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect()
    };
    assert_eq!((of("reasoning_content").as_str(), of("content").as_str()), ("Hm, <tool_call>.", "Yes."));
}

#[tokio::test(start_paused = true)]
async fn a_template_that_shows_no_calls_refuses_tools_by_name() {
    let answer = chat_with("{{ messages[0].content }}", "Yes.", json!({"tools": tools()})).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!("tools")));
    assert!(answer.body.contains("model.tool_format"), "{}", answer.body);
}
