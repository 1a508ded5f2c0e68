//! The HTTP port in front of pools of another engine: bodies and answers pass through as they came.
//!
//! The client, its deadline, its limits and the request's id are read from headers as for Baton's own nodes.
//! Only paths that serve requests pass; the engines' paths for operators do not.

use std::future::Future as _;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Version, header};
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use tracing::{Span, info};

use super::api::{HttpApi, RequestHead};
use super::body::{self, BodyLimits};
use super::error::{ErrorForm, HttpError};
use super::explanation::explained;
use super::{caller, chat_box};
use crate::accept::N_MAX;
use crate::error::ServeError;
use crate::serve::Detail;
use crate::upstream::{
    AnswerStream, EngineKind, Fields, LegRole, Legs, Upstream, UpstreamAnswer, UpstreamRequest,
};

/// The paths whose requests both servers of a pair work on, for each engine.
const BOTH: &[&str] = &["/v1/chat/completions", "/v1/completions"];
const BOTH_OF_SGLANG: &[&str] = &["/generate"];
/// The paths that need a prompt's computation at most: a prefill server serves them.
const PREFILL: &[&str] = &[
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/classify",
    "/score",
    "/rerank",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
];
/// The paths whose requests name no transfer of KV: a decode server computes prompt and answer.
const DECODE: &[&str] =
    &["/v1/responses", "/v1/messages", "/v1/audio/transcriptions", "/v1/audio/translations"];

/// The largest body of a request: images and recordings are larger than text.
const BODY_BYTES_MAX: usize = 64 << 20;

/// The bytes of text that count as one token against a tenant's limit, because the router has no tokenizer here.
const BYTES_PER_TOKEN: usize = 4;

/// The header of an answer with its explanation up to its first byte.
const EXPLANATION: HeaderName = HeaderName::from_static("x-baton-explanation");

/// Headers of one connection, which are not passed on in either direction.
const OF_CONNECTION: &[&str] =
    &["connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "trailer", "upgrade"];
/// Headers of a request that the servers do not get: those that the client makes anew, keys, and cookies.
const NOT_PASSED: &[&str] =
    &["host", "content-length", "expect", "authorization", "proxy-authorization", "x-api-key", "cookie"];
/// The beginning of the names of headers for this router.
const OWN: &str = "x-baton-";

/// The state of the routes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Passthrough {
    pub api: HttpApi,
    pub upstream: Upstream,
}

/// Returns the routes in front of another engine, in place of [`super::api()`]. They work only inside
/// [`super::stack`].
pub fn passthrough(state: Passthrough) -> Router {
    let paths = [BOTH, BOTH_OF_SGLANG, PREFILL, DECODE].concat();
    let routes = paths.into_iter().fold(Router::new(), |routes, path| routes.route(path, post(forward)));
    routes.route("/v1/models", get(forward)).route("/v1/models/{*name}", get(forward)).with_state(state)
}

/// Returns the route of the live page's chat box, in place of [`super::chat_box()`].
pub fn passthrough_chat_box(state: Passthrough) -> Router {
    chat_box::answered_by(post(forward)).with_state(state)
}

fn legs(kind: EngineKind, path: &str) -> Legs {
    if BOTH.contains(&path) || (kind == EngineKind::Sglang && BOTH_OF_SGLANG.contains(&path)) {
        Legs::Both
    } else if PREFILL.contains(&path) {
        Legs::Only(LegRole::Prefill)
    } else {
        Legs::Only(LegRole::Decode)
    }
}

async fn forward(State(state): State<Passthrough>, request: Request) -> Result<Response, HttpError> {
    let Passthrough { api, upstream } = state;
    let (mut parts, body) = request.into_parts();
    let RequestHead { id, client, headers } = RequestHead::from_request_parts(&mut parts, &api).await?;
    let mut caller = caller::caller(&api.acceptor, id, client, &headers)?;
    let within = api.body.within.min(api.world.left(caller.deadline));
    let body = body::read(body, BodyLimits { within, bytes_max: BODY_BYTES_MAX }).await?;
    caller.read = api.world.now();
    let path = parts.uri.path();
    let path = path.strip_prefix("/debug").unwrap_or(path);
    let legs = legs(upstream.kind(), path);
    let n_answers = match legs {
        Legs::Both => n_answers(&fields_of(&body)?),
        Legs::Only(_) => 1,
    };
    let tenant = upstream.admit(&caller, n_answers, body.len() / BYTES_PER_TOKEN)?;
    let query = parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let target = format!("{path}{query}");
    let mut headers = passed_on(&headers);
    let id = HeaderValue::from_str(caller.id.as_str());
    headers.insert(caller::REQUEST_ID, id.expect("ids are letters, digits and a few plain signs"));
    let request = UpstreamRequest { method: parts.method, target, headers, body, legs, n_answers };
    let answer = upstream.serve(request, &caller, tenant).await?;
    Ok(respond(answer, caller.detail, ErrorForm::of(path)))
}

