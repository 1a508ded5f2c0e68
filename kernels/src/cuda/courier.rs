//! Moves pages between cards, and digests them, beside what the card computes.
//!
//! A courier has streams of its own, of high priority, and uses few multiprocessors: the card's kernels hardly notice.
//! Errands overlap: while one ends, the next is on its way already.
//!
//! There are two ways to move pages between GPUs. If the pages form large rectangles, the copy engines move
//! them at the full link rate, and a kernel digests them afterwards. Otherwise one kernel moves and digests
//! them in one pass.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUevent_flags, CUfunction_attribute as FunctionAttribute,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, result};

use super::engines::Engines;
use super::error::ensure;
use super::lanes::{Lanes, Load};
use super::memory::DeviceMemory;
use super::rectangles::{Moved, mean_bytes, rectangles};
use super::remote::RemoteMemory;
use super::slate::Slate;
use super::slots::Slots;
use super::tally::Looker;
use super::{Card, CudaError};

/// Threads of a kernel's block. One block occupies one multiprocessor.
const THREADS: u32 = 512;
/// Pages of one errand, as in wire.cu.
pub const PAGES_MAX: usize = 1024;
/// Words that any errand is told, and that it usually answers at most: a digest for each of 8 heads.
const TOLD_MAX: usize = 2 * PAGES_MAX;
const ANSWERS_USUAL: usize = 8 * PAGES_MAX;
/// Slates that a courier has from the start on.
const SLATES: usize = 8;
/// Shared memory of one stage for all warps of a block, shared memory of a block outside its stages, and the
/// maximum number of stages: as in wire.cu.
const STAGE_BYTES: usize = 16 * 4096;
const TABLE_BYTES: usize = 17 << 10;
const STAGES_MAX: usize = 2;
/// The vector size of the kernels' loads and stores.
const VECTOR_BYTES: usize = 16;

/// How much of a card a courier takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CourierSize {
    /// Streams, and so errands under way at one time.
    pub n_lanes: usize,
    /// Multiprocessors of each stream.
    pub lane_multiprocessors: u32,
    /// Copy engines that one errand keeps busy.
    pub n_engines: usize,
    /// Multiprocessors that digest pages which copy engines have moved, and pages that a sender describes.
    pub digest_multiprocessors: u32,
    /// The smallest mean rectangle for which copy engines are used. Starting one copy takes 3.5 microseconds.
    pub engine_bytes_min: usize,
}

impl CourierSize {
    /// This number of multiprocessors, in four parts: the others fill the wire while one begins or ends an errand. Digests alone go
    /// one errand after the other: what counts there is when the last one is done.
    pub fn of(multiprocessors: u32) -> Self {
        Self {
            n_lanes: 4,
            lane_multiprocessors: multiprocessors.div_ceil(4),
            n_engines: 2,
            digest_multiprocessors: multiprocessors,
            engine_bytes_min: 8 << 20,
        }
    }
}

impl Default for CourierSize {
    fn default() -> Self {
        Self::of(16)
    }
}

/// The kernels that move and digest pages, on one GPU.
#[derive(Clone)]
pub(super) struct WireKernels {
    pull: CudaFunction,
    digest: CudaFunction,
    copy: CudaFunction,
    /// Pipeline stages of a warp.
    n_stages: usize,
}

/// See the module.
pub struct Courier {
    context: Arc<CudaContext>,
    kernels: WireKernels,
    lanes: Lanes,
    engines: Engines,
    verifier: Arc<CudaStream>,
    size: CourierSize,
    /// Held while engines and the kernel behind them are told of one errand, so that it waits for its own copies only.
    order: Mutex<()>,
    /// Slates of errands that are done, for the next ones.
    ///
    /// Held for a look, never while anything is waited for.
    slates: Mutex<Vec<Slate>>,
}

/// The layout of a page, `[K|V][head]`, with a run of `run_bytes` for each head, and the range of heads to
/// move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRuns {
    pub n_parts: usize,
    /// The number of heads to move: consecutive, from `first_head`.
    pub n_heads: usize,
    pub run_bytes: usize,
    pub first_head: usize,
    /// All heads of the page.
    pub page_heads: usize,
}

