//! The same request over HTTP and over gRPC gives the same prompts, the same answers and the same refusals.

use std::sync::Arc;

use chassis::metrics::Metrics;
use futures::StreamExt as _;
use proto::v1::answer_grammar::Grammar;
use proto::v1::generate_event::Event;
use proto::v1::tool_choice::{Choice, Mode};
use serde_json::{Value, json};

use super::*;
use crate::accept::Deadlines;
use crate::http::BodyLimits;
use crate::http::tests::fake_serve::{FakeServe, app_of, send};
use crate::text::tokenizer::HuggingFace;
use crate::text::{ChatTemplate, Tokenizer};

const CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";
const CALLS: &str = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>\
    <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}</tool_call>";
const THOUGHT: &str = "<think>\nHm, <tool_call>.\n</think>\n\nYes.";
/// A template of a model that reasons and calls tools, with a variable.
const THINKS: &str = "{{ messages[0].content.split('</think>')[-1] }}{{ mood }}<tool_call>\
    {% if add_generation_prompt %}>{% endif %}";
/// The bytes of a message that is parsed on another thread, and fits into no context.
const LONG: usize = 200_000;
const CHATS: &str = "/v1/chat/completions";
const TEXTS: &str = "/v1/completions";

// === the models ===

fn mock() -> ServedModel {
    ServedModel::mock("org/mock", 512)
}

fn reasoning() -> ServedModel {
    let template = ChatTemplate::new(THINKS, Vec::new()).expect("a template");
    ServedModel { template: Some(template), ..mock() }
}

/// Makes a model with a tokenizer file, which grammars need.
fn demo() -> ServedModel {
    let json = include_bytes!("../../../models/demo/tokenizer.json");
    let tokenizer = Tokenizer::HuggingFace(Box::new(HuggingFace::new(json).expect("the demo model's")));
    ServedModel { tokenizer: tokenizer.into(), vocab: 2048, ..mock() }
}

// === the requests ===

type Filled = fn(&mut v1::GenerateRequest);

fn text() -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: "org/mock".to_owned(),
        input: Some(Input::Text("Hi".to_owned())),
        request_id: "r1".to_owned(),
        ..Default::default()
    }
}

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content: Some(content.to_owned()), ..Default::default() }
}

fn chat_of(messages: Vec<v1::ChatMessage>) -> v1::Chat {
    v1::Chat { messages, ..Default::default() }
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": parameters}}])
}

fn weather() -> v1::Tool {
    let parameters = tools()[0]["function"]["parameters"].to_string();
    v1::Tool { name: "weather".to_owned(), description: "Now.".to_owned(), parameters }
}

/// Returns the chat of a request, which is the usual one if it has none.
fn chat(request: &mut v1::GenerateRequest) -> &mut v1::Chat {
    if !matches!(request.input, Some(Input::Chat(_))) {
        request.input = Some(Input::Chat(chat_of(vec![message("user", "Hi")])));
    }
    let Some(Input::Chat(chat)) = &mut request.input else { unreachable!("it was set") };
    chat
}

fn sampling(request: &mut v1::GenerateRequest) -> &mut v1::SamplingParams {
    request.sampling.get_or_insert_default()
}

fn stop(request: &mut v1::GenerateRequest) -> &mut v1::StopParams {
    request.stop.get_or_insert_default()
}

fn constrain(request: &mut v1::GenerateRequest, grammar: Grammar) {
    sampling(request).grammar = Some(v1::AnswerGrammar { grammar: Some(grammar) });
}

fn choose(request: &mut v1::GenerateRequest, choice: Choice) {
    chat(request).tool_choice = Some(v1::ToolChoice { choice: Some(choice) });
}

/// Returns the JSON of a request: `fields` with the usual ones.
fn body(path: &str, fields: &Value) -> String {
    let mut body = match path {
        CHATS => json!({"model": "org/mock", "messages": [{"role": "user", "content": "Hi"}]}),
        _ => json!({"model": "org/mock", "prompt": "Hi", "max_tokens": 500}),
    };
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body.to_string()
}

fn call_of(path: &str, fill: Filled) -> v1::GenerateRequest {
    let mut request = text();
    match path {
        CHATS => _ = chat(&mut request),
        _ => stop(&mut request).max_tokens = Some(500),
    }
    fill(&mut request);
    request
}

// === the answers ===

