//! cuBLASLt: NVIDIA's matrix products, loaded at run time.
//!
//! The library is column-major and this code is row-major. `y[row][n] = x[row][k] * transpose(w[n][k])` is `y
//! = transpose(w) * x` for the library, with matrices in the same memory.

use std::ffi::c_void;
use std::path::Path;

use cudarc::cublaslt::{result, sys};

use device::cuda::{Bf16, Buffer, CudaError, View, library};

use super::super::ComputeCard;
use super::{OutputRows, ProductShape};

/// The size of an algorithm's workspace, as NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// The number of algorithms that are requested, best guess first.
const ALGORITHMS_MAX: usize = 12;
/// The library's constant for a transposed matrix: `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
const DTYPE: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_16BF;
const WIDE: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_32F;

/// One of the library's algorithms. Its words are valid only for the same version of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Algorithm(sys::cublasLtMatmulAlgo_t);

/// The cuBLASLt library, ready for one GPU.
#[derive(Debug)]
pub(super) struct Lt {
    handle: Handle,
    preference: Preference,
    workspace: Buffer<u8>,
}

/// A product of one exact shape, described to the library.
#[derive(Debug)]
pub(super) struct Plan {
    operation: Operation,
    w: Layout,
    x: Layout,
    y: Layout,
    algorithm: Algorithm,
}

// === the library's objects, destroyed when dropped ===

macro_rules! handed_out {
    ($name:ident, $pointer:ty, $destroy:path) => {
        #[derive(Debug)]
        struct $name($pointer);

        // JUSTIFICATION: a pointer is not Send.
        // SAFETY: the library's descriptors belong to no thread, and each is used through one owner.
        unsafe impl Send for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // JUSTIFICATION: cuBLASLt is a C library.
                // SAFETY: it was created, and is destroyed once.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}
handed_out!(Handle, sys::cublasLtHandle_t, result::destroy_handle);
handed_out!(Preference, sys::cublasLtMatmulPreference_t, result::destroy_matmul_pref);
handed_out!(Operation, sys::cublasLtMatmulDesc_t, result::destroy_matmul_desc);
handed_out!(Layout, sys::cublasLtMatrixLayout_t, result::destroy_matrix_layout);

impl Preference {
    fn new() -> Result<Self, CudaError> {
        let preference =
            Self(result::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE_BYTES as u64;
        // JUSTIFICATION: cuBLASLt is a C library.
        // SAFETY: the attribute is a number of 64 bits, which outlives the call.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                attribute,
                std::ptr::from_ref(&bytes).cast(),
                size_of_val(&bytes),
            )
        }
        .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))?;
        Ok(preference)
    }
}

impl Operation {
    /// Describes a product whose first matrix is transposed and whose sums are in f32.
    fn new() -> Result<Self, CudaError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation =
            Self(result::create_matmul_desc(compute, WIDE).map_err(failed("cublasLtMatmulDescCreate"))?);
        let transposed = TRANSPOSED;
        // JUSTIFICATION: cuBLASLt is a C library.
        // SAFETY: the attribute is a number of 32 bits, which outlives the call.
        unsafe {
            result::set_matmul_desc_attribute(
                operation.0,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )
        }
        .map_err(failed("cublasLtMatmulDescSetAttribute"))?;
        Ok(operation)
    }
}

impl Layout {
    /// Describes a matrix of `n_columns` columns of `height` numbers; a column is one of our rows.
    fn new(dtype: sys::cudaDataType, height: usize, n_columns: usize) -> Result<Self, CudaError> {
        let layout = result::create_matrix_layout(dtype, height as u64, n_columns as u64, height as i64);
        layout.map(Self).map_err(failed("cublasLtMatrixLayoutCreate"))
    }
}

// === impl Lt ===

impl Lt {
    pub(super) fn open(card: &ComputeCard, folder: Option<&Path>) -> Result<Self, CudaError> {
        library::load_cublaslt(folder)?;
        card.bind()?;
        let handle = Handle(result::create_handle().map_err(failed("cublasLtCreate"))?);
        Ok(Self { handle, preference: Preference::new()?, workspace: card.buffer(WORKSPACE_BYTES)? })
    }