/// Pages of equal layout, and the part of them to move.
#[derive(Clone, Copy, Debug)]
pub struct SomePages<'a> {
    /// The region and page of each, layer by layer.
    pub places: &'a [(u32, u32)],
    /// The number of pages in each layer.
    pub n_of_layer: usize,
    pub runs: PageRuns,
    /// The page of each layer in which only the first bytes of each run are valid, and the number of these
    /// bytes.
    pub partial: Option<(usize, usize)>,
}

/// Pages in a peer GPU's memory, at these offsets. There are as many as local pages.
#[derive(Clone, Copy, Debug)]
pub struct RemotePages<'a> {
    pub memory: &'a RemoteMemory,
    pub offsets: &'a [u64],
    /// The parts and heads to move. The pages may have other heads too.
    pub runs: PageRuns,
}

impl RemotePages<'_> {
    /// The address of the first byte to move in each page.
    fn addresses(self) -> impl Iterator<Item = u64> {
        let first = self.memory.address() + self.runs.start() as u64;
        self.offsets.iter().map(move |offset| first + offset)
    }
}

/// An offset in a slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotAt<'a> {
    pub slots: &'a Slots,
    pub slot: usize,
    pub offset: usize,
}

impl SlotAt<'_> {
    /// The addresses of these pages in the slot, packed one after the other.
    fn pages(self, some: &SomePages<'_>) -> Result<impl Iterator<Item = u64> + use<>, CudaError> {
        let (n_pages, page_bytes) = (some.places.len(), some.runs.moved_bytes());
        let first = self.slots.address(self.slot, self.offset, n_pages * page_bytes)?;
        let is_vectors =
            self.slots.slot_bytes().is_multiple_of(VECTOR_BYTES) && self.offset.is_multiple_of(VECTOR_BYTES);
        ensure("a slot", is_vectors, "pages that do not start at a multiple of 16 bytes")?;
        Ok((0..n_pages as u64).map(move |nth| first + nth * page_bytes as u64))
    }
}

/// Work under way on the card. [`Courier::take`] waits for it.
#[must_use = "the end of an errand is known only once it is taken"]
pub struct Errand {
    slate: Slate,
    done: Arc<CudaEvent>,
    n_digests: usize,
    /// The load that this work adds to its stream, until it is dropped.
    _load: Option<Load>,
}

/// When an errand is done, for whatever else of the card waits for it.
#[derive(Clone, Debug)]
pub struct ErrandDone(pub(super) Arc<CudaEvent>);

/// The fields of `WirePages` in wire.cu, in the same order. It is copied as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
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

impl Shape {
    /// For pages whose other heads differ between the two sides.
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

/// What an errand does.
#[derive(Clone, Copy)]
enum Kind {
    Pull,
    Digest,
    Copy,
}

// === impl WireKernels ===

impl WireKernels {
    pub(super) fn of(card: &Card) -> Result<Self, CudaError> {
        let n_stages = n_stages(card.context())?;
        let [pull, digest, copy] = ["wire_pull", "wire_digest", "wire_copy"].map(|name| card.function(name));
        for kernel in [&pull, &digest, &copy] {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            kernel
                .set_attribute(attribute, (n_stages * STAGE_BYTES) as i32)
                .map_err(CudaError::during("reserve shared memory for a kernel"))?;
        }
        Ok(Self { pull, digest, copy, n_stages })
    }
}

/// The stages that fit into shared memory. Zero before Hopper, whose kernels alone have stages.
fn n_stages(context: &CudaContext) -> Result<usize, CudaError> {
    let attribute = |attribute| {
        context.attribute(attribute).map_err(CudaError::during("ask for the GPU's shared memory"))
    };
    let bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
    let is_hopper = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? >= 9;
    let fitting = bytes.saturating_sub(TABLE_BYTES) / STAGE_BYTES;
    Ok(if is_hopper { fitting.clamp(1, STAGES_MAX) } else { 0 })
}

// === impl PageRuns ===

impl PageRuns {
    /// All heads of a page.
    pub const fn whole(n_parts: usize, n_heads: usize, run_bytes: usize) -> Self {
        Self { n_parts, n_heads, run_bytes, first_head: 0, page_heads: n_heads }
    }