/// An answer, by HTTP or by gRPC.
#[derive(Debug, Default, PartialEq)]
struct Whole {
    reasoning: String,
    text: String,
    /// Each call's id, name and arguments.
    calls: Vec<[String; 3]>,
    tokens: Vec<u32>,
    finish: String,
}

/// The answers to a request, and the number of its prompt's tokens, all and cached.
type Answers = (Vec<Whole>, [u64; 2]);

fn of_http(answer: &Value) -> Answers {
    let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let call = |call: &Value| {
        let function = &call["function"];
        [string(&call["id"]), string(&function["name"]), string(&function["arguments"])]
    };
    let whole = |choice: &Value| {
        let message = &choice["message"];
        Whole {
            reasoning: string(&message["reasoning_content"]),
            text: string(&message["content"]) + choice["text"].as_str().unwrap_or_default(),
            calls: message["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
            tokens: serde_json::from_value(choice["token_ids"].clone()).expect("ids"),
            finish: string(&choice["finish_reason"]),
        }
    };
    let usage = &answer["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    let counts = [&usage["prompt_tokens"], cached].map(|count| count.as_u64().expect("a count"));
    (answer["choices"].as_array().expect("choices").iter().map(whole).collect(), counts)
}

async fn of_grpc(mut events: Events) -> Answers {
    let (mut wholes, mut counts) = (Vec::<Whole>::new(), [0, 0]);
    while let Some(event) = events.next().await {
        let event = event.expect("a good stream");
        let at = event.choice as usize;
        wholes.resize_with(wholes.len().max(at + 1), Whole::default);
        let whole = &mut wholes[at];
        match event.event.expect("an event") {
            Event::Token(token) => {
                assert_eq!(whole.finish, "", "the end comes last");
                whole.tokens.push(token.step.expect("a step").token);
                whole.reasoning += &token.reasoning;
                whole.text += &token.text;
                for delta in token.tool_calls {
                    let at = delta.index as usize;
                    whole.calls.resize_with(whole.calls.len().max(at + 1), Default::default);
                    let parts = [delta.id, delta.name, delta.arguments];
                    whole.calls[at].iter_mut().zip(parts).for_each(|(text, part)| *text += &part);
                }
            }
            Event::PromptLogprobs(_) => panic!("the call does not ask for log-probabilities"),
            Event::End(end) => {
                assert_eq!(end.completion_tokens as usize, whole.tokens.len());
                assert_eq!(end.request_id, "r1");
                whole.finish = match end.reason() {
                    v1::AnswerFinish::Stop => "stop",
                    v1::AnswerFinish::Length => "length",
                    v1::AnswerFinish::ToolCalls => "tool_calls",
                    v1::AnswerFinish::Unspecified => panic!("an end has a reason"),
                }
                .to_owned();
                let usage = end.usage.expect("usage");
                counts = [usage.prompt_tokens, usage.cached_tokens].map(u64::from);
            }
        }
    }
    (wholes, counts)
}

async fn over_http(
    serve: &Arc<FakeServe>,
    model: ServedModel,
    path: &str,
    fields: &Value,
) -> crate::http::tests::fake_serve::Answer {
    let request = ::http::Request::post(path).header("x-request-id", "r1");
    let request = request.body(body(path, fields).into()).expect("a request");
    send(app_of(serve, BodyLimits::default(), model), request).await
}

async fn over_grpc(
    serve: &Arc<FakeServe>,
    model: ServedModel,
    request: v1::GenerateRequest,
) -> Result<Events, Status> {
    let world = World::seeded(1);
    let metrics = RouterMetrics::new(&Metrics::new("router"));
    let acceptor = Acceptor::new(world.clone(), Deadlines::default(), metrics.clone());
    let models = RouterModels::new([model]);
    let api = GrpcApi { serve: serve.clone(), models, acceptor, metrics, world, shutdown: Shutdown::new() };
    api.generate(Request::new(request)).await.map(Response::into_inner)
}

/// Checks that both APIs make the same prompts and the same answers. Returns the answers.
async fn check(
    model: fn() -> ServedModel,
    says: &'static str,
    path: &str,
    fields: Value,
    fill: Filled,
) -> Vec<Whole> {
    let (http, grpc) = (FakeServe::saying(says), FakeServe::saying(says));
    let mut fields = fields;
    fields["return_token_ids"] = true.into();
    let answer = over_http(&http, model(), path, &fields).await;
    assert_eq!(answer.status, 200, "{fields}: {}", answer.body);
    let events = over_grpc(&grpc, model(), call_of(path, fill)).await;
    let events = events.unwrap_or_else(|status| panic!("{fields}: {status}"));
    let (expected, answers) = (of_http(&answer.json()), of_grpc(events).await);
    assert_eq!(answers, expected, "{fields}");
    let seen = http.seen().into_iter().zip(grpc.seen());
    assert_eq!(http.seen().len(), grpc.seen().len());
    for (expected, prompt) in seen {
        let deadline = expected.deadline;
        assert_eq!(types::Prompt { deadline, ..prompt }, expected, "{fields}");
    }
    answers.0
}

#[tokio::test(start_paused = true)]
async fn texts_are_the_same_over_both() {
    let bias = json!({"5": 1.5, "7": -2.0});
    let cases: [(Value, Filled); 4] = [
        (json!({}), |_| ()),
        (json!({"n": 3, "seed": 7, "stop": ["b"]}), |request| {
            request.n = Some(3);
            sampling(request).seed = Some(7);
            request.stop_strings = vec!["b".to_owned()];
        }),
        (
            json!({"temperature": 0.0, "seed": 0, "max_tokens": 20, "cache_salt": "s", "ignore_eos": true}),
            |request| {
                (sampling(request).temperature, sampling(request).seed) = (Some(0.0), Some(0));
                request.cache_salt = "s".to_owned();
                (stop(request).max_tokens, stop(request).ignore_eos) = (Some(20), true);
            },
        ),
        (
            json!({
                "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5,
                "presence_penalty": 1.0, "frequency_penalty": -1.0, "logit_bias": bias, "logprobs": 2,
                "min_tokens": 1, "stop_token_ids": [9],
            }),
            |request| {
                *sampling(request) = v1::SamplingParams {
                    temperature: Some(0.5),
                    top_p: Some(0.5),
                    top_k: Some(3),
                    min_p: Some(0.25),
                    repetition_penalty: Some(1.5),
                    presence_penalty: Some(1.0),
                    frequency_penalty: Some(-1.0),
                    logit_bias: [(5, 1.5), (7, -2.0)].into(),
                    logprobs: Some(2),
                    ..Default::default()
                };
                (stop(request).min_tokens, stop(request).stop_tokens) = (1, vec![9]);
            },
        ),
    ];
    for (fields, fill) in cases {
        check(mock, "abc", TEXTS, fields, fill).await;
    }
}

/// They come once, before all tokens.
#[tokio::test(start_paused = true)]
async fn log_probabilities_of_prompts_are_the_same_over_both() {
    let serve = FakeServe::saying("x");
    let answer = over_http(&serve, mock(), TEXTS, &json!({"prompt_logprobs": 2, "n": 2})).await.json();
    let expected = answer["choices"][0]["prompt_logprobs"].as_array().expect("a list");
    let n = expected.len() - 1;
    assert_ne!(n, 0, "{answer}");
    let request = call_of(TEXTS, |request| {
        (sampling(request).prompt_logprobs, request.n) = (Some(2), Some(2));
    });
    let mut events = over_grpc(&serve, mock(), request).await.expect("accepted");
    let first = events.next().await.expect("an event").expect("a good stream");
    let Some(Event::PromptLogprobs(found)) = first.event else { panic!("{first:?}") };
    assert_eq!(found.chosen, (1..=n).map(|nth| -(nth as f32)).collect::<Vec<_>>());
    assert_eq!((found.ranks, found.top_tokens), (vec![3; n], [65, 66].repeat(n)));
    assert_eq!(found.top_logprobs.len(), 2 * n);
    for (expected, top) in expected[1..].iter().zip(found.top_logprobs.chunks(2)) {
        assert_eq!(
            (&expected["65"]["logprob"], &expected["66"]["logprob"]),
            (&json!(top[0]), &json!(top[1]))
        );
    }
    while let Some(event) = events.next().await {
        let event = event.expect("a good stream").event;
        assert!(!matches!(event, Some(Event::PromptLogprobs(_))), "{event:?}");
    }
}

fn conversation(request: &mut v1::GenerateRequest) {
    let arguments = "{\"city\":\"Rome\"}".to_owned();
    let call = v1::ToolCall { id: "c1".to_owned(), name: "weather".to_owned(), arguments };
    let named = v1::ChatMessage { name: "Ada".to_owned(), ..message("user", "Weather?") };
    let called =
        v1::ChatMessage { role: "assistant".to_owned(), tool_calls: vec![call], ..Default::default() };
    let result = v1::ChatMessage { tool_call_id: "c1".to_owned(), ..message("tool", "sunny") };
    chat(request).messages = vec![message("developer", "Be brief."), named, called, result];
    chat(request).tools = vec![weather()];
}

#[tokio::test(start_paused = true)]
async fn chats_are_the_same_over_both() {
    let call = json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}});
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "Ada"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]);
    check(mock, "Hello", CHATS, json!({}), |_| ()).await;
    check(mock, "Sunny.", CHATS, json!({"messages": messages, "tools": tools()}), conversation).await;
    let answers = check(mock, CALL, CHATS, json!({"tools": tools(), "n": 2}), |request| {
        chat(request).tools = vec![weather()];
        request.n = Some(2);
    })
    .await;
    assert_eq!((answers.len(), answers[1].finish.as_str()), (2, "tool_calls"));
    assert_eq!(answers[1].calls[0][1..], ["weather", "{\"city\": \"Paris\"}"].map(str::to_owned));
    assert_ne!(answers[0].calls[0][0], answers[1].calls[0][0]);
    let fields = json!({"tools": tools(), "parallel_tool_calls": false, "continue_final_message": true});
    let answers = check(mock, CALLS, CHATS, fields, |request| {
        chat(request).tools = vec![weather()];
        chat(request).parallel_tool_calls = Some(false);
        chat(request).continue_final_message = Some(true);
    })
    .await;
    assert_eq!(answers[0].calls.len(), 1);
    let answers = check(mock, CALL, CHATS, json!({"tools": tools(), "tool_choice": "none"}), |request| {
        chat(request).tools = vec![weather()];
        choose(request, Choice::Mode(Mode::None.into()));
    })
    .await;
    assert_eq!((answers[0].text.as_str(), answers[0].calls.len()), (CALL, 0));
}

