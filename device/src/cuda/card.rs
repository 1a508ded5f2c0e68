//! An open GPU: its context, its one compute stream and all loaded kernels.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUevent_flags, CUfunction_attribute as FunctionAttribute,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;

use super::buffer::{Buffer, Element, View, ViewMut};
use super::rectangles::{PageMove, Rectangle};
use super::source::{Programs, Source, WIRE};
use super::{Cache, CudaError, Nvrtc, engines, library};

/// A GPU that is ready to compute.
///
/// All work goes into one stream, in the order of the calls. A kernel therefore sees what earlier calls
/// wrote, and the next call may reuse memory that a view borrowed.
pub struct Card {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    functions: HashMap<&'static str, CudaFunction>,
    name: String,
    arch: String,
    n_multiprocessors: u32,
    /// Whether a kernel may start while the previous one ends: on Hopper and later.
    overlaps: bool,
    n_compiled: usize,
}

/// The launch shape of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub blocks: (usize, usize, usize),
    /// Threads of each block.
    pub threads: u32,
    /// Dynamic shared memory of each block.
    pub shared_bytes: u32,
    /// Whether the kernel starts only after the previous kernel has ended.
    pub waits: bool,
}

impl Grid {
    pub fn of(blocks: (usize, usize, usize), threads: u32, shared_bytes: u32) -> Self {
        Self { blocks, threads, shared_bytes, waits: false }
    }
}

/// Bytes of GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBytes {
    pub free: usize,
    pub total: usize,
}

/// The columns that [`Card::copy_columns`] copies. All fields count numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The width of a row that is written.
    pub width: usize,
    /// The first column that is written.
    pub first: usize,
    pub n_columns: usize,
    /// The width of a row that is read, from its first column on.
    pub from_width: usize,
}

/// A point in the GPU's stream. Two markers measure the time between them.
#[derive(Debug)]
pub struct Marker(pub(super) CudaEvent);

// === impl Card ===

impl Card {
    /// Returns the number of GPUs. No GPU is an error.
    pub fn count() -> Result<usize, CudaError> {
        library::driver()
    }

    /// Opens a GPU that moves pages: loads the libraries, compiles kernels missing from the cache and loads
    /// those of [`WIRE`].
    ///
    /// `nvrtc_folder` names the folder of NVRTC if the loader does not find it, for example with CUDA from
    /// Python packages.
    pub fn open(ordinal: usize, nvrtc_folder: Option<&Path>, cache: &Cache) -> Result<Self, CudaError> {
        Self::open_with(ordinal, nvrtc_folder, cache, None, Programs::NONE)
    }

    /// Like [`open`](Self::open), with more programs, and with kernels for another architecture that this GPU
    /// can run. For example, `sm_90` on Hopper leaves out Hopper's own kernels and runs the general ones.
    pub fn open_with(
        ordinal: usize,
        nvrtc_folder: Option<&Path>,
        cache: &Cache,
        arch_instead: Option<&str>,
        programs: Programs,
    ) -> Result<Self, CudaError> {
        let n_cards = library::driver()?;
        if ordinal >= n_cards {
            return Err(CudaError::NoSuchDevice { ordinal, n_cards });
        }
        let context = CudaContext::new(ordinal).map_err(CudaError::during("open the GPU"))?;
        let name = context.name().map_err(CudaError::during("ask for the GPU's name"))?;
        let capability =
            context.compute_capability().map_err(CudaError::during("ask for the compute capability"))?;
        let arch = arch(capability.0, capability.1)
            .ok_or_else(|| CudaError::CardTooOld { name: name.clone(), capability })?;
        let arch = arch_instead.map_or(arch, str::to_owned);
        let nvrtc = nvrtc(nvrtc_folder)?;
        let n_multiprocessors = context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(CudaError::during("count the multiprocessors"))? as u32;
        let stream = context.new_stream().map_err(CudaError::during("make a stream"))?;
        let (functions, n_compiled) = load_all(&context, &nvrtc, cache, &arch, programs)?;
        let overlaps = capability.0 >= 9;
        Ok(Self { context, stream, functions, name, arch, n_multiprocessors, overlaps, n_compiled })
    }

