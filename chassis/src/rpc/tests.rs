//! Tests over real sockets on port 0. The service under test is health: its code is generated already, and it has a
//! unary call and a stream.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::body::{Body, Bytes};
use axum::extract::Request as HttpRequest;
use axum::middleware::Next;
use futures::StreamExt as _;
use http::{HeaderMap, HeaderValue};
use tokio::io::DuplexStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tower::ServiceExt as _;
use tracing::{Instrument, info_span};
use types::RequestId;

use super::*;
use crate::gate::Gate;
use crate::identity::ExpectedPeer;
use crate::net::{Net, TcpNet};
use crate::task::{Task, spawn_guarded};
use crate::telemetry::{Capture, request_span};

const WITHIN: Duration = Duration::from_secs(20);

// === a server ===

struct Served {
    addr: String,
    shutdown: Shutdown,
    server: Task<Result<(), StillHeld>>,
}

impl Served {
    async fn start(routes: Routes, limits: ServerLimits) -> Self {
        let listener = TcpNet.listen("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound").to_string();
        let shutdown = Shutdown::new();
        let serving = serve(listener, routes, shutdown.clone(), limits, Callers::known_to(&World::real()));
        Self { addr, shutdown, server: spawn_guarded(&Gate::new("test"), "server", serving) }
    }

    async fn standard() -> Self {
        Self::start(routes(), ServerLimits::default()).await
    }

    fn client(&self) -> HealthClient<RpcChannel> {
        HealthClient::new(channel(&World::real(), &self.addr, ExpectedPeer::Registry, RpcLimits::default()))
    }

    /// Returns a client that does not send Baton's headers.
    fn plain_channel(&self) -> Channel {
        Endpoint::from_shared(format!("http://{}", self.addr)).expect("an address").connect_lazy()
    }

    async fn stop(self) {
        self.shutdown.trigger();
        let ended = timeout(WITHIN, self.server).await.expect("in time");
        ended.expect("the server ran").expect("nothing is late");
    }
}

fn routes() -> Routes {
    standard_services(&[], &[]).expect("described").0
}

/// Routes that call `see` before every handler.
fn watched(see: impl Fn(&HttpRequest) + Clone + Send + Sync + 'static) -> Routes {
    let mut routes = routes();
    let seen = middleware::from_fn(move |request: HttpRequest, next: Next| {
        see(&request);
        next.run(request)
    });
    let router = routes.axum_router_mut();
    *router = std::mem::take(router).layer(seen);
    routes
}

fn whole_server() -> HealthCheckRequest {
    HealthCheckRequest { service: String::new() }
}

// === headers ===

#[tokio::test]
async fn every_call_carries_our_headers() {
    type Seen = (HeaderMap, Option<RequestId>);
    let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
    let note = Arc::clone(&seen);
    let routes = watched(move |request| {
        let id = request.extensions().get::<RequestId>().cloned();
        note.lock().unwrap().push((request.headers().clone(), id));
    });
    let served = Served::start(routes, ServerLimits::default()).await;
    let mut client = served.client();
    let id = RequestId::new("req-1");
    timeout(WITHIN, client.check(call(&id, whole_server()))).await.expect("in time").expect("it serves");
    timeout(WITHIN, client.check(whole_server())).await.expect("in time").expect("it serves");
    let [with_id, without] = <[_; 2]>::try_from(std::mem::take(&mut *seen.lock().unwrap())).unwrap();
    assert_eq!((&with_id.0[PROTOCOL_HEADER], with_id.1), (&HeaderValue::from_static("3-7"), Some(id)));
    assert_eq!((&without.0[PROTOCOL_HEADER], without.1), (&HeaderValue::from_static("3-7"), None));
    served.stop().await;
}

#[tokio::test]
async fn protocol_refusals_table() {
    let served = Served::standard().await;
    for (header, expected) in [
        (None, Ok(())),
        (Some("1-7"), Ok(())),
        (
            Some("0-0"),
            Err((
                Code::FailedPrecondition,
                "no common protocol version: this side speaks 3..7, the peer 0..0",
            )),
        ),
        (Some("new"), Err((Code::InvalidArgument, "`baton-protocol` must be MIN-MAX, not \"new\""))),
    ] {
        let mut request = Request::new(whole_server());
        if let Some(header) = header {
            request.metadata_mut().insert(PROTOCOL_HEADER, header.parse().unwrap());
        }
        let mut client = HealthClient::new(served.plain_channel());
        let answer = timeout(WITHIN, client.check(request)).await.expect("in time");
        let answer = answer.as_ref().map(drop).map_err(|status| (status.code(), status.message()));
        assert_eq!(answer, expected, "{header:?}");
    }
    served.stop().await;
}

