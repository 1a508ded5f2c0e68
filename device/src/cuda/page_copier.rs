//! Moves pages between GPUs and digests them, while the GPU computes.
//!
//! A page copier has its own streams of high priority and uses few multiprocessors, so it hardly slows other
//! kernels. Copy jobs overlap: the next one runs while one ends.
//!
//! There are two methods to move pages between GPUs. If the pages form large rectangles, the copy engines
//! move them at the full link rate, and a kernel digests them afterwards. Otherwise one kernel moves and
//! digests them in one pass.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::CudaError;
use super::completion_counter::CounterReader;
use super::copied_pages::{PageRuns, RemotePages, SlotAt, SomePages};
use super::engines::Engines;
use super::error::ensure;
use super::job_buffers::JobBuffers;
use super::lanes::{Lanes, Load};
use super::memory::DeviceMemory;
use super::page_copier_size::PageCopierSize;
use super::rectangles::{PageMove, mean_bytes, rectangles};
use super::remote::RemoteMemory;
use super::slots::VECTOR_BYTES;
use super::wire_kernels::{STAGE_BYTES, WireKernels};

/// Threads of a kernel's block. One block occupies one multiprocessor.
const THREADS: u32 = 512;
/// The maximum number of pages in one copy job, as in wire.cu.
pub const PAGES_MAX: usize = 1024;
/// The maximum number of input words of a copy job, and the usual maximum of its results: a digest for each
/// of 8 heads.
const TOLD_MAX: usize = 2 * PAGES_MAX;
const ANSWERS_USUAL: usize = 8 * PAGES_MAX;
/// The number of job buffers that a page copier allocates at the start.
const BUFFERS_AT_START: usize = 8;

/// Moves pages between GPUs and digests them. One value serves one GPU.
pub struct PageCopier {
    context: Arc<CudaContext>,
    kernels: WireKernels,
    lanes: Lanes,
    engines: Engines,
    verifier: Arc<CudaStream>,
    size: PageCopierSize,
    /// The lock is held while the copies of one job and the kernel behind them are queued, so that the kernel
    /// waits for its own copies only.
    order: Mutex<()>,
    /// Buffers of finished copy jobs, for reuse.
    ///
    /// The lock is held briefly, never during a wait.
    free_buffers: Mutex<Vec<JobBuffers>>,
}

/// Whether a copy job makes a digest of each head of each page that it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageDigests {
    Make,
    Skip,
}

/// A copy job in progress on the GPU. [`PageCopier::take`] waits for it.
#[must_use = "the end of a copy job is known only once it is taken"]
pub struct CopyJob {
    buffers: JobBuffers,
    done: Arc<CudaEvent>,
    n_digests: usize,
    /// The bytes that this work adds to its stream, until the job is dropped.
    _load: Option<Load>,
}

/// The completion event of a copy job, for other work on the GPU that must wait for it.
#[derive(Clone, Debug)]
pub struct CopyDone(pub(super) Arc<CudaEvent>);

/// The fields of `WirePages` in wire.cu, in the same order. The struct is copied to the GPU as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct WirePages {
    n_pages: u32,
    n_heads: u32,
    n_parts: u32,
    run_bytes: u32,
    valid: u32,
    layer_pages: u32,
    partial: u32,
    partial_valid: u32,
    n_stages: u32,
    from_part: u32,
    to_part: u32,
}

impl WirePages {
    /// Sets the distances from K to V, for pages whose other heads differ between the two sides.
    fn between(self, from: PageRuns, to: PageRuns) -> Self {
        let part = |runs: PageRuns| u32::try_from(runs.part_bytes()).unwrap_or(u32::MAX);
        Self { from_part: part(from), to_part: part(to), ..self }
    }

    fn bytes(self) -> usize {
        [self.n_pages, self.n_parts, self.n_heads, self.run_bytes]
            .map(|number| number as usize)
            .iter()
            .product()
    }
}

/// The operation of a copy job.
#[derive(Clone, Copy)]
enum Kind {
    Pull,
    Digest,
    Copy,
}

// === impl PageCopier ===

