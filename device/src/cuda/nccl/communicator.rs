//! One end of a pair of NCCL ranks. Both ends must queue the same messages in the same order.
//!
//! No method blocks. One thread owns the communicator, because NCCL allows one call at a time. Between two
//! calls the thread polls [`is_settled`](Communicator::is_settled).

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaStream};

use super::super::CudaError;
use super::super::completion_counter::{CompletionCounter, CounterReader};
use super::super::page_copier::CopyDone;
use super::super::slots::Slots;
use super::library::{BYTES, CommHandle, Config, Nccl, UniqueId};

const N_RANKS: c_int = 2;

/// The role of this process in the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    Sender = 0,
    Receiver = 1,
}

/// One end of a pair. Dropping it aborts the communicator and waits until its stream is empty. Afterwards no
/// message is written.
pub struct Communicator {
    nccl: &'static Nccl,
    handle: Option<CommHandle>,
    rank: Rank,
    slots: Arc<Slots>,
    stream: Arc<CudaStream>,
    /// Counts the messages so far, on the GPU.
    counter: Arc<CompletionCounter>,
    n_messages: u32,
}

/// One message in flight.
pub struct Message {
    counter: Arc<CompletionCounter>,
    nth: u32,
    done: CudaEvent,
    reader: CounterReader,
}

// JUSTIFICATION: the handle makes the type not Send.
// SAFETY: NCCL allows calls from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Starts to join the pair. Both ends must do so with the same id.
    pub fn join(slots: Arc<Slots>, id: UniqueId, rank: Rank) -> Result<Self, CudaError> {
        let nccl = Nccl::load()?;
        let context = Arc::clone(slots.context());
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        let stream = context.new_stream().map_err(CudaError::during("make a stream"))?;
        let counter = Arc::new(CompletionCounter::new(&context)?);
        let mut this = Self { nccl, handle: None, rank, slots, stream, counter, n_messages: 0 };
        let (mut handle, mut config) = (std::ptr::null_mut(), Config::without_blocking());
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: both pointers are to values in the form of nccl.h that outlive the call.
        let status =
            unsafe { (nccl.init_rank)(&raw mut handle, N_RANKS, id, rank as c_int, &raw mut config) };
        this.handle = (!handle.is_null()).then_some(handle);
        nccl.checked("ncclCommInitRankConfig", status)?;
        Ok(this)
    }

    /// Returns whether the last call has ended. The next call may be made only after that.
    pub fn is_settled(&mut self) -> Result<bool, CudaError> {
        let mut status = 0;
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the handle is alive, and the pointer is to a number that outlives the call.
        let asked = unsafe { (self.nccl.async_error)(self.handle()?, &raw mut status) };
        self.nccl.checked("ncclCommGetAsyncError", asked)?;
        self.nccl.checked("a message between GPUs", status)
    }

    /// Makes later messages wait for a copy job, also on another GPU.
    pub fn wait_for(&mut self, copy_job: &CopyDone) -> Result<(), CudaError> {
        self.stream.wait(&copy_job.0).map_err(CudaError::during("wait for pages on their way"))
    }

    /// Queues the sending of a slot's first bytes. The slot is filled already, or the caller has used
    /// [`wait_for`](Self::wait_for). The caller must not change the slot until the message is
    /// [done](Message::is_done).
    pub fn send(&mut self, slot: usize, bytes: usize) -> Result<(), CudaError> {
        let from = self.slots.address(slot, 0, bytes)?;
        let (handle, stream) = (self.handle()?, self.stream.cu_stream());
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the bytes belong to the slot, which lives as long as this value. This value is dropped only
        // after its stream is empty.
        let status =
            unsafe { (self.nccl.send)(from as *const _, bytes, BYTES, self.peer(), handle, stream.cast()) };
        self.nccl.checked("ncclSend", status).map(|_| ())
    }

    /// Queues the reception of the next message into a slot.
    pub fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), CudaError> {
        let to = self.slots.address(slot, 0, bytes)?;
        let (handle, stream) = (self.handle()?, self.stream.cu_stream());
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the bytes belong to the slot, as in `send`.
        let status =
            unsafe { (self.nccl.receive)(to as *mut _, bytes, BYTES, self.peer(), handle, stream.cast()) };
        self.nccl.checked("ncclRecv", status).map(|_| ())
    }

    /// Returns a handle on the message of the last call, after the call has settled.
    pub fn message(&mut self) -> Result<Message, CudaError> {
        self.n_messages = self.n_messages.wrapping_add(1);
        self.counter.count_behind(&self.stream, self.n_messages)?;
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let done = self.stream.record_event(Some(flags)).map_err(CudaError::during("record an event"))?;
        Ok(Message {
            counter: Arc::clone(&self.counter),
            nth: self.n_messages,
            done,
            reader: CounterReader::default(),
        })
    }

    /// Starts an orderly end. Both ends call this while no message is in flight. Then they poll
    /// [`is_settled`](Self::is_settled) once more.
    pub fn finalize(&mut self) -> Result<(), CudaError> {
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the handle is alive.
        let status = unsafe { (self.nccl.finalize)(self.handle()?) };
        self.nccl.checked("ncclCommFinalize", status).map(|_| ())
    }

    /// Destroys the communicator, after `finalize` has settled.
    pub fn destroy(mut self) -> Result<(), CudaError> {
        let Some(handle) = self.handle.take() else { return Ok(()) };
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: the handle is alive, and has no other owner.
        let status = unsafe { (self.nccl.destroy)(handle) };
        self.nccl.checked("ncclCommDestroy", status).map(|_| ())
    }

    fn handle(&self) -> Result<CommHandle, CudaError> {
        self.handle.ok_or_else(|| CudaError::Nccl { call: "a communicator", why: "there is none".to_owned() })
    }

    fn peer(&self) -> c_int {
        N_RANKS - 1 - self.rank as c_int
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let _ = self.stream.context().bind_to_thread();
        if let Some(handle) = self.handle.take() {
            // JUSTIFICATION: NCCL is a C library. After `destroy` there is no handle.
            // SAFETY: the handle is alive, and has no other owner.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
        // The drop waits, because an aborted operation leaves the GPU some time later.
        let _ = self.stream.synchronize();
    }
}

impl Message {
    pub fn is_done(&mut self) -> Result<bool, CudaError> {
        self.reader.sees(&self.counter, self.nth, &self.done)
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({})", self.nth)
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}
