//! A matrix as Hopper's copy engine knows it, which brings boxes of it into shared memory (`hopper.cuh`).

use cudarc::driver::sys;

use super::{Bf16, CudaError};

/// Columns of a box: 128 bytes, as wide as the swizzle.
const BOX_COLUMNS: u32 = 64;

/// The map that a kernel takes by value.
pub(super) struct TensorMap(
    #[expect(dead_code, reason = "kernels read it, by its address")] sys::CUtensorMap,
);

/// Rows of bf16 on the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) address: u64,
    pub(super) n_rows: usize,
    pub(super) n_columns: usize,
    /// Numbers between two rows.
    pub(super) stride: usize,
}

impl TensorMap {
    /// Boxes of so many rows and 64 columns. What lies beyond the matrix comes as zeroes.
    pub(super) fn of(matrix: Matrix, box_rows: usize) -> Result<Self, CudaError> {
        let swizzle = sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
        Self::encode(matrix, [BOX_COLUMNS, box_rows as u32], swizzle)
    }

    fn encode(
        matrix: Matrix,
        box_dims: [u32; 2],
        swizzle: sys::CUtensorMapSwizzle,
    ) -> Result<Self, CudaError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let dims = [matrix.n_columns as u64, matrix.n_rows as u64];
        let stride_bytes = [(matrix.stride * size_of::<Bf16>()) as u64];
        let steps = [1_u32, 1];
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: every pointer is to values that outlive the call, as many as a matrix has dimensions; the address is
        // not read but noted, and the driver refuses what the copy engine could not follow.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                matrix.address as *mut std::ffi::c_void,
                dims.as_ptr(),
                stride_bytes.as_ptr(),
                box_dims.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(CudaError::during("describe a matrix to the copy engine"))?;
        Ok(Self(map))
    }
}
