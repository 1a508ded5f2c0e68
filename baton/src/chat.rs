//! `baton chat`: a conversation in the terminal, with streamed answers.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::process::ExitCode;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use crate::cli::ChatArgs;
use crate::exit::CommandError;
use crate::{http_url, interrupt, output};

/// The largest incomplete server-sent event, in bytes.
const EVENT_BYTES_MAX: usize = 1 << 20;

pub(crate) fn run(args: &ChatArgs) -> Result<ExitCode, CommandError> {
    interrupt::says("interrupted")?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::start)?;
    let endpoint = Endpoint::new(&args.url, &args.header)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => runtime.block_on(endpoint.first_model())?,
    };
    let mut talk = Conversation { model, max_tokens: args.max_tokens, messages: Vec::new() };
    if let Some(system) = &args.system {
        talk.messages.push(json!({ "role": "system", "content": system }));
    }
    match &args.message {
        Some(message) => runtime.block_on(talk.say(&endpoint, message))?,
        None => converse(&runtime, &endpoint, &mut talk)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads lines until the end of input. An answer that fails is reported, and the conversation continues.
fn converse(
    runtime: &tokio::runtime::Runtime,
    endpoint: &Endpoint,
    talk: &mut Conversation,
) -> Result<(), CommandError> {
    output::tell(&format!("talking to {} at {}; Ctrl-D ends", talk.model, endpoint.base));
    let interactive = std::io::stdin().is_terminal();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if interactive {
            let _ = write!(std::io::stderr(), "> ");
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.map_err(CommandError::work)?;
        if line.trim().is_empty() {
            continue;
        }
        if let Err(failed) = runtime.block_on(talk.say(endpoint, &line)) {
            failed.report();
        }
    }
}

/// A conversation: its messages so far, and the model that answers.
struct Conversation {
    model: String,
    max_tokens: u32,
    messages: Vec<Value>,
}

impl Conversation {
    /// Sends one message and prints the answer. If there is no answer, the message is removed from the
    /// conversation.
    async fn say(&mut self, endpoint: &Endpoint, text: &str) -> Result<(), CommandError> {
        self.messages.push(json!({ "role": "user", "content": text }));
        match self.answer(endpoint).await {
            Ok(answer) => {
                self.messages.push(json!({ "role": "assistant", "content": answer }));
                Ok(())
            }
            Err(failed) => {
                self.messages.pop();
                Err(failed)
            }
        }
    }

    async fn answer(&self, endpoint: &Endpoint) -> Result<String, CommandError> {
        let request = json!({
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "stream": true,
        });
        let mut body = endpoint.post("/v1/chat/completions", &request).await?.into_body();
        let (mut pending, mut answer) = (Vec::new(), String::new());
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(CommandError::work)?.into_data() {
                pending.extend_from_slice(&data);
            }
            while let Some(event) = take_event(&mut pending) {
                if event == "[DONE]" {
                    print_piece("\n")?;
                    return Ok(answer);
                }
                let piece = piece_of(&event)?;
                print_piece(&piece)?;
                answer.push_str(&piece);
            }
            if pending.len() > EVENT_BYTES_MAX {
                return Err(CommandError::work("the endpoint sent an event without an end"));
            }
        }
        Err(CommandError::work("the answer ended early"))
    }
}

fn print_piece(piece: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes()).and_then(|()| out.flush()).map_err(CommandError::work)
}

/// Removes the next complete event from `pending` and returns its data; `None` if no event is complete.
fn take_event(pending: &mut Vec<u8>) -> Option<String> {
    loop {
        let end = pending.windows(2).position(|pair| pair == b"\n\n")?;
        let event: Vec<u8> = pending.drain(..end + 2).collect();
        let event = String::from_utf8_lossy(&event);
        let data: Vec<&str> =
            event.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start).collect();
        if !data.is_empty() {
            return Some(data.join("\n"));
        }
    }
}

fn piece_of(event: &str) -> Result<String, CommandError> {
    let event: Value = serde_json::from_str(event).map_err(CommandError::work)?;
    if let Some(message) = event["error"]["message"].as_str() {
        return Err(CommandError::work(message.to_owned()));
    }
    Ok(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned())
}

/// The address of an OpenAI-compatible endpoint, and its client.
struct Endpoint {
    base: String,
    /// The headers of every request.
    headers: HeaderMap,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Endpoint {
    fn new(url: &str, headers: &[(String, String)]) -> Result<Self, CommandError> {
        let base = http_url::parse(url)?;
        // A trailing `/v1` is removed, because other clients use the address with it.
        let base = base.strip_suffix("/v1").unwrap_or(&base).to_owned();
        let header = |(name, value): &(String, String)| {
            let name: HeaderName = name.parse().map_err(CommandError::usage)?;
            let value: HeaderValue = value.parse().map_err(CommandError::usage)?;
            Ok((name, value))
        };
        let headers = headers.iter().map(header).collect::<Result<_, CommandError>>()?;
        let client = Client::builder(TokioExecutor::new()).build_http();
        Ok(Self { base, headers, client })
    }

    async fn first_model(&self) -> Result<String, CommandError> {
        let request = Request::get(format!("{}/v1/models", self.base))
            .body(Full::default())
            .map_err(CommandError::usage)?;
        let models = json_of(self.send(request).await?).await?;
        let first = models["data"][0]["id"].as_str();
        first
            .map(str::to_owned)
            .ok_or_else(|| CommandError::work(format!("{} serves no model now", self.base)))
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Response<Incoming>, CommandError> {
        let request =
            Request::post(format!("{}{path}", self.base)).header("content-type", "application/json");
        self.send(request.body(Full::from(body.to_string())).map_err(CommandError::usage)?).await
    }

    async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>, CommandError> {
        request.headers_mut().extend(self.headers.clone());
        let response = self.client.request(request).await.map_err(|error| self.unreachable(&error))?;
        let base = &self.base;
        http_url::refuse_grpc(&response).map_err(|reason| CommandError::work(format!("{base}: {reason}")))?;
        if response.status() == StatusCode::OK {
            return Ok(response);
        }
        let status = response.status();
        let body = json_of(response).await.unwrap_or_default();
        let message = body["error"]["message"].as_str().unwrap_or("no reason was given");
        Err(CommandError::work(format!("{status}: {message}")))
    }

    fn unreachable(&self, error: &hyper_util::client::legacy::Error) -> CommandError {
        let (base, cause) = (&self.base, http_url::failure(error));
        CommandError::work(format!("no answer from {base}: {cause}; is `baton up` running?"))
    }
}

async fn json_of(response: Response<Incoming>) -> Result<Value, CommandError> {
    let body = response.into_body().collect().await.map_err(CommandError::work)?.to_bytes();
    serde_json::from_slice(&body).map_err(CommandError::work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_taken_whole() {
        let mut pending = b": keep-alive\n\ndata: {\"a\":1}\n\ndata: [DO".to_vec();
        assert_eq!(take_event(&mut pending).as_deref(), Some("{\"a\":1}"));
        assert_eq!(take_event(&mut pending), None);
        pending.extend_from_slice(b"NE]\n\n");
        assert_eq!(take_event(&mut pending).as_deref(), Some("[DONE]"));
    }

    #[test]
    fn an_error_in_mid_stream_is_an_error() {
        assert_eq!(piece_of(r#"{"choices":[{"delta":{"content":"hi"}}]}"#).expect("a piece"), "hi");
        assert_eq!(piece_of(r#"{"choices":[{"delta":{}}]}"#).expect("no piece"), "");
        piece_of(r#"{"error":{"message":"gone"}}"#).expect_err("an error");
    }
}
