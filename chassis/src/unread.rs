//! A bound on the time that a client of HTTP/2 leaves an answer unread. Each answer has its own flow-control window, so
//! the connection still makes progress, and its write timeout does not end such an answer.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Error, Router};
use http::Version;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, sleep_until};
use tracing::info;

use crate::gate::Gate;
use crate::task::{Task, spawn_guarded};

/// Ends answers over HTTP/2 that are left unread for `patience`: they fail, and their requests are cancelled.
pub fn bounded(routes: Router, patience: Duration, gate: &Gate) -> Router {
    routes.layer(middleware::from_fn_with_state((patience, gate.clone()), bound))
}

async fn bound(State((patience, gate)): State<(Duration, Gate)>, request: Request, next: Next) -> Response {
    let version = request.version();
    let answer = next.run(request).await;
    match version {
        Version::HTTP_2 => answer.map(|body| Body::new(BoundedBody::new(body, patience, &gate))),
        _ => answer,
    }
}

/// An answer's body that a task drops when it is unread for too long.
#[derive(Debug)]
struct BoundedBody {
    shared: Arc<Mutex<Reading>>,
    _watch: Task<()>,
}

/// Locked for one poll, or one look of the task.
#[derive(Debug)]
struct Reading {
    /// `None`: it was left unread.
    body: Option<Body>,
    /// When the last frame was taken; `None` while the next one is waited for.
    unread_since: Option<Instant>,
}

impl BoundedBody {
    fn new(body: Body, patience: Duration, gate: &Gate) -> Self {
        let shared = Arc::new(Mutex::new(Reading { body: Some(body), unread_since: None }));
        let watch = watch(Arc::downgrade(&shared), patience);
        Self { shared, _watch: spawn_guarded(gate, "unread answer", watch) }
    }
}

fn locked(shared: &Mutex<Reading>) -> MutexGuard<'_, Reading> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops the body when it was unread for `patience`, and for twice this time at most.
async fn watch(shared: Weak<Mutex<Reading>>, patience: Duration) {
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let since = locked(&shared).unread_since;
        if since.is_some_and(|since| since.elapsed() >= patience) {
            info!("request cancelled: the client does not read its answer");
            drop(locked(&shared).body.take());
            return;
        }
        drop(shared);
        sleep_until(since.unwrap_or_else(Instant::now) + patience).await;
    }
}

impl HttpBody for BoundedBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut reading = locked(&self.shared);
        let Some(body) = &mut reading.body else {
            let unread = io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answer");
            return Poll::Ready(Some(Err(Error::new(unread))));
        };
        let polled = Pin::new(body).poll_frame(cx);
        reading.unread_since = polled.is_ready().then(Instant::now);
        polled
    }

    fn is_end_stream(&self) -> bool {
        locked(&self.shared).body.as_ref().is_some_and(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        locked(&self.shared).body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use futures::stream;
    use http_body_util::BodyExt as _;
    use tokio::time::{sleep, timeout};
    use tower::ServiceExt as _;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);
    const A_SECOND: Duration = Duration::from_secs(1);

    /// Returns the body of an answer, and what its handler's body holds until it is dropped.
    async fn answer(version: Version) -> (Body, Weak<()>) {
        let held = Arc::new(());
        let held_until = Arc::downgrade(&held);
        let endless = get(async move || {
            Body::from_stream(stream::repeat_with(move || {
                let _held = &held;
                Ok::<_, io::Error>(Bytes::from_static(b"frame"))
            }))
        });
        let routes = bounded(Router::new().route("/", endless), PATIENCE, &Gate::new("test"));
        let request = Request::builder().version(version).body(Body::empty()).expect("a request");
        (routes.oneshot(request).await.expect("an answer").into_body(), held_until)
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_left_unread_is_dropped() {
        let (mut body, held) = answer(Version::HTTP_2).await;
        body.frame().await.expect("a frame").expect("it is read");
        sleep(PATIENCE - A_SECOND).await;
        assert_eq!(held.strong_count(), 1);
        sleep(PATIENCE + 2 * A_SECOND).await;
        assert_eq!(held.strong_count(), 0);
        body.frame().await.expect("an error").expect_err("it was left unread");
    }

    #[tokio::test(start_paused = true)]
    async fn other_answers_are_not() {
        let (mut slow, _held) = answer(Version::HTTP_2).await;
        for _ in 0..10 {
            slow.frame().await.expect("a frame").expect("it is read");
            sleep(PATIENCE - A_SECOND).await;
        }
        let (mut of_http1, _held) = answer(Version::HTTP_11).await;
        of_http1.frame().await.expect("a frame").expect("it is read");
        sleep(3 * PATIENCE).await;
        of_http1.frame().await.expect("a frame").expect("the connection's writes have their own timeout");
        let never = Body::from_stream(stream::pending::<Result<Bytes, io::Error>>());
        let mut never = BoundedBody::new(never, PATIENCE, &Gate::new("test"));
        timeout(10 * PATIENCE, never.frame()).await.expect_err("the answer has no frame yet");
        assert!(locked(&never.shared).body.is_some());
    }
}
