//! Tests of `/tokenize` and `/detokenize`.

use serde_json::{Value, json};

use super::fake_serve::*;

async fn answer(path: &str, body: Value) -> Answer {
    post(&FakeServe::saying(""), path, body.to_string()).await
}

#[tokio::test(start_paused = true)]
async fn a_text_becomes_tokens_and_text_again() {
    let tokens = answer("/tokenize", json!({"prompt": "Hé<|end|>", "return_token_strs": true})).await.json();
    let strs = json!(["H", "\u{fffd}", "\u{fffd}", "<|end|>"]);
    let expected =
        json!({"count": 4, "max_model_len": 512, "tokens": [72, 195, 169, 256], "token_strs": strs});
    assert_eq!(tokens, expected);
    let text = answer("/detokenize", json!({"model": "org/mock", "tokens": tokens["tokens"]})).await.json();
    assert_eq!(text, json!({"prompt": "Hé<|end|>"}));
}

#[tokio::test(start_paused = true)]
async fn a_chat_becomes_the_tokens_that_the_model_reads() {
    let fake_serve = FakeServe::saying("");
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let chat_fields = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]});
    assert_eq!(chat(&fake_serve, chat_fields.clone()).await.status, 200);
    let tokens = answer("/tokenize", chat_fields).await.json();
    let read: Vec<u32> = fake_serve.seen()[0].tokens.iter().map(|token| token.0).collect();
    assert_eq!((&tokens["tokens"], &tokens["token_strs"]), (&json!(read), &json!(null)));
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let open =
        answer("/tokenize", json!({"messages": messages, "add_generation_prompt": false})).await.json();
    assert_eq!(open["tokens"], json!([258, 72, 105, 256]));
    let continued = json!({"messages": messages, "continue_final_message": true});
    assert_eq!(answer("/tokenize", continued).await.json()["tokens"], json!([258, 72, 105]));
}

#[tokio::test(start_paused = true)]
async fn wrong_requests_are_refused_by_name() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": messages}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "tools": [{}]}), "tools"),
        ("/tokenize", json!({"prompt": "a", "speed": 1}), "speed"),
        ("/tokenize", json!({"prompt": "a", "model": "other"}), "model"),
        (
            "/tokenize",
            json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        ("/tokenize", json!({"messages": messages, "add_special_tokens": true}), "add_special_tokens"),
        ("/tokenize", json!({"messages": [{}]}), "messages[0].role"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [1, 261]}), "tokens"),
        ("/detokenize", json!({"tokens": "a"}), "tokens"),
        ("/detokenize", json!({"tokens": [], "speed": 1}), "speed"),
    ] {
        let answer = answer(path, body.clone()).await;
        assert!(answer.status.is_client_error(), "{body}");
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
    }
    let neutral = json!({"messages": messages, "chat_template": null, "continue_final_message": false});
    assert_eq!(answer("/tokenize", neutral).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn embeddings_are_refused() {
    let answer = answer("/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (400, &json!("unsupported_parameter"))
    );
    assert!(answer.body.contains("embeddings are not supported"), "{}", answer.body);
}