/// Divides a body into its fields. Errors come from the parser of whole bodies.
fn fields_of(body: &[u8]) -> Result<Fields<'_>, HttpError> {
    Fields::parse(body)
        .map_err(|error| body::parse::<Map<String, Value>>(body).err().unwrap_or_else(|| error.into()))
}

/// Returns the number of answers to all prompts.
fn n_answers(fields: &Fields<'_>) -> usize {
    // The engines take a number such as 2.0 for the integer.
    let n = (fields.get::<f64>("n").unwrap_or(1.0) as u32).clamp(1, N_MAX) as usize;
    n.saturating_mul(n_prompts(fields))
}

/// Returns the number of prompts. A list of token ids is one.
fn n_prompts(fields: &Fields<'_>) -> usize {
    if fields.get::<Vec<u32>>("prompt").is_some() {
        return 1;
    }
    fields.get::<Vec<IgnoredAny>>("prompt").map_or(1, |prompts| prompts.len())
}

/// Returns the headers of one connection: the known ones, and those that the header `connection` names.
fn of_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let named = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let named = named.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse().ok());
    OF_CONNECTION.iter().map(|name| HeaderName::from_static(name)).chain(named).collect()
}

/// Returns the headers of a request that the servers get.
fn passed_on(headers: &HeaderMap) -> HeaderMap {
    let of_connection = of_connection(headers);
    let is_kept = |name: &HeaderName| {
        let is_own = NOT_PASSED.contains(&name.as_str()) || name.as_str().starts_with(OWN);
        !is_own && !of_connection.contains(name)
    };
    let kept = headers.iter().filter(|(name, _)| is_kept(name));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Returns the head of an answer without the headers of the server's connection, and without the server's CORS headers,
/// because this router decides which pages may read its answers.
fn passed_back(mut head: Parts) -> Parts {
    let cors = head.headers.keys().filter(|name| name.as_str().starts_with("access-control-"));
    let removed: Vec<HeaderName> = cors.cloned().chain(of_connection(&head.headers)).collect();
    removed.iter().for_each(|name| drop(head.headers.remove(name)));
    head.version = Version::default();
    head
}

fn respond(answer: UpstreamAnswer, detail: Detail, errors: ErrorForm) -> Response {
    let UpstreamAnswer { head, record, bytes } = answer;
    let head = passed_back(head);
    let of_events = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let format = match of_events {
        Some(kind) if kind.starts_with(b"text/event-stream") => BytesFormat::Events(Boundary::At),
        _ => BytesFormat::Plain,
    };
    let passing = Passing { bytes, format, errors, span: Span::current() };
    let mut response = Response::from_parts(head, Body::from_stream(Gathered::of(passing.into_stream())));
    if detail == Detail::Explained {
        let text = explained(0, &record.explanation()).to_string();
        response
            .headers_mut()
            .insert(EXPLANATION, HeaderValue::from_str(&text).expect("names and numbers are plain text"));
    }
    response
}

/// An answer on its way to the client.
struct Passing {
    bytes: AnswerStream,
    format: BytesFormat,
    errors: ErrorForm,
    span: Span,
}

/// How the bytes of an answer are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BytesFormat {
    /// Server-sent events.
    Events(Boundary),
    Plain,
}

/// Where the bytes that were sent to the client end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Boundary {
    /// Between two events: an error event may follow.
    At,
    Inside,
}

impl BytesFormat {
    fn after(self, bytes: &[u8]) -> Self {
        match self {
            Self::Plain => Self::Plain,
            Self::Events(_) if bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n") => {
                Self::Events(Boundary::At)
            }
            Self::Events(_) => Self::Events(Boundary::Inside),
        }
    }

    /// Estimates the tokens in `bytes`: one for each event, or by their length.
    fn n_tokens(self, bytes: &[u8]) -> usize {
        match self {
            Self::Plain => bytes.len() / BYTES_PER_TOKEN,
            Self::Events(_) => bytes.windows(2).filter(|pair| *pair == b"\n\n").count(),
        }
    }
}

impl Passing {
    fn into_stream(self) -> impl Stream<Item = Result<Bytes, ServeError>> + Unpin {
        Box::pin(futures::stream::unfold(Some(self), |passing| async { passing?.next().await }))
    }