#[tokio::test]
async fn calls_that_are_refused_for_one_reason_have_one_line_a_minute() {
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    let served = Served::standard().await;
    let mut client = HealthClient::new(served.plain_channel());
    for _ in 0..1000 {
        let mut request = Request::new(whole_server());
        request.metadata_mut().insert(PROTOCOL_HEADER, "0-1".parse().unwrap());
        client.check(request).await.expect_err("no common version");
    }
    served.stop().await;
    let lines = capture.lines();
    let refused: Vec<_> =
        lines.iter().filter(|line| line["message"] == "incoming gRPC call refused").collect();
    assert_eq!((refused.len(), &refused[0]["left_out"]), (1, &0.into()));
    assert!(refused[0]["peer"].as_str().expect("an address").starts_with("127.0.0.1:"), "{refused:?}");
}

#[tokio::test]
async fn the_health_of_a_peer_is_asked() {
    let (routes, reporter) = standard_services(&[], &[]).expect("described");
    let served = Served::start(routes, ServerLimits::default()).await;
    let ask = async || {
        let channel = channel(&World::real(), &served.addr, ExpectedPeer::Registry, RpcLimits::default());
        check_health(channel, WITHIN).await
    };
    ask().await.expect("it serves");
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    assert_eq!(ask().await.expect_err("it does not").message(), "its health is NOT_SERVING");
    served.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_stopped_peer_has_no_health_in_time() {
    let world = World::seeded(1).with_net(Arc::new(DeadNet::Frozen(Mutex::default())));
    let channel = channel(&world, "peer:1", ExpectedPeer::Registry, RpcLimits::default());
    let status = check_health(channel, Duration::from_secs(1)).await.expect_err("no server answers");
    assert_eq!((status.code(), status.message()), (Code::DeadlineExceeded, "no answer within 1s"));
}

#[tokio::test]
async fn a_trace_crosses_the_wire() {
    let capture = Capture::spans("test");
    let _listening = capture.listen();
    let served = Served::standard().await;
    let mut client = served.client();
    let watch = async {
        let call = call(&RequestId::new("req-1"), whole_server());
        let mut updates = client.watch(call).await.expect("it serves").into_inner();
        updates.message().await.expect("the stream is open").expect("the first state");
    };
    timeout(WITHIN, watch.instrument(info_span!("dispatch"))).await.expect("in time");
    served.stop().await;

    let spans = capture.lines();
    let find = |name: &str| spans.iter().find(|span| span["span"] == name).expect("a span of that name");
    let (caller, callee) = (find("dispatch"), find("/grpc.health.v1.Health/Watch"));
    assert_eq!(caller["trace_id"], callee["trace_id"]);
    assert_eq!(caller["span_id"], callee["parent_span_id"]);
    assert_eq!(callee["fields"]["request_id"], "req-1");
}

#[test]
fn only_errors_of_the_server_mark_the_span_of_a_call() {
    for (code, expected) in [
        (Code::Internal, Some("error")),
        (Code::Unavailable, Some("error")),
        (Code::DeadlineExceeded, Some("error")),
        (Code::InvalidArgument, None),
        (Code::ResourceExhausted, None),
        (Code::Ok, None),
    ] {
        let capture = Capture::spans("test");
        {
            let _listening = capture.listen();
            let span = request_span("/a.B/C", None, &HeaderMap::new());
            super::receive::mark_error(&span, Status::new(code, "").into_http::<()>().headers());
        }
        assert_eq!(capture.lines()[0]["status"].as_str(), expected, "{code:?}");
    }
}

// === standard services ===

#[tokio::test]
async fn services_describe_themselves() {
    let served = Served::standard().await;
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(served.plain_channel());
    let names = async {
        let question = futures::stream::iter([question]);
        let mut answers = client.server_reflection_info(question).await.expect("it serves").into_inner();
        let answer = answers.message().await.expect("an answer").expect("one answer");
        let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
            panic!("not a list: {answer:?}")
        };
        list.service.into_iter().map(|service| service.name).collect::<Vec<_>>()
    };
    let names = timeout(WITHIN, names).await.expect("in time");
    assert!(names.contains(&"grpc.health.v1.Health".to_owned()), "{names:?}");
    served.stop().await;
}

