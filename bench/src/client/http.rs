//! Hot path. Parses an HTTP/1.1 response while its bytes arrive: head, framing, and the events of the body.

use crate::client::chunked::ChunkState;
use crate::client::sse::Lines;

const HEAD_BYTES_MAX: usize = 64 << 10;
const N_HEADERS_MAX: usize = 96;
/// The number of bytes of an error's body that are kept for the record.
const ERROR_BYTES_MAX: usize = 2 << 10;

/// The parser of one response. Pass it the socket's bytes with `feed`.
#[derive(Debug)]
pub struct ResponseReader {
    state: State,
    /// The head until it is complete; after that, the body of an answer that is not a stream.
    kept: Vec<u8>,
    lines: Lines,
    status: u16,
    is_stream: bool,
    keeps_alive: bool,
    plain_bytes_max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Chunked(ChunkState),
    Counted(u64),
    UntilClose,
    Done,
}

/// Whether the response is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    More,
    /// The body is complete; `reusable` says whether the connection may carry another request.
    Whole {
        reusable: bool,
    },
}

/// The error of bytes that are no valid response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    #[error("the response's head is not HTTP/1.1")]
    Head,
    #[error("the response's chunked framing is broken")]
    Framing,
    #[error("an event line is too long")]
    Line,
    #[error("the connection closed before the response was whole")]
    CutShort,
    #[error("bytes follow a whole response")]
    Excess,
}

impl ResponseReader {
    pub fn new() -> Self {
        Self::keeping(ERROR_BYTES_MAX)
    }

    /// Makes a parser that keeps at most `plain_bytes_max` bytes of a body that is not a stream.
    pub fn keeping(plain_bytes_max: usize) -> Self {
        Self {
            plain_bytes_max,
            state: State::Head,
            kept: Vec::new(),
            lines: Lines::default(),
            status: 0,
            is_stream: false,
            keeps_alive: true,
        }
    }

    /// Returns the status code; 0 until the head is complete.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Returns whether the answer is an event stream with status 200.
    pub fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Returns the beginning of the body of an answer that is not a stream.
    pub fn plain_body(&self) -> &[u8] {
        &self.kept
    }

    pub fn feed(&mut self, bytes: &[u8], on_data: &mut dyn FnMut(&[u8])) -> Result<Progress, HttpError> {
        let body_at = if self.state == State::Head { self.take_head(bytes)? } else { 0 };
        match (self.state, body_at) {
            (State::Head, _) => Ok(Progress::More),
            (_, body_at) => self.take_body(&bytes[body_at..], on_data),
        }
    }

    /// Handles the end of the connection. Fails unless the body may end without a length.
    pub fn close(&mut self) -> Result<(), HttpError> {
        match self.state {
            State::UntilClose | State::Done => Ok(()),
            _ => Err(HttpError::CutShort),
        }
    }

    /// Returns the start of the body in `bytes`, once the head is complete.
    fn take_head(&mut self, bytes: &[u8]) -> Result<usize, HttpError> {
        let before = self.kept.len();
        self.kept.extend_from_slice(bytes);
        let kept = std::mem::take(&mut self.kept);
        match parse_head(&kept)? {
            Some(head) => {
                self.status = head.status;
                self.is_stream = head.status == 200 && head.is_event_stream;
                self.keeps_alive = head.keeps_alive;
                self.state = head.framing;
                Ok(head.length - before)
            }
            None if kept.len() > HEAD_BYTES_MAX => Err(HttpError::Head),
            None => {
                self.kept = kept;
                Ok(bytes.len())
            }
        }
    }

    fn take_body(&mut self, bytes: &[u8], on_data: &mut dyn FnMut(&[u8])) -> Result<Progress, HttpError> {
        let (kept, lines, is_stream) = (&mut self.kept, &mut self.lines, self.is_stream);
        let plain_bytes_max = self.plain_bytes_max;
        let mut is_line_too_long = false;
        let mut on_body = |body: &[u8]| {
            if is_stream {
                is_line_too_long |= lines.take(body, on_data).is_err();
            } else {
                let room = plain_bytes_max.saturating_sub(kept.len());
                kept.extend_from_slice(&body[..body.len().min(room)]);
            }
        };
        let taken = self.state.take(bytes, &mut on_body)?;
        match self.state {
            _ if is_line_too_long => Err(HttpError::Line),
            State::Done if taken < bytes.len() => Err(HttpError::Excess),
            State::Done => Ok(Progress::Whole { reusable: self.keeps_alive }),
            _ => Ok(Progress::More),
        }
    }
}

impl Default for ResponseReader {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    /// Removes the framing from `bytes`. Returns the number of bytes that belong to the body.
    fn take(&mut self, bytes: &[u8], on_body: &mut dyn FnMut(&[u8])) -> Result<usize, HttpError> {
        match self {
            State::Chunked(chunked) => {
                let taken = chunked.take(bytes, on_body).map_err(|_| HttpError::Framing)?;
                if *chunked == ChunkState::Done {
                    *self = State::Done;
                }
                Ok(taken)
            }
            State::Counted(left) => {
                let n = (*left).min(bytes.len() as u64);
                on_body(&bytes[..n as usize]);
                *self = if n == *left { State::Done } else { State::Counted(*left - n) };
                Ok(n as usize)
            }
            State::UntilClose => {
                on_body(bytes);
                Ok(bytes.len())
            }
            State::Head | State::Done => Ok(0),
        }
    }
}

