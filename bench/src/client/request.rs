//! Writes the bytes of one streaming request.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde_json::{Map, Value};

use crate::client::target::TargetServer;

/// The two endpoints of an OpenAI-compatible server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Endpoint {
    /// The endpoint `/v1/completions`. It takes token ids, so the prompt has the planned length without a
    /// tokenizer.
    #[default]
    Completions,
    /// The endpoint `/v1/chat/completions`. It takes text.
    Chat,
}

/// A prompt in the form in which it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    TokenIds(Vec<u32>),
    Text(String),
    /// Messages as (role, content), the oldest first.
    Messages(Vec<(&'static str, String)>),
}

/// The optional request fields that the server accepts, as [`mod@super::survey`] has found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionalFields {
    pub return_token_ids: bool,
    pub continuous_usage: bool,
    pub ignore_eos: bool,
}

/// The parts that are the same in all requests of a run.
#[derive(Clone, Debug)]
pub struct RequestShape {
    endpoint: Endpoint,
    /// The head of the request up to and including `content-length: `.
    head: String,
    /// The beginning of the body: `"model":"...",`.
    model: String,
    /// The fields of the body after `max_tokens`, and the closing brace.
    tail: String,
}

/// The settings from which a shape is made.
#[derive(Clone, Debug)]
pub struct ShapeParts<'a> {
    pub target: &'a TargetServer,
    pub endpoint: Endpoint,
    pub model: &'a str,
    pub extras: OptionalFields,
    /// The headers of the command line, without line ends.
    pub headers: &'a [(String, String)],
    /// The fields of the command line; they replace the harness's own.
    pub fields: &'a Map<String, Value>,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Completions => "/v1/completions",
            Endpoint::Chat => "/v1/chat/completions",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Endpoint::Completions => "completions",
            Endpoint::Chat => "chat",
        }
    }
}

impl RequestShape {
    pub fn new(parts: &ShapeParts<'_>) -> Self {
        let mut head = parts.target.head("POST", parts.endpoint.path());
        head.push_str("content-type: application/json\r\naccept: text/event-stream\r\n");
        for (name, value) in parts.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        let model = format!("\"model\":{},", Value::from(parts.model));
        Self { endpoint: parts.endpoint, head, model, tail: tail(parts) }
    }

    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Writes head and body into one buffer, so that one write sends them.
    pub fn compose(&self, prompt: &Prompt, max_tokens: u32, request_id: &str) -> Vec<u8> {
        let mut body = String::with_capacity(256 + self.tail.len() + prompt.bytes_hint());
        body.push('{');
        body.push_str(&self.model);
        prompt.write(&mut body);
        let _ = write!(body, "\"max_tokens\":{max_tokens}{}", self.tail);
        let mut wire = Vec::with_capacity(self.head.len() + body.len() + 64);
        wire.extend_from_slice(self.head.as_bytes());
        wire.extend_from_slice(
            format!("x-request-id: {request_id}\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(),
        );
        wire.extend_from_slice(body.as_bytes());
        wire
    }
}

/// Writes the fields that are the same in all requests, `,"temperature":0,…}`, once for all.
fn tail(parts: &ShapeParts<'_>) -> String {
    let mut fields = Map::new();
    fields.insert("temperature".to_owned(), 0.into());
    fields.insert("stream".to_owned(), true.into());
    let mut options = serde_json::json!({"include_usage": true});
    if parts.extras.continuous_usage {
        options["continuous_usage_stats"] = true.into();
    }
    fields.insert("stream_options".to_owned(), options);
    if parts.extras.return_token_ids {
        fields.insert("return_token_ids".to_owned(), true.into());
    }
    if parts.extras.ignore_eos {
        fields.insert("ignore_eos".to_owned(), true.into());
    }
    fields.extend(parts.fields.clone());
    let rendered = Value::Object(fields).to_string();
    format!(",{}", &rendered[1..])
}

impl Prompt {
    /// Writes the prompt's field: `"prompt":[…],` or `"messages":[…],`.
    fn write(&self, body: &mut String) {
        match self {
            Prompt::TokenIds(ids) => {
                body.push_str("\"prompt\":[");
                for (nth, id) in ids.iter().enumerate() {
                    let _ = write!(body, "{}{id}", if nth == 0 { "" } else { "," });
                }
                body.push_str("],");
            }
            Prompt::Text(text) => {
                let _ = write!(body, "\"prompt\":{},", Value::from(text.as_str()));
            }
            Prompt::Messages(messages) => {
                let list: Vec<_> = messages.iter().map(|(role, content)| message(role, content)).collect();
                let _ = write!(body, "\"messages\":{},", Value::from(list));
            }
        }
    }

    fn bytes_hint(&self) -> usize {
        match self {
            Prompt::TokenIds(ids) => ids.len() * 7,
            Prompt::Text(text) => text.len() * 5 / 4,
            Prompt::Messages(messages) => {
                messages.iter().map(|(_, content)| 40 + content.len() * 5 / 4).sum()
            }
        }
    }
}

fn message(role: &str, content: &str) -> Value {
    serde_json::json!({"role": role, "content": content})
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// Returns the JSON body of a request that was written.
    pub(crate) fn body_of(wire: &[u8]) -> Value {
        let text = String::from_utf8(wire.to_vec()).expect("requests are text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        assert!(head.contains(&format!("content-length: {}", body.len())), "{head}");
        serde_json::from_str(body).expect("the body is JSON")
    }

    #[tokio::test]
    async fn requests_are_whole_and_typed_fields_win() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let target = TargetServer::resolve(&url).await.expect("it accepts");
        let fields = json!({"temperature": 0.5, "top_p": 0.9});
        let shape = RequestShape::new(&ShapeParts {
            target: &target,
            endpoint: Endpoint::Completions,
            model: "a \"b\"",
            extras: OptionalFields { return_token_ids: true, continuous_usage: true, ignore_eos: false },
            headers: &[("x-a".to_owned(), "1".to_owned())],
            fields: fields.as_object().expect("an object"),
        });
        let wire = shape.compose(&Prompt::TokenIds(vec![1, 22, 333]), 7, "r-1");
        assert!(wire.starts_with(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:"));
        let expected = json!({
            "model": "a \"b\"", "prompt": [1, 22, 333], "max_tokens": 7, "temperature": 0.5, "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
            "return_token_ids": true, "top_p": 0.9,
        });
        assert_eq!(body_of(&wire), expected);
        let chat = shape.compose(&Prompt::Messages(vec![("user", "hi \n".to_owned())]), 7, "r-2");
        assert_eq!(body_of(&chat)["messages"], json!([{"role": "user", "content": "hi \n"}]));
    }
}