#[tokio::test(start_paused = true)]
async fn reasoning_and_template_arguments_are_the_same_over_both() {
    let answers = check(reasoning, THOUGHT, CHATS, json!({"tools": tools()}), |request| {
        chat(request).tools = vec![weather()];
    })
    .await;
    assert_eq!((answers[0].reasoning.as_str(), answers[0].text.as_str()), ("Hm, <tool_call>.", "Yes."));
    let answers = check(reasoning, THOUGHT, CHATS, json!({"include_reasoning": false}), |request| {
        chat(request).include_reasoning = Some(false);
    })
    .await;
    assert_eq!((answers[0].reasoning.as_str(), answers[0].text.as_str()), ("", "Yes."));
    let answers = check(reasoning, THOUGHT, CHATS, json!({"separate_reasoning": false}), |request| {
        chat(request).separate_reasoning = Some(false);
    })
    .await;
    assert_eq!(answers[0].text, THOUGHT);
    let fields = json!({"chat_template_kwargs": {"mood": 1}, "add_generation_prompt": false});
    check(reasoning, "Yes.", CHATS, fields, |request| {
        chat(request).chat_template_kwargs = "{\"mood\": 1}".to_owned();
        chat(request).add_generation_prompt = Some(false);
    })
    .await;
}

#[tokio::test]
async fn grammars_are_the_same_over_both() {
    let cases: [(Value, Filled); 7] = [
        (json!({"response_format": {"type": "json_object"}}), |request| {
            constrain(request, Grammar::JsonObject(v1::JsonObject {}));
        }),
        (json!({"guided_json": {"type": "array"}}), |request| {
            constrain(request, Grammar::JsonSchema("{\"type\":\"array\"}".to_owned()));
        }),
        (json!({"guided_regex": "a+"}), |request| constrain(request, Grammar::Regex("a+".to_owned()))),
        (json!({"guided_grammar": "start: \"a\""}), |request| {
            constrain(request, Grammar::Lark("start: \"a\"".to_owned()));
        }),
        (json!({"guided_choice": ["a", "\"b"]}), |request| {
            let texts = ["a", "\"b"].map(str::to_owned).to_vec();
            constrain(request, Grammar::Choice(v1::Texts { texts }));
        }),
        (json!({"tools": tools(), "tool_choice": "required"}), |request| {
            chat(request).tools = vec![weather()];
            choose(request, Choice::Mode(Mode::Required.into()));
        }),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
            |request| {
                chat(request).tools = vec![weather()];
                choose(request, Choice::Function("weather".to_owned()));
            },
        ),
    ];
    for (fields, fill) in cases {
        check(demo, "abc", CHATS, fields, fill).await;
    }
}