    pub fn page_bytes(&self) -> usize {
        self.n_parts * self.part_bytes()
    }

    /// Bytes of the heads to move.
    pub fn moved_bytes(&self) -> usize {
        self.n_parts * self.n_heads * self.run_bytes
    }

    fn are_there(&self) -> bool {
        self.first_head.checked_add(self.n_heads).is_some_and(|end| end <= self.page_heads)
    }

    fn are_whole(&self) -> bool {
        self.n_heads == self.page_heads
    }

    /// The distance from K to V.
    fn part_bytes(&self) -> usize {
        self.page_heads * self.run_bytes
    }

    /// The offset of the first head to move.
    fn start(&self) -> usize {
        self.first_head * self.run_bytes
    }

    /// The same heads as they lie in a slot, without the other heads.
    fn packed(&self) -> Self {
        Self { first_head: 0, page_heads: self.n_heads, ..*self }
    }
}

// === impl Courier ===

impl Courier {
    /// A courier for the card that `memory` lies on.
    pub fn new(memory: &DeviceMemory, size: CourierSize) -> Result<Self, CudaError> {
        let context = Arc::clone(memory.context());
        let stream =
            || context.new_stream_with_priority(urgent(&context)).map_err(CudaError::during("make a stream"));
        let lanes = Lanes::over((0..size.n_lanes.max(1)).map(|_| stream()).collect::<Result<_, _>>()?);
        let engines = (0..size.n_engines.max(1)).map(|_| stream()).collect::<Result<_, _>>()?;
        let engines = Engines::over(engines);
        let (verifier, kernels) = (stream()?, memory.wire_kernels().clone());
        let slates = (0..SLATES).map(|_| Slate::new(&context, TOLD_MAX, ANSWERS_USUAL));
        let slates = Mutex::new(slates.collect::<Result<_, _>>()?);
        let order = Mutex::default();
        Ok(Self { kernels, lanes, engines, verifier, size, order, slates, context })
    }

    /// Digests pages, a number for each head of each page: what [`take`](Self::take) answers.
    pub fn digest(&self, memory: &DeviceMemory, some: SomePages<'_>) -> Result<Errand, CudaError> {
        let shape = self.shape(&some, memory)?;
        self.start(Kind::Digest, shape, to_look_at(memory, &some), n_digests(&some))
    }

    /// Copies pages from a peer's GPU in the faster of the two ways. Digests them if `digests`.
    ///
    /// The peer must not write the pages meanwhile. If it does, the copy is a mixture, which the digests
    /// reveal.
    pub fn fetch(
        &self,
        from: RemotePages<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
        digests: bool,
    ) -> Result<Errand, CudaError> {
        let shape = self.checked(from, memory, &to)?;
        let pages = from.addresses().zip(addresses(memory, &to));
        let pages: Vec<Moved> = pages.map(|(from, to)| Moved { from, to }).collect();
        let are_whole = from.runs.are_whole() && to.runs.are_whole();
        let rectangles = rectangles(&pages, to.n_of_layer, to.runs.page_bytes());
        if !are_whole || mean_bytes(&rectangles) < self.size.engine_bytes_min {
            return match digests {
                true => self.pull(from, memory, to),
                false => self.copy(from, memory, to),
            };
        }
        self.bind()?;
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        // JUSTIFICATION: copy engines take addresses.
        // SAFETY: rectangles consist of pages. `checked` has checked that every page is within memory that is
        // mapped on both sides, and code that unmaps it first waits for the GPU. Leases ensure that the pages
        // have no other user, as for kernels.
        let started = unsafe { self.engines.start(&rectangles, &self.verifier) };
        let errand = started.and_then(|()| match digests {
            true => self.start(Kind::Digest, shape, to_look_at(memory, &to), n_digests(&to)),
            false => self.errand(self.slate(0, 0)?, 0, (&self.verifier, None)),
        });
        // On an error no later wait covers the copies that have started, so they end here, before the pages
        // get another user.
        errand.inspect_err(|_| self.engines.settle())
    }

