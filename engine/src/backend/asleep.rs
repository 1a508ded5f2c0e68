//! A backend that has returned its memory, and its waking.

use std::fmt::{self, Debug};
use std::fs;

use types::ModelInfo;

use super::Backend;
use crate::error::{BackendError, OpenError};

/// A backend that sleeps: it computes nothing, and has neither weights nor KV.
///
/// **Who calls it.** The owner of the backend: [`Backend::sleep`] turns the backend into this value. Dropping it ends the
/// backend.
///
/// **What it promises.** The backend that wakes is the same model, with weights from the same files and empty
/// KV. If waking fails, the value stays asleep and may be woken later.
pub trait Asleep: Debug + Send + 'static {
    /// Allocates memory, loads the weights, and returns the backend. Takes seconds.
    fn wake(self: Box<Self>) -> Result<Box<dyn Backend>, WakeFailed>;

    /// Returns the bytes in use, like [`Backend::used_bytes`].
    fn used_bytes(&self) -> Option<u64>;
}

/// The error of a backend that could not be put to sleep. The backend works as before unless its device is
/// lost.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct SleepFailed {
    pub backend: Box<dyn Backend>,
    #[source]
    pub why: BackendError,
}

/// The error of a backend that could not be woken. The backend is still asleep.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct WakeFailed {
    pub asleep: Box<dyn Asleep>,
    #[source]
    pub why: OpenError,
}

type Opening = Box<dyn Fn() -> Result<Box<dyn Backend>, OpenError> + Send>;

/// A backend that is closed while it sleeps. Waking opens the model again.
pub(super) struct ClosedBackend {
    model: ModelInfo,
    open: Opening,
}

impl ClosedBackend {
    /// Closes `backend`. `open` opens it again with the same settings.
    pub(super) fn close<B: Backend>(
        backend: B,
        open: impl Fn() -> Result<B, OpenError> + Send + 'static,
    ) -> Self {
        let model = backend.model().clone();
        drop(backend);
        Self { model, open: Box::new(move || Ok(Box::new(open()?))) }
    }
}

impl Asleep for ClosedBackend {
    fn wake(self: Box<Self>) -> Result<Box<dyn Backend>, WakeFailed> {
        match (self.open)().and_then(|backend| same_model(&self.model, backend)) {
            Ok(backend) => Ok(backend),
            Err(why) => Err(WakeFailed { asleep: self, why }),
        }
    }

    fn used_bytes(&self) -> Option<u64> {
        resident_bytes()
    }
}

impl Debug for ClosedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClosedBackend").field("model", &self.model.name).finish_non_exhaustive()
    }
}

fn same_model(before: &ModelInfo, backend: Box<dyn Backend>) -> Result<Box<dyn Backend>, OpenError> {
    check_same(before, backend.model())?;
    Ok(backend)
}

/// Rejects a model whose files have changed, because it would be another model with the same name.
pub(super) fn check_same(before: &ModelInfo, now: &ModelInfo) -> Result<(), OpenError> {
    before.fingerprint.agree(&now.fingerprint).map_err(OpenError::Changed)?;
    if before == now { Ok(()) } else { Err(OpenError::ConfigChanged) }
}

/// Returns the resident memory of this process. `None` on systems without `/proc`.
pub(super) fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib << 10)
}

/// Rejects sleep while launched steps may still write into the memory.
pub(super) fn check_idle(n_in_flight: usize) -> Result<(), BackendError> {
    match n_in_flight {
        0 => Ok(()),
        _ => Err(BackendError::Order(format!("{n_in_flight} steps are in flight"))),
    }
}

/// Rejects sleep while other users hold the memory.
pub(super) fn check_not_held(n_holders: usize, n_own: usize) -> Result<(), BackendError> {
    match n_holders.saturating_sub(n_own) {
        0 => Ok(()),
        n_others => Err(BackendError::Held(format!("{n_others} other users still hold KV memory"))),
    }
}
