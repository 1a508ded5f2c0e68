//! An HTTP client that sees every token. Each request has its own connection, so dropping it closes the
//! connection.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures::future::join_all;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::in_time;

/// A client of one HTTP endpoint.
#[derive(Clone, Debug)]
pub struct Client {
    addr: SocketAddr,
}

/// A request: a completion of token ids.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub headers: Vec<(&'static str, String)>,
    pub extra: Value,
}

/// All tokens of a successful answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub finish: String,
    pub cached_tokens: u64,
}

/// An error as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The HTTP status; `None` if the error came in mid-stream.
    pub status: Option<u16>,
    pub code: String,
    pub message: String,
}

impl Ask {
    pub fn new(prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self { prompt, max_tokens, headers: Vec::new(), extra: json!({}) }
    }

    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    #[must_use]
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.extra[field] = value;
        self
    }

    fn body(&self, stream: bool) -> Value {
        let mut body = json!({
            "model": "mock",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "return_token_ids": true,
            "stream": stream,
        });
        if stream {
            body["stream_options"] = json!({ "include_usage": true });
        }
        for (field, value) in self.extra.as_object().expect("fields") {
            body[field] = value.clone();
        }
        body
    }
}

impl Client {
    pub fn new(addr: SocketAddr) -> Self {
        Self { addr }
    }

    /// Fetches a JSON page that must exist.
    pub async fn get_json(&self, path: &str) -> Value {
        let (status, body) = self.get(path).await;
        assert_eq!(status, StatusCode::OK, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        self.try_get(path).await.expect("an answer")
    }

    /// Fetches a page. The connection may break.
    pub async fn try_get(&self, path: &str) -> Result<(StatusCode, String), hyper::Error> {
        let request = Request::get(path).header("host", "test").body(Full::default()).expect("a request");
        let (response, _connection) = self.send(request).await?;
        let status = response.status();
        let body = in_time("a page", response.into_body().collect()).await?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }

    /// Returns the value of a counter on the metrics page; 0 while it is absent. `name` includes its labels.
    pub async fn counter(&self, name: &str) -> u64 {
        let page = self.get("/metrics").await.1;
        let metric = name.split('{').next().unwrap_or_default();
        let of_histogram = ["_count", "_sum", "_bucket"].iter().find_map(|part| metric.strip_suffix(part));
        let is_there = |metric: &str| page.contains(&format!("# TYPE {metric} "));
        assert!(is_there(metric) || of_histogram.is_some_and(is_there), "no metric `{metric}`:\n{page}");
        let of = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        page.lines().find_map(of).unwrap_or(0)
    }

    /// Returns the bytes of KV that have arrived over a connector, by the router's count.
    pub async fn kv_arrived(&self, connector: &str) -> u64 {
        self.counter(&format!("baton_router_kv_arrived_bytes_total{{connector=\"{connector}\"}}")).await
    }

    /// Posts any body, and returns status, headers and body.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> (StatusCode, hyper::HeaderMap, String) {
        self.post_with(path, &[], body).await
    }

    /// Posts any body with these headers.
    pub async fn post_with(
        &self,
        path: &str,
        headers: &[(&'static str, String)],
        body: impl Into<Bytes>,
    ) -> (StatusCode, hyper::HeaderMap, String) {
        let request = Request::post(path).header("host", "test").header("content-type", "application/json");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, value));
        let request = request.body(Full::new(body.into())).expect("a request");
        let (response, _connection) = self.send(request).await.expect("an answer");
        let (status, headers) = (response.status(), response.headers().clone());
        let body = in_time("an answer", response.into_body().collect()).await.expect("a body").to_bytes();
        (status, headers, String::from_utf8_lossy(&body).into_owned())
    }