    /// Returns the next bytes, and the rest of the answer. After an error the client gets an error event, or a
    /// broken connection if an event cannot follow: the client must not take the answer for a complete one.
    async fn next(mut self) -> Option<(Result<Bytes, ServeError>, Option<Self>)> {
        match self.bytes.next().await {
            Ok(Some(bytes)) => {
                self.bytes.generated(|| self.format.n_tokens(&bytes));
                self.format = self.format.after(&bytes);
                Some((Ok(bytes), Some(self)))
            }
            Ok(None) => None,
            Err(error) => {
                self.span.in_scope(|| info!(%error, "upstream answer ended early"));
                match self.format {
                    BytesFormat::Events(Boundary::At) => Some((Ok(error_event(error, self.errors)), None)),
                    _ => Some((Err(error), None)),
                }
            }
        }
    }
}

/// The size after which gathered bytes are sent without those that follow.
const WRITE_BYTES: usize = 16 << 10;

/// Joins pieces of an answer that arrive together, because a write to the client costs more than all else that a piece
/// needs. The task that reads the server's connection gives one piece at a time. So after a piece this stream waits until
/// the tasks that are ready have run, and sends when there is no further piece.
struct Gathered<S> {
    pieces: S,
    gathered: BytesMut,
    /// The wait for other tasks since the last piece.
    yielded: Option<Arc<Yielded>>,
    /// The event after the gathered bytes: an error, or the end.
    end: Option<Result<(), ServeError>>,
}

impl<S> Gathered<S> {
    fn of(pieces: S) -> Self {
        Self { pieces, gathered: BytesMut::new(), yielded: None, end: None }
    }
}

impl<S: Stream<Item = Result<Bytes, ServeError>> + Unpin> Stream for Gathered<S> {
    type Item = Result<Bytes, ServeError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { pieces, gathered, yielded, end } = self.get_mut();
        while end.is_none() && gathered.len() < WRITE_BYTES {
            match pieces.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    gathered.extend_from_slice(&piece);
                    *yielded = None;
                }
                Poll::Ready(Some(Err(error))) => *end = Some(Err(error)),
                Poll::Ready(None) => *end = Some(Ok(())),
                Poll::Pending if gathered.is_empty() => return Poll::Pending,
                Poll::Pending => {
                    let others = yielded.get_or_insert_with(|| Yielded::begin(cx));
                    if !others.have_run.load(Ordering::Acquire) {
                        return Poll::Pending;
                    }
                    *yielded = None;
                    break;
                }
            }
        }
        if !gathered.is_empty() {
            return Poll::Ready(Some(Ok(gathered.split().freeze())));
        }
        let ended = end.replace(Ok(())).unwrap_or(Ok(()));
        Poll::Ready(ended.err().map(Err))
    }
}

/// A wait of one task until the runtime has run the tasks that were ready. A second poll does not show that they have run:
/// hyper polls a body more than once in one poll of its task.
struct Yielded {
    have_run: AtomicBool,
    task: Waker,
}

impl Yielded {
    fn begin(cx: &Context<'_>) -> Arc<Self> {
        let yielded = Arc::new(Self { have_run: AtomicBool::new(false), task: cx.waker().clone() });
        let waker = Waker::from(Arc::clone(&yielded));
        // The first poll passes the waker to the runtime, which wakes it when no other task is ready.
        let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
        yielded
    }
}

impl Wake for Yielded {
    fn wake(self: Arc<Self>) {
        self.have_run.store(true, Ordering::Release);
        self.task.wake_by_ref();
    }
}

