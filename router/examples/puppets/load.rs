//! Clients that send one request after the other, each on a connection of its own.

use std::cell::RefCell;
use std::io::Write as _;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

const ANSWER_WITHIN: Duration = Duration::from_secs(60);

#[derive(Default)]
struct LoadReport {
    failed: usize,
    chunks: usize,
    first_failure: Option<String>,
    latencies_us: Vec<u64>,
}

/// Prints one JSON line: the requests, their chunks and their times.
pub(crate) async fn run(args: &[&str]) -> Result<(), String> {
    let [addr, kind, connections, seconds, chunks, gap_ms] = args else {
        return Err(crate::USAGE.to_owned());
    };
    let number = |text: &str| text.parse::<usize>().map_err(|error| format!("{text}: {error}"));
    let request = request(kind, number(chunks)?, number(gap_ms)?);
    let report = Rc::new(RefCell::new(LoadReport::default()));
    let began = Instant::now();
    let until = began + Duration::from_secs(number(seconds)? as u64);
    let mut clients = JoinSet::new();
    for _ in 0..number(connections)? {
        let (addr, request, report) = ((*addr).to_owned(), request.clone(), Rc::clone(&report));
        clients.spawn_local(async move {
            let mut stream = None;
            while Instant::now() < until {
                let sent = Instant::now();
                let answered = timeout(ANSWER_WITHIN, ask(&addr, &mut stream, &request)).await;
                let mut report = report.borrow_mut();
                match answered.unwrap_or_else(|_| Err("no answer".to_owned())) {
                    Ok(chunks) => {
                        report.chunks += chunks;
                        report.latencies_us.push(sent.elapsed().as_micros() as u64);
                    }
                    Err(reason) => {
                        stream = None;
                        report.failed += 1;
                        report.first_failure.get_or_insert(reason);
                    }
                }
            }
        });
    }
    while clients.join_next().await.is_some() {}
    let mut report = report.take();
    report.latencies_us.sort_unstable();
    let percentile = |share: f64| {
        let last = report.latencies_us.len().saturating_sub(1) as f64;
        report.latencies_us.get((last * share) as usize).copied()
    };
    let line = json!({
        "requests": report.latencies_us.len(), "failed": report.failed, "failure": report.first_failure,
        "chunks": report.chunks, "seconds": began.elapsed().as_secs_f64(),
        "p50_us": percentile(0.5), "p99_us": percentile(0.99),
    });
    writeln!(std::io::stdout(), "{line}").map_err(|error| error.to_string())
}

fn request(kind: &str, chunks: usize, gap_ms: usize) -> Vec<u8> {
    let sampling = json!({ "model": "mock", "stream": true, "max_tokens": chunks, "seed": gap_ms });
    let mut body = sampling.as_object().cloned().unwrap_or_default();
    let path = if kind == "tokens" {
        body.insert("prompt".to_owned(), json!((0..512).map(|id| id % 256).collect::<Vec<u32>>()));
        "/v1/completions"
    } else {
        let content = "All the words of a text of 1 KiB. ".repeat(30);
        body.insert("messages".to_owned(), json!([{ "role": "user", "content": content }]));
        "/v1/chat/completions"
    };
    let body = serde_json::Value::Object(body).to_string();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    (head + &body).into_bytes()
}

/// Sends a request and reads its answer. Returns the number of chunks, without the one that says `[DONE]`.
async fn ask(addr: &str, kept: &mut Option<TcpStream>, request: &[u8]) -> Result<usize, String> {
    let failed = |error: std::io::Error| error.to_string();
    let stream = match kept {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(addr).await.map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            kept.insert(stream)
        }
    };
    stream.write_all(request).await.map_err(failed)?;
    let mut answer = Vec::with_capacity(64 << 10);
    while !answer.ends_with(b"\r\n0\r\n\r\n") {
        let is_refusal = answer.len() > 12 && !answer.starts_with(b"HTTP/1.1 200");
        if is_refusal || stream.read_buf(&mut answer).await.map_err(failed)? == 0 {
            return Err(String::from_utf8_lossy(&answer).into_owned());
        }
    }
    let n_events = answer.windows(6).filter(|six| six == b"data: ").count();
    Ok(n_events.saturating_sub(1))
}