impl PageCopier {
    /// Creates a page copier for the GPU of `memory`.
    pub fn new(memory: &DeviceMemory, size: PageCopierSize) -> Result<Self, CudaError> {
        let context = Arc::clone(memory.context());
        let stream =
            || context.new_stream_with_priority(urgent(&context)).map_err(CudaError::during("make a stream"));
        let lanes = Lanes::over((0..size.n_lanes.max(1)).map(|_| stream()).collect::<Result<_, _>>()?);
        let engines = (0..size.n_engines.max(1)).map(|_| stream()).collect::<Result<_, _>>()?;
        let engines = Engines::over(engines);
        let (verifier, kernels) = (stream()?, memory.wire_kernels().clone());
        let free_buffers = (0..BUFFERS_AT_START).map(|_| JobBuffers::new(&context, TOLD_MAX, ANSWERS_USUAL));
        let free_buffers = Mutex::new(free_buffers.collect::<Result<_, _>>()?);
        let order = Mutex::default();
        Ok(Self { kernels, lanes, engines, verifier, size, order, free_buffers, context })
    }

    /// Digests pages: a number for each head of each page. [`take`](Self::take) returns the digests.
    pub fn digest(&self, memory: &DeviceMemory, some: SomePages<'_>) -> Result<CopyJob, CudaError> {
        let shape = self.shape(&some, memory)?;
        self.start(Kind::Digest, shape, to_look_at(memory, &some), n_digests(&some))
    }

    /// Copies pages from a peer's GPU by the faster of the two methods.
    ///
    /// The peer must not write the pages meanwhile. If it does, the copy is a mixture, which the digests
    /// reveal.
    pub fn fetch(
        &self,
        from: RemotePages<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
        digests: PageDigests,
    ) -> Result<CopyJob, CudaError> {
        let shape = self.checked(from, memory, &to)?;
        let pages = from.addresses().zip(addresses(memory, &to));
        let pages: Vec<PageMove> = pages.map(|(from, to)| PageMove { from, to }).collect();
        let are_whole = from.runs.are_whole() && to.runs.are_whole();
        let rectangles = rectangles(&pages, to.n_of_layer, to.runs.page_bytes());
        if !are_whole || mean_bytes(&rectangles) < self.size.engine_bytes_min {
            return match digests {
                PageDigests::Make => self.pull(from, memory, to),
                PageDigests::Skip => self.copy(from, memory, to),
            };
        }
        self.bind()?;
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        // JUSTIFICATION: copy engines take addresses.
        // SAFETY: rectangles consist of pages. `checked` has checked that every page is within memory that is
        // mapped on both sides, and code that unmaps it first waits for the GPU. Leases ensure that the pages
        // have no other user, as for kernels.
        let started = unsafe { self.engines.start(&rectangles, &self.verifier) };
        let copy_job = started.and_then(|()| match digests {
            PageDigests::Make => self.start(Kind::Digest, shape, to_look_at(memory, &to), n_digests(&to)),
            PageDigests::Skip => self.copy_job(self.take_buffers(0, 0)?, 0, &self.verifier, None),
        });
        // On an error no later wait covers the copies that have started, so they end here, before the pages
        // get another user.
        copy_job.inspect_err(|_| self.engines.settle())
    }

    /// Like [`fetch`](Self::fetch) with digests, always by a kernel.
    pub fn pull(
        &self,
        from: RemotePages<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
    ) -> Result<CopyJob, CudaError> {
        let shape = self.checked(from, memory, &to)?.between(from.runs, to.runs);
        self.start(Kind::Pull, shape, from.addresses().zip(addresses(memory, &to)), n_digests(&to))
    }

    /// Writes local pages into a peer's memory.
    pub fn push(
        &self,
        memory: &DeviceMemory,
        from: SomePages<'_>,
        to: RemotePages<'_>,
    ) -> Result<CopyJob, CudaError> {
        let shape = self.checked(to, memory, &from)?.between(from.runs, to.runs);
        self.start(Kind::Pull, shape, addresses(memory, &from).zip(to.addresses()), n_digests(&from))
    }

