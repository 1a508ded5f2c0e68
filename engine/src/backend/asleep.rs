//! A backend that has given its memory back, and how it comes to be one again.

use std::fmt::{self, Debug};
use std::fs;

use types::ModelInfo;

use super::Backend;
use crate::error::{BackendError, OpenError};

/// A backend that sleeps: it computes nothing, and has neither weights nor KV.
///
/// **Who calls it.** Whoever had the backend, which [`Backend::sleep`] has taken for it. Dropped, it is over.
///
/// **What it promises.** Awake again it is the same model, with weights from where they came from and KV that is empty:
/// what was computed before is gone. Where that cannot be, it goes on sleeping, and may be woken later.
pub trait Asleep: Debug + Send + 'static {
    /// Takes memory again, loads the weights, and is a backend. Takes seconds.
    fn wake(self: Box<Self>) -> Result<Box<dyn Backend>, Wakeless>;

    /// As [`Backend::used_bytes`].
    fn used_bytes(&self) -> Option<u64>;
}

/// A backend that could not be put to sleep, unharmed unless its device is lost.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Sleepless {
    pub backend: Box<dyn Backend>,
    #[source]
    pub why: BackendError,
}

/// A backend that could not be woken, and sleeps on.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Wakeless {
    pub asleep: Box<dyn Asleep>,
    #[source]
    pub why: OpenError,
}

type Opening = Box<dyn Fn() -> Result<Box<dyn Backend>, OpenError> + Send>;

/// A backend of which nothing is left while it sleeps: it is opened again.
pub(super) struct Closed {
    model: ModelInfo,
    open: Opening,
}

impl Closed {
    /// `open` does what was done when `backend` was opened; it is closed here.
    pub(super) fn close<B: Backend>(
        backend: B,
        open: impl Fn() -> Result<B, OpenError> + Send + 'static,
    ) -> Self {
        let model = backend.model().clone();
        drop(backend);
        Self { model, open: Box::new(move || Ok(Box::new(open()?))) }
    }
}

impl Asleep for Closed {
    fn wake(self: Box<Self>) -> Result<Box<dyn Backend>, Wakeless> {
        match (self.open)().and_then(|backend| same_model(&self.model, backend)) {
            Ok(backend) => Ok(backend),
            Err(why) => Err(Wakeless { asleep: self, why }),
        }
    }

    fn used_bytes(&self) -> Option<u64> {
        resident_bytes()
    }
}

impl Debug for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closed").field("model", &self.model.name).finish_non_exhaustive()
    }
}

fn same_model(before: &ModelInfo, backend: Box<dyn Backend>) -> Result<Box<dyn Backend>, OpenError> {
    check_same(before, backend.model())?;
    Ok(backend)
}

/// Files that say something else than before would be another model under the same name.
pub(super) fn check_same(before: &ModelInfo, now: &ModelInfo) -> Result<(), OpenError> {
    before.fingerprint.agree(&now.fingerprint).map_err(OpenError::Changed)?;
    if before == now { Ok(()) } else { Err(OpenError::ConfigChanged) }
}

/// Memory that this process has touched and still has, of which there is no word on some systems.
pub(super) fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib << 10)
}

/// A step that was launched writes into memory that is to go.
pub(super) fn check_idle(n_in_flight: usize) -> Result<(), BackendError> {
    match n_in_flight {
        0 => Ok(()),
        _ => Err(BackendError::Order(format!("{n_in_flight} steps are in flight"))),
    }
}

/// Somebody else has a hold on memory that is to go.
pub(super) fn check_not_held(n_holders: usize, n_own: usize) -> Result<(), BackendError> {
    match n_holders.saturating_sub(n_own) {
        0 => Ok(()),
        n_others => Err(BackendError::Held(format!("{n_others} others still hold the memory of KV"))),
    }
}