    /// Returns the driver's name of the GPU.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the architecture that the kernels are compiled for.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    pub fn n_multiprocessors(&self) -> u32 {
        self.n_multiprocessors
    }

    /// Returns the number of sources that were compiled because the cache did not have them.
    pub fn n_compiled(&self) -> usize {
        self.n_compiled
    }

    /// Returns the free and the total bytes of GPU memory.
    pub fn memory(&self) -> Result<MemoryBytes, CudaError> {
        let (free, total) =
            self.context.mem_get_info().map_err(CudaError::during("ask for the GPU's memory"))?;
        Ok(MemoryBytes { free, total })
    }

    /// Allocates memory with undefined content.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        Buffer::new(&self.context, len)
    }

    /// Allocates GPU memory and fills it with `numbers`.
    pub fn upload<T: Element>(&self, numbers: &[T]) -> Result<Buffer<T>, CudaError> {
        let mut buffer = self.buffer(numbers.len())?;
        self.write(buffer.view_mut(), numbers)?;
        Ok(buffer)
    }

    /// Overwrites GPU memory. Returns when `from` may be changed again.
    ///
    /// # Panics
    /// If the lengths differ, or the memory is on another GPU.
    pub fn write<T: Element>(&self, to: ViewMut<'_, T>, from: &[T]) -> Result<(), CudaError> {
        assert_eq!(
            (to.len(), to.ordinal()),
            (from.len(), self.context.ordinal()),
            "the lengths are equal and the memory is on this GPU"
        );
        self.bind()?;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the view is on this GPU and as long as the slice, which lives until the copy is done.
        unsafe { result::memcpy_htod_async(to.address(), from, self.stream.cu_stream()) }
            .map_err(CudaError::during("copy to the GPU"))?;
        self.synchronize()
    }

    /// Waits for all earlier work and copies memory to the host.
    ///
    /// # Panics
    /// If the memory is on another GPU.
    pub fn download<T: Element + Default>(&self, from: View<'_, T>) -> Result<Vec<T>, CudaError> {
        assert_eq!(from.ordinal(), self.context.ordinal(), "the memory is on this GPU");
        let mut numbers = vec![T::default(); from.len()];
        self.bind()?;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the view is on this GPU. The vector has the same length and lives until the copy is done.
        unsafe { result::memcpy_dtoh_async(&mut numbers, from.address(), self.stream.cu_stream()) }
            .map_err(CudaError::during("copy from the GPU"))?;
        self.synchronize()?;
        Ok(numbers)
    }

    /// Copies numbers within this GPU's memory, in stream order.
    ///
    /// # Panics
    /// If the lengths differ, or the memory is on another GPU.
    pub fn copy<T: Element>(&self, to: ViewMut<'_, T>, from: View<'_, T>) -> Result<(), CudaError> {
        let here = self.context.ordinal();
        assert_eq!(to.len(), from.len(), "the lengths are equal");
        assert!(to.ordinal() == here && from.ordinal() == here, "the memory is on this GPU");
        self.bind()?;
        let bytes = to.len() * size_of::<T>();
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: both views are on this GPU and have this length.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), bytes, self.stream.cu_stream()) }
            .map_err(CudaError::during("copy within the GPU"))
    }

    /// Copies columns of rows within this GPU's memory, in stream order.
    ///
    /// # Panics
    /// If the columns are not within the rows, the rows differ in number, or the memory is on another GPU.
    pub fn copy_columns<T: Element>(
        &self,
        to: ViewMut<'_, T>,
        from: View<'_, T>,
        columns: Columns,
    ) -> Result<(), CudaError> {
        let Columns { width, first, n_columns, from_width } = columns;
        let (here, n_rows) = (self.context.ordinal(), to.len() / width);
        assert!(to.ordinal() == here && from.ordinal() == here, "the memory is on this GPU");
        assert!(first + n_columns <= width && n_columns <= from_width, "the columns are within the rows");
        assert_eq!((to.len(), from.len()), (n_rows * width, n_rows * from_width), "equal numbers of rows");
        if n_rows * n_columns == 0 {
            return Ok(());
        }
        self.bind()?;
        let [start, row, to_pitch, from_pitch] =
            [first, n_columns, width, from_width].map(|numbers| numbers * size_of::<T>());
        let first = PageMove { from: from.address(), to: to.address() + start as u64 };
        let pitch = PageMove { from: from_pitch as u64, to: to_pitch as u64 };
        let rectangle = Rectangle { first, row_bytes: row, n_rows, pitch };
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: both views are on this GPU and have these rows, as just checked.
        unsafe { engines::copy(&rectangle, &self.stream) }.map_err(CudaError::during("copy within the GPU"))
    }

    /// Sets every byte, in stream order.
    ///
    /// # Panics
    /// If the memory is on another GPU.
    pub fn fill<T: Element>(&self, to: ViewMut<'_, T>, byte: u8) -> Result<(), CudaError> {
        assert_eq!(to.ordinal(), self.context.ordinal(), "the memory is on this GPU");
        self.bind()?;
        let bytes = to.len() * size_of::<T>();
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the view is on this GPU and has this length. Every byte makes a valid element.
        unsafe { result::memset_d8_async(to.address(), byte, bytes, self.stream.cu_stream()) }
            .map_err(CudaError::during("fill memory of the GPU"))
    }

    /// Waits for all earlier work. Returns any failure since the last call.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(CudaError::during("wait for the GPU"))
    }

    /// Records a point in the stream.
    pub fn mark(&self) -> Result<Marker, CudaError> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream.record_event(flags).map(Marker).map_err(CudaError::during("record an event"))
    }

    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns whether a kernel is loaded. Some kernels exist for one architecture only.
    pub fn has(&self, kernel: &str) -> bool {
        self.functions.contains_key(kernel)
    }

    /// Returns a kernel, to be launched on another stream.
    pub(super) fn function(&self, kernel: &'static str) -> CudaFunction {
        self.functions
            .get(kernel)
            .expect("every kernel of the programs is loaded, and no other is asked for")
            .clone()
    }

    /// Launches a kernel on the stream. It may start while the previous kernel ends: every kernel calls
    /// `wait_for_last` (`prelude.cuh`) before it reads computed data.
    ///
    /// # Safety
    /// The arguments point to values with the types and order of the kernel's signature. The memory that they
    /// name is as large as the kernel expects, and the caller holds the borrows that the kernel's access
    /// needs.
    pub unsafe fn launch(
        &self,
        kernel: &'static str,
        grid: Grid,
        cluster: usize,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let function = self
            .functions
            .get(kernel)
            .expect("every kernel of the programs is loaded, and no other is asked for");
        self.bind()?;
        let overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let together = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster as u32, y: 1, z: 1 },
            },
        };
        // Sets a balanced policy, because otherwise some multiprocessors get two blocks while others get
        // none.
        let balanced = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterSchedulingPolicyPreference:
                    sys::CUclusterSchedulingPolicy::CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING,
            },
        };
        let (x, y, z) = grid.blocks;
        let has_one_each = x * y * z <= self.n_multiprocessors() as usize;
        let mut attributes = [overlap, together, balanced];
        let mut attributes = &mut attributes[..match (self.overlaps, cluster > 1) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2 + usize::from(has_one_each),
        }];
        if grid.waits && !attributes.is_empty() {
            attributes = &mut attributes[1..];
        }
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // JUSTIFICATION: cudarc's launch does not support launch attributes.
        // SAFETY: the driver copies the configuration and the arguments before it returns. The caller
        // guarantees the rest.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function.cu_function(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(CudaError::during("launch a kernel"))
    }

    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Card").field("name", &self.name).field("arch", &self.arch).finish_non_exhaustive()
    }
}