    /// Packs pages one after the other into a slot, from an offset. Digests are made in the same pass.
    pub fn gather(
        &self,
        memory: &DeviceMemory,
        from: SomePages<'_>,
        to: SlotAt<'_>,
        digests: PageDigests,
    ) -> Result<CopyJob, CudaError> {
        let shape = self.shape(&from, memory)?.between(from.runs, from.runs.packed());
        let there = to.pages(&from)?;
        self.start_moving(shape, addresses(memory, &from).zip(there), &from, digests)
    }

    /// Copies packed pages from a slot into memory.
    pub fn scatter(
        &self,
        from: SlotAt<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
        digests: PageDigests,
    ) -> Result<CopyJob, CudaError> {
        let shape = self.shape(&to, memory)?.between(to.runs.packed(), to.runs);
        let there = from.pages(&to)?;
        self.start_moving(shape, there.zip(addresses(memory, &to)), &to, digests)
    }

    fn start_moving(
        &self,
        shape: WirePages,
        pages: impl Iterator<Item = (u64, u64)>,
        some: &SomePages<'_>,
        digests: PageDigests,
    ) -> Result<CopyJob, CudaError> {
        match digests {
            PageDigests::Make => self.start(Kind::Pull, shape, pages, n_digests(some)),
            PageDigests::Skip => self.start(Kind::Copy, shape, pages, 0),
        }
    }

    /// Like [`pull`](Self::pull) without digests. It measures the cost of digests.
    pub fn copy(
        &self,
        from: RemotePages<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
    ) -> Result<CopyJob, CudaError> {
        let shape = self.checked(from, memory, &to)?.between(from.runs, to.runs);
        self.start(Kind::Copy, shape, from.addresses().zip(addresses(memory, &to)), 0)
    }

    /// Copies one run of bytes by the copy engines and waits. It is the reference for the kernels' speed.
    pub fn copy_plainly(
        &self,
        from: &RemoteMemory,
        memory: &DeviceMemory,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let fits = bytes <= from.bytes() && bytes <= memory.bytes();
        ensure("plain copy", fits, "more bytes than both memories have")?;
        self.bind()?;
        let lane = self.lanes.first();
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: both ranges are mapped and long enough, as checked above. Code that unmaps one first waits
        // for the GPU.
        unsafe {
            result::memcpy_dtod_async(memory.page_address(0, 0), from.address(), bytes, lane.cu_stream())
        }
        .and_then(|()| lane.synchronize())
        .map_err(CudaError::during("copy between GPUs"))
    }

    /// Checks that local and remote pages have the same heads to move, and that they can be moved.
    fn checked(
        &self,
        there: RemotePages<'_>,
        memory: &DeviceMemory,
        here: &SomePages<'_>,
    ) -> Result<WirePages, CudaError> {
        let (kernel, RemotePages { memory: remote, offsets, runs }) = ("wire_pull", there);
        ensure(kernel, offsets.len() == here.places.len(), "the numbers of local and remote pages differ")?;
        let are_alike = runs.packed() == here.runs.packed();
        ensure(kernel, are_alike && runs.are_there(), "the two sides name different parts of their pages")?;
        let page_bytes = runs.page_bytes() as u64;
        let fits =
            |offset: &u64| offset.checked_add(page_bytes).is_some_and(|end| end <= remote.bytes() as u64);
        ensure(kernel, offsets.iter().all(fits), "a page outside of the peer's memory")?;
        let aligned = |offset: &u64| offset.is_multiple_of(VECTOR_BYTES as u64);
        ensure(
            kernel,
            offsets.iter().all(aligned),
            "a peer's page that does not start at a multiple of 16 bytes",
        )?;
        ensure(
            kernel,
            remote.ordinal() == self.context.ordinal(),
            "a peer's memory that is mapped for another GPU",
        )?;
        self.shape(here, memory)
    }