    /// Like [`fetch`](Self::fetch) with digests, always by a kernel.
    pub fn pull(
        &self,
        from: RemotePages<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
    ) -> Result<Errand, CudaError> {
        let shape = self.checked(from, memory, &to)?.between(from.runs, to.runs);
        self.start(Kind::Pull, shape, from.addresses().zip(addresses(memory, &to)), n_digests(&to))
    }

    /// Writes local pages into a peer's memory.
    pub fn push(
        &self,
        memory: &DeviceMemory,
        from: SomePages<'_>,
        to: RemotePages<'_>,
    ) -> Result<Errand, CudaError> {
        let shape = self.checked(to, memory, &from)?.between(from.runs, to.runs);
        self.start(Kind::Pull, shape, addresses(memory, &from).zip(to.addresses()), n_digests(&from))
    }

    /// Packs pages one after the other into a slot, from an offset. Digests them in the same pass if
    /// `digests`.
    pub fn gather(
        &self,
        memory: &DeviceMemory,
        from: SomePages<'_>,
        to: SlotAt<'_>,
        digests: bool,
    ) -> Result<Errand, CudaError> {
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
        digests: bool,
    ) -> Result<Errand, CudaError> {
        let shape = self.shape(&to, memory)?.between(to.runs.packed(), to.runs);
        let there = from.pages(&to)?;
        self.start_moving(shape, there.zip(addresses(memory, &to)), &to, digests)
    }

    fn start_moving(
        &self,
        shape: Shape,
        pages: impl Iterator<Item = (u64, u64)>,
        some: &SomePages<'_>,
        digests: bool,
    ) -> Result<Errand, CudaError> {
        match digests {
            true => self.start(Kind::Pull, shape, pages, n_digests(some)),
            false => self.start(Kind::Copy, shape, pages, 0),
        }
    }

    /// Like [`pull`](Self::pull) without digests. It measures the cost of digests.
    pub fn copy(
        &self,
        from: RemotePages<'_>,
        memory: &DeviceMemory,
        to: SomePages<'_>,
    ) -> Result<Errand, CudaError> {
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
    ) -> Result<Shape, CudaError> {
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
            "a peer's memory mapped for another card",
        )?;
        self.shape(here, memory)
    }

