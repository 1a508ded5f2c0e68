//! GPUs that sleep: weights and KV are given back; code, graphs and what a step computes in stay.
//!
//! Graphs and TMA descriptors know where weights and KV lie, and both come back to the same addresses. All ranks go and
//! come together, each on its own thread; where one cannot come back, all go again.

use std::sync::Arc;

use kernels::MemoryError;
use kernels::cuda::DeviceMemory;
use tokio::time::Instant;
use tracing::{info, warn};
use types::in_full;

use super::opening::{Described, LOAD_WITHIN};
use super::rank::{Order, PREPARE_WITHIN, Rank, kv_of};
use super::{CudaBackend, Loaded};
use crate::backend::Backend;
use crate::backend::asleep::{self, Asleep, Sleepless, Wakeless};
use crate::error::{BackendError, OpenError};

/// A backend whose cards have neither its weights nor its KV.
#[derive(Debug)]
pub(super) struct CudaAsleep(Box<CudaBackend>);

/// Why a rank's memory did not go or come. It is told to the rank that was asked.
type RankResult = Result<(), OpenError>;

// === impl CudaAsleep ===

impl CudaAsleep {
    pub(super) fn from(mut backend: Box<CudaBackend>) -> Result<Box<dyn Asleep>, Sleepless> {
        if let Err(why) = backend.check_unused() {
            return Err(Sleepless { backend, why });
        }
        match backend.give_back() {
            Ok(()) => Ok(Box::new(Self(backend))),
            // Nobody knows which of the cards have given back what.
            Err(error) => Err(Sleepless { why: BackendError::DeviceLost(in_full(&error)), backend }),
        }
    }
}

impl Asleep for CudaAsleep {
    fn wake(mut self: Box<Self>) -> Result<Box<dyn Backend>, Wakeless> {
        match self.0.refill() {
            Ok(()) => Ok(self.0),
            Err(why) => Err(Wakeless { asleep: self, why }),
        }
    }

    fn used_bytes(&self) -> Option<u64> {
        self.0.used_bytes()
    }
}

// === impl CudaBackend ===

impl CudaBackend {
    fn check_unused(&self) -> Result<(), BackendError> {
        asleep::check_idle(self.flights.len())?;
        asleep::check_not_held(self.memory.n_holders(), self.n_holders)?;
        match self.on_cards().any(DeviceMemory::is_registered) {
            true => Err(BackendError::Held("a network card still reaches the memory of KV".to_owned())),
            false => Ok(()),
        }
    }

    /// KV of all ranks.
    fn on_cards(&self) -> impl Iterator<Item = &DeviceMemory> {
        let ranks = (0..self.memory.n_ranks()).map(|nth| self.memory.rank(nth).on_card());
        ranks.flatten().map(|on_card| on_card.memory())
    }

    /// Has all ranks give back weights and KV.
    fn give_back(&mut self) -> RankResult {
        self.previous.clear();
        self.helpers.begin(&Order::GiveBack)?;
        let own = self.rank.give_back();
        let others = self.helpers.finish(PREPARE_WITHIN)?;
        first_refusal(own, others.into_iter().map(|done| done.refused))
    }

    /// Has all ranks take their memory again and load their weights: all of them, or none.
    fn refill(&mut self) -> RankResult {
        let arithmetic = self.described.settings().arithmetic(self.card().arch());
        asleep::check_same(&self.model, &self.described.again()?.model_info(&arithmetic)?)?;
        let started = Instant::now();
        self.helpers.begin(&Order::Refill(Arc::clone(&self.described)))?;
        let own = self.rank.refill(&self.described);
        let others = self.helpers.finish(LOAD_WITHIN)?;
        let refilled = first_refusal(own, others.into_iter().map(|done| done.refused));
        if let Err(refused) = refilled {
            told(self.give_back());
            return Err(refused);
        }
        self.loaded = Loaded { seconds: started.elapsed().as_secs_f64(), ..self.loaded };
        info!(mib = self.loaded.bytes >> 20, seconds = self.loaded.seconds, "weights are on the GPU again");
        Ok(())
    }

    /// Of all its cards, by anyone.
    pub(super) fn used_on_cards(&self) -> Option<u64> {
        self.on_cards().map(|memory| memory.used_bytes().ok()).sum()
    }
}

// === impl Rank ===

impl Rank {
    /// Waits for what the card still does. What was given back already is left as it is.
    pub(super) fn give_back(&mut self) -> RankResult {
        self.tools.card.synchronize()?;
        self.kv().give_back().map_err(kv_memory)?;
        Ok(self.tools.decoder.arena.give_back()?)
    }

    /// Takes the memory again and loads the weights: where one of it fails, nothing was taken.
    pub(super) fn refill(&mut self, described: &Described) -> RankResult {
        self.check_room()?;
        let filled = self.fill(described);
        if filled.is_err() {
            told(self.give_back());
        }
        filled
    }

    fn fill(&mut self, described: &Described) -> RankResult {
        self.tools.decoder.arena.refill()?;
        self.kv().take_again().map_err(kv_memory)?;
        let decoder = &mut self.tools.decoder;
        decoder.weights = described.weights_on(&self.tools.card, decoder.sizes, &mut decoder.arena)?;
        Ok(())
    }

    /// Refuses what will not fit, with the sum, before any of it is taken.
    fn check_room(&self) -> RankResult {
        let (weights, kv) = (self.tools.decoder.arena.bytes(), self.kv().mapped_bytes());
        let free = self.tools.card.memory()?.0;
        if weights + kv <= free {
            return Ok(());
        }
        let [weights, kv, both, free] = [weights, kv, weights + kv, free].map(|bytes| bytes >> 20);
        Err(OpenError::CudaMemory(format!(
            "{weights} MiB of weights + {kv} MiB of KV = {both} MiB to wake with, and the GPU has {free} MiB free: \
             somebody else uses it now"
        )))
    }

    fn kv(&self) -> &DeviceMemory {
        kv_of(&self.tools.memory, &self.tools.decoder).memory()
    }
}

/// What follows a failed wake is for the log: the caller is told why it failed.
fn told(given_back: RankResult) {
    if let Err(error) = given_back {
        warn!(error = in_full(&error), "memory was not given back after a wake that failed");
    }
}

fn kv_memory(error: MemoryError) -> OpenError {
    OpenError::KvMemory(in_full(&error))
}

/// What the first of the ranks says that was refused something.
fn first_refusal(own: RankResult, others: impl Iterator<Item = Option<OpenError>>) -> RankResult {
    own?;
    match (1..).zip(others).find_map(|(nth, refused)| refused.map(|refused| (nth, refused))) {
        Some((nth, refused)) => Err(OpenError::Ranks(format!("rank {nth}: {}", in_full(&refused)))),
        None => Ok(()),
    }
}
