//! Hot path.
//! Numbers from another process for the steps of GPUs, in a ring of places in page-locked memory.
//!
//! The host writes a place and raises the place's flag. Streams wait for the flag and fetch the place, so a step can be
//! launched before its numbers have arrived. A place may be written again when the steps that fetched it have ended,
//! which the caller ensures.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{self, CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ};
use cudarc::driver::{CudaContext, result};

use super::buffer::{Element, ViewMut};
use super::staging::PinnedBytes;
use super::{Card, CudaError, HostWords};

/// This number, added to a flag, releases all waiting streams. A stream compares the difference of two numbers with
/// zero, so numbers may wrap.
const PASS: u32 = 1 << 30;

/// The host's end of a ring.
pub struct HostOutbox<T: Element> {
    ring: Arc<Ring<T>>,
}

/// The end of one GPU, which fetches all that the host writes. A clone is the end of another GPU.
#[derive(Clone)]
pub struct HostInbox<T: Element> {
    ring: Arc<Ring<T>>,
    /// How often the stream has waited for each place. The numbers wrap.
    n_awaited: Vec<u32>,
}

/// The memory of a ring.
struct Ring<T: Element> {
    numbers: PinnedBytes,
    /// For each place, how often it was written. The numbers wrap.
    flags: HostWords,
    is_released: AtomicBool,
    place_len: usize,
    element: PhantomData<T>,
}

/// Makes a ring of `n_places` places with `place_len` numbers each, which all GPUs of the process can fetch from.
pub fn host_ring<T: Element>(
    context: &Arc<CudaContext>,
    n_places: usize,
    place_len: usize,
) -> Result<(HostOutbox<T>, HostInbox<T>), CudaError> {
    let bytes = n_places.saturating_mul(place_len).saturating_mul(size_of::<T>());
    let (numbers, flags) = (PinnedBytes::new(context, bytes)?, HostWords::new(context, n_places)?);
    let is_released = AtomicBool::new(false);
    let ring = Arc::new(Ring { numbers, flags, is_released, place_len, element: PhantomData });
    Ok((HostOutbox { ring: Arc::clone(&ring) }, HostInbox { ring, n_awaited: vec![0; n_places] }))
}

// === impl HostOutbox ===

impl<T: Element> HostOutbox<T> {
    /// Writes numbers, given as bytes, to the start of a place, and lets the streams that wait for them fetch them.
    ///
    /// # Panics
    /// If there is no such place, or if it is too short.
    pub fn put(&mut self, place: usize, bytes: &[u8]) {
        let ring = &self.ring;
        let place_bytes = ring.place_len * size_of::<T>();
        assert!(bytes.len() <= place_bytes, "{} bytes for a place of {place_bytes}", bytes.len());
        // JUSTIFICATION: GPUs read the memory, so no slice of it may exist.
        // SAFETY: the place is within the memory, which lives as long as the ring. Only this end writes, and no stream
        // reads the place before the flag below is raised, which the caller ensures for the place's last use.
        unsafe {
            let to = ring.place_address(place) as *mut u8;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        ring.flags.words()[place].fetch_add(1, Ordering::Release);
    }

    /// Releases all streams that wait or will wait. The numbers that they fetch are not valid.
    pub fn release(&self) {
        self.ring.release();
    }
}

// === impl HostInbox ===

impl<T: Element> HostInbox<T> {
    /// Makes the stream wait until the host has written a place once more. The host does not wait.
    pub fn wait_for_next(&mut self, card: &Card, place: usize) -> Result<(), CudaError> {
        let n_awaited = &mut self.n_awaited[place];
        *n_awaited = n_awaited.wrapping_add(1);
        let flag = self.ring.flags.address() + (place * size_of::<u32>()) as u64;
        card.bind()?;
        let stream = card.stream().cu_stream();
        // JUSTIFICATION: the safe wrapper has no such call.
        // SAFETY: the flag is a word of page-locked memory that all GPUs reach. It lives as long as this value, whose
        // owner waits for the stream before it drops it.
        unsafe { sys::cuStreamWaitValue32_v2(stream, flag, *n_awaited, CU_STREAM_WAIT_VALUE_GEQ as u32) }
            .result()
            .map_err(CudaError::during("wait for rows of another process"))
    }

    /// Copies numbers of a place, from `start` on, to this GPU's memory, in stream order.
    ///
    /// # Panics
    /// If the place does not have them, or `to` is on another GPU.
    pub fn fetch(
        &self,
        card: &Card,
        place: usize,
        start: usize,
        to: ViewMut<'_, T>,
    ) -> Result<(), CudaError> {
        let place_len = self.ring.place_len;
        assert!(start + to.len() <= place_len, "{} numbers from {start} on of {place_len}", to.len());
        assert!(
            place < self.n_awaited.len() && to.ordinal() == card.ordinal(),
            "a place, and this GPU's memory"
        );
        card.bind()?;
        let from = self.ring.place_address(place) + (start * size_of::<T>()) as u64;
        // JUSTIFICATION: the borrow checker cannot express a copy that outlives the call.
        // SAFETY: both ranges exist and have this length. The ring lives as long as this value, whose owner waits for
        // the stream before it drops it. The host does not write the place before the copy has ended, which the caller
        // of `put` ensures.
        unsafe {
            let from = std::slice::from_raw_parts(from as *const T, to.len());
            result::memcpy_htod_async(to.address(), from, card.stream().cu_stream())
        }
        .map_err(CudaError::during("copy to the GPU"))
    }

    /// Releases all streams that wait or will wait. The numbers that they fetch are not valid.
    pub fn release(&self) {
        self.ring.release();
    }
}

// === impl Ring ===

impl<T: Element> Ring<T> {
    fn place_address(&self, place: usize) -> u64 {
        assert!(place < self.flags.words().len(), "no place {place}");
        self.numbers.address() + (place * self.place_len * size_of::<T>()) as u64
    }

    fn release(&self) {
        if !self.is_released.swap(true, Ordering::Relaxed) {
            for flag in self.flags.words() {
                flag.fetch_add(PASS, Ordering::Release);
            }
        }
    }
}

impl<T: Element> fmt::Debug for HostOutbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostOutbox({} places of {} numbers)", self.ring.flags.words().len(), self.ring.place_len)
    }
}

impl<T: Element> fmt::Debug for HostInbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostInbox({} places of {} numbers)", self.n_awaited.len(), self.ring.place_len)
    }
}