    /// Checks that the kernels can move the pages, and describes the pages for them.
    fn shape(&self, some: &SomePages<'_>, memory: &DeviceMemory) -> Result<WirePages, CudaError> {
        let (kernel, runs) = ("wire_pull", some.runs);
        ensure(kernel, some.places.len() <= PAGES_MAX, "more pages than one copy job takes")?;
        ensure(kernel, memory.ordinal() == self.context.ordinal(), "memory of another GPU")?;
        ensure(
            kernel,
            matches!(runs.n_parts, 1 | 2) && runs.n_heads > 0,
            "pages of neither one nor two parts",
        )?;
        ensure(kernel, runs.are_there(), "heads that the pages do not have")?;
        let is_vectors = |bytes: usize| bytes > 0 && bytes.is_multiple_of(VECTOR_BYTES);
        ensure(kernel, is_vectors(runs.run_bytes), "runs that are not whole vectors of 16 bytes")?;
        let is_page = |(region, page): &(u32, u32)| {
            *region < memory.n_regions()
                && *page < memory.shape(*region).n_pages
                && memory.shape(*region).page_bytes == runs.page_bytes()
        };
        ensure(kernel, some.places.iter().all(is_page), "a page that does not exist, or has another size")?;
        ensure(kernel, some.n_of_layer > 0, "layers without pages")?;
        let (partial, partial_valid) = some.partial.unwrap_or((usize::MAX, runs.run_bytes));
        ensure(
            kernel,
            is_vectors(partial_valid) && partial_valid <= runs.run_bytes,
            "a partial page that is not whole vectors of 16 bytes",
        )?;
        let number = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        Ok(WirePages {
            n_pages: number(some.places.len()),
            n_heads: number(runs.n_heads),
            n_parts: number(runs.n_parts),
            run_bytes: number(runs.run_bytes),
            valid: number(runs.run_bytes),
            layer_pages: number(some.n_of_layer),
            partial: number(partial),
            partial_valid: number(partial_valid),
            n_stages: number(self.kernels.n_stages),
            from_part: number(runs.part_bytes()),
            to_part: number(runs.part_bytes()),
        })
    }

    /// Waits for a copy job. Returns its digests, page by page and head by head.
    pub fn take(&self, copy_job: CopyJob) -> Result<Vec<u64>, CudaError> {
        copy_job.wait()?;
        let digests = copy_job.buffers.answers.words(copy_job.n_digests).to_vec();
        self.free_buffers().push(copy_job.buffers);
        Ok(digests)
    }

    fn start(
        &self,
        kind: Kind,
        shape: WirePages,
        pages: impl Iterator<Item = (u64, u64)>,
        n_digests: usize,
    ) -> Result<CopyJob, CudaError> {
        self.bind()?;
        let (lane, load) = self.lane(kind, shape);
        let mut buffers = self.take_buffers(2 * shape.n_pages as usize, n_digests)?;
        let told = buffers.told.words_mut(2 * shape.n_pages as usize);
        for (words, (from, to)) in told.chunks_exact_mut(2).zip(pages) {
            words.copy_from_slice(&[from, to]);
        }
        self.launch(kind, shape, &buffers, lane)?;
        self.copy_job(buffers, n_digests, lane, load)
    }

    /// Returns the stream for a job of this kind. Digests share one stream behind the copy engines' work;
    /// moves are distributed over the other streams.
    fn lane(&self, kind: Kind, shape: WirePages) -> (&CudaStream, Option<Load>) {
        match kind {
            Kind::Digest => (&self.verifier, None),
            Kind::Pull | Kind::Copy => {
                let (lane, load) = self.lanes.give(shape.bytes());
                (lane, Some(load))
            }
        }
    }

