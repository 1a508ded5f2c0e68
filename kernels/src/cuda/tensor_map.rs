//! The description of a matrix for Hopper's copy engine, which copies boxes of the matrix into shared memory
//! (`hopper.cuh`).

use cudarc::driver::sys;

use device::cuda::{Bf16, CudaError};

/// The number of columns of a box: 128 bytes, the width of the swizzle.
const BOX_COLUMNS: u32 = 64;
const BOX_BYTES: usize = 128;

/// The map, a kernel argument that is passed by value.
pub(super) struct TensorMap(#[expect(dead_code, reason = "kernels read it by address")] sys::CUtensorMap);

/// Rows of bf16 in GPU memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) address: u64,
    pub(super) n_rows: usize,
    pub(super) n_columns: usize,
    /// The distance between two rows, in numbers.
    pub(super) stride: usize,
}

/// The part of a matrix of bytes that one load copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoxSize {
    pub(super) columns: usize,
    pub(super) rows: usize,
}

/// The matrices of gate and up of all experts, one expert after the other: its rows of gate, then those of up. A unit is
/// eight rows of gate, and the same of up.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnitMatrices {
    pub(super) address: u64,
    pub(super) n_experts: usize,
    /// The number of rows of gate of an expert.
    pub(super) n_rows: usize,
    /// The width of a row, in numbers.
    pub(super) width: usize,
}

/// The rows of gate, or of up, of a unit.
const UNIT_ROWS: usize = 8;

/// The arguments of the driver's call that makes a map of `D` dimensions, `S` of them with a stride.
struct MapArguments<const D: usize, const S: usize> {
    dtype: sys::CUtensorMapDataType,
    address: u64,
    dims: [u64; D],
    /// The distances between neighbours in all dimensions but the first.
    stride_bytes: [u64; S],
    box_dims: [u32; D],
    swizzle: sys::CUtensorMapSwizzle,
}

impl MapArguments<2, 1> {
    /// The arguments for boxes of a matrix of bytes, copied without a swizzle.
    fn of_bytes(address: u64, n_rows: usize, width: usize, boxes: BoxSize) -> Self {
        Self {
            dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            address,
            dims: [width as u64, n_rows as u64],
            stride_bytes: [width as u64],
            box_dims: [boxes.columns as u32, boxes.rows as u32],
            swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        }
    }
}

impl MapArguments<5, 4> {
    /// The arguments for boxes of `n_units` units and 128 bytes of each row.
    fn of_units(
        matrices: UnitMatrices,
        dtype: sys::CUtensorMapDataType,
        number_bytes: usize,
        n_units: usize,
    ) -> Self {
        let UnitMatrices { address, n_experts, n_rows, width } = matrices;
        let row_bytes = width * number_bytes;
        let all = |numbers: [usize; 5]| numbers.map(|number| number as u64);
        let stride_bytes = [row_bytes, n_rows * row_bytes, UNIT_ROWS * row_bytes, 2 * n_rows * row_bytes];
        Self {
            dtype,
            address,
            dims: all([width, UNIT_ROWS, 2, n_rows / UNIT_ROWS, n_experts]),
            stride_bytes: stride_bytes.map(|bytes| bytes as u64),
            box_dims: [BOX_BYTES / number_bytes, UNIT_ROWS, 2, n_units, 1].map(|number| number as u32),
            swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

impl TensorMap {
    /// Describes boxes of `box_rows` rows and 64 columns. Numbers outside of the matrix are read as zeroes.
    pub(super) fn of(matrix: Matrix, box_rows: usize) -> Result<Self, CudaError> {
        Self::encode(MapArguments {
            dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            address: matrix.address,
            dims: [matrix.n_columns as u64, matrix.n_rows as u64],
            stride_bytes: [(matrix.stride * size_of::<Bf16>()) as u64],
            box_dims: [BOX_COLUMNS, box_rows as u32],
            swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        })
    }

    /// Describes boxes of `box_rows` rows and 128 columns of a matrix in FP8. Numbers outside of it are read as
    /// zeroes.
    pub(super) fn of_fp8(
        address: u64,
        n_rows: usize,
        width: usize,
        box_rows: usize,
    ) -> Result<Self, CudaError> {
        let boxes = BoxSize { columns: BOX_BYTES, rows: box_rows };
        let arguments = MapArguments::of_bytes(address, n_rows, width, boxes);
        let swizzle = sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
        Self::encode(MapArguments { swizzle, ..arguments })
    }

    /// Describes boxes of a matrix of bytes, copied without a swizzle.
    pub(super) fn of_bytes(
        address: u64,
        n_rows: usize,
        width: usize,
        boxes: BoxSize,
    ) -> Result<Self, CudaError> {
        Self::encode(MapArguments::of_bytes(address, n_rows, width, boxes))
    }

    /// Describes boxes of `n_units` units and 64 columns.
    pub(super) fn of_units(matrices: UnitMatrices, n_units: usize) -> Result<Self, CudaError> {
        let dtype = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        Self::encode(MapArguments::of_units(matrices, dtype, size_of::<Bf16>(), n_units))
    }

    /// Describes boxes of `n_units` units and 128 columns of matrices in FP8.
    pub(super) fn of_fp8_units(matrices: UnitMatrices, n_units: usize) -> Result<Self, CudaError> {
        let dtype = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8;
        Self::encode(MapArguments::of_units(matrices, dtype, 1, n_units))
    }

    fn encode<const D: usize, const S: usize>(encoded: MapArguments<D, S>) -> Result<Self, CudaError> {
        const { assert!(S + 1 == D, "a stride for each dimension but the first") };
        let MapArguments { dtype, address, dims, stride_bytes, box_dims, swizzle } = encoded;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let steps = [1_u32; D];
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: every pointer is to as many values as the call reads for `D` dimensions, which outlive the call. The
        // address is stored, not read. The driver rejects what the copy engine cannot use.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                D as u32,
                address as *mut std::ffi::c_void,
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