// === impl Marker ===

impl Marker {
    /// Returns the milliseconds of GPU time between two points. Waits until both are reached.
    pub fn ms_until(&self, later: &Marker) -> Result<f32, CudaError> {
        self.0.elapsed_ms(&later.0).map_err(CudaError::during("measure between two events"))
    }
}

/// Returns a one-dimensional or two-dimensional grid of small blocks.
pub fn grid(x: usize, y: usize, threads: u32) -> Grid {
    Grid::of((x, y, 1), threads, 0)
}

/// Returns the architecture to compile for. Hopper's own instructions need `sm_90a`; that code runs on no
/// other architecture.
fn arch(major: i32, minor: i32) -> Option<String> {
    match (major, minor) {
        (9, 0) => Some("sm_90a".to_owned()),
        (8.., _) => Some(format!("sm_{major}{minor}")),
        _ => None,
    }
}

/// Loads the compiler. Fails if the driver is too old for its code.
fn nvrtc(folder: Option<&Path>) -> Result<Nvrtc, CudaError> {
    let nvrtc = Nvrtc::load(folder)?;
    let driver = library::driver_version()?;
    if driver.0 < nvrtc.version().0 {
        return Err(CudaError::DriverTooOld { driver, nvrtc: nvrtc.version() });
    }
    Ok(nvrtc)
}

/// Loads all kernels by name. Also returns the number of sources that were compiled, each on its own thread.
fn load_all(
    context: &Arc<CudaContext>,
    nvrtc: &Nvrtc,
    cache: &Cache,
    arch: &str,
    programs: Programs,
) -> Result<(HashMap<&'static str, CudaFunction>, usize), CudaError> {
    let sources = || [&WIRE].into_iter().chain(programs.sources).filter(|source| source.is_for(arch));
    let fetched: Vec<_> = std::thread::scope(|scope| {
        let fetch = |source: &'static Source| scope.spawn(move || cache.fetch(nvrtc, source, arch));
        let threads: Vec<_> = sources().map(fetch).collect();
        threads.into_iter().map(|thread| thread.join().expect("a compilation does not panic")).collect()
    });
    let mut functions = HashMap::new();
    let mut n_compiled = 0;
    for (source, fetched) in sources().zip(fetched) {
        let fetched = fetched?;
        n_compiled += usize::from(fetched.was_compiled);
        let module = context
            .load_module(Ptx::from_binary(fetched.cubin))
            .map_err(CudaError::during("load machine code onto the GPU"))?;
        for kernel in source.kernels {
            let function = module.load_function(kernel).map_err(CudaError::during("find a kernel"))?;
            if let Some(bytes) = (programs.shared_bytes)(kernel) {
                function
                    .set_attribute(
                        FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        bytes as i32,
                    )
                    .map_err(CudaError::during("reserve shared memory for a kernel"))?;
            }
            functions.insert(*kernel, function);
        }
    }
    Ok((functions, n_compiled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_card_has_its_code() {
        assert_eq!(arch(9, 0).as_deref(), Some("sm_90a"));
        assert_eq!(arch(8, 6).as_deref(), Some("sm_86"));
        assert_eq!(arch(12, 0).as_deref(), Some("sm_120"));
        assert_eq!(arch(7, 5), None);
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_so_in_one_sentence() {
        match Card::open(0, None, &Cache::none()) {
            Ok(card) => assert!(!card.name().is_empty()),
            Err(error) => {
                let sentence = error.to_string();
                assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
            }
        }
    }
}
