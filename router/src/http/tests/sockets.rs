//! Tests that need a real connection: the times at which bytes are sent, and clients that disconnect.

use std::sync::Arc;
use std::time::Duration;

use chassis::net::{Net, TcpNet};
use chassis::server::{self, ServerLimits};
use chassis::{Gate, Shutdown, Stream, Task, spawn_guarded};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::fake_serve::*;
use crate::http::WriteTimeoutListener;

const WITHIN: Duration = Duration::from_secs(20);

/// The HTTP API, served on a free port.
struct Served {
    address: String,
    shutdown: Shutdown,
    server: Task<Result<(), chassis::StillHeld>>,
}

impl Served {
    async fn new(fake_serve: &Arc<FakeServe>, patience: Duration) -> Self {
        let listener = TcpNet.listen("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let (listener, shutdown) = (Box::new(WriteTimeoutListener::new(listener, patience)), Shutdown::new());
        let serve = server::serve(
            listener,
            server::PortTls::Plaintext,
            app(fake_serve),
            shutdown.clone(),
            ServerLimits::default(),
        );
        Self { address, shutdown, server: spawn_guarded(&Gate::new("test"), "http", serve) }
    }

    async fn client(&self) -> Client {
        Client {
            stream: TcpNet.connect(&self.address).await.expect("the server listens"),
            read: String::new(),
        }
    }

    async fn stop(self) {
        self.shutdown.trigger();
        timeout(WITHIN, self.server).await.expect("in time").expect("it ran").expect("nothing is late");
    }
}

/// A client that reads the response's bytes as they arrive.
struct Client {
    stream: Stream,
    read: String,
}

impl Client {
    async fn send(&mut self, path: &str, body: &str) {
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        self.stream.write_all(format!("{head}{body}").as_bytes()).await.expect("sent");
    }

    /// Reads until the response contains `text`.
    async fn reads(&mut self, text: &str) {
        let mut bytes = [0; 4096];
        while !self.read.contains(text) {
            let n = timeout(WITHIN, self.stream.read(&mut bytes)).await.expect("in time").expect("open");
            assert!(n > 0, "the end came before {text:?}: {}", self.read);
            self.read.push_str(std::str::from_utf8(&bytes[..n]).expect("whole characters"));
        }
    }
}

fn streamed() -> String {
    json!({"prompt": "a", "stream": true, "max_tokens": 500}).to_string()
}

#[tokio::test]
async fn the_first_event_is_not_held_back() {
    let fake_serve = FakeServe::new(|_| begins("x"));
    let served = Served::new(&fake_serve, WITHIN).await;
    let mut client = served.client().await;
    client.send("/v1/completions", &streamed()).await;
    client.reads(r#""text":"x""#).await;
    assert!(client.read.starts_with("HTTP/1.1 200 OK\r\n"));
    fake_serve.holds(1).await;
    drop(client);
    fake_serve.holds(0).await;
    served.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    // The numbers of prompts in progress: the second answer waits for the first one's prefill.
    for (play, stream, n_held) in [
        (ScriptedEvent::silence as fn() -> ScriptedEvent, true, 1),
        (ScriptedEvent::silence, false, 1),
        (|| begins("x"), false, 2),
    ] {
        let fake_serve = FakeServe::new(move |_| play());
        let served = Served::new(&fake_serve, WITHIN).await;
        let mut client = served.client().await;
        client.send("/v1/completions", &json!({"prompt": "a", "stream": stream, "n": 2}).to_string()).await;
        fake_serve.holds(n_held).await;
        drop(client);
        fake_serve.holds(0).await;
        served.stop().await;
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up() {
    let fake_serve = FakeServe::new(|_| babbles());
    let served = Served::new(&fake_serve, Duration::from_millis(200)).await;
    let mut client = served.client().await;
    client.send("/v1/completions", &streamed()).await;
    client.reads("data: ").await;
    fake_serve.holds(0).await;
    served.stop().await;
}

#[tokio::test]
async fn a_body_that_is_too_large_is_answered_and_the_next_request_works() {
    let fake_serve = FakeServe::saying("fine");
    let served = Served::new(&fake_serve, WITHIN).await;
    let mut client = served.client().await;
    client.send("/v1/completions", &json!({"prompt": "a".repeat(10_000_000)}).to_string()).await;
    client.reads("body_too_large").await;
    assert!(client.read.starts_with("HTTP/1.1 400 "));
    client.read.clear();
    client.send("/v1/completions", r#"{"prompt": "a"}"#).await;
    client.reads("fine").await;
    served.stop().await;
}

#[tokio::test]
async fn streams_end_before_the_server_does() {
    let fake_serve = FakeServe::saying("to the end");
    let served = Served::new(&fake_serve, WITHIN).await;
    let mut client = served.client().await;
    client.send("/v1/completions", &streamed()).await;
    client.reads("data: ").await;
    served.stop().await;
    client.reads("[DONE]").await;
}
