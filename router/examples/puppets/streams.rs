//! Clients that keep many streams open at once, and measure the time that each token takes from a decode puppet to
//! its client.
//!
//! The token's id is the time at which the puppet sent it, on this machine's clock.

use std::cell::RefCell;
use std::io::Write as _;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// The number of streams that are being opened at a time.
const OPENING_MAX: usize = 16;
/// The longest time until all streams are open.
const OPEN_WITHIN: Duration = Duration::from_secs(300);

#[derive(Default)]
struct Streams {
    n_open: usize,
    failures: Vec<String>,
    /// The times of tokens in microseconds, while all streams are open.
    ways_us: Vec<u32>,
    is_measured: bool,
}

/// Opens the streams, prints a line `open`, measures, and prints the figures as one JSON line.
pub(crate) async fn run(args: &[&str]) -> Result<(), String> {
    let [addr, n_streams, seconds, prompt_tokens, gap_ms] = args else { return Err(crate::USAGE.to_owned()) };
    let number = |text: &str| text.parse::<usize>().map_err(|error| format!("{text}: {error}"));
    let (n_streams, seconds) = (number(n_streams)?, number(seconds)?);
    let (streams, opening) =
        (Rc::new(RefCell::new(Streams::default())), Rc::new(Semaphore::new(OPENING_MAX)));
    let began = Instant::now();
    let mut clients = JoinSet::new();
    for nth in 0..n_streams {
        let request = request(nth, number(prompt_tokens)?, number(gap_ms)?);
        let (addr, streams, opening) = ((*addr).to_owned(), Rc::clone(&streams), Rc::clone(&opening));
        // The request is dropped once it is sent, so that this process stays small.
        clients.spawn_local(async move {
            if let Err(reason) = follow(&addr, request, &opening, &streams).await {
                streams.borrow_mut().failures.push(reason);
            }
        });
    }
    let all_open = async {
        while streams.borrow().n_open + streams.borrow().failures.len() < n_streams {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(OPEN_WITHIN, all_open)
        .await
        .map_err(|_| format!("{} streams are open", streams.borrow().n_open))?;
    let opened_s = began.elapsed().as_secs_f64();
    say(&json!({ "open": streams.borrow().n_open, "opened_s": opened_s }))?;
    // The streams that opened last had their first tokens in a burst.
    tokio::time::sleep(Duration::from_secs(2)).await;
    streams.borrow_mut().is_measured = true;
    tokio::time::sleep(Duration::from_secs(seconds as u64)).await;
    let mut seen = streams.take();
    drop(clients);
    seen.ways_us.sort_unstable();
    let last = seen.ways_us.len().saturating_sub(1) as f64;
    let percentile = |share: f64| seen.ways_us.get((last * share) as usize).copied();
    say(&json!({
        "failed": seen.failures.len(), "failure": seen.failures.first(), "tokens": seen.ways_us.len(),
        "seconds": seconds, "p50_us": percentile(0.5), "p90_us": percentile(0.9), "p99_us": percentile(0.99),
        "max_us": percentile(1.0),
    }))
}

fn say(line: &serde_json::Value) -> Result<(), String> {
    let mut out = std::io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|error| error.to_string())
}

/// Makes a request whose prompt no other stream has.
fn request(nth: usize, prompt_tokens: usize, gap_ms: usize) -> Vec<u8> {
    let prompt: Vec<usize> = (0..prompt_tokens).map(|at| (at * 7 + (nth >> (at % 16))) % 256).collect();
    let body = json!({
        "model": "mock", "stream": true, "max_tokens": 8000, "seed": gap_ms, "prompt": prompt, "ignore_eos": true,
        "return_token_ids": true,
    });
    let body = body.to_string();
    let length = body.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n\
         x-baton-timeout-ms: 3600000\r\ncontent-length: {length}\r\n\r\n"
    );
    (head + &body).into_bytes()
}

/// Sends a request and reads its tokens until the stream ends, which is an error.
async fn follow(
    addr: &str,
    request: Vec<u8>,
    opening: &Semaphore,
    streams: &RefCell<Streams>,
) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut place = Some(opening.acquire().await.map_err(|error| error.to_string())?);
    let mut stream = TcpStream::connect(addr).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.write_all(&request).await.map_err(failed)?;
    drop(request);
    let mut read = Vec::with_capacity(1 << 10);
    loop {
        if stream.read_buf(&mut read).await.map_err(failed)? == 0 {
            return Err(format!("the stream ended: {}", String::from_utf8_lossy(&read)));
        }
        let now = crate::now_us();
        if place.is_some() && !read.starts_with(b"HTTP/1.1 200") {
            return Err(String::from_utf8_lossy(&read).into_owned());
        }
        // Only complete events are parsed. The rest of an incomplete one waits for the next read.
        let Some(end) = read.windows(2).rposition(|two| two == b"\n\n") else { continue };
        let sent = times(&read[..end]);
        read.drain(..end);
        if !sent.is_empty() && place.take().is_some() {
            streams.borrow_mut().n_open += 1;
        }
        let mut streams = streams.borrow_mut();
        if streams.is_measured {
            streams.ways_us.extend(sent.iter().map(|sent| now.wrapping_sub(*sent)));
        }
    }
}

/// Returns the token ids in events.
fn times(events: &[u8]) -> Vec<u32> {
    const FIELD: &[u8] = b"\"token_ids\":[";
    let at = events.windows(FIELD.len()).enumerate().filter(|(_, window)| *window == FIELD);
    // `prompt_token_ids` ends with the same letters, without a quote before them.
    at.filter_map(|(at, _)| {
        let digits = events[at + FIELD.len()..].split(|byte| !byte.is_ascii_digit()).next()?;
        std::str::from_utf8(digits).ok()?.parse().ok()
    })
    .collect()
}
