//! A byte budget for the request bodies of one port that are being read.
//!
//! A body counts from its first byte until it is fully read or dropped. When the total exceeds the budget, the body that
//! has been read for the longest time ends with [`BodyBudgetSpent`], so that endless bodies do not block new ones.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use tracing::debug;

/// The error of a body that was aborted because the budget is exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request bodies being read exceed the limit of {bytes_max} bytes")]
pub struct BodyBudgetSpent {
    pub bytes_max: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Bodies {
    bytes_max: usize,
    open: Arc<Mutex<OpenBodies>>,
}

/// The bodies that are being read, and their bytes in total. Later bodies have greater numbers.
#[derive(Debug, Default)]
struct OpenBodies {
    bytes: usize,
    by_number: BTreeMap<u64, Reading>,
    next: u64,
}

#[derive(Debug, Default)]
struct Reading {
    bytes: usize,
    /// The waker of the task that reads the body, to be woken when the body is aborted.
    waiting: Option<Waker>,
}

/// One body's share of the byte budget. Dropping it returns the bytes.
#[derive(Debug)]
struct Share {
    bodies: Bodies,
    number: u64,
}

impl Bodies {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, open: Arc::default() }
    }

    /// Wraps a request's body so that its bytes count against the budget.
    pub(super) fn body(&self, body: Incoming) -> Body {
        if body.is_end_stream() { Body::empty() } else { Body::new(self.bounded(body)) }
    }

    fn bounded<B>(&self, body: B) -> BudgetedBody<B> {
        let mut open = self.open();
        let number = open.next;
        open.next += 1;
        open.by_number.insert(number, Reading::default());
        BudgetedBody { body, share: Share { bodies: self.clone(), number } }
    }

    fn open(&self) -> MutexGuard<'_, OpenBodies> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenBodies {
    fn remove(&mut self, number: u64) {
        let Some(reading) = self.by_number.remove(&number) else { return };
        self.bytes -= reading.bytes;
        if let Some(waker) = reading.waiting {
            waker.wake();
        }
    }
}

impl Share {
    /// Adds bytes that were read. Aborts the oldest bodies while the total exceeds the budget, possibly this
    /// body too.
    fn add(&self, bytes: usize) -> Result<(), BodyBudgetSpent> {
        let mut open = self.bodies.open();
        let Some(reading) = open.by_number.get_mut(&self.number) else { return Err(self.spent()) };
        reading.bytes += bytes;
        open.bytes += bytes;
        while open.bytes > self.bodies.bytes_max {
            let holds = |(number, reading): (&u64, &Reading)| (reading.bytes > 0).then_some(*number);
            let Some(oldest) = open.by_number.iter().find_map(holds) else { break };
            debug!(body = oldest, bytes = open.bytes, "request body aborted: the byte budget is exhausted");
            open.remove(oldest);
        }
        if open.by_number.contains_key(&self.number) { Ok(()) } else { Err(self.spent()) }
    }

    /// Returns an error if the body was aborted. Otherwise stores `waker`, to be woken when it is aborted.
    fn wait(&self, waker: &Waker) -> Result<(), BodyBudgetSpent> {
        let mut open = self.bodies.open();
        let reading = open.by_number.get_mut(&self.number).ok_or_else(|| self.spent())?;
        reading.waiting.get_or_insert_with(|| waker.clone()).clone_from(waker);
        Ok(())
    }

    fn spent(&self) -> BodyBudgetSpent {
        BodyBudgetSpent { bytes_max: self.bodies.bytes_max }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.bodies.open().remove(self.number);
    }
}

/// A request's body whose bytes count against the budget.
#[derive(Debug)]
struct BudgetedBody<B> {
    body: B,
    share: Share,
}

impl<B> HttpBody for BudgetedBody<B>
where
    B: HttpBody<Data = Bytes> + Unpin,
    B::Error: Into<axum::BoxError>,
{
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        self.share.wait(cx.waker())?;
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let Some(frame) = frame.transpose().map_err(Into::into)? else { return Poll::Ready(None) };
        self.share.add(frame.data_ref().map_or(0, Bytes::len))?;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use http_body_util::BodyExt as _;

    use super::*;

    /// Returns a body of `n` pieces of `size` bytes that then stays open.
    fn endless(n: usize, size: usize) -> Body {
        let pieces = (0..n).map(move |_| Ok::<_, std::convert::Infallible>(Bytes::from(vec![b'x'; size])));
        Body::from_stream(futures::stream::iter(pieces).chain(futures::stream::pending()))
    }

    async fn read(body: &mut BudgetedBody<Body>) -> Option<usize> {
        let frame = body.frame().await.expect("it does not end");
        match frame {
            Ok(frame) => Some(frame.into_data().expect("data").len()),
            Err(error) => {
                assert!(error.is::<BodyBudgetSpent>(), "{error}");
                None
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_body_that_is_read_for_the_longest_gives_way() {
        let bodies = Bodies::new(100);
        let [mut first, mut second, mut third] = [40, 40, 60].map(|size| bodies.bounded(endless(2, size)));
        assert_eq!((read(&mut first).await, read(&mut second).await), (Some(40), Some(40)));
        assert_eq!(read(&mut third).await, Some(60), "the first gave way");
        assert_eq!(read(&mut first).await, None);
        assert_eq!(read(&mut second).await, None, "it is the oldest now, and asks for more");
        drop((first, second));
        assert_eq!(bodies.open().bytes, 60);
        assert_eq!(read(&mut third).await, None, "it alone is more than the budget");
        assert_eq!(bodies.open().bytes, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_waits_for_more_is_woken() {
        let bodies = Bodies::new(100);
        let (mut waits, mut other) = (bodies.bounded(endless(1, 40)), bodies.bounded(endless(1, 70)));
        let both = async { (read(&mut waits).await, read(&mut waits).await) };
        let after = async {
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            read(&mut other).await
        };
        assert_eq!(tokio::join!(both, after), ((Some(40), None), Some(70)));
    }

    #[tokio::test]
    async fn a_body_that_ends_gives_its_bytes_back() {
        let bodies = Bodies::new(100);
        for _ in 0..3 {
            let body = bodies.bounded(Body::from(vec![b'x'; 90]));
            assert_eq!(body.collect().await.expect("within the budget").to_bytes().len(), 90);
            assert_eq!(bodies.open().bytes, 0);
        }
    }
}
