//! Sums over the ranks of a model whose GPUs are in several processes.
//!
//! A sum is queued behind the work of the card, and its call returns when it is queued. A sum waits on the GPU for the
//! other ranks, without a time limit. The code that detects a lost rank ends the sums with an [`EndOfSums`].

use std::ffi::c_int;
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;

use super::super::{Bf16, Card, CudaError, Element, ViewMut};
use super::library::{BF16, CommHandle, Config, F32, Nccl, SUM, UniqueId};

/// The number of looks at lost ranks after which a rank that has not joined gives up: after a minute.
const JOIN_LOOKS: u32 = 600;
/// The time between two looks at lost ranks, while not all have joined.
const JOIN_EVERY: Duration = Duration::from_millis(100);
/// The number of looks at a call that queues a sum after which the end of sums gives up: after five seconds.
const END_LOOKS: u32 = 5000;
/// The time between two looks at such a call.
const END_EVERY: Duration = Duration::from_millis(1);

/// One rank. Dropping it ends its sums.
#[derive(Debug)]
pub struct RankSums(EndOfSums);

/// Ends the sums of one rank, from any thread. Later sums are refused, and the numbers of those that the GPU has begun are
/// invalid. Cheap to clone.
#[derive(Clone, Default)]
pub struct EndOfSums(Arc<Mutex<Option<Handle>>>);

/// The rank that joins, and all ranks of its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// Equal on all ranks.
    pub id: UniqueId,
    pub nth: usize,
    pub n_ranks: usize,
}

/// Numbers that can be added up.
pub trait Summed: Element {
    /// The number of the type in nccl.h.
    const TYPE: c_int;
}

impl Summed for Bf16 {
    const TYPE: c_int = BF16;
}

impl Summed for f32 {
    const TYPE: c_int = F32;
}

/// A communicator of NCCL.
struct Handle {
    nccl: &'static Nccl,
    communicator: CommHandle,
}

// JUSTIFICATION: the handle is a pointer.
// SAFETY: NCCL allows calls from any thread, one at a time, which the mutex around the handle ensures.
unsafe impl Send for Handle {}

impl RankSums {
    /// Waits until all ranks have joined, or one is lost. `end` ends the sums of this rank.
    pub fn join(
        card: &Card,
        place: RankPlace,
        end: EndOfSums,
        is_one_lost: impl Fn() -> bool,
    ) -> Result<Self, CudaError> {
        let nccl = Nccl::load()?;
        let (context, (out, joined)) = (Arc::clone(card.context()), sync_channel(1));
        // A call that waits for other ranks cannot be ended, so a thread makes it, and this one may give up.
        let join = move || {
            if let Err(late) = out.send(joined_as(nccl, &context, place)) {
                late.0.into_iter().for_each(Handle::abort);
            }
        };
        let started = thread::Builder::new().name(format!("nccl-rank-{}", place.nth)).spawn(join);
        started.map_err(|error| failed(format!("no thread: {error}")))?;
        let handle = waited(&joined, is_one_lost)?;
        *end.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
        Ok(Self(end))
    }

    /// Replaces numbers by their sums over all ranks, in stream order. All ranks make the same sums in the same
    /// order.
    ///
    /// # Panics
    /// If the memory is on another GPU.
    pub fn sum<T: Summed>(&self, card: &Card, numbers: ViewMut<'_, T>) -> Result<(), CudaError> {
        assert_eq!(numbers.ordinal(), card.ordinal(), "the memory is on this GPU");
        card.bind()?;
        let handle = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Handle { nccl, communicator } = handle.as_ref().ok_or_else(|| failed("the sums were ended"))?;
        let (at, stream) = (numbers.address() as *mut _, card.stream().cu_stream());
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the view is on this GPU and has this length. The owner of the memory waits for the stream, or ends the
        // sums, before it frees the memory.
        let status =
            unsafe { (nccl.all_reduce)(at, at, numbers.len(), T::TYPE, SUM, *communicator, stream.cast()) };
        nccl.checked("ncclAllReduce", status).map(drop)
    }
}

impl EndOfSums {
    /// Returns the error of sums under way, if another rank cannot be reached any more.
    pub fn check(&self) -> Result<(), CudaError> {
        let handle = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Handle { nccl, communicator }) = &*handle else { return Ok(()) };
        let mut status = 0;
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the handle is alive, and the pointer is to a number that outlives the call.
        let asked = unsafe { (nccl.async_error)(*communicator, &raw mut status) };
        nccl.checked("ncclCommGetAsyncError", asked)?;
        nccl.checked("a sum over ranks", status).map(drop)
    }

    /// Ends the sums. If a call that queues one does not return, the sums go on.
    pub fn end(&self) {
        for _ in 0..END_LOOKS {
            let mut handle = match self.0.try_lock() {
                Ok(handle) => handle,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    thread::sleep(END_EVERY);
                    continue;
                }
            };
            return handle.take().into_iter().for_each(Handle::abort);
        }
    }
}

impl Handle {
    fn abort(self) {
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the handle is alive, and has no other owner.
        let _ = unsafe { (self.nccl.abort)(self.communicator) };
    }
}

/// Waits for the communicator that a thread makes.
fn waited(
    joined: &Receiver<Result<Handle, CudaError>>,
    is_one_lost: impl Fn() -> bool,
) -> Result<Handle, CudaError> {
    for _ in 0..JOIN_LOOKS {
        match joined.recv_timeout(JOIN_EVERY) {
            Ok(handle) => return handle,
            Err(RecvTimeoutError::Disconnected) => return Err(failed("the thread that joins has ended")),
            Err(RecvTimeoutError::Timeout) if is_one_lost() => {
                return Err(failed("a process with ranks of this stage is lost"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    Err(failed("not all ranks of this stage have joined within a minute"))
}

fn joined_as(nccl: &'static Nccl, context: &Arc<CudaContext>, place: RankPlace) -> Result<Handle, CudaError> {
    context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
    let RankPlace { id, nth, n_ranks } = place;
    let (mut communicator, mut config) = (std::ptr::null_mut(), Config::blocking());
    // JUSTIFICATION: NCCL is a C library.
    // SAFETY: both pointers are to values in the form of nccl.h that outlive the call.
    let status = unsafe {
        (nccl.init_rank)(&raw mut communicator, n_ranks as c_int, id, nth as c_int, &raw mut config)
    };
    nccl.checked("ncclCommInitRankConfig", status)?;
    Ok(Handle { nccl, communicator })
}

fn failed(why: impl Into<String>) -> CudaError {
    CudaError::Nccl { call: "the ranks", why: why.into() }
}

impl Drop for RankSums {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl fmt::Debug for EndOfSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EndOfSums")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_rank_ends_the_wait_for_the_others() {
        let (_joins, joined) = sync_channel(1);
        let why = |error: CudaError| error.to_string();
        let lost = waited(&joined, || true).map(drop).map_err(why);
        assert_eq!(lost, Err("the ranks of NCCL: a process with ranks of this stage is lost".to_owned()));
        let (joins, joined) = sync_channel(1);
        joins.send(Err(CudaError::NoNccl)).expect("there is room");
        let refused = waited(&joined, || true).map(drop).map_err(why);
        assert_eq!(refused, Err(CudaError::NoNccl.to_string()), "NCCL's own words come first");
        drop(joins);
        let ended = waited(&joined, || false).map(drop).map_err(why);
        assert_eq!(ended, Err("the ranks of NCCL: the thread that joins has ended".to_owned()));
    }
}
