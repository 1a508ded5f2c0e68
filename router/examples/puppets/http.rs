//! A prefill and a decode server that speak SGLang's protocol. They find each other by the request's
//! `bootstrap_room`: a decode server whose request had no prefill answers 500.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

/// The longest time between the two requests of a pair.
const PAIR_WITHIN: Duration = Duration::from_secs(5);
const PAGE: &str = r#"{"status":"ready","model_path":"mock","tokenizer_path":"mock","data":[{"id":"mock"}]}"#;

#[derive(Clone, Copy)]
enum Leg {
    Prefill,
    Decode,
}

/// The bootstrap rooms whose prompts are computed and whose KV no decode server has fetched.
#[derive(Default)]
struct Rooms {
    open: RefCell<HashSet<u64>>,
    opened: Notify,
}

/// The fields that count. A router may write those that a client left out as `null`.
#[derive(Deserialize)]
struct Body {
    bootstrap_room: u64,
    stream: Option<bool>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    seed: Option<u64>,
}

struct Message {
    is_get: bool,
    body: Vec<u8>,
}

pub(crate) async fn serve(prefill: &str, decode: &str) -> Result<(), String> {
    let rooms = Rc::new(Rooms::default());
    let prefill = accept(prefill, Leg::Prefill, Rc::clone(&rooms));
    let decode = accept(decode, Leg::Decode, rooms);
    tokio::try_join!(prefill, decode).map(|_| ())
}

async fn accept(addr: &str, leg: Leg, rooms: Rc<Rooms>) -> Result<(), String> {
    let listener = TcpListener::bind(addr).await.map_err(|error| format!("{addr}: {error}"))?;
    loop {
        let (stream, _) = listener.accept().await.map_err(|error| error.to_string())?;
        spawn_local(connection(stream, leg, Rc::clone(&rooms)));
    }
}

async fn connection(mut stream: TcpStream, leg: Leg, rooms: Rc<Rooms>) {
    drop(stream.set_nodelay(true));
    let mut unread = Vec::new();
    while let Some(message) = read(&mut stream, &mut unread).await {
        if answer(&mut stream, leg, &rooms, &message).await.is_err() {
            return;
        }
    }
}

/// Reads one request. The bytes after it stay in `unread`.
async fn read(stream: &mut TcpStream, unread: &mut Vec<u8>) -> Option<Message> {
    loop {
        if let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&unread[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
            if unread.len() >= end + 4 + length {
                let body = unread[end + 4..end + 4 + length].to_vec();
                unread.drain(..end + 4 + length);
                return Some(Message { is_get: head.starts_with("get"), body });
            }
        }
        if stream.read_buf(unread).await.ok()? == 0 {
            return None;
        }
    }
}

async fn answer(stream: &mut TcpStream, leg: Leg, rooms: &Rooms, message: &Message) -> std::io::Result<()> {
    if message.is_get {
        return whole(stream, "200 OK", PAGE).await;
    }
    let body: Body = match serde_json::from_slice(&message.body) {
        Ok(body) => body,
        Err(error) => {
            return whole(stream, "400 Bad Request", &format!("not a leg of a pair: {error}")).await;
        }
    };
    let n_chunks = match leg {
        Leg::Prefill => {
            rooms.open.borrow_mut().insert(body.bootstrap_room);
            rooms.opened.notify_waiters();
            1
        }
        Leg::Decode if rooms.take(body.bootstrap_room).await => {
            body.max_tokens.or(body.max_completion_tokens).unwrap_or(1)
        }
        Leg::Decode => {
            return whole(stream, "500 Oops", "{\"message\":\"the prefill was skipped\"}").await;
        }
    };
    if body.stream == Some(true) {
        streamed(stream, n_chunks, Duration::from_millis(body.seed.unwrap_or(0))).await
    } else {
        whole(stream, "200 OK", PAGE).await
    }
}

impl Rooms {
    async fn take(&self, room: u64) -> bool {
        let taken = async {
            loop {
                let opened = self.opened.notified();
                if self.open.borrow_mut().remove(&room) {
                    return;
                }
                opened.await;
            }
        };
        timeout(PAIR_WITHIN, taken).await.is_ok()
    }
}

async fn whole(stream: &mut TcpStream, status: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).await
}

/// Writes each chunk by itself, as an engine does.
async fn streamed(stream: &mut TcpStream, n_chunks: usize, gap: Duration) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let event = concat!(
        r#"data: {"id":"0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"#,
        r#""model":"mock","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}"#,
        "\n\n"
    );
    let chunk = framed(event);
    for nth in 0..n_chunks {
        if nth > 0 && !gap.is_zero() {
            sleep(gap).await;
        }
        stream.write_all(chunk.as_bytes()).await?;
    }
    stream.write_all((framed("data: [DONE]\n\n") + "0\r\n\r\n").as_bytes()).await
}

fn framed(event: &str) -> String {
    format!("{:x}\r\n{event}\r\n", event.len())
}