#[test]
fn a_broken_description_is_refused_at_start() {
    let error = standard_services(&[b"junk"], &[]).map(drop).expect_err("not a descriptor set");
    assert_eq!(error.to_string(), "describe services");
}

// === ends ===

#[tokio::test]
async fn a_call_under_way_ends_after_shutdown_is_requested() {
    let (entered, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let mut routes = routes();
    let slow = middleware::from_fn({
        let (entered, go_on) = (Arc::clone(&entered), Arc::clone(&go_on));
        move |request: HttpRequest, next: Next| {
            let (entered, go_on) = (Arc::clone(&entered), Arc::clone(&go_on));
            async move {
                entered.notify_one();
                go_on.notified().await;
                next.run(request).await
            }
        }
    });
    let router = routes.axum_router_mut();
    *router = std::mem::take(router).layer(slow);
    let served = Served::start(routes, ServerLimits::default()).await;
    let mut client = served.client();
    let stop = async {
        entered.notified().await;
        served.shutdown.trigger();
        go_on.notify_one();
    };
    let (answer, ()) =
        timeout(WITHIN, async { tokio::join!(client.check(whole_server()), stop) }).await.expect("in time");
    answer.expect("the call was let end");
    served.stop().await;
}

#[tokio::test]
async fn an_endless_stream_does_not_hold_the_server() {
    let limits = ServerLimits { drain: Duration::from_millis(100), ..ServerLimits::default() };
    let served = Served::start(routes(), limits).await;
    let mut client = served.client();
    let mut updates = client.watch(whole_server()).await.expect("it serves").into_inner();
    updates.message().await.expect("the stream is open").expect("the first state");
    served.stop().await;
    timeout(WITHIN, updates.message()).await.expect("in time").expect_err("its connection was closed");
}

#[tokio::test]
async fn a_channel_connects_again() {
    let first = Served::standard().await;
    let addr = first.addr.clone();
    let mut client = first.client();
    client.check(whole_server()).await.expect("it serves");
    first.stop().await;
    let listener = TcpNet.listen(&addr).await.expect("the port is free again");
    let shutdown = Shutdown::new();
    let callers = Callers::known_to(&World::real());
    let serving = serve(listener, routes(), shutdown.clone(), ServerLimits::default(), callers);
    let server = spawn_guarded(&Gate::new("test"), "server", serving);
    // The first call may still find the old connection closing, so its result does not matter.
    let _ = timeout(WITHIN, client.check(whole_server())).await.expect("in time");
    timeout(WITHIN, client.check(whole_server())).await.expect("in time").expect("it serves again");
    Served { addr, shutdown, server }.stop().await;
}

// === peers that do not answer ===

#[tokio::test]
async fn a_call_without_listener_is_unavailable() {
    let served = Served::standard().await;
    let addr = served.addr.clone();
    served.stop().await;
    for addr in [addr.as_str(), "no address", ""] {
        let mut client =
            HealthClient::new(channel(&World::real(), addr, ExpectedPeer::Registry, RpcLimits::default()));
        let status =
            timeout(WITHIN, client.check(whole_server())).await.expect("in time").expect_err("no server");
        assert_eq!(status.code(), Code::Unavailable, "{addr}: {status}");
    }
}

/// A network whose peers accept no call: they are off, or suspended.
#[derive(Debug)]
enum DeadNet {
    /// `connect` never returns, as with a machine that is off.
    Unreachable,
    /// Connections are made and their other ends kept open, as with a suspended process.
    Frozen(Mutex<Vec<DuplexStream>>),
}

#[async_trait]
impl Net for DeadNet {
    async fn connect(&self, _: &str) -> io::Result<Stream> {
        let Self::Frozen(held) = self else { return std::future::pending().await };
        let (near, far) = tokio::io::duplex(1 << 16);
        held.lock().unwrap().push(far);
        Ok(Stream::other(near))
    }

    async fn listen(&self, _: &str) -> io::Result<Box<dyn Listener>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Calls over `net`. Returns the error and the time until it.
async fn failure(net: DeadNet) -> (Status, Duration) {
    let world = World::seeded(1).with_net(Arc::new(net));
    let mut client =
        HealthClient::new(channel(&world, "peer:1", ExpectedPeer::Registry, RpcLimits::default()));
    let start = Instant::now();
    (client.check(whole_server()).await.expect_err("no server answers"), start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_peer_is_given_up() {
    let (status, after) = failure(DeadNet::Unreachable).await;
    assert_eq!((status.code(), after.as_secs()), (Code::Unavailable, 2), "{status}");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_peer_is_noticed() {
    let (status, after) = failure(DeadNet::Frozen(Mutex::default())).await;
    assert!(after <= Duration::from_secs(6), "{after:?}");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
}

#[test]
fn a_body_that_was_cut_off_is_no_whole_message() {
    let whole = [0, 0, 0, 0, 2, 7, 8];
    assert!(super::receive::is_whole(&whole) && super::receive::is_whole(&[0; 5]));
    assert!((0..whole.len()).all(|end| !super::receive::is_whole(&whole[..end])));
}

/// The server refuses messages that are too long or late. It does not refuse a call whose connection ends before its message
/// has arrived.
#[tokio::test(start_paused = true)]
async fn messages_that_are_too_long_or_late_are_refused() {
    use super::receive::CallRejection::{Cancelled, Refused};
    let reset = futures::stream::iter([Err::<Bytes, _>(io::Error::from(io::ErrorKind::ConnectionReset))]);
    let lost = super::receive::message_of(Body::from_stream(reset)).await;
    assert!(matches!(lost, Err(Cancelled)), "{lost:?}");
    let part = super::receive::message_of(Body::from(vec![0, 0, 0, 0, 3, 1])).await;
    assert!(matches!(part, Err(Cancelled)), "{part:?}");
    let long = super::receive::message_of(Body::from(vec![0; types::node::MESSAGE_BYTES_MAX + 6])).await;
    assert!(matches!(&long, Err(Refused(why)) if why.message() == "length limit exceeded"), "{long:?}");
    let never = Body::from_stream(futures::stream::pending::<io::Result<Bytes>>());
    let late = super::receive::message_of(never).await;
    assert!(
        matches!(&late, Err(Refused(why)) if why.message().ends_with("did not arrive in time")),
        "{late:?}"
    );
}

/// A caller that sends a part of its message holds nothing for longer than a client that sends all of it may take.
#[tokio::test(start_paused = true)]
async fn a_message_that_does_not_arrive_ends_its_call() {
    let callers = Callers::known_to(&World::real());
    let receive = middleware::from_fn_with_state(callers, super::receive::receive);
    let router = routes().prepare().into_axum_router().layer(receive);
    let part = futures::stream::iter([Ok::<_, io::Error>(Bytes::from_static(&[0, 0, 0, 0, 9, 1]))]);
    let call = HttpRequest::post("/grpc.health.v1.Health/Check").header("content-type", "application/grpc");
    let call = call.body(Body::from_stream(part.chain(futures::stream::pending()))).expect("a request");
    let answer =
        timeout(super::receive::CLIENT_MESSAGE_WITHIN * 2, router.oneshot(call)).await.expect("in time");
    let status = Status::from_header_map(answer.expect("an answer").headers()).expect("a status");
    assert_eq!(
        (status.code(), status.message()),
        (Code::DeadlineExceeded, "the call's message did not arrive within 30 s")
    );
}

/// Routes with an answer of 4 MiB, whose bytes are counted when they are sent.
fn with_large_answers(n_sent: &Arc<AtomicUsize>) -> Routes {
    const PART: usize = 16 << 10;
    let mut routes = routes();
    let count = Arc::clone(n_sent);
    let answer = move || {
        let count = Arc::clone(&count);
        let parts = std::iter::repeat_n(Bytes::from_static(&[0; PART]), (4 << 20) / PART);
        let counted = parts.inspect(move |_| _ = count.fetch_add(PART, Ordering::Relaxed));
        std::future::ready(Body::from_stream(futures::stream::iter(counted.map(Ok::<_, io::Error>))))
    };
    let router = routes.axum_router_mut();
    *router = std::mem::take(router).route("/large", axum::routing::post(answer));
    routes
}

#[tokio::test]
async fn answers_that_are_not_read_delay_no_other_call() {
    let n_sent = Arc::default();
    let served = Served::start(with_large_answers(&n_sent), ServerLimits::default()).await;
    let channel = channel(&World::real(), &served.addr, ExpectedPeer::Registry, RpcLimits::default());
    let others = async {
        let mut unread = Vec::new();
        for _ in 0..32 {
            let request = HttpRequest::post("/large").body(tonic::body::Body::empty()).expect("a request");
            unread.push(channel.clone().oneshot(request).await.expect("it answers"));
        }
        let mut before = 0;
        while before == 0 || before < n_sent.load(Ordering::Relaxed) {
            before = n_sent.load(Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        HealthClient::new(channel).check(whole_server()).await.expect("it serves");
    };
    timeout(WITHIN, others).await.expect("in time");
    served.stop().await;
}