    /// Checks that the kernels can move the pages, and describes the pages for them.
    fn shape(&self, some: &SomePages<'_>, memory: &DeviceMemory) -> Result<Shape, CudaError> {
        let (kernel, runs) = ("wire_pull", some.runs);
        ensure(kernel, some.places.len() <= PAGES_MAX, "more pages than one errand takes")?;
        ensure(kernel, memory.ordinal() == self.context.ordinal(), "memory of another card")?;
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
        Ok(Shape {
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

    /// Waits for an errand: its digests, page by page and head by head.
    pub fn take(&self, errand: Errand) -> Result<Vec<u64>, CudaError> {
        errand.wait()?;
        let digests = errand.slate.answers.words(errand.n_digests).to_vec();
        self.slates().push(errand.slate);
        Ok(digests)
    }

    fn start(
        &self,
        kind: Kind,
        shape: Shape,
        pages: impl Iterator<Item = (u64, u64)>,
        n_digests: usize,
    ) -> Result<Errand, CudaError> {
        self.bind()?;
        let (lane, load) = self.lane(kind, shape);
        let mut slate = self.slate(2 * shape.n_pages as usize, n_digests)?;
        let told = slate.told.words_mut(2 * shape.n_pages as usize);
        for (words, (from, to)) in told.chunks_exact_mut(2).zip(pages) {
            words.copy_from_slice(&[from, to]);
        }
        self.launch(kind, shape, &slate, lane)?;
        self.errand(slate, n_digests, (lane, load))
    }

    /// The stream to use. Digests share one stream behind the copy engines' work; moves are distributed over
    /// the others.
    fn lane(&self, kind: Kind, shape: Shape) -> (&CudaStream, Option<Load>) {
        match kind {
            Kind::Digest => (&self.verifier, None),
            Kind::Pull | Kind::Copy => {
                let (lane, load) = self.lanes.give(shape.bytes());
                (lane, Some(load))
            }
        }
    }

    /// All that waits on the lane now.
    fn errand(
        &self,
        mut slate: Slate,
        n_digests: usize,
        (lane, load): (&CudaStream, Option<Load>),
    ) -> Result<Errand, CudaError> {
        slate.n_errands = slate.n_errands.wrapping_add(1);
        slate.tally.count_behind(lane, slate.n_errands)?;
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let done = lane.record_event(Some(flags)).map_err(CudaError::during("record an event"))?;
        Ok(Errand { slate, done: Arc::new(done), n_digests, _load: load })
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))
    }

    fn launch(&self, kind: Kind, shape: Shape, slate: &Slate, lane: &CudaStream) -> Result<(), CudaError> {
        let (answers, told) = (slate.answers.address(), slate.told.address());
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
        // JUSTIFICATION: a GPU's code is called by address, and its compiler knows nothing of Rust.
        // SAFETY: the arguments are those of the kernel's signature in kernels/cu, in its order. `shape` and `checked` have
        // checked that every page lies within memory that is mapped; the code that unmaps it waits for the card first, and so
        // does who drops the slate. The slate is as long as the table and the digests, by `slate`.
        unsafe {
            let function = kernel.cu_function();
            result::launch_kernel(function, grid, (THREADS, 1, 1), stages, lane.cu_stream(), &mut arguments)
        }
        .map_err(CudaError::during("start to move pages between GPUs"))
    }

    /// One that is large enough: a used one, or a new one.
    fn slate(&self, n_told: usize, n_answers: usize) -> Result<Slate, CudaError> {
        let used = {
            let mut slates = self.slates();
            let fitting = slates.iter().position(|slate| slate.fits(n_told, n_answers));
            fitting.map(|nth| slates.swap_remove(nth))
        };
        // Every one is long enough for most requests: allocating or freeing such memory stops the GPU and
        // every thread that submits work to it.
        used.map_or_else(|| Slate::new(&self.context, n_told.max(TOLD_MAX), n_answers.max(ANSWERS_USUAL)), Ok)
    }

    fn slates(&self) -> MutexGuard<'_, Vec<Slate>> {
        self.slates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A kernel argument in the driver's form: a pointer to a value, which the driver copies.
fn pointer<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

/// The highest stream priority, so that a wire kernel's blocks start as soon as other blocks end.
fn urgent(context: &CudaContext) -> i32 {
    let (mut least, mut greatest) = (0, 0);
    let _ = context.bind_to_thread();
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: both pointers are to numbers that outlive the call.
    let asked =
        unsafe { cudarc::driver::sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.result();
    if asked.is_ok() { greatest } else { 0 }
}

/// The address of the first byte to move in each page.
fn addresses<'a>(memory: &'a DeviceMemory, some: &SomePages<'a>) -> impl Iterator<Item = u64> + use<'a> {
    let start = some.runs.start() as u64;
    some.places.iter().map(move |(region, page)| memory.page_address(*region, *page) + start)
}

/// The page table of the digest kernel. It moves nothing, so the second address is zero.
fn to_look_at<'a>(
    memory: &'a DeviceMemory,
    some: &SomePages<'a>,
) -> impl Iterator<Item = (u64, u64)> + use<'a> {
    addresses(memory, some).map(|page| (page, 0))
}

fn n_digests(some: &SomePages<'_>) -> usize {
    some.places.len() * some.runs.n_heads
}

impl fmt::Debug for Courier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Courier").field("size", &self.size).finish_non_exhaustive()
    }
}

// === impl Errand ===

impl Errand {
    pub fn done(&self) -> ErrandDone {
        ErrandDone(Arc::clone(&self.done))
    }

    /// The waiting thread does not sleep: an errand takes less time than waking up.
    fn wait(&self) -> Result<(), CudaError> {
        let mut looker = Looker::default();
        while !looker.sees(&self.slate.tally, self.slate.n_errands, &self.done)? {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl fmt::Debug for Errand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errand({} digests)", self.n_digests)
    }
}