// === refusals ===

/// A request over both: path, JSON fields, the field at fault in the message, and what sets it.
type Refused<'a> = (&'a str, Value, &'a str, Filled);

/// Checks that both APIs refuse the requests with the same code and message, apart from the field's name.
async fn check_refusals(cases: Vec<Refused<'_>>) {
    for (path, fields, param, fill) in cases {
        let answer = over_http(&FakeServe::saying(""), mock(), path, &fields).await;
        let error = &answer.json()["error"];
        let Err(status) = over_grpc(&FakeServe::saying(""), mock(), call_of(path, fill)).await else {
            panic!("{fields} is accepted");
        };
        let code = error["code"].as_str().expect("a code");
        assert_eq!(status.metadata().get("baton-code").expect("a code"), code);
        let expected =
            if answer.status == 404 { tonic::Code::NotFound } else { tonic::Code::InvalidArgument };
        assert_eq!(status.code(), expected, "{fields}");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let over_http = text(&error["param"]);
        assert_eq!(status.message(), text(&error["message"]).replacen(&over_http, param, 1), "{fields}");
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_of_texts_are_the_same_over_both() {
    let cases: Vec<Refused<'_>> = vec![
        (TEXTS, json!({"model": "other"}), "model", |request| request.model = "other".to_owned()),
        (TEXTS, json!({"n": 0}), "n", |request| request.n = Some(0)),
        (TEXTS, json!({"n": 1000}), "n", |request| request.n = Some(1000)),
        (TEXTS, json!({"temperature": 3.0}), "sampling.temperature", |request| {
            sampling(request).temperature = Some(3.0);
        }),
        (TEXTS, json!({"top_p": 0.0}), "sampling.top_p", |request| sampling(request).top_p = Some(0.0)),
        (TEXTS, json!({"logit_bias": {"9999": 1.0}}), "sampling.logit_bias", |request| {
            sampling(request).logit_bias = [(9999, 1.0)].into();
        }),
        (TEXTS, json!({"logprobs": 99}), "sampling.logprobs", |request| {
            sampling(request).logprobs = Some(99)
        }),
        (TEXTS, json!({"prompt_logprobs": 21}), "sampling.prompt_logprobs", |request| {
            sampling(request).prompt_logprobs = Some(21);
        }),
        (TEXTS, json!({"max_tokens": 0}), "stop.max_tokens", |request| stop(request).max_tokens = Some(0)),
        (TEXTS, json!({"min_tokens": 600}), "stop.min_tokens", |request| stop(request).min_tokens = 600),
        (TEXTS, json!({"stop": [""]}), "stop_strings", |request| request.stop_strings = vec![String::new()]),
        (TEXTS, json!({"cache_salt": "s".repeat(257)}), "cache_salt", |request| {
            request.cache_salt = "s".repeat(257);
        }),
        (TEXTS, json!({"stop_token_ids": [9999]}), "stop.stop_tokens", |request| {
            stop(request).stop_tokens = vec![9999];
        }),
    ];
    check_refusals(cases).await;
}

#[tokio::test(start_paused = true)]
async fn refusals_of_chats_are_the_same_over_both() {
    let nameless = json!([tools()[0], {"type": "function", "function": {}}]);
    let user = json!({"role": "user", "content": "Hi"});
    let cases: Vec<Refused<'_>> = vec![
        (CHATS, json!({"messages": []}), "chat.messages", |request| chat(request).messages.clear()),
        (CHATS, json!({"messages": [user, {"role": "user"}]}), "chat.messages[1].content", |request| {
            chat(request).messages.push(v1::ChatMessage { content: None, ..message("user", "") });
        }),
        (CHATS, json!({"messages": [{"content": "Hi"}]}), "chat.messages[0].role", |request| {
            chat(request).messages = vec![message("", "Hi")];
        }),
        (CHATS, json!({"messages": [{"role": "bard", "content": ""}]}), "chat.messages[0].role", |request| {
            chat(request).messages = vec![message("bard", "")];
        }),
        (CHATS, json!({"tools": nameless}), "chat.tools[1].name", |request| {
            chat(request).tools = vec![weather(), v1::Tool::default()];
        }),
        (CHATS, json!({"tool_choice": "required"}), "chat.tool_choice", |request| {
            choose(request, Choice::Mode(Mode::Required.into()));
        }),
        (
            CHATS,
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "time"}}}),
            "chat.tool_choice.function",
            |request| {
                chat(request).tools = vec![weather()];
                choose(request, Choice::Function("time".to_owned()));
            },
        ),
        // The mock has no tokenizer file.
        (CHATS, json!({"tools": tools(), "tool_choice": "required"}), "chat.tool_choice", |request| {
            chat(request).tools = vec![weather()];
            choose(request, Choice::Mode(Mode::Required.into()));
        }),
        (CHATS, json!({"guided_regex": "a"}), "sampling.grammar", |request| {
            constrain(request, Grammar::Regex("a".to_owned()));
        }),
        (CHATS, json!({"guided_choice": []}), "sampling.grammar", |request| {
            constrain(request, Grammar::Choice(v1::Texts::default()));
        }),
        (CHATS, json!({"guided_grammar": "a ::= b"}), "sampling.grammar", |request| {
            constrain(request, Grammar::Lark("a ::= b".to_owned()));
        }),
        (
            CHATS,
            json!({"messages": [{"role": "user", "content": "a".repeat(LONG)}]}),
            "chat.messages",
            |request| {
                chat(request).messages = vec![message("user", &"a".repeat(LONG))];
            },
        ),
    ];
    check_refusals(cases).await;
}