    pub(super) fn version(&self) -> usize {
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: it takes no arguments, and `open` has found the library.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Makes a plan with the library's first suggestion.
    pub(super) fn plan(&self, shape: ProductShape) -> Result<Plan, CudaError> {
        let described = Plan::described(shape, Algorithm::of([0; 8]))?;
        let algorithm = self.guesses(&described)?.into_iter().next();
        let algorithm =
            algorithm.ok_or(CudaError::NoProduct { n: shape.n, k: shape.k, n_rows: shape.n_rows })?;
        Ok(Plan { algorithm, ..described })
    }

    /// Makes a plan with this algorithm, measured for a similar shape. If it does not support this shape, the
    /// library's first suggestion is used.
    pub(super) fn plan_with(&self, shape: ProductShape, algorithm: Algorithm) -> Result<Plan, CudaError> {
        let plan = Plan::described(shape, algorithm)?;
        if self.can(&plan) { Ok(plan) } else { self.plan(shape) }
    }

    /// Returns the algorithms to measure for a shape.
    pub(super) fn algorithms(&self, shape: ProductShape) -> Result<Vec<Algorithm>, CudaError> {
        self.guesses(&Plan::described(shape, Algorithm::of([0; 8]))?)
    }

    fn guesses(&self, plan: &Plan) -> Result<Vec<Algorithm>, CudaError> {
        let mut found = [nothing(); ALGORITHMS_MAX];
        let mut n_found = 0;
        // JUSTIFICATION: cudarc's safe call returns one suggestion only.
        // SAFETY: all descriptors are alive, and the array has the length that the library is told.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle.0,
                plan.operation.0,
                plan.w.0,
                plan.x.0,
                plan.y.0,
                plan.y.0,
                self.preference.0,
                ALGORITHMS_MAX as i32,
                found.as_mut_ptr(),
                &mut n_found,
            )
        }
        .result()
        .map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?;
        let found = &found[..usize::try_from(n_found).unwrap_or(0).min(ALGORITHMS_MAX)];
        let good = found.iter().filter(|one| one.state.result().is_ok() && fits(one));
        Ok(good.map(|one| Algorithm(one.algo)).collect())
    }

    fn can(&self, plan: &Plan) -> bool {
        let mut found = nothing();
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: all descriptors and the result outlive the call. An invalid algorithm is rejected and not
        // run.
        let outcome = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle.0,
                plan.operation.0,
                plan.w.0,
                plan.x.0,
                plan.y.0,
                plan.y.0,
                &plan.algorithm.0,
                &mut found,
            )
        };
        outcome.result().is_ok() && found.state.result().is_ok() && fits(&found)
    }

    /// Runs a planned product. The caller has checked that the views have the plan's shape.
    pub(super) fn run(
        &self,
        card: &ComputeCard,
        plan: &Plan,
        y: OutputRows<'_>,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
    ) -> Result<(), CudaError> {
        card.bind()?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let y = y.address();
        // JUSTIFICATION: cuBLASLt is a C library.
        // SAFETY: descriptors and factors outlive the call. The addresses are in this GPU's memory, and the
        // caller has checked their sizes against the layouts. Uses of the workspace are ordered by the one
        // stream.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.operation.0,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&zero).cast(),
                w.address() as *const c_void,
                plan.w.0,
                x.address() as *const c_void,
                plan.x.0,
                y as *const c_void,
                plan.y.0,
                y as *mut c_void,
                plan.y.0,
                &plan.algorithm.0,
                self.workspace.view().address() as *mut c_void,
                WORKSPACE_BYTES,
                card.stream().cu_stream().cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }
}

impl Plan {
    fn described(shape: ProductShape, algorithm: Algorithm) -> Result<Self, CudaError> {
        let ProductShape { n, k, n_rows, is_wide, .. } = shape;
        Ok(Self {
            operation: Operation::new()?,
            w: Layout::new(DTYPE, k, n)?,
            x: Layout::new(DTYPE, k, n_rows)?,
            y: Layout::new(if is_wide { WIDE } else { DTYPE }, n, n_rows)?,
            algorithm,
        })
    }
}

impl Algorithm {
    pub(super) fn of(words: [u64; 8]) -> Self {
        Self(sys::cublasLtMatmulAlgo_t { data: words })
    }

    pub(super) fn words(&self) -> [u64; 8] {
        self.0.data
    }
}

fn nothing() -> sys::cublasLtMatmulHeuristicResult_t {
    sys::cublasLtMatmulHeuristicResult_t {
        algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    }
}

fn fits(found: &sys::cublasLtMatmulHeuristicResult_t) -> bool {
    found.workspaceSize <= WORKSPACE_BYTES
}

fn failed(call: &'static str) -> impl FnOnce(result::CublasError) -> CudaError {
    move |error| CudaError::Cublas { call, code: format!("{:?}", error.0) }
}
