//! Limits the requests that upstream servers work on. Requests above the limit are refused before any work on them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::accept::check_answers;
use crate::error::{AcceptError, ServeError};

/// The time after which a refused client should try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The router's limit of concurrent requests.
#[derive(Clone, Debug)]
pub struct RequestLimit {
    room: Arc<Semaphore>,
    requests_max: usize,
}

/// The right of one request to be served. Dropping it admits another request.
#[derive(Debug)]
pub struct LimitPermit {
    _room: OwnedSemaphorePermit,
}

impl RequestLimit {
    pub fn new(requests_max: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(requests_max)), requests_max }
    }

    /// Refuses a request with more answers than may ever be served together.
    pub fn check(&self, n_answers: usize) -> Result<(), AcceptError> {
        check_answers(n_answers, self.requests_max)
    }

    pub fn admit(&self) -> Result<LimitPermit, ServeError> {
        match self.room.clone().try_acquire_owned() {
            Ok(room) => Ok(LimitPermit { _room: room }),
            Err(_) => Err(ServeError::Overloaded {
                retry_after: RETRY_AFTER,
                reason: format!(
                    "{} requests are being served, as many as router.requests_max allows",
                    self.requests_max
                ),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_makes_room_when_it_goes() {
        let limit = RequestLimit::new(1);
        let permit = limit.admit().expect("there is room");
        assert!(matches!(limit.admit(), Err(ServeError::Overloaded { .. })));
        drop(permit);
        limit.admit().expect("there is room again");
        limit.check(1).expect("as many as are served together");
        assert_eq!(limit.check(2).expect_err("never served").param(), "n");
    }
}