#[test]
fn a_field_has_its_name_in_the_message() {
    for (over_http, name) in [
        ("top_logprobs", "sampling.logprobs"),
        ("stop", "stop_strings"),
        ("stop.max_tokens", "stop.max_tokens"),
        ("messages[2].content", "chat.messages[2].content"),
        ("tools[3].function.parameters", "chat.tools[3].parameters"),
        ("tool_choice.function.name", "chat.tool_choice.function"),
        ("x-baton-tenant", "tenant"),
        ("x-baton-priority", "priority"),
        ("model", "model"),
    ] {
        assert_eq!(request::name_of(over_http), name);
    }
}

#[tokio::test(start_paused = true)]
async fn what_only_messages_can_have_wrong_is_refused_by_name() {
    let cases: [(&str, Filled); 6] = [
        ("input is required", |request| request.input = None),
        ("sampling.grammar.grammar is required", |request| {
            sampling(request).grammar = Some(v1::AnswerGrammar::default());
        }),
        ("chat.tool_choice.choice is required", |request| {
            chat(request).tool_choice = Some(v1::ToolChoice::default());
        }),
        ("chat.tool_choice: unknown choice `0`", |request| choose(request, Choice::Mode(0))),
        ("chat.tools[0].parameters: expected a JSON object: ", |request| {
            chat(request).tools = vec![v1::Tool { parameters: "[]".to_owned(), ..weather() }];
        }),
        ("chat.chat_template_kwargs: expected a JSON object: ", |request| {
            chat(request).chat_template_kwargs = "mood".to_owned();
        }),
    ];
    for (message, fill) in cases {
        let Err(status) = over_grpc(&FakeServe::saying(""), mock(), call_of(CHATS, fill)).await else {
            panic!("accepted instead of: {message}");
        };
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        assert!(status.message().starts_with(message), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_breaks_ends_the_stream_with_its_error() {
    let serve = FakeServe::new(|_| {
        crate::http::tests::fake_serve::breaks("ab", ServeError::Failed { reason: "broken".to_owned() })
    });
    let mut events = over_grpc(&serve, mock(), text()).await.unwrap_or_else(|status| panic!("{status}"));
    assert!(events.next().await.is_some_and(|event| event.is_ok()));
    assert!(events.next().await.is_some_and(|event| event.is_ok()));
    let status = events.next().await.expect("an error").expect_err("the end of the steps");
    assert_eq!(status.code(), tonic::Code::Internal);
    assert_eq!(status.metadata().get("baton-code").expect("a code"), "internal");
}