struct Head {
    status: u16,
    length: usize,
    framing: State,
    is_event_stream: bool,
    keeps_alive: bool,
}

/// Parses the head; `None` while it is incomplete. An informational answer (1xx) before the real one is
/// skipped.
fn parse_head(bytes: &[u8]) -> Result<Option<Head>, HttpError> {
    let mut headers = [httparse::EMPTY_HEADER; N_HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(bytes).map_err(|_| HttpError::Head)? {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial => return Ok(None),
    };
    let status = response.code.unwrap_or(0);
    if (100..200).contains(&status) {
        return Ok(parse_head(&bytes[length..])?.map(|head| Head { length: head.length + length, ..head }));
    }
    let says = |name: &str, word: &str| {
        header(response.headers, name).is_some_and(|value| value.to_ascii_lowercase().contains(word))
    };
    Ok(Some(Head {
        status,
        length,
        framing: framing(response.headers, status)?,
        is_event_stream: says("content-type", "text/event-stream"),
        keeps_alive: response.version == Some(1) && !says("connection", "close"),
    }))
}

fn framing(headers: &[httparse::Header<'_>], status: u16) -> Result<State, HttpError> {
    if status == 204 || status == 304 {
        return Ok(State::Done);
    }
    if header(headers, "transfer-encoding")
        .is_some_and(|value| value.to_ascii_lowercase().contains("chunked"))
    {
        return Ok(State::Chunked(ChunkState::START));
    }
    match header(headers, "content-length").map(|value| value.trim().parse()) {
        Some(Ok(0)) => Ok(State::Done),
        Some(Ok(length)) => Ok(State::Counted(length)),
        Some(Err(_)) => Err(HttpError::Head),
        None => Ok(State::UntilClose),
    }
}

fn header<'a>(headers: &[httparse::Header<'a>], name: &str) -> Option<&'a str> {
    let found = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(found.value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the events of a response that arrives in two pieces. Fails the test if they depend on the cut.
    fn read(wire: &str) -> (u16, Vec<String>, Result<Progress, HttpError>) {
        let mut verdicts = (0..wire.len()).map(|cut| read_cut(wire.as_bytes(), cut));
        let first = verdicts.next().expect("a wire has bytes");
        for (cut, other) in verdicts.enumerate() {
            assert_eq!(first, other, "cut at {}", cut + 1);
        }
        first
    }

    fn read_cut(wire: &[u8], cut: usize) -> (u16, Vec<String>, Result<Progress, HttpError>) {
        let (mut reader, mut seen) = (ResponseReader::new(), Vec::new());
        let mut verdict = Ok(Progress::More);
        for piece in [&wire[..cut], &wire[cut..]] {
            let mut on_data = |data: &[u8]| seen.push(String::from_utf8_lossy(data).into_owned());
            if verdict == Ok(Progress::More) {
                verdict = reader.feed(piece, &mut on_data);
            }
        }
        if !reader.is_stream() {
            seen.push(String::from_utf8_lossy(reader.plain_body()).into_owned());
        }
        (reader.status(), seen, verdict)
    }

    #[test]
    fn a_chunked_stream() {
        let wire = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
                    9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n";
        let expected = ["a", "b"].map(String::from).to_vec();
        assert_eq!(read(wire), (200, expected, Ok(Progress::Whole { reusable: true })));
    }

    #[test]
    fn an_informational_head_comes_first() {
        let wire = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\
                    Content-Length: 9\r\nConnection: close\r\n\r\ndata: a\n\n";
        assert_eq!(read(wire), (200, vec!["a".to_owned()], Ok(Progress::Whole { reusable: false })));
    }

    #[test]
    fn a_refusal_keeps_its_body() {
        let wire =
            "HTTP/1.1 429 Slow Down\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\nbusy";
        assert_eq!(read(wire), (429, vec!["busy".to_owned()], Ok(Progress::Whole { reusable: true })));
    }

    #[test]
    fn malformed_bytes_are_refused() {
        assert_eq!(read("SSH-2.0-x\r\n\r\n").2, Err(HttpError::Head));
        let wire = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n";
        assert_eq!(read(wire).2, Err(HttpError::Framing));
    }

    #[test]
    fn a_stream_may_end_by_closing_only_where_it_has_no_length() {
        let closed = |wire: &str| {
            let mut reader = ResponseReader::new();
            reader.feed(wire.as_bytes(), &mut |_| ()).expect("well formed");
            reader.close()
        };
        assert_eq!(closed("HTTP/1.1 200 OK\r\n\r\nabc"), Ok(()));
        assert_eq!(closed("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"), Err(HttpError::CutShort));
        assert_eq!(closed("HTTP/1.1 200 OK\r\n"), Err(HttpError::CutShort));
    }
}
