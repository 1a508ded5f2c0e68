//! Tests of complete answers, compared with golden JSON.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::stream::{self, StreamExt as _};
use serde_json::json;
use tokio::sync::Notify;
use types::step::Logprobs;
use types::{FinishReason, TokenId};

use super::fake_serve::*;

#[tokio::test(start_paused = true)]
async fn a_chat() {
    let fake_serve = FakeServe::saying("Hello");
    let answer = chat(&fake_serve, json!({})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-request-id"), "r1");
    assert_eq!(
        answer.json(),
        json!({
            "id": "chatcmpl-r1", "object": "chat.completion", "created": 1_700_000_000, "model": "org/mock",
            "choices": [{
                "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": null},
                "logprobs": null, "finish_reason": "stop",
            }],
            "usage": {
                "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        })
    );
    let prompt = &fake_serve.seen()[0];
    let text = [258, 72, 105, 256, 259].map(TokenId);
    assert_eq!(prompt.tokens.as_ref(), text, "<|user|>Hi<|end|><|assistant|>");
    assert_eq!(prompt.stop.max_tokens, 507);
    fake_serve.holds(0).await;
}

#[tokio::test(start_paused = true)]
async fn a_completion() {
    let fake_serve = FakeServe::new(|_| {
        plays(vec![step(0, TokenId(65), None), step(1, TokenId(66), Some(FinishReason::Length))])
    });
    let answer = complete(&fake_serve, json!({"echo": true, "return_token_ids": true})).await;
    assert_eq!(
        answer.json(),
        json!({
            "id": "cmpl-r1", "object": "text_completion", "created": 1_700_000_000, "model": "org/mock",
            "choices": [{
                "index": 0, "text": "HiAB", "logprobs": null, "finish_reason": "length",
                "token_ids": [65, 66], "prompt_token_ids": [72, 105],
            }],
            "usage": {
                "prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        })
    );
    assert_eq!(fake_serve.seen()[0].stop.max_tokens, 16);
}

#[tokio::test(start_paused = true)]
async fn an_echo_with_log_probabilities() {
    let fake_serve = FakeServe::new(|_| {
        let logprobs = Some(Logprobs { chosen: -0.5, top: vec![(TokenId(65), -0.5)] });
        plays(vec![types::Step { logprobs, ..step(0, TokenId(65), Some(FinishReason::Length)) }])
    });
    // The fields of lm-eval.
    let fields = json!({
        "prompt": [[72, 195, 164], [105]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true,
    });
    let answer = complete(&fake_serve, fields).await.json();
    let logprobs = json!({
        "tokens": ["H", "\u{fffd}", "\u{fffd}", "A"],
        "token_logprobs": [null, -1.0, -2.0, -0.5],
        "top_logprobs": [
            null, {"A": -0.25, "\u{fffd}": -1.0}, {"A": -0.25, "\u{fffd}": -2.0}, {"A": -0.5},
        ],
        "text_offset": [0, 1, 1, 2],
    });
    assert_eq!(answer["choices"][0]["logprobs"], logprobs);
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][1]["text"]), (&json!("HäA"), &json!("iA")));
    assert_eq!(answer["choices"][1]["logprobs"]["token_logprobs"], json!([null, -0.5]));
    let asked = |prompt: &types::Prompt| (prompt.sampling.logprobs, prompt.sampling.prompt_logprobs);
    assert!(fake_serve.seen().iter().all(|prompt| asked(prompt) == (Some(1), Some(1))));
}

/// OpenAI and vLLM echo the prompt itself, with the names of its special tokens.
#[tokio::test(start_paused = true)]
async fn an_echo_has_special_tokens() {
    let fake_serve = FakeServe::new(|_| {
        let logprobs = Some(Logprobs { chosen: -0.5, top: vec![] });
        plays(vec![types::Step { logprobs, ..step(0, TokenId(65), Some(FinishReason::Length)) }])
    });
    for prompt in [json!("<|user|>hi<|end|>"), json!([258, 104, 105, 256])] {
        for stream in [false, true] {
            let fields =
                json!({"prompt": prompt, "echo": true, "logprobs": 0, "max_tokens": 1, "stream": stream});
            let answer = complete(&fake_serve, fields).await;
            let parts = if stream { answer.events() } else { vec![answer.json()] };
            let choices = parts.iter().filter_map(|part| part["choices"].get(0));
            let text: String = choices.clone().filter_map(|choice| choice["text"].as_str()).collect();
            let offsets: Vec<u64> = choices
                .flat_map(|choice| choice["logprobs"]["text_offset"].as_array().into_iter().flatten())
                .filter_map(serde_json::Value::as_u64)
                .collect();
            assert_eq!(text, "<|user|>hi<|end|>A", "{prompt}");
            assert_eq!(offsets, [0, 8, 9, 10, 17], "{prompt}");
        }
    }
}

/// vLLM answers so too: the one token that a node generates is not shown.
#[tokio::test(start_paused = true)]
async fn an_echo_alone() {
    let fake_serve = FakeServe::new(|_| plays(vec![step(0, TokenId(65), Some(FinishReason::Stop))]));
    let fields = json!({"max_tokens": 0, "logprobs": 0, "echo": true, "prompt_logprobs": 1, "n": 2});
    let answer = complete(&fake_serve, fields).await.json();
    let choice = |index| {
        json!({
            "index": index, "text": "Hi", "finish_reason": "length",
            "logprobs": {
                "tokens": ["H", "i"], "token_logprobs": [null, -1.0], "top_logprobs": [null, {"i": -1.0}],
                "text_offset": [0, 1],
            },
            "prompt_logprobs": [null, {
                "105": {"logprob": -1.0, "rank": 3, "decoded_token": "i"},
                "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
            }],
        })
    };
    assert_eq!(answer["choices"], json!([choice(0), choice(1)]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let asked: Vec<_> = fake_serve.seen().iter().map(|prompt| prompt.sampling.prompt_logprobs).collect();
    assert_eq!(asked, [Some(1), None], "one of the answers brings them");
    let fields = json!({"max_tokens": 0, "logprobs": 0, "echo": true, "stream": true});
    let events = complete(&fake_serve, fields).await.events();
    assert_eq!(events[0]["choices"][0]["logprobs"]["token_logprobs"], json!([null, -1.0]));
    assert_eq!(
        (&events[0]["choices"][0]["text"], &events[1]["choices"][0]["text"]),
        (&json!("Hi"), &json!(""))
    );
    assert_eq!(events[1]["choices"][0]["finish_reason"], "length");
}

#[tokio::test(start_paused = true)]
async fn a_chats_prompt_has_log_probabilities() {
    let answer = chat(&FakeServe::saying("x"), json!({"prompt_logprobs": 0})).await.json();
    let of_tokens = answer["prompt_logprobs"].as_array().expect("a list");
    assert_eq!((of_tokens.len(), &of_tokens[0]), (5, &json!(null)));
    assert_eq!(of_tokens[1], json!({"72": {"logprob": -1.0, "rank": 3, "decoded_token": "H"}}));
    let plain = chat(&FakeServe::saying("x"), json!({})).await.json();
    assert_eq!(plain.get("prompt_logprobs"), None);
}

#[tokio::test(start_paused = true)]
async fn prompts_of_all_forms() {
    for (prompt, expected) in [
        (json!("ab"), vec![vec![97, 98]]),
        (json!([97, 98]), vec![vec![97, 98]]),
        (json!(["a", "b"]), vec![vec![97], vec![98]]),
        (json!([[97], [98, 99]]), vec![vec![97], vec![98, 99]]),
    ] {
        let fake_serve = FakeServe::saying("x");
        let answer = complete(&fake_serve, json!({"prompt": prompt})).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let ids = |prompt: types::Prompt| prompt.tokens.iter().map(|token| token.0).collect::<Vec<u32>>();
        let seen: Vec<Vec<u32>> = fake_serve.seen().into_iter().map(ids).collect();
        assert_eq!(seen, expected);
        let n_tokens: usize = expected.iter().map(Vec::len).sum();
        assert_eq!(answer.json()["usage"]["prompt_tokens"], n_tokens);
    }
}

#[tokio::test(start_paused = true)]
async fn several_answers_are_drawn_apart() {
    let fake_serve = FakeServe::new(|prompt| says(&format!("seed {}", prompt.sampling.seed)));
    let answer = chat(&fake_serve, json!({"n": 3, "seed": 40})).await.json();
    let texts: Vec<&str> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["seed 40", "seed 41", "seed 42"]);
    assert_eq!(answer["usage"]["prompt_tokens"], 5, "one prompt, three answers");
    assert_eq!(answer["usage"]["completion_tokens"], 24);
}

/// An answer that is not read keeps its KV room, which the others may wait for.
#[tokio::test(start_paused = true)]
async fn an_answer_is_read_while_others_begin() {
    for (fields, stream) in [
        (json!({"prompt": ["a", "b"]}), false),
        (json!({"prompt": ["a", "b"]}), true),
        (json!({"n": 2}), false),
        (json!({"n": 2}), true),
    ] {
        let read = Arc::new(Notify::new());
        let fake_serve = FakeServe::new(move |prompt| {
            let read = Arc::clone(&read);
            if prompt.id.as_str() == "r1-0" {
                let last = move |step: &types::Step| step.finish.iter().for_each(|_| read.notify_one());
                return ScriptedEvent::Steps(stream::iter(steps_of("x")).inspect(last).map(Ok).boxed());
            }
            let later = async move {
                read.notified().await;
                says("y")
            };
            ScriptedEvent::Later(later.boxed())
        });
        let mut fields = fields;
        fields["stream"] = stream.into();
        let answer = complete(&fake_serve, fields).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let parts = if stream { answer.events() } else { vec![answer.json()] };
        let mut texts = [String::new(), String::new()];
        for choice in parts.iter().filter_map(|part| part["choices"].as_array()).flatten() {
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        }
        assert_eq!(texts, ["x", "y"]);
        fake_serve.holds(0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn every_sampling_field_reaches_the_backend() {
    let fake_serve = FakeServe::saying("x");
    let params = json!({
        "max_completion_tokens": 9, "max_tokens": 8, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7,
        "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2,
        "logit_bias": {"65": -100, "66": 1.5}, "seed": -1, "stop_token_ids": [10], "ignore_eos": true,
        "logprobs": true, "top_logprobs": 2, "user": "u", "metadata": {"a": [1]}, "guided_json": null, "stop": null, "stream_options": null,
    });
    let answer = chat(&fake_serve, params).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let types::Prompt { sampling, stop, .. } = fake_serve.seen().remove(0);
    let expected = types::Sampling {
        prompt_logprobs: None,
        temperature: 0.5,
        top_p: 0.25,
        top_k: 7,
        min_p: 0.125,
        repetition_penalty: 1.5,
        presence_penalty: -1.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(TokenId(65), -100.0), (TokenId(66), 1.5)],
        seed: u64::MAX,
        logprobs: Some(2),
        grammar: None,
    };
    assert_eq!(sampling, expected);
    let expected =
        types::StopRules { max_tokens: 9, min_tokens: 2, stop_tokens: vec![TokenId(10)], ignore_eos: true };
    assert_eq!(stop, expected);
}

#[tokio::test(start_paused = true)]
async fn the_answer_ends_before_a_stop_string() {
    let fake_serve = FakeServe::new(|_| babbles_then_stops());
    for (stop, min_tokens, expected, n_tokens) in
        [(json!("cd"), 0, "ab", 4), (json!(["zz", "b"]), 0, "a", 2), (json!("b"), 2, "abcda", 6)]
    {
        let answer = complete(&fake_serve, json!({"stop": stop, "min_tokens": min_tokens})).await.json();
        assert_eq!(answer["choices"][0]["text"], expected);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(answer["usage"]["completion_tokens"], n_tokens);
        fake_serve.holds(0).await;
    }
}

/// Generates "abcdabcd" and then nothing, so only a stop string can end the answer.
fn babbles_then_stops() -> ScriptedEvent {
    begins("abcdabcd")
}

#[tokio::test(start_paused = true)]
async fn logprobs_in_both_shapes() {
    let with_logprobs = |_: &types::Prompt| {
        let mut steps = steps_of("é");
        let logprobs = |chosen, top| Some(Logprobs { chosen, top });
        steps[0].logprobs = logprobs(-0.5, vec![(TokenId(195), -0.5), (TokenId(65), -1.5)]);
        steps[1].logprobs = logprobs(-0.25, vec![(TokenId(66), -0.125)]);
        steps[2].logprobs = logprobs(f32::NEG_INFINITY, vec![]);
        plays(steps)
    };
    let fake_serve = FakeServe::new(with_logprobs);
    let answer = chat(&fake_serve, json!({"logprobs": true, "top_logprobs": 2})).await.json();
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({"refusal": null, "content": [
            {"token": "\u{fffd}", "logprob": -0.5, "bytes": [195], "top_logprobs": [
                {"token": "\u{fffd}", "logprob": -0.5, "bytes": [195]}, {"token": "A", "logprob": -1.5, "bytes": [65]},
            ]},
            {"token": "\u{fffd}", "logprob": -0.25, "bytes": [169], "top_logprobs": [
                {"token": "B", "logprob": -0.125, "bytes": [66]},
            ]},
            {"token": "<|end|>", "logprob": -9999.0, "bytes": b"<|end|>", "top_logprobs": []},
        ]})
    );
    let answer = complete(&fake_serve, json!({"logprobs": 2})).await.json();
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({
            "tokens": ["\u{fffd}", "\u{fffd}", "<|end|>"],
            "token_logprobs": [-0.5, -0.25, -9999.0],
            "top_logprobs": [
                {"\u{fffd}": -0.5, "A": -1.5}, {"B": -0.125, "\u{fffd}": -0.25}, {"<|end|>": -9999.0},
            ],
            "text_offset": [0, 0, 1],
        })
    );
}

#[tokio::test(start_paused = true)]
async fn text_offset_counts_text_that_may_become_a_stop_string() {
    let fake_serve = FakeServe::new(|_| {
        let with_logprobs =
            |step| types::Step { logprobs: Some(Logprobs { chosen: -0.5, top: vec![] }), ..step };
        plays(steps_of("abc").into_iter().map(with_logprobs).collect())
    });
    for (stop, stream) in [("zz", false), ("abz", false), ("abz", true), ("bc", true)] {
        let fields = json!({"logprobs": 0, "stop": stop, "stream": stream});
        let answer = complete(&fake_serve, fields).await;
        let parts = if stream { answer.events() } else { vec![answer.json()] };
        let offsets: Vec<u64> = parts
            .iter()
            .filter_map(|part| part["choices"][0]["logprobs"]["text_offset"].as_array())
            .flatten()
            .filter_map(serde_json::Value::as_u64)
            .collect();
        let expected: &[u64] = if stop == "bc" { &[0, 1, 2] } else { &[0, 1, 2, 3] };
        assert_eq!(offsets, expected, "{stop}");
    }
}

#[tokio::test(start_paused = true)]
async fn chats_return_token_ids() {
    let answer = chat(&FakeServe::saying("A"), json!({"return_token_ids": true})).await.json();
    assert_eq!(answer["prompt_token_ids"], json!([258, 72, 105, 256, 259]));
    assert_eq!(answer["choices"][0]["token_ids"], json!([65, 256]));
}

#[tokio::test(start_paused = true)]
async fn models() {
    let get = async |path: &str| {
        let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        send(app(&FakeServe::saying("x")), request).await
    };
    let model =
        json!({"id": "org/mock", "object": "model", "created": 0, "owned_by": "baton", "max_model_len": 512});
    assert_eq!(get("/v1/models").await.json(), json!({"object": "list", "data": [model]}));
    assert_eq!(get("/v1/models/org/mock").await.json(), model);
    let missing = get("/v1/models/other").await;
    assert_eq!((missing.status.as_u16(), &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(get("/live").await.status, 200);
    assert_eq!(get("/health").await.status, 200);
}
