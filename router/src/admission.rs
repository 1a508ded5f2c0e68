//! Limits the requests in progress. Requests above the limit are refused before any work on them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ServeError;

/// The time after which a refused client should try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The router's limit of concurrent requests.
#[derive(Clone, Debug)]
pub struct Admission {
    room: Arc<Semaphore>,
    requests_max: usize,
}

/// The right of one request to be served. Dropping it admits another request.
#[derive(Debug)]
pub struct Permit {
    _room: OwnedSemaphorePermit,
}

impl Admission {
    pub fn new(requests_max: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(requests_max)), requests_max }
    }

    pub fn admit(&self) -> Result<Permit, ServeError> {
        match self.room.clone().try_acquire_owned() {
            Ok(room) => Ok(Permit { _room: room }),
            Err(_) => Err(ServeError::Overloaded {
                retry_after: RETRY_AFTER,
                reason: format!(
                    "{} requests are being served, as many as router.requests_max allows",
                    self.requests_max
                ),
            }),
        }
    }

    pub fn n_inside(&self) -> usize {
        self.requests_max - self.room.available_permits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_makes_room_when_it_goes() {
        let admission = Admission::new(1);
        let permit = admission.admit().expect("there is room");
        assert_eq!(admission.n_inside(), 1);
        assert!(matches!(admission.admit(), Err(ServeError::Overloaded { .. })));
        drop(permit);
        assert_eq!(admission.n_inside(), 0);
        admission.admit().expect("there is room again");
    }
}