    /// Makes a copy job that covers all work queued on the stream so far.
    fn copy_job(
        &self,
        mut buffers: JobBuffers,
        n_digests: usize,
        lane: &CudaStream,
        load: Option<Load>,
    ) -> Result<CopyJob, CudaError> {
        buffers.n_jobs = buffers.n_jobs.wrapping_add(1);
        buffers.counter.count_behind(lane, buffers.n_jobs)?;
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let done = lane.record_event(Some(flags)).map_err(CudaError::during("record an event"))?;
        Ok(CopyJob { buffers, done: Arc::new(done), n_digests, _load: load })
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))
    }

    fn launch(
        &self,
        kind: Kind,
        shape: WirePages,
        buffers: &JobBuffers,
        lane: &CudaStream,
    ) -> Result<(), CudaError> {
        let (answers, told) = (buffers.answers.address(), buffers.told.address());
        let mut arguments = [pointer(&answers), pointer(&told), pointer(&shape)];
        let kernel = match kind {
            Kind::Pull => &self.kernels.pull,
            Kind::Digest => &self.kernels.digest,
            Kind::Copy => &self.kernels.copy,
        };
        let n_multiprocessors = match kind {
            Kind::Digest => self.size.digest_multiprocessors,
            Kind::Pull | Kind::Copy => self.size.lane_multiprocessors,
        };
        let grid = (n_multiprocessors.max(1), 1, 1);
        let stages = (self.kernels.n_stages * STAGE_BYTES) as u32;
        // JUSTIFICATION: GPU code is called by address, outside of Rust's checks.
        // SAFETY: the arguments have the types and order of the kernel's signature in wire.cu. `shape` and
        // `checked` have checked that every page is within mapped memory. Code that unmaps the memory first
        // waits for the GPU, and so does the drop of the buffers. `take_buffers` ensures that the buffers fit
        // the table and the digests.
        unsafe {
            let function = kernel.cu_function();
            result::launch_kernel(function, grid, (THREADS, 1, 1), stages, lane.cu_stream(), &mut arguments)
        }
        .map_err(CudaError::during("start to move pages between GPUs"))
    }

    /// Returns buffers that are large enough: used ones, or new ones.
    fn take_buffers(&self, n_told: usize, n_answers: usize) -> Result<JobBuffers, CudaError> {
        let used = {
            let mut free_buffers = self.free_buffers();
            let fitting = free_buffers.iter().position(|buffers| buffers.fits(n_told, n_answers));
            fitting.map(|nth| free_buffers.swap_remove(nth))
        };
        // New buffers are long enough for most copy jobs: allocating or freeing such memory stops the GPU and
        // every thread that submits work to it.
        used.map_or_else(
            || JobBuffers::new(&self.context, n_told.max(TOLD_MAX), n_answers.max(ANSWERS_USUAL)),
            Ok,
        )
    }

    fn free_buffers(&self) -> MutexGuard<'_, Vec<JobBuffers>> {
        self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a kernel argument in the driver's form: a pointer to a value, which the driver copies.
fn pointer<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

/// Returns the highest stream priority, so that a wire kernel's blocks start as soon as other blocks end.
fn urgent(context: &CudaContext) -> i32 {
    let (mut least, mut greatest) = (0, 0);
    let _ = context.bind_to_thread();
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: both pointers are to numbers that outlive the call.
    let asked =
        unsafe { cudarc::driver::sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.result();
    if asked.is_ok() { greatest } else { 0 }
}

/// Returns the address of the first byte to move in each page.
fn addresses<'a>(memory: &'a DeviceMemory, some: &SomePages<'a>) -> impl Iterator<Item = u64> + use<'a> {
    let start = some.runs.start() as u64;
    some.places.iter().map(move |(region, page)| memory.page_address(*region, *page) + start)
}

/// Makes the page table of the digest kernel. The kernel moves nothing, so the second address is zero.
fn to_look_at<'a>(
    memory: &'a DeviceMemory,
    some: &SomePages<'a>,
) -> impl Iterator<Item = (u64, u64)> + use<'a> {
    addresses(memory, some).map(|page| (page, 0))
}

fn n_digests(some: &SomePages<'_>) -> usize {
    some.places.len() * some.runs.n_heads
}

impl fmt::Debug for PageCopier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageCopier").field("size", &self.size).finish_non_exhaustive()
    }
}

// === impl CopyJob ===

impl CopyJob {
    pub fn done(&self) -> CopyDone {
        CopyDone(Arc::clone(&self.done))
    }

    /// Waits for the job by polling, because a copy job takes less time than waking a sleeping thread.
    fn wait(&self) -> Result<(), CudaError> {
        let mut reader = CounterReader::default();
        while !reader.sees(&self.buffers.counter, self.buffers.n_jobs, &self.done)? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl fmt::Debug for CopyJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyJob({} digests)", self.n_digests)
    }
}
