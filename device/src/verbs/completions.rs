//! Hot path.
//! Completions of RDMA requests. A file descriptor signals them, and they are taken in batches.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use super::error::{Failure, VerbsError};
use super::layout::{Channel, WC_RECV_RDMA_WITH_IMM, Wc};

/// The maximum number of completions in one batch.
const BATCH: usize = 32;

/// The completion queue of some queue pairs. Clones share the queue.
#[derive(Clone)]
pub struct Completions {
    pub(super) inner: Arc<Queue>,
}

pub(super) struct Queue {
    pub(super) cq: NonNull<c_void>,
    channel: NonNull<Channel>,
    device: Device,
}

// JUSTIFICATION: a pointer is neither Send nor Sync.
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Send for Queue {}
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Sync for Queue {}

/// The end of one request, as the device reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The id that the caller gave the request.
    pub id: u64,
    /// The number of the request's queue pair.
    pub queue_pair: u32,
    pub outcome: Result<Done, Failure>,
}

/// A request that the device has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// The bytes of a write are at the peer.
    Written,
    /// A peer's write with this number is in place, and so are its earlier writes on the same queue pair.
    Received { number: u32 },
}

impl Completions {
    /// Creates a queue for `n` completions. It must have room for all requests that its queue pairs can have
    /// in flight.
    pub fn new(device: &Device, n: u32) -> Result<Self, VerbsError> {
        let (functions, context) = device.parts();
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open, and the value below holds it.
        let channel = unsafe { (functions.ibv_create_comp_channel)(context) };
        let channel = NonNull::new(channel).ok_or_else(|| VerbsError::last("make a completion channel"))?;
        let n = i32::try_from(n).unwrap_or(i32::MAX);
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open. The channel outlives the queue, which is destroyed first.
        let cq = unsafe { (functions.ibv_create_cq)(context, n, std::ptr::null_mut(), channel.as_ptr(), 0) };
        let Some(cq) = NonNull::new(cq) else {
            let error = VerbsError::last("make a completion queue");
            // JUSTIFICATION: a call into C.
            // SAFETY: no object was made from the channel.
            unsafe { (functions.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let this = Self { inner: Arc::new(Queue { cq, channel, device: device.clone() }) };
        this.make_nonblocking()
            .map_err(|source| VerbsError::System { what: "set up completions", source })?;
        this.arm()?;
        Ok(this)
    }

    fn make_nonblocking(&self) -> io::Result<()> {
        // JUSTIFICATION: the library owns the descriptor.
        // SAFETY: the channel and its descriptor live as long as `self`.
        let fd = unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) };
        let flags = rustix::fs::fcntl_getfl(fd)?;
        Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
    }

    /// Makes the descriptor readable at the next completion. Existing completions do not count, so they must
    /// be taken after this call.
    pub fn arm(&self) -> Result<(), VerbsError> {
        let (_, context) = self.inner.device.parts();
        // JUSTIFICATION: a C function, called by pointer.
        // SAFETY: the context is open and owns the queue.
        let errno = unsafe { ((*context).req_notify_cq)(self.inner.cq.as_ptr(), 0) };
        VerbsError::check("ask for the next completion", errno)
    }

    /// Takes a notification from the descriptor. Returns false if there is none.
    pub fn take_word(&self) -> Result<bool, VerbsError> {
        let (functions, _) = self.inner.device.parts();
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // JUSTIFICATION: a call into C.
        // SAFETY: the channel lives, the descriptor does not block, and the pointers are to local variables.
        match unsafe { (functions.ibv_get_cq_event)(self.inner.channel.as_ptr(), &mut cq, &mut context) } {
            0 => {
                // JUSTIFICATION: a call into C.
                // SAFETY: the channel has one queue, and one notification was taken.
                unsafe { (functions.ibv_ack_cq_events)(cq, 1) };
                Ok(true)
            }
            _ if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => Ok(false),
            _ => Err(VerbsError::last("wait for completions")),
        }
    }

    /// Takes up to one batch of completions. Returns their number.
    pub fn take(&self, into: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        let mut batch = [Wc::default(); BATCH];
        let (_, context) = self.inner.device.parts();
        // JUSTIFICATION: a C function, called by pointer.
        // SAFETY: the context is open and owns the queue. The array has room for a batch.
        let n = unsafe { ((*context).poll_cq)(self.inner.cq.as_ptr(), BATCH as i32, batch.as_mut_ptr()) };
        let n = usize::try_from(n).map_err(|_| VerbsError::Failed(Failure::Device))?;
        into.extend(batch[..n].iter().map(completion));
        Ok(n)
    }
}

fn completion(wc: &Wc) -> Completion {
    let done = match wc.opcode {
        WC_RECV_RDMA_WITH_IMM => Done::Received { number: u32::from_be(wc.imm_be) },
        _ => Done::Written,
    };
    let outcome = Failure::of(wc.status).map_or(Ok(done), Err);
    Completion { id: wc.wr_id, queue_pair: wc.qp_num, outcome }
}

impl AsRawFd for Completions {
    fn as_raw_fd(&self) -> RawFd {
        // JUSTIFICATION: a field of a C structure.
        // SAFETY: the channel lives as long as `self`.
        unsafe { self.inner.channel.as_ref().fd }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let (functions, _) = self.device.parts();
        // JUSTIFICATION: calls into C.
        // SAFETY: queue pairs hold this value, so none is left. All notifications were acknowledged when they
        // were taken.
        unsafe {
            (functions.ibv_destroy_cq)(self.cq.as_ptr());
            (functions.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Completions({})", self.inner.device.name())
    }
}