    /// Lets `n_askers` tasks send these requests in turn, repeatedly, while `happens` runs. Each answer must
    /// equal the expected one. `happens` gets the number of requests so far.
    ///
    /// # Panics
    /// If an answer differs, or a request gets none.
    pub async fn ask_while<T>(
        &self,
        n_askers: usize,
        (asks, expected): (&[Ask], &[Answer]),
        happens: impl AsyncFnOnce(&AtomicUsize) -> T,
    ) -> T {
        let (over, next) = (AtomicBool::new(false), AtomicUsize::new(0));
        let one = async || {
            while !over.load(Ordering::Relaxed) {
                let idx = next.fetch_add(1, Ordering::Relaxed) % asks.len();
                let answer = self.ask(&asks[idx]).await.expect("another node is always there");
                assert_eq!(answer.tokens, expected[idx].tokens, "request {idx}");
            }
        };
        let happening = async {
            let seen = happens(&next).await;
            over.store(true, Ordering::Relaxed);
            seen
        };
        tokio::join!(join_all((0..n_askers).map(|_| one())), happening).1
    }

    /// Sends a request and waits for the whole answer, token by token.
    pub async fn ask(&self, ask: &Ask) -> Result<Answer, Failed> {
        in_time("an answer", async {
            let mut stream = self.stream(ask).await?;
            let mut answer = Answer { tokens: Vec::new(), finish: String::new(), cached_tokens: 0 };
            while let Some(event) = stream.next().await? {
                add(&mut answer, &event);
            }
            Ok(answer)
        })
        .await
    }

    /// Sends a request, and returns with the stream's head. Dropping the stream closes the connection.
    pub async fn stream(&self, ask: &Ask) -> Result<Stream, Failed> {
        let mut request = Request::post("/v1/completions").header("host", "test");
        for (name, value) in &ask.headers {
            request = request.header(*name, value);
        }
        let request = request.body(Full::from(ask.body(true).to_string())).expect("a request");
        let (response, connection) = self.send(request).await.map_err(broken)?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(Stream { body: response.into_body(), pending: Vec::new(), _connection: connection });
        }
        let body = response.into_body().collect().await.map_err(broken)?.to_bytes();
        Err(failed(Some(status.as_u16()), &serde_json::from_slice(&body).unwrap_or_default()))
    }

    async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Connection), hyper::Error> {
        let stream = TcpStream::connect(self.addr).await.expect("the endpoint listens");
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
        Ok((sender.send_request(request).await?, connection))
    }
}

/// The connection behind a request. Dropping it closes the connection.
#[derive(Debug)]
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A stream of server-sent events.
#[derive(Debug)]
pub struct Stream {
    body: Incoming,
    pending: Vec<u8>,
    _connection: Connection,
}

impl Stream {
    /// Returns the next event; `None` after `[DONE]`. A stream that ends without `[DONE]`, or with an error,
    /// has failed.
    pub async fn next(&mut self) -> Result<Option<Value>, Failed> {
        loop {
            if let Some(event) = self.take_event() {
                if event == "[DONE]" {
                    return Ok(None);
                }
                let event: Value = serde_json::from_str(&event).expect("JSON in an event");
                return if event["error"].is_null() { Ok(Some(event)) } else { Err(failed(None, &event)) };
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.pending.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
                Some(Err(error)) => return Err(broken(error)),
                None => return Err(broken("the stream ended without [DONE]")),
            }
        }
    }

    fn take_event(&mut self) -> Option<String> {
        let end = self.pending.windows(2).position(|pair| pair == b"\n\n")?;
        let event: Vec<u8> = self.pending.drain(..end + 2).collect();
        let event = String::from_utf8_lossy(&event).into_owned();
        let data: String = event.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        if data.is_empty() { self.take_event() } else { Some(data) }
    }
}

fn add(answer: &mut Answer, event: &Value) {
    if let Some(choice) = event["choices"].get(0) {
        let ids = choice["token_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        answer.tokens.extend(ids.iter().map(|id| id.as_u64().expect("a token id") as u32));
        if let Some(finish) = choice["finish_reason"].as_str() {
            answer.finish = finish.to_owned();
        }
    }
    if let Some(cached) = event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() {
        answer.cached_tokens = cached;
    }
}

fn broken(error: impl ToString) -> Failed {
    Failed { status: None, code: "broken".to_owned(), message: error.to_string() }
}

fn failed(status: Option<u16>, body: &Value) -> Failed {
    let text = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    Failed { status, code: text("code"), message: text("message") }
}
