//! A server that plays puppet scripts on a socket.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::puppet::script::{Ending, Script, ScriptedWrite};

const REQUEST_BYTES_MAX: usize = 16 << 20;
/// The largest number of requests whose records are kept.
const N_PLAYED_MAX: usize = 100_000;

/// A script whose writes are rendered once for all requests.
#[derive(Clone, Debug)]
pub struct PreparedScript {
    writes: Arc<Vec<ScriptedWrite>>,
    ending: Ending,
    is_open: bool,
}

impl From<&Script> for PreparedScript {
    fn from(script: &Script) -> Self {
        Self { writes: Arc::new(script.writes()), ending: script.ending, is_open: script.status == 200 }
    }
}

/// The function that chooses the script for a request, by the number of earlier requests and by its body.
pub type Casting = Arc<dyn Fn(usize, &Value) -> PreparedScript + Send + Sync>;

/// The record of one request to a puppet.
#[derive(Clone, Debug)]
pub struct PlayedRequest {
    /// The request's id, from `x-request-id`.
    pub request_id: String,
    /// The time at which the whole request had arrived.
    pub received: Instant,
    /// The time just before each write, with the write's number of tokens.
    pub writes: Vec<(Instant, u32)>,
    /// Whether the client left before the end.
    pub is_abandoned: bool,
}

/// A running puppet. Dropping it ends all its streams.
#[derive(Debug)]
pub struct ScriptedServer {
    pub addr: SocketAddr,
    stage: Arc<Stage>,
    _tasks: JoinSet<()>,
}

/// The state that all connections of a puppet share.
struct Stage {
    casting: Casting,
    accept_delay: Duration,
    played: Mutex<(usize, VecDeque<PlayedRequest>)>,
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("accept_delay", &self.accept_delay).finish_non_exhaustive()
    }
}

impl ScriptedServer {
    /// Starts a puppet on `addr`. `accept_delay` passes between one accepted connection and the next.
    pub async fn start(addr: &str, accept_delay: Duration, casting: Casting) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        let stage = Arc::new(Stage { casting, accept_delay, played: Mutex::default() });
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&stage).accept(listener));
        Ok(Self { addr, stage, _tasks: tasks })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Returns the records of all requests so far, in their order.
    pub fn played(&self) -> Vec<PlayedRequest> {
        let played = self.stage.played.lock().unwrap_or_else(PoisonError::into_inner);
        played.1.iter().cloned().collect()
    }

    /// Returns a casting that plays the same script for every request.
    pub fn always(script: &Script) -> Casting {
        let part = PreparedScript::from(script);
        Arc::new(move |_, _| part.clone())
    }
}

impl Stage {
    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            if !self.accept_delay.is_zero() {
                sleep(self.accept_delay).await;
            }
            if let Ok((stream, _)) = listener.accept().await {
                connections.spawn(Arc::clone(&self).serve(stream));
            }
            while connections.try_join_next().is_some() {}
        }
    }

    /// Serves one connection, request after request, until one side ends it.
    async fn serve(self: Arc<Self>, mut stream: TcpStream) {
        let mut unread = Vec::new();
        let _ = stream.set_nodelay(true);
        while let Ok(Some(request)) = Request::read(&mut stream, &mut unread).await {
            if !self.answer(&mut stream, &request).await.unwrap_or(false) {
                return;
            }
        }
    }

    /// Answers one request. Returns whether the connection stays open.
    async fn answer(&self, stream: &mut TcpStream, request: &Request) -> io::Result<bool> {
        if request.is_get {
            stream.write_all(request.page().as_bytes()).await?;
            return Ok(true);
        }
        let nth = self.enter(request);
        let part = (self.casting)(nth, &request.body);
        let end = self.play(stream, nth, &part).await;
        if end.is_err() {
            self.note(nth, |played| played.is_abandoned = true);
        }
        end?;
        match part.ending {
            _ if !part.is_open => Ok(true),
            Ending::Done => Ok(true),
            Ending::Cut => Ok(false),
            Ending::Silence => stream.read(&mut [0; 64]).await.map(|_| false),
        }
    }

    async fn play(&self, stream: &mut TcpStream, nth: usize, part: &PreparedScript) -> io::Result<()> {
        let received = Instant::now();
        let mut writes = Vec::with_capacity(part.writes.len());
        let mut end = Ok(());
        for write in part.writes.iter() {
            sleep_until(received + write.at).await;
            writes.push((Instant::now(), write.tokens));
            end = stream.write_all(&write.bytes).await;
            if end.is_err() {
                break;
            }
        }
        self.note(nth, |played| (played.received, played.writes) = (received, writes));
        end
    }

    fn enter(&self, request: &Request) -> usize {
        let played = PlayedRequest {
            request_id: request.id.clone(),
            received: Instant::now(),
            writes: Vec::new(),
            is_abandoned: false,
        };
        let mut all = self.played.lock().unwrap_or_else(PoisonError::into_inner);
        all.1.push_back(played);
        if all.1.len() > N_PLAYED_MAX {
            all.1.pop_front();
        }
        all.0 += 1;
        all.0 - 1
    }

    fn note(&self, nth: usize, change: impl FnOnce(&mut PlayedRequest)) {
        let mut all = self.played.lock().unwrap_or_else(PoisonError::into_inner);
        let forgotten = all.0 - all.1.len();
        if let Some(played) = nth.checked_sub(forgotten).and_then(|kept| all.1.get_mut(kept)) {
            change(played);
        }
    }
}

/// The parts of a request that a puppet reads.
struct Request {
    is_get: bool,
    path: String,
    id: String,
    body: Value,
}

impl Request {
    /// Reads a request; `None` if the client has closed the connection.
    async fn read(stream: &mut TcpStream, unread: &mut Vec<u8>) -> io::Result<Option<Self>> {
        let mut buffer = vec![0; 16 << 10];
        loop {
            if let Some((request, length)) = Self::parse(unread) {
                unread.drain(..length);
                return Ok(Some(request));
            }
            let n = stream.read(&mut buffer).await?;
            if n == 0 || unread.len() > REQUEST_BYTES_MAX {
                return Ok(None);
            }
            unread.extend_from_slice(&buffer[..n]);
        }
    }

    /// Parses the request at the start of `bytes`. Returns it with its length; `None` while it is incomplete.
    fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let head_length = memchr::memmem::find(bytes, b"\r\n\r\n")? + 4;
        let head = String::from_utf8_lossy(&bytes[..head_length]);
        let header = |name: &str| {
            let found = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name))?;
            Some(found[name.len()..].trim().to_owned())
        };
        let body_length = header("content-length:").and_then(|text| text.parse().ok()).unwrap_or(0);
        let body = bytes.get(head_length..head_length + body_length)?;
        let mut words = head.split(' ');
        let request = Self {
            is_get: words.next() == Some("GET"),
            path: words.next().unwrap_or("").to_owned(),
            id: header("x-request-id:").unwrap_or_default(),
            body: serde_json::from_slice(body).unwrap_or_default(),
        };
        Some((request, head_length + body_length))
    }

    fn page(&self) -> String {
        let (status, body) = match self.path.as_str() {
            "/v1/models" => ("200 OK", r#"{"object":"list","data":[{"id":"puppet","object":"model"}]}"#),
            _ => ("404 Not Found", "{}"),
        };
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    }
}
