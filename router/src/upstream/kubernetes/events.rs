//! The answer of a watch: one JSON object on each line.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::api::AnswerBytes;
use super::slices::{EndpointSlice, ObjectMeta};

/// The longest line. The API server's objects are shorter (at most 1.5 MiB in etcd).
const LINE_BYTES_MAX: usize = 4 << 20;

/// An event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchEvent {
    /// The slice is new or has changed.
    Put(EndpointSlice),
    Removed(ObjectMeta),
    /// All changes up to this version were sent.
    Bookmark(ObjectMeta),
    /// The API server no longer has the changes since the requested version.
    Gone,
}

#[derive(Debug, Deserialize)]
struct Line {
    r#type: String,
    object: Value,
}

/// The answer of one watch. Dropping it ends the watch.
#[derive(Debug)]
pub(super) struct WatchLines {
    body: AnswerBytes,
    lines: Lines,
    opened: Instant,
    until: Instant,
}

/// The bytes that are not a whole line yet.
#[derive(Debug, Default)]
struct Lines {
    received: BytesMut,
    /// The length of the beginning that has no line end.
    searched: usize,
}

impl WatchLines {
    /// Reads the answer for `within` at most.
    pub(super) fn new(body: AnswerBytes, within: Duration) -> Self {
        let opened = Instant::now();
        Self { body, lines: Lines::default(), opened, until: opened + within }
    }

    pub(super) fn opened(&self) -> Instant {
        self.opened
    }

    /// Returns the next event; `None` after the end, or once the time is over. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<WatchEvent>, String> {
        loop {
            if let Some(line) = self.lines.take()? {
                return parse(&line).map(Some);
            }
            match timeout_at(self.until, self.body.frame()).await {
                Ok(Some(Ok(frame))) => self.lines.add(frame.data_ref().map_or(&[], |data| data)),
                Ok(Some(Err(error))) => return Err(format!("the watch broke: {error}")),
                Ok(None) | Err(_) => return Ok(None),
            }
        }
    }
}

impl Lines {
    fn add(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// Returns the next whole line.
    fn take(&mut self) -> Result<Option<Bytes>, String> {
        let end = self.received[self.searched..].iter().position(|byte| *byte == b'\n');
        if let Some(end) = end {
            let line = self.received.split_to(self.searched + end + 1).freeze();
            self.searched = 0;
            return Ok(Some(line));
        }
        self.searched = self.received.len();
        if self.searched > LINE_BYTES_MAX {
            return Err(format!("a line of the watch is longer than {LINE_BYTES_MAX} bytes"));
        }
        Ok(None)
    }
}

/// Reads one line. An error names the fault of the line, or the reason why the API server ends the watch.
fn parse(line: &[u8]) -> Result<WatchEvent, String> {
    let unreadable = |error| format!("a line of the watch cannot be read: {error}");
    let Line { r#type, object } = serde_json::from_slice(line).map_err(unreadable)?;
    match r#type.as_str() {
        "ADDED" | "MODIFIED" => serde_json::from_value(object).map(WatchEvent::Put).map_err(unreadable),
        "DELETED" | "BOOKMARK" => {
            let metadata = object.get("metadata").cloned().unwrap_or_default();
            let metadata = serde_json::from_value(metadata).map_err(unreadable)?;
            let of_slice = r#type == "DELETED";
            Ok(if of_slice { WatchEvent::Removed(metadata) } else { WatchEvent::Bookmark(metadata) })
        }
        "ERROR" if object["code"] == 410 => Ok(WatchEvent::Gone),
        "ERROR" => Err(format!("the API server ended the watch: {}", object["message"])),
        other => Err(format!("the watch has an event of the unknown type {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{Full, StreamBody};
    use hyper::body::Frame;

    use super::*;

    const SLICE: &str =
        r#"{"metadata":{"name":"a","resourceVersion":"7"},"addressType":"IPv4","endpoints":null}"#;

    #[test]
    fn lines_are_events() {
        let slice: EndpointSlice = serde_json::from_str(SLICE).expect("a slice");
        let metadata = |name: &str| ObjectMeta { name: name.to_owned(), resource_version: "7".to_owned() };
        let bookmark = r#"{"kind":"EndpointSlice","metadata":{"resourceVersion":"7","creationTimestamp":null},"addressType":"","endpoints":null,"ports":null}"#;
        for (kind, object, expected) in [
            ("ADDED", SLICE, Ok(WatchEvent::Put(slice.clone()))),
            ("MODIFIED", SLICE, Ok(WatchEvent::Put(slice))),
            ("DELETED", SLICE, Ok(WatchEvent::Removed(metadata("a")))),
            ("BOOKMARK", bookmark, Ok(WatchEvent::Bookmark(metadata("")))),
            ("ERROR", r#"{"kind":"Status","reason":"Expired","code":410}"#, Ok(WatchEvent::Gone)),
            (
                "ERROR",
                r#"{"kind":"Status","message":"etcd is away","code":500}"#,
                Err("the API server ended the watch: \"etcd is away\""),
            ),
            ("ADDED", "{}", Err("a line of the watch cannot be read: missing field `metadata`")),
            (
                "BOOKMARK",
                "7",
                Err("a line of the watch cannot be read: invalid type: null, expected struct ObjectMeta"),
            ),
            ("SLEEPING", "{}", Err("the watch has an event of the unknown type \"SLEEPING\"")),
        ] {
            let found = parse(format!(r#"{{"type":"{kind}","object":{object}}}"#).as_bytes());
            assert_eq!(found, expected.map_err(str::to_owned), "{kind} {object}");
        }
        for line in ["", "{}", "[1]", r#"{"type":"ADDED","object":{"#, "\u{0}"] {
            let reason = parse(line.as_bytes()).expect_err("it is no event");
            assert!(reason.starts_with("a line of the watch cannot be read: "), "{reason}");
        }
    }

    fn watch(body: AnswerBytes) -> WatchLines {
        WatchLines::new(body, Duration::from_secs(9))
    }

    #[tokio::test(start_paused = true)]
    async fn lines_come_in_pieces_of_any_size() {
        let line = format!("{{\"type\":\"ADDED\",\"object\":{SLICE}}}\n");
        let text = format!("{line}{line}{}", &line[..20]);
        for size in [1, 7, text.len()] {
            let pieces =
                text.as_bytes().chunks(size).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece))));
            let pieces = futures::stream::iter(pieces.collect::<Vec<_>>());
            let mut watch = watch(StreamBody::new(pieces).boxed());
            for _ in 0..2 {
                assert!(matches!(watch.next().await, Ok(Some(WatchEvent::Put(_)))), "{size}");
            }
            assert_eq!(watch.next().await, Ok(None), "half a line at the end is none");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_has_a_largest_length() {
        for (n_bytes, is_read) in [(LINE_BYTES_MAX - 100, true), (LINE_BYTES_MAX + 1, false)] {
            let body = Full::new(Bytes::from("x".repeat(n_bytes))).map_err(|never| match never {}).boxed();
            let found = watch(body).next().await;
            assert_eq!(found.is_ok(), is_read, "{found:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_watch_ends_by_its_deadline() {
        let began = Instant::now();
        let body = StreamBody::new(futures::stream::pending::<Result<Frame<Bytes>, String>>()).boxed();
        assert_eq!(watch(body).next().await, Ok(None));
        assert_eq!(began.elapsed(), Duration::from_secs(9));
    }
}