fn error_event(error: ServeError, form: ErrorForm) -> Bytes {
    format!("event: error\ndata: {}\n\n", HttpError::from(error).data(form)).into()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use chassis::{Gate, spawn_guarded};
    use futures::SinkExt as _;

    use super::*;
    use crate::http::Code;

    #[test]
    fn paths_name_their_legs() {
        use EngineKind::{Sglang, Vllm};
        for (kind, path, expected) in [
            (Vllm, "/v1/chat/completions", Legs::Both),
            (Sglang, "/v1/completions", Legs::Both),
            (Sglang, "/generate", Legs::Both),
            (Vllm, "/generate", Legs::Only(LegRole::Decode)),
            (Vllm, "/v1/embeddings", Legs::Only(LegRole::Prefill)),
            (Vllm, "/v1/responses", Legs::Only(LegRole::Decode)),
            (Vllm, "/v1/models", Legs::Only(LegRole::Decode)),
        ] {
            assert_eq!(legs(kind, path), expected, "{path}");
        }
    }

    #[test]
    fn keys_and_headers_of_this_hop_are_not_passed_on() {
        let all = [
            "content-type",
            "x-data-parallel-rank",
            "authorization",
            "cookie",
            "x-baton-tenant",
            "te",
            "host",
        ];
        let header = |name: &&str| (name.parse().unwrap(), "v".parse().unwrap());
        let mut headers: HeaderMap = all.iter().map(header).collect();
        headers.append("connection", "keep-alive, X-Hop".parse().unwrap());
        headers.append("x-hop", "v".parse().unwrap());
        let passed = passed_on(&headers);
        assert_eq!(
            passed.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            ["content-type", "x-data-parallel-rank"]
        );
    }

    #[test]
    fn only_this_router_names_the_pages_that_read_an_answer() {
        let answer = http::Response::builder()
            .version(Version::HTTP_10)
            .header("content-type", "application/json")
            .header("connection", "x-hop")
            .header("x-hop", "v")
            .header("access-control-allow-origin", "*")
            .header("access-control-allow-credentials", "true");
        let head = passed_back(answer.body(()).expect("an answer").into_parts().0);
        let names: Vec<&str> = head.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!((names, head.version), (vec!["content-type"], Version::HTTP_11));
    }

    #[test]
    fn each_answer_to_each_prompt_counts() {
        for (body, expected) in [
            (r#"{"prompt": "a"}"#, 1),
            (r#"{"prompt": [1, 2, 3], "n": 2}"#, 2),
            (r#"{"prompt": ["a", "b"], "n": 2}"#, 4),
            (r#"{"prompt": [[1, 2], [3]]}"#, 2),
            (r#"{"prompt": [], "n": 0}"#, 1),
            (r#"{"messages": [{}, {}], "n": 2.0}"#, 2),
            (r#"{"n": "x"}"#, 1),
        ] {
            assert_eq!(n_answers(&fields_of(body.as_bytes()).expect("an object")), expected, "{body}");
        }
    }

    #[test]
    fn a_body_that_is_no_object_has_the_code_of_its_fault() {
        for (body, code) in
            [("{\"n\": 1", Code::InvalidJson), ("x", Code::InvalidJson), ("[1]", Code::InvalidValue)]
        {
            assert_eq!(fields_of(body.as_bytes()).expect_err(body).code, code, "{body}");
        }
    }

    /// Pieces of one task, each given when the one before it was taken. The stream is polled twice at a time.
    #[tokio::test]
    async fn pieces_that_are_ready_leave_together() {
        let failed = || ServeError::Failed { reason: "a server broke".to_owned() };
        let (mut send, pieces) = futures::channel::mpsc::channel::<Result<Bytes, ServeError>>(0);
        let gate = Gate::new("pieces");
        let _giving = spawn_guarded(&gate, "pieces", async move {
            for piece in ["a", "b", "c"] {
                send.send(Ok(piece.into())).await.expect("it reads");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            for piece in [Ok(Bytes::from_static(b"d")), Ok(vec![b'e'; WRITE_BYTES].into()), Err(failed())] {
                send.send(piece).await.expect("it reads");
            }
        });
        let mut gathered = Gathered::of(pieces);
        let mut next = async || {
            poll_fn(|cx| match gathered.poll_next_unpin(cx) {
                Poll::Ready(next) => Poll::Ready(next),
                Poll::Pending => gathered.poll_next_unpin(cx),
            })
            .await
        };
        assert_eq!(next().await.expect("bytes").expect("bytes").as_ref(), b"abc");
        assert_eq!(next().await.expect("bytes").expect("bytes").len(), 1 + WRITE_BYTES);
        assert!(next().await.expect("an error").is_err());
        assert!(next().await.is_none());
    }

    #[test]
    fn an_error_event_has_the_form_of_its_path() {
        for (path, begin) in [
            ("/v1/chat/completions", "event: error\ndata: {\"error\":{\"message\":"),
            ("/v1/messages", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\","),
        ] {
            let event = error_event(ServeError::Failed { reason: "x".to_owned() }, ErrorForm::of(path));
            assert!(event.starts_with(begin.as_bytes()), "{event:?}");
        }
    }

    #[test]
    fn events_end_at_an_empty_line() {
        let events = BytesFormat::Events(Boundary::At);
        for (bytes, after, n_tokens) in [
            (&b"data: 1\n\ndata: 2\n\n"[..], Boundary::At, 2),
            (b"data: 1\n\nda", Boundary::Inside, 1),
            (b"data: 1\r\n\r\n", Boundary::At, 0),
        ] {
            assert_eq!((events.after(bytes), events.n_tokens(bytes)), (BytesFormat::Events(after), n_tokens));
        }
        assert_eq!(
            (BytesFormat::Plain.after(b"x\n\n"), BytesFormat::Plain.n_tokens(b"12345678")),
            (BytesFormat::Plain, 2)
        );
    }
}
