//! A GPU backend that sleeps. It returns the memory of weights and KV, and keeps code, graphs and workspace.
//!
//! Graphs and TMA descriptors contain the addresses of weights and KV, so both are mapped at the same
//! addresses again. All ranks sleep and wake together, each on its own thread. If one rank cannot wake, all
//! ranks sleep again.

use std::sync::Arc;

use device::cuda::DeviceMemory;
use tokio::time::Instant;
use tracing::{info, warn};
use types::in_full;

use super::description::LOAD_WITHIN;
use super::rank::{Order, PREPARE_WITHIN};
use super::{CudaBackend, LoadReport};
use crate::backend::Backend;
use crate::backend::asleep::{self, Asleep, SleepFailed, WakeFailed};
use crate::error::{BackendError, OpenError};

/// A GPU backend without weights and KV on its GPUs.
#[derive(Debug)]
pub(super) struct CudaAsleep(Box<CudaBackend>);

/// The result of a rank's sleep or wake.
type RankResult = Result<(), OpenError>;

// === impl CudaAsleep ===

impl CudaAsleep {
    pub(super) fn from(mut backend: Box<CudaBackend>) -> Result<Box<dyn Asleep>, SleepFailed> {
        if let Err(why) = backend.check_unused() {
            return Err(SleepFailed { backend, why });
        }
        match backend.give_back() {
            Ok(()) => Ok(Box::new(Self(backend))),
            // The device counts as lost, because the backend cannot know which GPUs have returned their
            // memory.
            Err(error) => Err(SleepFailed { why: BackendError::DeviceLost(in_full(&error)), backend }),
        }
    }
}

impl Asleep for CudaAsleep {
    fn wake(mut self: Box<Self>) -> Result<Box<dyn Backend>, WakeFailed> {
        match self.0.refill() {
            Ok(()) => Ok(self.0),
            Err(why) => Err(WakeFailed { asleep: self, why }),
        }
    }

    fn used_bytes(&self) -> Option<u64> {
        self.0.used_bytes()
    }
}

// === impl CudaBackend ===

impl CudaBackend {
    fn check_unused(&self) -> Result<(), BackendError> {
        if self.elsewhere.is_some() {
            return Err(BackendError::Held("other processes of this node do not sleep".to_owned()));
        }
        asleep::check_idle(self.flights.len())?;
        asleep::check_not_held(self.memory.n_holders(), self.n_holders)?;
        match self.on_cards().any(DeviceMemory::is_registered) {
            true => Err(BackendError::Held("KV memory is still registered with a network card".to_owned())),
            false => Ok(()),
        }
    }

    /// Returns the KV memory of each GPU.
    fn on_cards(&self) -> impl Iterator<Item = &DeviceMemory> {
        self.memory.on_cards().map(|on_card| on_card.memory())
    }

    /// Returns the memory of weights and KV on all ranks.
    fn give_back(&mut self) -> RankResult {
        self.previous.clear();
        self.helpers.begin(&Order::GiveBack)?;
        let own = self.rank.tools.give_back();
        let others = self.helpers.finish(PREPARE_WITHIN)?;
        let others = self.helpers.names().zip(others);
        first_refusal(own, others.map(|(name, done)| (name, done.refused)))
    }

    /// Allocates memory and loads weights, on all ranks or on none.
    fn refill(&mut self) -> RankResult {
        let arithmetic = self.described.settings().arithmetic(self.card().arch());
        asleep::check_same(&self.model, &self.described.again()?.model_info(&arithmetic)?)?;
        let started = Instant::now();
        self.helpers.begin(&Order::Refill(Arc::clone(&self.described)))?;
        let own = self.rank.tools.refill(&self.described);
        let others = self.helpers.finish(LOAD_WITHIN)?;
        let others = self.helpers.names().zip(others);
        let refilled = first_refusal(own, others.map(|(name, done)| (name, done.refused)));
        if let Err(refused) = refilled {
            if let Err(error) = self.give_back() {
                warn!(error = in_full(&error), "GPU memory was not released after a failed wake");
            }
            return Err(refused);
        }
        self.loaded = LoadReport { seconds: started.elapsed().as_secs_f64(), ..self.loaded };
        info!(
            mib = self.loaded.bytes >> 20,
            seconds = self.loaded.seconds,
            "weights loaded onto the GPU again"
        );
        Ok(())
    }

    /// Returns the bytes in use on all GPUs of the model, by all processes.
    pub(super) fn used_on_cards(&self) -> Option<u64> {
        self.on_cards().map(|memory| memory.used_bytes().ok()).sum()
    }
}

/// Returns this thread's error, or the first error of the other ranks.
fn first_refusal<'a>(
    own: RankResult,
    mut others: impl Iterator<Item = (&'a str, Option<OpenError>)>,
) -> RankResult {
    own?;
    match others.find_map(|(name, refused)| refused.map(|refused| (name, refused))) {
        Some((name, refused)) => Err(OpenError::Ranks(format!("{name}: {}", in_full(&refused)))),
        None => Ok(()),
    }
}
